"""Full disks and read-only folders: every command prints one line and leaves no partial files."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.writers import WRITING_COMMANDS, CommandCall, make_workdir, read_outputs
from tests.io.full_disk import limited_file_size
from tests.runner import run_command

SLOW_COMMANDS = ("export onnx", "export torch", "profile", "profile --out", "plot")  # seconds each
FAST_COMMANDS = [name for name in WRITING_COMMANDS if name not in SLOW_COMMANDS]
SIZES = (0, 300, 3_000)  # maximum file sizes in bytes


@pytest.fixture(scope="module")
def workdir() -> Iterator[Path]:
    """A folder outside that of pytest, which other users cannot read."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(make_workdir(Path(folder)))
        yield Path(folder)


@contextmanager
def read_only_folder(folder: Path) -> Iterator[None]:
    """Make a folder read-only. Root temporarily becomes another user, because root can write everywhere."""
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


def expected_contents(workdir: Path, call: CommandCall) -> dict[str, bytes]:
    """Return the files of a call with enough space."""
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        assert run_command(*call.arguments(Path(folder))).code == 0
        return read_outputs(Path(folder), call)


def check_full_disk(workdir: Path, call: CommandCall, size: int) -> None:
    expected = expected_contents(workdir, call)
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        out = Path(folder)
        with limited_file_size(size):
            done = run_command(*call.arguments(out))
        if size == 0:
            assert done.code, "nothing can be written, so nothing can be done"
        if done.code:
            assert "File too large" in done.error_line
        if call.resumes:  # finished parts may remain; with enough space the call resumes
            assert run_command(*call.arguments(out)).code == 0
            assert read_outputs(out, call) == expected
        else:
            remaining = read_outputs(out, call)
            assert remaining == {name: expected[name] for name in remaining}, "what is there is whole"
            names = {name.split("/")[0] for name in remaining}
            assert {file.name for file in out.iterdir()} == names, "and nothing else is"


@pytest.mark.parametrize("name", FAST_COMMANDS)
def test_command_full_disk_writes_nothing(workdir: Path, name: str) -> None:
    check_full_disk(workdir, WRITING_COMMANDS[name], 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WRITING_COMMANDS)
def test_command_nearly_full_disk_writes_complete_files_only(workdir: Path, name: str, size: int) -> None:
    check_full_disk(workdir, WRITING_COMMANDS[name], size)


def check_read_only(workdir: Path, call: CommandCall) -> None:
    expected_contents(workdir, call)  # this also imports all modules
    with tempfile.TemporaryDirectory(dir=workdir) as folder:
        out = Path(folder)
        with read_only_folder(out):
            done = run_command(*call.arguments(out))
        assert "Permission denied" in done.error_line
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", FAST_COMMANDS)
def test_command_read_only_folder_raises(workdir: Path, name: str) -> None:
    check_read_only(workdir, WRITING_COMMANDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_COMMANDS)
def test_slow_command_read_only_folder_raises(workdir: Path, name: str) -> None:
    check_read_only(workdir, WRITING_COMMANDS[name])
