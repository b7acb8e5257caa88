"""Stop writing commands at random times with SIGINT or SIGKILL and check the files; python -m tests.cli.kill_script.

Each attempt is a forked child of a process with all modules imported, so that the signal arrives during the work and not
during the imports. Afterwards the files are byte for byte those from before or those of an uninterrupted call. A resumable
command is run again and must produce the files of an uninterrupted call. Prints one line per command.
"""

import argparse
import importlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch

from headwise.cli import main
from tests.cli.writers import WRITING_COMMANDS, CommandCall, make_workdir, read_outputs


def start_command(arguments: list[str], names: Path | None = None) -> int:
    """Fork a child that runs a command and return its process id. `names` is a file for the modules it has imported."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["headwise", *arguments]
        code = 0
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as captured:
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException as error:  # uncaught
                inside = traceback.extract_tb(error.__traceback__)[1:]
                captured.write(traceback.format_exc() if inside else "stopped before it was called")
        if "Traceback" in captured.getvalue():
            code = 99
        if code not in (0, 130):
            print(captured.getvalue(), file=sys.__stderr__, flush=True)
        if names is not None:
            names.write_text("\n".join(sys.modules))
        os._exit(code)
    return child


def run_command(arguments: list[str], names: Path | None = None) -> int:
    """Return the exit code of an uninterrupted call."""
    return os.waitstatus_to_exitcode(os.waitpid(start_command(arguments, names), 0)[1])


def import_modules(names: Path) -> None:
    """Import the modules that a child has imported, so that later children start faster."""
    for name in names.read_text().splitlines():
        with suppress(Exception):  # some modules cannot be imported by name
            importlib.import_module(name)


def stop_after(arguments: list[str], after: float, signal_number: int) -> int:
    """Return the exit code of a call that receives a signal after `after` seconds."""
    child = start_command(arguments)
    time.sleep(after)
    os.kill(child, signal_number)  # valid for a finished child too, until waitpid
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_outputs(out: Path, call: CommandCall, before: dict[str, bytes], expected: dict[str, bytes]) -> int:
    """Check that the files of a stopped call are complete or absent. Return the number of hidden files that remain."""
    if call.resumes:
        assert run_command(call.arguments(out)) == 0, "the second call does not resume"
        remaining = read_outputs(out, call)
        assert remaining == expected, (
            f"other files than expected: {[n for n in remaining.keys() | expected if remaining.get(n) != expected.get(n)]}"
        )
        return 0
    remaining = read_outputs(out, call)
    for name in call.outputs:  # each file or folder is complete, old or new
        found_files = {key: value for key, value in remaining.items() if key.split("/")[0] == name}
        allowed = [{k: v for k, v in files.items() if k.split("/")[0] == name} for files in (before, expected)]
        assert found_files in allowed, f"{name} is neither the old nor the new output: {sorted(found_files)}"
    others = [file.name for file in out.iterdir() if file.name not in call.outputs]
    assert all(name.startswith(".") for name in others), f"partial files without a leading dot: {others}"
    return len(others)


def stop_repeatedly(name: str, tries: int, workdir: Path, rng: random.Random) -> str:
    """Stop a command `tries` times."""
    call, complete = WRITING_COMMANDS[name], workdir / "whole"
    complete.mkdir()
    assert run_command(call.arguments(complete), workdir / "names") == 0, f"{name} does not run"
    import_modules(workdir / "names")
    shutil.rmtree(complete)
    complete.mkdir()
    started = time.perf_counter()
    assert run_command(call.arguments(complete)) == 0
    duration = time.perf_counter() - started
    expected = read_outputs(complete, call)
    stopped = hidden = 0
    for attempt in range(tries):
        out = workdir / "out"
        out.mkdir()
        before: dict[str, bytes] = {}
        if attempt % 2 and not call.resumes:  # an older output exists and must not be lost
            assert run_command(call.arguments(out)) == 0
            before = read_outputs(out, call)
        signal_number = signal.SIGINT if attempt % 4 < 2 else signal.SIGKILL
        code = stop_after(call.arguments(out), rng.uniform(0, duration), signal_number)
        assert code in (0, 130, -signal_number), f"{name} ended with {code}"
        stopped += code != 0
        num_hidden = check_outputs(out, call, before, expected)
        hidden += num_hidden if signal_number == signal.SIGINT else 0  # a killed process cannot clean up
        shutil.rmtree(out)
    shutil.rmtree(complete)
    ended = tries - stopped
    return f"{name}: {tries} tries, {stopped} stopped, {ended} ended before; hidden files left by Ctrl-C: {hidden}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", default=list(WRITING_COMMANDS))
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(make_workdir(Path(folder)))
        os.environ["COLUMNS"] = "120"
        for command in options.verbs:
            print(stop_repeatedly(command, options.tries, Path(folder), random.Random(options.seed)), flush=True)
