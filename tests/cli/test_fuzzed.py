"""Anything may be typed: a call ends with 0, 1 or 2 and one line that says why, never with a traceback."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.cli import VERBS
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer
from tests.runner import headwise

NAMES = sorted(verb.__name__.rpartition(".")[2] for verb in VERBS)
SLOW = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
    HealthCheck.large_base_example,
)
QUICK = [
    name for name in NAMES if name not in ("demo", "view", "claims", "sweep", "train", "distil")
]  # these do not end soon
WORDS = st.one_of(
    st.sampled_from(
        ["MODEL", "TEXT", "0.1", "5.*", "*", "-1", "0", "1e9", "nan", "../..", "", " ", "4,3", "=", "*=4", "é\u202e"]
    ),
    st.text(max_size=12).filter(lambda text: "\0" not in text),
)
OPTIONS = st.sampled_from(
    ["--json", "--head", "--heads", "--from", "--to", "--at", "--keep", "--bits", "--weights", "--by", "--plan", "--on",
     "--tokens", "--seed", "--most", "--role", "--layers", "--lead", "--no-causal", "--help", "-x", "--"]
)  # fmt: skip
ARGUMENTS = st.lists(st.one_of(WORDS, OPTIONS), max_size=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two heads that reads bytes, and a text."""
    folder = tmp_path_factory.mktemp("fuzz")
    torch.manual_seed(0)
    model = hw.Transformer(ModelSpec(vocab=257, context=256, layers=1, attention=AttentionSpec(width=4, heads=2)))
    model.tokenizer = byte_tokenizer()
    model.save(folder / "model")
    (folder / "text.txt").write_text("to be or not to be " * 40)
    return folder


def call(place: Path, name: str, given_words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)  # what is written is written there
        words = [{"MODEL": "model", "TEXT": "text.txt"}.get(word, word) for word in given_words]
        done = headwise(name, *words)
    assert done.code in (0, 1, 2), (name, words, done.err)
    assert "Traceback" not in done.err, (name, words, done.err)
    if done.code:
        assert done.err.strip(), (name, words)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(name=st.sampled_from(QUICK), words=ARGUMENTS)
def test_no_traceback(place: Path, name: str, words: list[str]) -> None:
    call(place, name, words)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=SLOW)
@given(name=st.sampled_from(QUICK), words=ARGUMENTS)
def test_no_traceback_ever(place: Path, name: str, words: list[str]) -> None:
    call(place, name, words)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(name=st.sampled_from(NAMES), words=st.lists(st.one_of(OPTIONS, st.text(max_size=5)), min_size=1, max_size=3))
def test_unknown_options(place: Path, name: str, words: list[str]) -> None:
    call(place, name, ["--no-such-option", *(word for word in words if "\0" not in word)])


def test_verbs_ask_no_network(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of anybody unless something that is not local is named."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError(f"a network was asked: {given}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(place)
    for words in (
        ("info", "model"), ("generate", "model", "to be", "--tokens", "2"), ("attend", "model", "to be"), ("presets",),
        ("why", "model", "to be", "--head", "0.1", "--at", "2"), ("corpus", "--documents", "2"),
        ("heads", "model", "text.txt", "--no-causal", "--save", "p.npz"), ("head", "p.npz", "0.1"),
        ("plot", "roles", "p.npz"),
        ("ablate", "model", "text.txt"), ("prune", "model", "--heads", "0.1", "--out", "small"),
        ("quantise", "model", "--weights", "8", "--out", "eight"), ("diff", "p.npz", "p.npz"),
        ("train", "text.txt", "--steps", "2", "--tokenizer", "byte", "--context", "8", "--out", "run"),
    ):  # fmt: skip
        done = headwise(*words)
        assert done.code == 0, (words, done.err)
