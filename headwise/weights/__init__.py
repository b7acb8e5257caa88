"""Loading and saving of model weights."""

from headwise.weights.export import export
from headwise.weights.load import load, open_checkpoint
from headwise.weights.save import save
from headwise.weights.to_native import to_native

__all__ = ["export", "load", "open_checkpoint", "save", "to_native"]
