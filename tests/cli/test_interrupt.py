"""Verbs that write, stopped at random moments by Ctrl-C or for good: what is left is whole, old or new, or goes on."""

import subprocess
import sys

import pytest

from tests.cli.writers import WRITES


def stop(*verbs: str, tries: int) -> None:
    script = [sys.executable, "-m", "tests.cli.kill_script", *verbs, "--tries", str(tries)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(verbs)
    assert any(", 0 stopped" not in line for line in done.stdout.splitlines()), done.stdout


def test_stopped_at_four_moments() -> None:
    stop("prune", "train", tries=4)


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRITES)
def test_stopped_at_twenty_moments(verb: str) -> None:
    stop(verb, tries=20)
