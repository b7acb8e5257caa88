"""Files: path resolution, readers that never execute code, aligned tensors, atomic writes."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.io.atomic_write import write_atomic
    from headwise.io.resolve_path import is_bundle_installed

__all__ = ["is_bundle_installed", "write_atomic"]

__getattr__ = make_lazy_getattr(__name__, {"atomic_write": ["write_atomic"], "resolve_path": ["is_bundle_installed"]})
