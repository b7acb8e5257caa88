"""Simulation of a full disk for one process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limit the file size, so that further writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
