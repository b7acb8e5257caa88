"""A disk without room, as far as one process is concerned."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """As on a disk that is full: writing further fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
