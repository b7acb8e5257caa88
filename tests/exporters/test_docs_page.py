"""Run the commands and servers of docs/exporters.md in order, in one folder, with a tiny model and with SmolLM2."""

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
from tests.exporters.llamas import TEXTS, make_llama

PAGE = (Path(__file__).parent.parent.parent / "docs" / "exporters.md").read_text(encoding="utf-8")
COMMANDS = [line.split("  #")[0].strip() for line in re.findall(r"^    headwise (.+)$", PAGE, re.MULTILINE)]
SERVERS = dict(re.findall(r"```py\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SERVER_COMMANDS = re.findall(r"^    python (serve_\w+\.py) (\S+) \d+$", PAGE, re.MULTILINE)
(REQUEST_BODY,) = re.findall(r"^    curl \S+/completion -d '(.+)'$", PAGE, re.MULTILINE)
pytestmark = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("onnxruntime") is None, reason="needs both engines"
)


def run_commands(commands: list[str]) -> None:
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "100"})
        assert done.exit_code == 0, (command, done.stderr, done.exception)
        if "--check" in command:
            assert re.search(r"the same text|cosines", done.stdout), (command, done.stdout)


@contextmanager
def running_server(name: str, model_path: str) -> Iterator[str]:
    """Start a server of the page on a free port. Yields its address."""
    Path(name).write_text(SERVERS[name], encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, name, model_path, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("http"))
        yield address.strip()
    finally:
        process.kill()
        process.communicate()


def request_completion(address: str) -> str:
    request = urllib.request.Request(
        f"{address}/completion", REQUEST_BODY.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["content"]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 8), encoding="utf-8")
    make_llama(layers=2).save(tmp_path / "tiny")
    return tmp_path


def test_docs_page_pruned_model_served_by_llama_cpp(workdir: Path) -> None:
    """A fast sample: the first two commands and the server."""
    run_commands([command.replace("smollm2", "tiny") for command in COMMANDS[:2]])
    name, model_path = SERVER_COMMANDS[0]
    with running_server(name, model_path) as address:
        completion = request_completion(address)
    prompt = json.loads(REQUEST_BODY)["prompt"]
    expected = hw.load(workdir / "small").generate(prompt, max_new_tokens=32).removeprefix(prompt)
    assert completion[:8] == expected[:8], "by itself it keeps keys at 16 bits: later on they may part"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_docs_page_all_commands_and_servers_run(model: str, workdir: Path) -> None:
    assert len(COMMANDS) == 7
    run_commands([command.replace("smollm2", model) for command in COMMANDS])
    assert [name for name, _ in SERVER_COMMANDS] == list(SERVERS)
    answers = []
    for name, model_path in SERVER_COMMANDS:
        with running_server(name, model_path) as address:
            answers.append(request_completion(address))
    assert all(answers)
    expected = hw.load(workdir / "small").generate(json.loads(REQUEST_BODY)["prompt"], max_new_tokens=32)
    assert answers[1].startswith(expected.removeprefix(json.loads(REQUEST_BODY)["prompt"])), (
        "onnxruntime writes what ours writes, or on behind its end"
    )
