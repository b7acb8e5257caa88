"""Writing whole or not at all: a file or a folder takes its place only when all of it is on the disk."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headwise.errors import HeadwiseError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
EXPORTED = "headwise-export.json"  # lies in every folder that was exported, so that it may be replaced


def whole_file(path: str | Path, data: bytes) -> Path:
    """Write a file that takes its place only when all of it is written."""
    path = Path(path)
    new = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        new = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.chmod(0o644)
        new.replace(path)
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    finally:
        if new is not None:
            new.unlink(missing_ok=True)
    return path


@contextmanager
def whole_file_of(path: str | Path, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """A file for others to write into that takes its place only when all of it is there; on an error nothing is changed.

    One that is there already is replaced only if `is_ours` says it was written here.
    """
    path = Path(path)
    try:
        if path.is_dir() or (path.exists() and not is_ours(path)):
            raise HeadwiseError(f"{path} is there already and is no {what} written here; choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    try:
        yield folder / path.name
        _flush(folder)
        (folder / path.name).replace(path)
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    finally:
        _remove(folder)


@contextmanager
def whole_folder(folder: str | Path, marks: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write into that takes its place only when all is written; on an error nothing is changed.

    A folder that is there already is replaced only if it is empty or holds one of `marks`: what was written here before.
    """
    folder = Path(folder)
    if folder.is_file() or (
        folder.is_dir() and any(folder.iterdir()) and not any((folder / m).is_file() for m in marks)
    ):
        raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
    new = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield new
        _flush(new)
        new.chmod(0o755)
        _take_place(new, folder)
    except (OSError, SafetensorError) as error:
        raise HeadwiseError(f"{folder} could not be written ({error}); nothing was changed.") from error
    finally:
        if new is not None:
            _remove(new)


def _remove(folder: Path) -> None:
    """Take a folder away, also if Ctrl-C is pressed meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _take_place(new: Path, folder: Path) -> None:
    """Put the new folder where the old one is; the old one is then where the new one was, or gone."""
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = new.with_name(new.name + "-old")
        try:
            folder.rename(old)
            new.rename(folder)
        finally:  # after an error, or Ctrl-C in between, the old one goes back
            if old.exists():
                if folder.exists():
                    _remove(old)
                else:
                    old.rename(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step, so that there is no moment without either; False where that cannot be."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old one
        return False
    return swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _flush(folder: Path) -> None:
    """Make sure the bytes are on the disk before the folder takes its place."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
