"""Random arguments: a call exits with 0, 1 or 2 and one line of explanation, never with a traceback."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.cli import COMMANDS
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer
from tests.runner import run_command

NAMES = sorted(command.__name__.rpartition(".")[2] for command in COMMANDS)
SUPPRESSED_CHECKS = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
    HealthCheck.large_base_example,
)
FAST_COMMANDS = [
    name for name in NAMES if name not in ("demo", "view", "claims", "sweep", "train", "distill")
]  # the excluded commands run too long
WORDS = st.one_of(
    st.sampled_from(
        ["MODEL", "TEXT", "0.1", "5.*", "*", "-1", "0", "1e9", "nan", "../..", "", " ", "4,3", "=", "*=4", "é\u202e"]
    ),
    st.text(max_size=12).filter(lambda text: "\0" not in text),
)
OPTIONS = st.sampled_from(
    ["--json", "--head", "--heads", "--query", "--key", "--keep", "--bits", "--weights", "--ranking", "--plan", "--model",
     "--no-words", "--seed", "--max-rows", "--role", "--show-layers", "--relative-to-mean", "--no-causal", "--help", "-x",
     "--"]
)  # fmt: skip
ARGUMENTS = st.lists(st.one_of(WORDS, OPTIONS), max_size=5)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with two heads and a byte tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("fuzz")
    torch.manual_seed(0)
    model = hw.Transformer(ModelSpec(vocab=257, context=256, layers=1, attention=AttentionSpec(width=4, heads=2)))
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "text.txt").write_text("to be or not to be " * 40)
    return folder


def check_command(workdir: Path, name: str, template: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workdir)  # outputs go to this folder
        arguments = [{"MODEL": "model", "TEXT": "text.txt"}.get(word, word) for word in template]
        done = run_command(name, *arguments)
    assert done.code in (0, 1, 2), (name, arguments, done.err)
    assert "Traceback" not in done.err, (name, arguments, done.err)
    if done.code:
        assert done.err.strip(), (name, arguments)


@settings(max_examples=60, deadline=None, suppress_health_check=SUPPRESSED_CHECKS)
@given(name=st.sampled_from(FAST_COMMANDS), words=ARGUMENTS)
def test_command_random_arguments_no_traceback(workdir: Path, name: str, words: list[str]) -> None:
    check_command(workdir, name, words)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=SUPPRESSED_CHECKS)
@given(name=st.sampled_from(FAST_COMMANDS), words=ARGUMENTS)
def test_command_many_random_arguments_no_traceback(workdir: Path, name: str, words: list[str]) -> None:
    check_command(workdir, name, words)


@settings(max_examples=30, deadline=None, suppress_health_check=SUPPRESSED_CHECKS)
@given(name=st.sampled_from(NAMES), words=st.lists(st.one_of(OPTIONS, st.text(max_size=5)), min_size=1, max_size=3))
def test_command_unknown_option_no_traceback(workdir: Path, name: str, words: list[str]) -> None:
    check_command(workdir, name, ["--no-such-option", *(word for word in words if "\0" not in word)])


def test_commands_local_arguments_use_no_network(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is opened unless a remote name is given."""

    def reject_connection(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"network access: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, reject_connection)
    monkeypatch.setattr(socket, "getaddrinfo", reject_connection)
    monkeypatch.chdir(workdir)
    for words in (
        ("info", "model"), ("generate", "model", "to be", "--max-new-tokens", "2"), ("maps", "model", "to be"), ("presets",),
        ("explain", "model", "to be", "--head", "0.1", "--query", "2"), ("corpus", "--documents", "2"),
        ("scan", "model", "to be"),
        ("profile", "model", "text.txt", "--no-causal", "--save", "p.npz"), ("describe", "p.npz", "0.1"),
        ("plot", "roles", "p.npz"),
        ("importance", "model", "text.txt"), ("prune", "model", "--heads", "0.1", "--out", "small"),
        ("quantize", "model", "--weights", "8", "--out", "eight"), ("diff", "p.npz", "p.npz"),
        ("train", "text.txt", "--steps", "2", "--tokenizer", "byte", "--context", "8", "--out", "run"),
    ):  # fmt: skip
        done = run_command(*words)
        assert done.code == 0, (words, done.err)
