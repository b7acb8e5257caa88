"""A real model that claims are also tried on, where it is installed."""

from headwise.io import is_bundle_installed
from headwise.model import ModelProtocol
from headwise.weights import load

PRETRAINED = "smollm2"


def load_pretrained() -> ModelProtocol | None:
    """SmolLM2, if its package is there; one that is damaged is an error, not an absence."""
    return load(PRETRAINED) if installed_pretrained_name() else None


def installed_pretrained_name() -> str:
    """Its name, if it is there: part of what decides figures."""
    return PRETRAINED if is_bundle_installed(PRETRAINED) else ""
