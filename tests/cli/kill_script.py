"""Stop a verb that writes at random moments, by Ctrl-C or for good, and look what is left; python -m tests.cli.kill_script.

Each try is a child of a process that has all imported, so that a moment lies in the work and not in the start. What is there
afterwards is what was there before or what a call makes that nobody stops, byte by byte; where the same call goes on, it is
called again and must end in those bytes. Prints a line for each verb: tries, stopped, ended before.
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
from tests.cli.writers import WRITES, Call, contents, make_place


def begin(words: list[str], names: Path | None = None) -> int:
    """A child that calls a verb; its number. `names` is a file for what it has imported in the end."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["headwise", *words]
        code = 0
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException as error:  # what nobody caught
                inside = traceback.extract_tb(error.__traceback__)[1:]
                said.write(traceback.format_exc() if inside else "stopped before it was called")
        if "Traceback" in said.getvalue():
            code = 99
        if code not in (0, 130):
            print(said.getvalue(), file=sys.__stderr__, flush=True)
        if names is not None:
            names.write_text("\n".join(sys.modules))
        os._exit(code)
    return child


def finish(words: list[str], names: Path | None = None) -> int:
    """How an unstopped call ends."""
    return os.waitstatus_to_exitcode(os.waitpid(begin(words, names), 0)[1])


def import_all(names: Path) -> None:
    """Import what a child has imported: so the next ones begin with their work."""
    for name in names.read_text().splitlines():
        with suppress(Exception):  # some are nobody's to import by name
            importlib.import_module(name)


def stop(words: list[str], after: float, how: int) -> int:
    """How a call ends that is sent a signal after so many seconds."""
    child = begin(words)
    time.sleep(after)
    os.kill(child, how)  # a child that has ended is there until it is waited for
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def look(out: Path, call: Call, before: dict[str, bytes], made: dict[str, bytes]) -> int:
    """What a stopped call has left: whole, or nothing; the number of hidden files and folders it could not tidy up."""
    if call.goes_on:
        assert finish(call.words(out)) == 0, "the same again does not go on"
        left = contents(out, call)
        assert left == made, (
            f"it went on to another end: {[n for n in left.keys() | made if left.get(n) != made.get(n)]}"
        )
        return 0
    left = contents(out, call)
    for name in call.made:  # each file or folder is whole, old or new
        ours = {key: value for key, value in left.items() if key.split("/")[0] == name}
        allowed = [{k: v for k, v in some.items() if k.split("/")[0] == name} for some in (before, made)]
        assert ours in allowed, f"{name} is neither what was there nor what is made: {sorted(ours)}"
    others = [file.name for file in out.iterdir() if file.name not in call.made]
    assert all(name.startswith(".") for name in others), f"somebody might take these for a result: {others}"
    return len(others)


def run(name: str, tries: int, place: Path, chance: random.Random) -> str:
    """Stop a verb so many times."""
    call, whole = WRITES[name], place / "whole"
    whole.mkdir()
    assert finish(call.words(whole), place / "names") == 0, f"{name} does not run"
    import_all(place / "names")
    shutil.rmtree(whole)
    whole.mkdir()
    started = time.perf_counter()
    assert finish(call.words(whole)) == 0
    lasts = time.perf_counter() - started
    made = contents(whole, call)
    stopped = hidden = 0
    for one in range(tries):
        out = place / "out"
        out.mkdir()
        before: dict[str, bytes] = {}
        if one % 2 and not call.goes_on:  # something older is there, which must not be lost
            assert finish(call.words(out)) == 0
            before = contents(out, call)
        how = signal.SIGINT if one % 4 < 2 else signal.SIGKILL
        code = stop(call.words(out), chance.uniform(0, lasts), how)
        assert code in (0, 130, -how), f"{name} ended with {code}"
        stopped += code != 0
        left = look(out, call, before, made)
        hidden += left if how == signal.SIGINT else 0  # who is killed cannot tidy up
        shutil.rmtree(out)
    shutil.rmtree(whole)
    ended = tries - stopped
    return f"{name}: {tries} tries, {stopped} stopped, {ended} ended before; hidden files left by Ctrl-C: {hidden}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", default=list(WRITES))
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(make_place(Path(folder)))
        os.environ["COLUMNS"] = "120"
        for verb in options.verbs:
            print(run(verb, options.tries, Path(folder), random.Random(options.seed)), flush=True)
