"""Files: path resolution, readers that never execute code, aligned tensors, atomic writes."""

__all__: list[str] = []
