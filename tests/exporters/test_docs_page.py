"""The commands and servers of docs/deploy.md, in their order, in one folder: with a tiny model, and with SmolLM2."""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headwise as hw
from headwise.cli import app
from tests.exporters.llamas import TEXTS, llama

PAGE = (Path(__file__).parent.parent.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
COMMANDS = [line.split("  #")[0].strip() for line in re.findall(r"^    headwise (.+)$", PAGE, re.MULTILINE)]
SERVERS = dict(re.findall(r"```py\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
STARTED = re.findall(r"^    python (serve_\w+\.py) (\S+) \d+$", PAGE, re.MULTILINE)
(ASKED,) = re.findall(r"^    curl \S+/completion -d '(.+)'$", PAGE, re.MULTILINE)
pytestmark = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("onnxruntime") is None, reason="needs both engines"
)


def run(commands: list[str]) -> None:
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "100"})
        assert done.exit_code == 0, (command, done.stderr, done.exception)
        if "--check" in command:
            assert re.search(r"the same text|cosines", done.stdout), (command, done.stdout)


@contextmanager
def started(name: str, given: str) -> Iterator[str]:
    """A server of the page, at a port that is free; its address."""
    Path(name).write_text(SERVERS[name], encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, name, given, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("http"))
        yield address.strip()
    finally:
        process.kill()
        process.communicate()


def ask(address: str) -> str:
    request = urllib.request.Request(f"{address}/completion", ASKED.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["content"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 8), encoding="utf-8")
    llama(layers=2).save(tmp_path / "tiny")
    return tmp_path


def test_a_cut_model_behind_llama_cpp(here: Path) -> None:
    """A quick sample: the first two commands, and the server."""
    run([command.replace("smollm2", "tiny") for command in COMMANDS[:2]])
    name, given = STARTED[0]
    with started(name, given) as address:
        found = ask(address)
    prompt = json.loads(ASKED)["prompt"]
    ours = hw.load(here / "small").generate(prompt, tokens=32).removeprefix(prompt)
    assert found[:8] == ours[:8], "by itself it keeps keys at 16 bits: later on they may part"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_the_whole_page(model: str, here: Path) -> None:
    assert len(COMMANDS) == 7
    run([command.replace("smollm2", model) for command in COMMANDS])
    assert [name for name, _ in STARTED] == list(SERVERS)
    answers = []
    for name, given in STARTED:
        with started(name, given) as address:
            answers.append(ask(address))
    assert all(answers)
    ours = hw.load(here / "small").generate(json.loads(ASKED)["prompt"], tokens=32)
    assert answers[1].startswith(ours.removeprefix(json.loads(ASKED)["prompt"])), (
        "onnxruntime writes what ours writes, or on behind its end"
    )
