"""Calls with unusual input: text that is not valid Unicode, files with odd names, empty batches, gradient modes."""

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer
from headwise.training.token_file import iter_encoded_chunks

SURROGATE = "the cat \ud800 sat on the mat, and then the cat \ud800 sat"
TEXTS = ["the cat sat on the mat, and then the cat sat"] * 6
RECIPE = hw.Recipe(steps=2, batch_size=2, warmup=1)


@pytest.fixture
def model() -> hw.Transformer:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=64, layers=2, attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    return model


FUNCTIONS: dict[str, Any] = {
    "encode": lambda model: model.tokenizer.encode(SURROGATE),
    "align": lambda model: model.tokenizer.align(SURROGATE),
    "attention_maps": lambda model: hw.attention_maps(model, SURROGATE),
    "profile": lambda model: hw.profile(model, [SURROGATE] * 4),
    "importance": lambda model: hw.importance(model, [SURROGATE] * 4),
    "explain": lambda model: hw.explain(model, SURROGATE, "0.0", 3),
    "generate": lambda model: model.generate(SURROGATE, 2),
    "train": lambda model: hw.train(model, SURROGATE * 20, RECIPE, progress=False),
    "iter_encoded_chunks": lambda model: list(iter_encoded_chunks(hw.Corpus.of(SURROGATE), model.tokenizer)),
    "bpe_tokenizer": lambda model: bpe_tokenizer([SURROGATE], 300),
    "character_tokenizer": lambda model: character_tokenizer(SURROGATE),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_given_lone_surrogate_raises(model: hw.Transformer, name: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"lone surrogate U\+D800"):
        FUNCTIONS[name](model)


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems refuse such names")
def test_corpus_file_name_not_utf8_is_read(model: hw.Transformer, tmp_path: Path) -> None:
    path, plain = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), tmp_path / "cafe.txt"
    for file in (path, plain):
        file.write_text(" ".join(TEXTS * 5))
    assert hw.importance(model, path).mean.tolist() == hw.importance(model, plain).mean.tolist()
    trained = hw.train(model.spec, path, RECIPE, tokenizer="byte", out=tmp_path / "run", progress=False)
    assert trained.step == RECIPE.steps


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("shape", [(0, 5), (0, 1), (1, 0)])
@torch.no_grad()
def test_transformer_empty_batch_with_cache_returns_empty_logits(
    model: hw.Transformer, kind: str, shape: tuple[int, int]
) -> None:
    cache = model.cache(kind, size=20) if kind == "static" else model.cache(kind)
    assert model(torch.zeros(shape, dtype=torch.long), cache=cache).shape == (*shape, 257)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_transformer_zero_tokens_after_prompt_leaves_cache_alone(model: hw.Transformer, kind: str) -> None:
    ids = torch.arange(6)[None]
    cache = model.cache(kind, size=20) if kind == "static" else model.cache(kind)
    model(ids[:, :5], cache=cache)
    assert model(ids[:, :0], cache=cache).shape == (1, 0, 257)
    assert torch.allclose(model(ids[:, 5:], cache=cache), model(ids)[:, 5:], atol=1e-5)


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
GRADIENT_FUNCTIONS: dict[str, Any] = {
    "gradient": lambda model: hw.importance(model, TEXTS, ranking="gradient").mean,
    "attribution": lambda model: hw.importance(model, TEXTS, ranking="attribution").mean,
    "calls": lambda model: (
        hw.importance(
            model, [{"ids": torch.arange(4)[None]}], ranking="gradient", loss=lambda logits: logits.square().sum()
        ).mean
    ),
    "gates": lambda model: hw.prune(model, keep=0.5, corpus=TEXTS, ranking="gates").spec.head_addresses,
    "train": lambda model: hw.train(model.spec, " ".join(TEXTS), RECIPE, tokenizer="byte", progress=False).loss,
    "distill": lambda model: hw.distill(model.spec, model, " ".join(TEXTS * 5), RECIPE, progress=False).loss,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GRADIENT_FUNCTIONS)
def test_gradient_function_inside_mode_equals_outside(model: hw.Transformer, name: str, mode: str) -> None:
    expected = GRADIENT_FUNCTIONS[name](model)
    context: AbstractContextManager[None] = MODES[mode]()
    with context:
        actual = GRADIENT_FUNCTIONS[name](model)
    assert repr(actual) == repr(expected)


def test_train_weights_made_in_inference_mode_raises(model: hw.Transformer) -> None:
    with torch.inference_mode():
        inference_model = hw.Transformer(model.spec)
    with pytest.raises(hw.HeadwiseError, match=r"created under torch\.inference_mode"):
        hw.train(inference_model, " ".join(TEXTS), RECIPE, tokenizer="byte", progress=False)
