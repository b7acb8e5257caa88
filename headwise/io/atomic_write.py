"""Atomic writes: a file or folder appears under its name only after all of it has been written to disk."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headwise.errors import ArgumentError, HeadwiseError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2
EXPORT_MARKER = "headwise-export.json"  # written to every exported folder, which may then be replaced by a later export


def write_atomic(path: str | Path, data: bytes) -> Path:
    """Write a file atomically. On an error the previous content is unchanged."""
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
        raise HeadwiseError(f"{path}: could not be written ({error}). Nothing was changed.") from error
    finally:
        if temp_path is not None:
            temp_path.unlink(missing_ok=True)
    return path


@contextmanager
def atomic_file(path: str | Path, may_replace: Callable[[Path], bool], description: str) -> Iterator[Path]:
    """Yield a temporary path to write to; on success, move the file to `path`. On an error nothing is changed.

    Args:
        path: Final path.
        may_replace: Returns whether an existing file may be replaced, because Headwise wrote it.
        description: Kind of file, for the error message.
    """
    path = Path(path)
    try:
        if path.is_dir() or (path.exists() and not may_replace(path)):
            raise ArgumentError(
                f"{path}: already exists and is not a {description} written by Headwise. Choose another name."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise HeadwiseError(f"{path}: could not be written ({error}). Nothing was changed.") from error
    try:
        yield temp_folder / path.name
        _flush_files(temp_folder)
        (temp_folder / path.name).replace(path)
    except OSError as error:
        raise HeadwiseError(f"{path}: could not be written ({error}). Nothing was changed.") from error
    finally:
        _remove(temp_folder)


@contextmanager
def atomic_folder(folder: str | Path, markers: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary folder to write to; on success, move it to `folder`. On an error nothing is changed.

    Args:
        folder: Final path. An existing folder is replaced only if it is empty or contains one of `markers`.
        markers: Names of files that show that Headwise wrote the folder.
    """
    folder = Path(folder)
    if folder.is_file() or (
        folder.is_dir() and any(folder.iterdir()) and not any((folder / marker).is_file() for marker in markers)
    ):
        raise ArgumentError(f"{folder}: already exists and was not written by Headwise. Choose a new or empty folder.")
    temp_folder = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield temp_folder
        _flush_files(temp_folder)
        temp_folder.chmod(0o755)
        _replace_folder(temp_folder, folder)
    except (OSError, SafetensorError) as error:
        raise HeadwiseError(f"{folder}: could not be written ({error}). Nothing was changed.") from error
    finally:
        if temp_folder is not None:
            _remove(temp_folder)


def _remove(folder: Path) -> None:
    """Delete a folder, even if Ctrl-C is pressed meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _replace_folder(temp_folder: Path, folder: Path) -> None:
    """Move the new folder to the path of the old one. The old one is deleted, or moved to the temporary path."""
    if not folder.exists():
        temp_folder.rename(folder)
    elif not _exchange(temp_folder, folder):
        old = temp_folder.with_name(temp_folder.name + "-old")
        try:
            folder.rename(old)
            temp_folder.rename(folder)
        finally:  # after an error or Ctrl-C between the two renames, restore the old folder
            if old.exists():
                if folder.exists():
                    _remove(old)
                else:
                    old.rename(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one atomic step. Return False if the platform does not support it."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old version of it
        return False
    return swap(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _flush_files(folder: Path) -> None:
    """Flush all files of a folder to disk before the folder is moved to its final path."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
