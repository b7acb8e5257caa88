"""Run the tests while other processes keep every core busy: `make test-busy`.

A test that depends on timing fails here sooner or later. The load runs from the first test to the last.
"""

import argparse
import multiprocessing
import subprocess
import sys


def keep_busy() -> None:
    """Compute until the process is killed."""
    value = 1
    while True:
        value = (value * 1103515245 + 12345) % 2147483648


def run_busy(arguments: list[str], processes: int, rounds: int) -> int:
    """Run pytest several times next to busy processes.

    Args:
        arguments: Arguments of pytest.
        processes: Number of busy processes.
        rounds: Number of runs.

    Returns:
        Number of failed runs.
    """
    load = [multiprocessing.Process(target=keep_busy, daemon=True) for _ in range(processes)]
    for process in load:
        process.start()
    failed = 0
    try:
        for number in range(rounds):
            print(f"Run {number + 1} of {rounds} next to {processes} busy processes", flush=True)
            failed += subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode != 0
    finally:
        for process in load:
            process.kill()
    print(f"{failed} of {rounds} runs failed")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8, help="Number of busy processes.")
    parser.add_argument("--rounds", type=int, default=3, help="Number of runs.")
    options, pytest_arguments = parser.parse_known_args()
    sys.exit(min(1, run_busy(pytest_arguments, options.processes, options.rounds)))
