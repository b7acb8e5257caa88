"""A small model with words, and its live view."""

from dataclasses import replace
from typing import Any

import torch

from headwise.model import Transformer
from headwise.show.guard import App
from headwise.show.live import Live
from headwise.show.server import make_app
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.little import VOCABULARY
from headwise.text.make import word_tokenizer

TEXT = "the cat likes the dog"
FILES = {"index.html": b"<!doctype html><head><title>x</title></head>", "style.css": b"p {}", "main.js": b"1;"}


def make_model(**more: Any) -> Transformer:
    """Two layers of four heads that matter, over the words of the little language."""
    tokenizer = word_tokenizer(VOCABULARY)
    attention = AttentionSpec(width=24, heads=4, kv_heads=2)
    torch.manual_seed(0)
    spec = ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=attention, hidden=16)
    model = Transformer(replace(spec, **more)).eval()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.write.weight.mul_(20)
        for value in model.parameters():
            value.mul_(3)  # probabilities apart enough to be told from each other
    model.tokenizer = tokenizer
    return model


def make_view(model: Transformer, **options: Any) -> App:
    """Its app, with a page and a book of next to nothing."""
    return make_app(Live(model), {"version": 1}, files=FILES, **options)
