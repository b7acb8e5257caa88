"""A real model that claims are also tried on, where it is installed."""

from importlib.util import find_spec

from headwise.io.resolve_path import BUNDLES
from headwise.model import AnyModel
from headwise.weights import load

BUNDLE = "smollm2"


def installed() -> AnyModel | None:
    """SmolLM2, if its package is there; one that is damaged is an error, not an absence."""
    return load(BUNDLE) if bundled() else None


def bundled() -> str:
    """Its name, if it is there: part of what decides figures."""
    _, module, _ = BUNDLES[BUNDLE]
    return BUNDLE if find_spec(module) is not None else ""
