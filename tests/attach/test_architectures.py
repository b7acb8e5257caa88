"""Some architectures of the walk over all (`python -m bench.architectures`), with what is known to come of them."""

import pytest

pytest.importorskip("transformers")

from bench.architectures import run_one

QUICK = {
    "bert": "right", "gpt2": "right", "llama": "right", "qwen3": "right", "qwen3_next": "right", "bitnet": "looking only",
    "t5": "right", "albert": "right", "vit": "right", "clip": "refused", "gpt_bigcode": "right", "opt": "right",
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str) -> None:
    told = run_one(name)
    assert told["verdict"] == QUICK[name], told
