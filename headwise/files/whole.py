"""Writing whole or not at all: a file or a folder takes its place only when all of it is on the disk."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headwise.errors import HeadwiseError

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
        shutil.rmtree(folder, ignore_errors=True)


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
            shutil.rmtree(new, ignore_errors=True)


def _take_place(new: Path, folder: Path) -> None:
    """Put the new folder where the old one is; if that fails, the old one goes back."""
    if not folder.exists():
        new.rename(folder)
        return
    old = new.with_name(new.name + "-old")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Make sure the bytes are on the disk before the folder takes its place."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
