"""Standard output of the command line: any encoding, any width, and a full disk."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def prepare_streams() -> None:
    """Replace characters that an ASCII or Latin-1 terminal cannot print, and ignore a COLUMNS that leaves no room."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) == 0:
        del os.environ["COLUMNS"]


@contextmanager
def flushed_output() -> Iterator[None]:
    """Write everything before the command ends, and report a failed write in one line with exit code 1."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
            raise
        discard_output()
        print(f"headwise: cannot write the result: {error.strerror}.", file=sys.stderr)
        sys.exit(1)


def discard_output() -> None:
    """Send what is still buffered nowhere: the interpreter would try to write it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
