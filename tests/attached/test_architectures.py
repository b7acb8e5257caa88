"""A sample of the architectures in `python -m bench.architectures`, with their known results."""

import pytest

pytest.importorskip("transformers")

from bench.architectures import run_architecture

QUICK = {
    "bert": "right", "gpt2": "right", "llama": "right", "qwen3": "right", "qwen3_next": "right", "bitnet": "looking only",
    "t5": "right", "albert": "right", "vit": "right", "clip": "right", "gpt_bigcode": "right", "opt": "right",
}  # fmt: skip
SLOW = {
    "afmoe": "right", "bart": "right", "beit": "right", "cohere_asr": "right", "ctrl": "right",
    "deepseek_v3": "right", "diffllama": "looking only", "dinov3_vit": "right", "doge": "right", "dpr": "right",
    "esmc": "right", "gemma2": "right", "gemma3_text": "right", "gemma4": "right", "glm5_next_text": "right",
    "gpt_neox": "right", "gpt_oss": "right", "gte": "right", "inkling_text": "right", "internvl_vision": "right",
    "jetmoe": "looking only", "llava": "right", "mistral": "right", "mllama": "right", "mobilebert": "right",
    "modernbert": "right", "nemotron_h": "right", "olmo2": "right",
    "bridgetower": "refused", "videoprism": "refused", "qwen3_5": "right", "codegen": "right", "siglip": "right",
    "deepseek_v2": "right", "nemotron": "right", "falcon": "right", "bloom": "right", "gptj": "right", "deberta-v2": "right",
    "mpnet": "right", "phi3": "right", "whisper": "right", "longformer": "refused", "zaya": "right",
}  # fmt: skip


NOT_PRUNABLE = ("codegen", "bloom", "zaya", "inkling_text")


@pytest.mark.parametrize("name", QUICK)
def test_architecture_quick_set_gets_expected_verdict(name: str) -> None:
    result = run_architecture(name)
    assert result["verdict"] == QUICK[name], result
    assert "prune" not in result["findings"] or result["verdict"] != "right", result


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_architecture_slow_set_gets_expected_verdict(name: str) -> None:
    result = run_architecture(name)
    assert result["verdict"] == SLOW[name], result
    if result["verdict"] == "right":
        assert ("prune" in result["findings"]) == (name in NOT_PRUNABLE), result
