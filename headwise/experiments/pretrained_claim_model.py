"""A real model that claims are also tried on, where it is installed."""

from importlib.util import find_spec

from headwise.io.resolve_path import BUNDLES
from headwise.model import ModelProtocol
from headwise.weights import load

PRETRAINED = "smollm2"


def load_pretrained() -> ModelProtocol | None:
    """SmolLM2, if its package is there; one that is damaged is an error, not an absence."""
    return load(PRETRAINED) if pretrained_name() else None


def pretrained_name() -> str:
    """Its name, if it is there: part of what decides figures."""
    _, module, _ = BUNDLES[PRETRAINED]
    return PRETRAINED if find_spec(module) is not None else ""
