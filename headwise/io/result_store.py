"""Store of results on disk: one file per result, for results that depend only on model, corpus, settings and version.

    <store>/profile-3f2a….result      a line with the format, a line of JSON (description, size, digest), then the content
    <store>/.profile-3f2a….lock       held by the process that computes this result; others wait, then read it

A file appears only after all of it is written. Damaged files count as missing. The content is plain data (JSON or npz), never
pickle. If the store is larger than its limit, the results that were not used for the longest time are deleted.
"""

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, HeadwiseError
from headwise.io.atomic_write import write_atomic

FOLDER_VARIABLE, SIZE_VARIABLE = "HEADWISE_STORE", "HEADWISE_STORE_BYTES"
DEFAULT_BYTES = 1 << 30
FORMAT = b"headwise result 1"
SUFFIX = ".result"
MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"([a-z]+)-([0-9a-f]{64})\.result")


@dataclass(frozen=True)
class StoredResultEntry:
    """One result of the store.

    Attributes:
        kind: Kind of result, such as "profile".
        key: Digest of everything on which the result depends.
        path: File.
        nbytes: Size of the file.
        used: Time of the last use, in seconds since 1970.
        description: Model, corpus and settings, for the list of results.
    """

    kind: str
    key: str
    path: Path
    nbytes: int
    used: float
    description: Mapping[str, Any]


class ResultStore:
    """Results on disk, shared by processes.

    Args:
        folder: Folder of the store. None takes `$HEADWISE_STORE`, or a folder `headwise/results` in the user's cache.
        max_bytes: Size limit. None takes `$HEADWISE_STORE_BYTES`, or 1 GiB.
        read_only: Whether the store is only read: nothing is written, locked or deleted.
    """

    def __init__(
        self, folder: str | Path | None = None, max_bytes: int | None = None, *, read_only: bool = False
    ) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.max_bytes = _default_bytes() if max_bytes is None else max_bytes
        self.read_only = read_only

    def path(self, kind: str, key: str) -> Path:
        """Return the file of a result."""
        return self.folder / f"{kind}-{key}{SUFFIX}"

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the content of a result. None if it is missing or damaged."""
        path = self.path(kind, key)
        try:
            content = _parse(path.read_bytes())[1]
        except (OSError, ValueError):
            return None
        if not self.read_only:
            _touch(path)
        return content

    def write(self, kind: str, key: str, content: bytes, description: Mapping[str, Any]) -> None:
        """Write a result, then delete old ones beyond the size limit. If the disk cannot be written, warn and go on."""
        if self.read_only or len(content) > self.max_bytes:
            return
        header = {
            "description": dict(description),
            "nbytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        try:
            write_atomic(self.path(kind, key), b"\n".join((FORMAT, json.dumps(header).encode(), content)))
        except HeadwiseError as error:
            warnings.warn(f"the result was not stored: {error}", stacklevel=2)
            return
        self.prune(self.max_bytes, protected=self.path(kind, key))

    @contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """Hold the lock of a result, so that one process computes it while others wait. Released if the process ends."""
        from filelock import FileLock

        lock = None
        if not self.read_only:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self.folder / f".{kind}-{key}.lock")
                lock.acquire()
            except OSError:  # a disk that cannot be written or does not support locks: `write` warns
                lock = None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def list_entries(self) -> list[StoredResultEntry]:
        """Return all readable results, the last used first."""
        found_results = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            match = _NAME.fullmatch(path.name)
            try:
                status = path.stat()
                description = _read_header(path)["description"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if match is not None and isinstance(description, dict):
                result = StoredResultEntry(match[1], match[2], path, status.st_size, status.st_mtime, description)
                found_results.append(result)
        return sorted(found_results, key=lambda result: -result.used)

    def prune(self, max_bytes: int = 0, *, kind: str | None = None, protected: Path | None = None) -> int:
        """Delete the results that were not used for the longest time until the store has at most `max_bytes`.

        Args:
            max_bytes: Size of the store afterwards.
            kind: Delete only results of this kind.
            protected: File that is not deleted.

        Returns:
            Number of deleted results.
        """
        if self.read_only:
            raise ArgumentError("store: opened read-only. Open it without read_only to delete results.")
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            match = _NAME.fullmatch(path.name)
            try:
                status = path.stat()
            except OSError:  # deleted by another process
                continue
            if match is not None and (kind is None or match[1] == kind):
                files.append((status.st_mtime, status.st_size, path))
        total, deleted = sum(size for _, size, _ in files), 0
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            if path != protected:
                path.unlink(missing_ok=True)
                path.with_name(f".{path.stem}.lock").unlink(missing_ok=True)
                total, deleted = total - size, deleted + 1
        return deleted


def default_folder() -> Path:
    """Return the folder of the store: `$HEADWISE_STORE`, or `headwise/results` in the user's cache folder."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder).expanduser()
    if sys.platform == "win32":
        cache_folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "headwise" / "results"


def result_key(parts: Mapping[str, Any]) -> str:
    """Return the digest of everything on which a result depends, and of the version of the package.

    >>> result_key({"a": 1}) == result_key({"a": 1}), result_key({"a": 1}) == result_key({"a": 2})
    (True, False)
    """
    text = json.dumps({**parts, "version": version_with_code_digest()}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def version_with_code_digest() -> str:
    """Return the version of the package with a digest of its files, which changes with every edit of a checkout."""
    import headwise

    hasher, root = hashlib.sha256(), Path(headwise.__file__).parent
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    for path in sorted(files):
        hasher.update(f"{path.relative_to(root)}:".encode())
        hasher.update(path.read_bytes())
    return f"{headwise.__version__}+{hasher.hexdigest()[:16]}"


def _default_bytes() -> int:
    text = os.environ.get(SIZE_VARIABLE, "")
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise ArgumentError(f"{SIZE_VARIABLE}: must be a number of bytes. Got {text!r}.")
    return int(text)


def _touch(path: Path) -> None:
    """Set the time of the last use. A store that cannot be written stays as it is."""
    try:
        os.utime(path)
    except OSError:
        return


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return _parse_header(file.readline(64), file.readline(MAX_HEADER_BYTES))


def _parse_header(first: bytes, second: bytes) -> dict[str, Any]:
    header = json.loads(second) if first.rstrip(b"\n") == FORMAT else None
    if not isinstance(header, dict):
        raise ValueError("not a stored result")
    return header


def _parse(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and content. Raise ValueError if the file is damaged."""
    first, _, rest = data.partition(b"\n")
    second, _, content = rest.partition(b"\n")
    header = _parse_header(first, second)
    if header.get("nbytes") != len(content) or header.get("sha256") != hashlib.sha256(content).hexdigest():
        raise ValueError("damaged")
    return header, content
