"""Standard output with other encodings, a full disk, or zero width."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner import run_command


def run(arguments: list[str], stdout: int | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "headwise", *arguments],
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_maps_output_encoding_without_character_replaces_it(encoding: str, tmp_path: Path) -> None:
    run_command("train", "--preset", "synthetic", "--steps", "1", "--out", tmp_path).output
    done = run(
        ["maps", str(tmp_path / "model"), "the dog saw 日本 …", "--heads", "0.0"],
        PYTHONIOENCODING=encoding,
        PYTHONUTF8="0",
    )
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_command_output_device_full_reports_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run(["presets"], stdout=full)
    finally:
        os.close(full)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("headwise: cannot write the result: No space left on device.")


def test_command_zero_columns_prints_result() -> None:
    assert run_command("presets", columns=0).output == run_command("presets", columns=80).output
