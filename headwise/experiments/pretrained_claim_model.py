"""The pretrained model on which some claims are also tested, if it is installed."""

from headwise.io import is_bundle_installed
from headwise.model import ModelProtocol
from headwise.weights import load

PRETRAINED = "smollm2"


def load_pretrained_if_installed() -> ModelProtocol | None:
    """Load SmolLM2 if its package is installed, else return None. A damaged package raises an error."""
    return load(PRETRAINED) if installed_pretrained_name() else None


def installed_pretrained_name() -> str:
    """Return the name of the pretrained model if it is installed, else "". It is part of the result key."""
    return PRETRAINED if is_bundle_installed(PRETRAINED) else ""
