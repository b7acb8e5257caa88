"""SmolLM2 in stock llama.cpp, full and pruned in several ways: fifty prompts each, 32 new tokens per prompt.

Compared with our model in float64, because our own float32 differs from it by up to 2.7e-3 for randomly pruned models.
"""

import copy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

import headwise as hw
from headwise.compression.recovery_finetune import recover
from headwise.exporters.engine_parity import compare_generated
from headwise.exporters.llama_cpp_runner import generate, is_available
from headwise.model import Transformer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp"),
]
PROMPTS, TOKENS = 50, 32
TOLERANCE = 5e-3  # nats, for the top five tokens in float32
TEXTS = [document.text for document in hw.Corpus.probe_set().items()]


def pruned_and_recovered(model: Transformer) -> Transformer:
    small = hw.prune(model, keep=0.7, ranking="random", corpus=TEXTS[:8])
    recover(small, "\n".join(TEXTS), steps=1, batch_size=2, context=64, progress=False)
    return small.eval()


VARIANTS: dict[str, Callable[[Transformer], Transformer]] = {
    "whole": lambda model: model,
    "30% cut": lambda model: hw.prune(model, keep=0.7, ranking="random", fold_mean=False),
    "uneven": lambda model: hw.prune(model, heads="0.1,5.2,5.3,9.0,17.4,17.5,17.8", fold_mean=False),
    "emptied layers": lambda model: hw.prune(model, heads="0.*,12.*,20.1", corpus=TEXTS[:8]),
    "folded": lambda model: hw.prune(model, keep=0.7, ranking="random", corpus=TEXTS[:8]),
    "healed": pruned_and_recovered,
}


@pytest.mark.parametrize("shape", VARIANTS)
def test_export_gguf_smollm2_matches_llama_cpp(shape: str, tmp_path: Path) -> None:
    model = VARIANTS[shape](cast(Transformer, hw.load("smollm2")))
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:24] for text in islice(TEXTS, PROMPTS)]
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    report = compare_generated(copy.deepcopy(model).double(), prompts, generate(tmp_path / "m.gguf", prompts, TOKENS))
    assert report.prompts == PROMPTS
    assert report.values > 0.9 * 5 * TOKENS * PROMPTS, "of a token inside a character it tells nothing"
    assert report.max_difference < TOLERANCE
    assert report.agrees, (
        f"{report.diverged} texts diverge, {report.diverged_at_ties} of them where two candidates lie within 1e-2"
    )
