"""Run the command line in tests and return its output and exit code."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from headwise.cli import main


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def output(self) -> str:
        """The result of a call that went well."""
        assert self.code == 0, self.err
        return self.out

    @property
    def error_line(self) -> str:
        """Return the error message of a failed command: one last line, without a result or a traceback."""
        assert (self.code, self.out) == (2, ""), self.err
        assert "Traceback" not in self.err
        last = self.err.splitlines()[-1]
        assert last.startswith("headwise: ")
        return last


def run_command(*arguments: object, columns: int = 120) -> CommandResult:
    """Run in this process, because importing torch for every call would take minutes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


def run_in_subprocess(*arguments: object) -> CommandResult:
    """In a process of its own, with one thread."""
    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)
