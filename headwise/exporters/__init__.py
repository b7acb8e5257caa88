"""Exporters to other engines: GGUF, ONNX, torch.export, transformers. The exported model runs without Headwise."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.exporters.export_targets import export

__all__ = ["export"]

__getattr__ = make_lazy_getattr(__name__, {"export_targets": __all__})
