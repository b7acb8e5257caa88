"""A small model with a word tokenizer, and its live view as an app and as a subprocess."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headwise as hw
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.ui.live_session import LiveSession
from headwise.ui.request_guard import ASGIApp
from headwise.ui.server import make_app

ROOT = Path(__file__).parents[2]
TEXT = "the cat likes the dog"
FILES = {"index.html": b"<!doctype html><head><title>x</title></head>", "style.css": b"p {}", "main.js": b"1;"}


def make_model(**fields: Any) -> Transformer:
    """Create a model with two layers of four heads on the vocabulary of the synthetic language."""
    tokenizer = word_tokenizer(VOCABULARY)
    attention = AttentionSpec(width=24, heads=4, kv_heads=2)
    torch.manual_seed(0)
    spec = ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=attention, mlp_width=16)
    model = Transformer(replace(spec, **fields)).eval()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.output_projection.weight.mul_(20)
        for value in model.parameters():
            value.mul_(3)  # clearly different probabilities
    model.tokenizer = tokenizer
    return model


def make_live_app(model: Transformer, **options: Any) -> ASGIApp:
    """Create the app with a minimal page and minimal report data."""
    return make_app(LiveSession(model), {"version": 1}, files=FILES, **options)


def make_folder(folder: Path) -> Path:
    """Save the model and its profile, so that a server starts fast."""
    model = make_model()
    model.save(folder / "small")
    hw.profile(model, TEXT, relations=Corpus.synthetic("held-out", documents=20), causal=False).save(folder / "profile")
    return folder


class ViewProcess(NamedTuple):
    process: subprocess.Popen[str]
    port: int
    url: str


@contextmanager
def running_view(folder: Path, *options: str, code: str = "") -> Iterator[ViewProcess]:
    """Start `headwise view` in a subprocess that first runs `code`."""
    arguments = [
        "headwise",
        "view",
        str(folder / "small"),
        "--profile",
        str(folder / "profile"),
        "--port",
        "0",
        "--json",
    ]
    code = f"import sys; sys.argv = {[*arguments, *options]!r}\n{code}\nfrom headwise.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        url = json.loads(line)["url"]
        yield ViewProcess(process, int(url.split(":")[2].split("/")[0]), url)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
