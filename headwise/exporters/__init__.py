"""A model, cut or not, where people run models. Loaded when first used: an engine's process needs no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.exporters.targets import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    if name != "export":
        raise AttributeError(f"module 'headwise.exporters' has no attribute {name!r}")
    from headwise.exporters.targets import export

    return export
