"""A disk that is full, a folder that may not be written: a line that says so, and nothing half-written, for every verb."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.writers import WRITES, Call, contents, make_place
from tests.io.full_disk import files_up_to
from tests.runner import headwise

DEAR = ("export onnx", "export torch", "heads", "heads --out", "plot")  # seconds each
QUICK = [name for name in WRITES if name not in DEAR]
SIZES = (0, 300, 3_000)  # bytes that a file may have


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Not pytest's own folder, which is closed to other users."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(make_place(Path(folder)))
        yield Path(folder)


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """A folder that may be read alone; the administrator, who may do everything, is nobody meanwhile."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        folder.chmod(0o755)


def whole(place: Path, call: Call) -> dict[str, bytes]:
    """What it makes where there is room."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        assert headwise(*call.words(Path(folder))).code == 0
        return contents(Path(folder), call)


def check_full(place: Path, call: Call, size: int) -> None:
    made = whole(place, call)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        out = Path(folder)
        with files_up_to(size):
            said = headwise(*call.words(out))
        if size == 0:
            assert said.code, "nothing can be written, so nothing can be done"
        if said.code:
            assert "File too large" in said.refused
        if call.goes_on:  # what is kept may be there; with room it goes on to the same end
            assert headwise(*call.words(out)).code == 0
            assert contents(out, call) == made
        else:
            left = contents(out, call)
            assert left == {name: made[name] for name in left}, "what is there is whole"
            names = {name.split("/")[0] for name in left}
            assert {file.name for file in out.iterdir()} == names, "and nothing else is"


@pytest.mark.parametrize("name", QUICK)
def test_a_full_disk(place: Path, name: str) -> None:
    check_full(place, WRITES[name], 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WRITES)
def test_a_disk_with_little_room(place: Path, name: str, size: int) -> None:
    check_full(place, WRITES[name], size)


def check_closed(place: Path, call: Call) -> None:
    whole(place, call)  # and all that is needed has been imported
    with tempfile.TemporaryDirectory(dir=place) as folder:
        out = Path(folder)
        with closed(out):
            said = headwise(*call.words(out))
        assert "Permission denied" in said.refused
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", QUICK)
def test_a_closed_folder(place: Path, name: str) -> None:
    check_closed(place, WRITES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", DEAR)
def test_a_closed_folder_for_what_takes_longer(place: Path, name: str) -> None:
    check_closed(place, WRITES[name])
