"""Exporters to other engines: GGUF, ONNX, torch.export, transformers. The process of an engine needs no torch."""

from typing import TYPE_CHECKING

from headwise.lazy_import import lazy_names

if TYPE_CHECKING:
    from headwise.exporters.export_targets import export

__all__ = ["export"]

__getattr__ = lazy_names(__name__, {"export_targets": __all__})
