"""Writing commands stopped at random times: the files are complete, old or new, or the command resumes."""

import subprocess
import sys

import pytest

from tests.cli.writers import WRITING_COMMANDS


def run_kill_script(*commands: str, tries: int) -> None:
    script = [sys.executable, "-m", "tests.cli.kill_script", *commands, "--tries", str(tries)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(commands)
    assert any(", 0 stopped" not in line for line in done.stdout.splitlines()), done.stdout


def test_command_interrupted_at_four_times_output_is_complete() -> None:
    run_kill_script("prune", "train", tries=4)


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRITING_COMMANDS)
def test_command_interrupted_at_twenty_times_output_is_complete(verb: str) -> None:
    run_kill_script(verb, tries=20)
