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
EXPORT_MARKER = "headwise-export.json"  # lies in every folder that was exported, so that it may be replaced


def write_atomic(path: str | Path, data: bytes) -> Path:
    """Write a file that takes its place only when all of it is written."""
    path = Path(path)
    temp_path = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        temp_path = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp_path.chmod(0o644)
        temp_path.replace(path)
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    finally:
        if temp_path is not None:
            temp_path.unlink(missing_ok=True)
    return path


@contextmanager
def atomic_file(path: str | Path, may_replace: Callable[[Path], bool], description: str) -> Iterator[Path]:
    """A file for others to write into that takes its place only when all of it is there; on an error nothing is changed.

    One that is there already is replaced only if `may_replace` says it was written here.
    """
    path = Path(path)
    try:
        if path.is_dir() or (path.exists() and not may_replace(path)):
            raise HeadwiseError(f"{path} is there already and is no {description} written here; choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    try:
        yield temp_folder / path.name
        _flush(temp_folder)
        (temp_folder / path.name).replace(path)
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    finally:
        _remove(temp_folder)


@contextmanager
def atomic_folder(folder: str | Path, markers: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write into that takes its place only when all is written; on an error nothing is changed.

    A folder that is there already is replaced only if it is empty or holds one of `markers`: what was written here before.
    """
    folder = Path(folder)
    if folder.is_file() or (
        folder.is_dir() and any(folder.iterdir()) and not any((folder / marker).is_file() for marker in markers)
    ):
        raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
    temp_folder = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield temp_folder
        _flush(temp_folder)
        temp_folder.chmod(0o755)
        _replace_folder(temp_folder, folder)
    except (OSError, SafetensorError) as error:
        raise HeadwiseError(f"{folder} could not be written ({error}); nothing was changed.") from error
    finally:
        if temp_folder is not None:
            _remove(temp_folder)


def _remove(folder: Path) -> None:
    """Take a folder away, also if Ctrl-C is pressed meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _replace_folder(temp_folder: Path, folder: Path) -> None:
    """Put the new folder where the old one is; the old one is then where the new one was, or gone."""
    if not folder.exists():
        temp_folder.rename(folder)
    elif not _exchange(temp_folder, folder):
        old = temp_folder.with_name(temp_folder.name + "-old")
        try:
            folder.rename(old)
            temp_folder.rename(folder)
        finally:  # after an error, or Ctrl-C in between, the old one goes back
            if old.exists():
                if folder.exists():
                    _remove(old)
                else:
                    old.rename(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one step, so that there is no moment without either; False where that cannot be."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old one
        return False
    return swap(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _flush(folder: Path) -> None:
    """Make sure the bytes are on the disk before the folder takes its place."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
