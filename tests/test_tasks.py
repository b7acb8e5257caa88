"""The commands of docs/tasks.md, as they stand there and in that order, in one folder."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwise.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "tasks.md"
COMMANDS = re.findall(r"^    headwise (.+)$", PAGE.read_text(), re.MULTILINE)
INTERACTIVE = ("view",)  # answers until Ctrl-C; tests/ui has it in a browser


def run(commands: list[str]) -> dict[str, str]:
    """Return the output of each command."""
    outputs = {}
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "80"})
        assert done.exit_code == 0, (command, done.stderr, done.exception)
        outputs[command] = done.stdout
    return outputs


def test_tasks_page_train_and_plot_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sample."""
    monkeypatch.chdir(tmp_path)
    run([command for command in COMMANDS if command.startswith(("train", "generate", "maps"))])
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_tasks_page_all_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = run([command for command in COMMANDS if not command.startswith(INTERACTIVE)])
    assert len(outputs) == 8
    heads = outputs[COMMANDS[1]]
    assert re.search(r"1\.1 +0\.\d+ +0\.\d+ +0\.\d+–0\.\d+", heads), "a row per head: score, baseline, interval"
    assert "Load it with hw.load" in outputs[COMMANDS[2]]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert "Model saved in runs/first" in outputs[COMMANDS[4]], "a finished run goes no further"
    assert "have the same role" in outputs[COMMANDS[-1]]
