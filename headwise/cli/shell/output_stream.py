"""Standard output of the command line: encodings, terminal width and failed writes."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def prepare_streams() -> None:
    """Replace characters that an ASCII or Latin-1 terminal cannot print, and ignore COLUMNS=0."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) == 0:
        del os.environ["COLUMNS"]


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output at the end, and report a failed write in one line with exit code 1."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
            raise
        redirect_stdout_to_devnull()
        print(
            f"headwise: cannot write the result: {error.strerror}. Free disk space or use another folder.",
            file=sys.stderr,
        )
        sys.exit(1)


def redirect_stdout_to_devnull() -> None:
    """Redirect standard output to the null device, so that the interpreter does not write the buffer again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
