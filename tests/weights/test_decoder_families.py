"""Decoders with QK norm, layers without positions, mixed windows and long contexts: caches, pruning, conversion, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.weights import open_checkpoint, to_native
from headwise.weights.families import FAMILIES
from tests.parity.cases import CASES, VOCAB, Case, llama
from tests.weights.test_configs import read_config, write_checkpoint

BY_NAME = {case.name: case for case in CASES}
CACHED = {
    "phi3, longrope": False, "gemma3": False, "smollm3": True, "ministral3": True, "olmo2": True,
    "olmo3, rotary of each kind": True, "gemma2": True, "qwen3, windows, biases, tied": True, "llama, yarn": True,
    "llama, dynamic rope": True,
}  # fmt: skip


def hf_model(case: Case, folder: Path) -> Any:
    return getattr(transformers, case.model).from_pretrained(folder, dtype=torch.float32).eval()


def steps(ids: Tensor, prompt: int) -> list[Tensor]:
    """Split token ids into a prompt and single tokens."""
    return [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if slow else ()) for name, slow in CACHED.items()]
)
@torch.no_grad()
def test_cached_steps_past_original_context_equal_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """A prompt of 12 tokens, then one token per step up to 24: the original context of these cases has 8 or 16 tokens."""
    case = BY_NAME[name]
    model, reference = hw.load(case.save(tmp_path)), hf_model(case, tmp_path)
    assert isinstance(model, hw.Transformer)
    ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))
    cache, past = model.cache(kind, 24) if kind == "static" else model.cache(), None
    for part in steps(ids, 12):
        want = reference(part, past_key_values=past, use_cache=True)
        past = want.past_key_values
        torch.testing.assert_close(model(part, cache=cache), want.logits, rtol=0, atol=1e-4)


PATTERN = "0.0-2, 1.4"
PRUNED = {"olmo2": False, "gemma3": False, "qwen3": True, "smollm3": True, "phi3, longrope": True, "gemma2": True}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if slow else ()) for name, slow in PRUNED.items()]
)
@torch.no_grad()
def test_pruned_family_equals_silenced_also_with_streaming_cache(name: str, tmp_path: Path) -> None:
    model = hw.load(BY_NAME[name].save(tmp_path))
    assert isinstance(model, hw.Transformer)
    ids = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
    small = model.prune(PATTERN)
    with model.heads.select(PATTERN).silenced():
        expected = model(ids)
    torch.testing.assert_close(small(ids), expected, rtol=0, atol=1e-5)
    again = small.prune("1.1").prune("2.0")
    with model.heads.select(f"{PATTERN},1.1,2.0").silenced():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5)
    assert sum(p.numel() for p in again.parameters()) == again.spec.num_parameters
    streaming = hw.Transformer(
        small.spec.with_cache({"*": hw.CachePolicy(sink_tokens=1, window=4)})
    )  # streaming heads, per-head caches
    streaming.load_state_dict(small.state_dict())
    cache = streaming.eval().cache()
    cached = torch.cat([streaming(part, cache=cache) for part in steps(ids, 5)], 1)
    torch.testing.assert_close(cached, streaming(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_quantized_family_equals_dequantized(name: str, tmp_path: Path) -> None:
    model = hw.load(BY_NAME[name].save(tmp_path / "theirs"))
    quantized = hw.quantize(model, weights={"*": 8, "0.1": 4, "mlp": 8}, group_size=8)
    ids = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
    quantized.save(tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(hw.dequantize(quantized)(ids), quantized(ids), rtol=0, atol=1e-4)
        torch.testing.assert_close(hw.load(tmp_path / "ours")(ids), quantized(ids), rtol=0, atol=1e-5)


EXPLAINED = {"qwen3": False, "gemma3, cap, biases, untied": True, "olmo2": True, "smollm3": True, "ministral3": True}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if slow else ()) for name, slow in EXPLAINED.items()]
)
def test_explain_family_is_complete(name: str, tmp_path: Path) -> None:
    """The pairs add up to the score that the model computes, with the norms of q and k frozen."""
    model = hw.load(BY_NAME[name].save(tmp_path), dtype=torch.float64)
    ids = torch.randint(VOCAB, (11,), generator=torch.Generator().manual_seed(5)).tolist()
    for head in ("1.4", "2.0"):
        attribution = hw.explain(model, ids, head, query=9, key=7)
        assert attribution.score == pytest.approx(attribution.total, abs=1e-5)
        assert attribution.is_complete


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi3, longrope", "gemma3"])
def test_to_native_family_equals_attached(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    attached = hw.attach(hf_model(case, case.save(tmp_path)))
    native = to_native(attached)  # checks the outputs
    assert native.family in {family.name for family in FAMILIES}
    if name == "olmo2":
        with pytest.raises(HeadwiseError, match="normalized over all heads"):
            to_native(attached.prune("0.1"))
    else:
        assert len(to_native(attached.prune("0.1")).spec.head_addresses) == len(native.spec.head_addresses) - 1


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_load_mixture_of_experts_attaches_and_names_experts(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, settings = EXPERTS[model_type]
    llama("", name, head_dim=8, **settings).save(tmp_path)
    loaded = hw.load(tmp_path)
    assert not loaded.is_native
    assert "mixture-of-experts MLPs (4 experts)" in capsys.readouterr().err
    ids = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = hf_model(Case("", name, {}), tmp_path)(ids).logits
        torch.testing.assert_close(loaded(ids), expected, rtol=0, atol=1e-5)


BAD_CONFIGS = [
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("gemma3", {"sliding_window": None}, "sliding_window is null or missing"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must list"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must list"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("phi3, longrope", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'short_factor' is missing"),
    ("qwen3", {"hidden_act": "relu"}, "activation 'relu' is not supported"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD_CONFIGS, ids=[message for *_, message in BAD_CONFIGS])
def test_load_unsupported_setting_raises(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = BY_NAME[name].save(tmp_path / "theirs")
    (tmp_path / "changed").mkdir()
    with pytest.raises(HeadwiseError, match=message):
        open_checkpoint(write_checkpoint(folder, read_config(folder) | changes, tmp_path / "changed"))


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "phi3", "olmo2", "gemma2", "gemma3"])
def test_export_other_architecture_raises(family: str, tmp_path: Path) -> None:
    spec = hw.ModelSpec(
        vocab=VOCAB, context=16, layers=1, attention=hw.AttentionSpec(width=8, heads=2, output_gate="head"), norm="rms"
    )
    with pytest.raises(HeadwiseError, match="format cannot represent"):
        hw.export(hw.Transformer(spec), tmp_path / "out", family=family)
