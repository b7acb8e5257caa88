"""SmolLM2 in stock llama.cpp, whole and cut in every way: fifty prompts each, 32 tokens behind them.

Beside our model in float64: where a model was damaged at random, our own float32 is up to 2.7e-3 from it.
"""

import copy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

import headwise as hw
from headwise.compression.recovery import heal
from headwise.exporters.llama_cpp import is_there, write_on
from headwise.exporters.parity import compare
from headwise.model import Transformer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_there(), reason="needs xllamacpp, which carries llama.cpp")]
PROMPTS, TOKENS = 50, 32
WITHIN = 5e-3  # nats, of the five likeliest tokens in float32
TEXTS = [one.text for one in hw.Corpus.probe().items()]


def healed(model: Transformer) -> Transformer:
    small = hw.prune(model, keep=0.7, by="random", on=TEXTS[:8])
    heal(small, "\n".join(TEXTS), steps=1, batch=2, context=64, progress=False)
    return small.eval()


SHAPES: dict[str, Callable[[Transformer], Transformer]] = {
    "whole": lambda model: model,
    "30 % cut": lambda model: hw.prune(model, keep=0.7, by="random", fold=False),
    "uneven": lambda model: hw.prune(model, heads="0.1,5.2,5.3,9.0,17.4,17.5,17.8", fold=False),
    "emptied layers": lambda model: hw.prune(model, heads="0.*,12.*,20.1", on=TEXTS[:8]),
    "folded": lambda model: hw.prune(model, keep=0.7, by="random", on=TEXTS[:8]),
    "healed": healed,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_says_what_we_say(shape: str, tmp_path: Path) -> None:
    model = SHAPES[shape](cast(Transformer, hw.load("smollm2")))
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:24] for text in islice(TEXTS, PROMPTS)]
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    found = compare(copy.deepcopy(model).double(), prompts, write_on(tmp_path / "m.gguf", prompts, TOKENS))
    assert found.prompts == PROMPTS
    assert found.numbers > 0.9 * 5 * TOKENS * PROMPTS, "of a token inside a character it tells nothing"
    assert found.largest < WITHIN
    assert found.agrees, f"{found.parted} texts part, {found.parted_close} of them where two candidates lie within 1e-2"
