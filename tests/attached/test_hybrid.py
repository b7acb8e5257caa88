# ruff: noqa: C408 (sizes read better as keywords)
"""Hybrid models: blocks without attention, and attention layers that share their weights (Bamba, Zamba2)."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.head_output_scores import ov_eigenvalue_scores
from headwise.attached.per_head_packed_weights import is_packed
from headwise.kernels.quantization import fake_quantize
from headwise.text.build_tokenizers import byte_tokenizer

transformers: Any = pytest.importorskip("transformers")

MAMBA = dict(
    hidden_size=24, num_hidden_layers=4, num_attention_heads=6, intermediate_size=40, vocab_size=257, mamba_d_state=8,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, mamba_expand=2,
)  # fmt: skip


def _randomized(model: Any) -> Any:
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return model.eval()


def _bamba() -> Any:
    sizes = MAMBA | dict(num_key_value_heads=2, mamba_n_heads=4, mamba_d_head=12, mamba_n_groups=1)
    return _randomized(transformers.BambaForCausalLM(transformers.BambaConfig(**sizes, attn_layer_indices=[1, 3])))


def _zamba2() -> Any:
    """One block of attention and MLP, shared by layers 1 and 3."""
    sizes = MAMBA | dict(n_mamba_heads=4, mamba_headdim=12, mamba_ngroups=1, num_mem_blocks=1, adapter_rank=4)
    sizes |= dict(layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], use_mamba_kernels=False)
    return _randomized(transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**sizes)))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def test_quantize_hybrid_model_rounds_the_mlps_of_all_blocks() -> None:
    model = _bamba()
    with hw.attach(model) as attached:
        small = hw.quantize(attached, {"mlp": 4})
    packed = {name for name, module in small.model.named_modules() if is_packed(module)}
    names = {f"model.layers.{i}.feed_forward.{part}_proj" for i in range(4) for part in ("gate", "up", "down")}
    assert packed == names  # the mixers of blocks 0 and 2 are recurrent and stay as they are
    with torch.no_grad():
        for name in names:
            weight = model.get_submodule(name).weight
            weight.copy_(fake_quantize(weight.clone(), 4))
    torch.testing.assert_close(_logits(small.model), _logits(model), rtol=1e-4, atol=1e-4)


def test_quantize_shared_blocks_with_recurrent_mixers_loads_again(tmp_path: Path) -> None:
    small = hw.quantize(hw.attach(_zamba2()), 8)
    assert is_packed(small.model.get_submodule("model.layers.1.shared_transformer.feed_forward.down_proj"))
    assert not is_packed(small.model.get_submodule("model.layers.1.mamba_decoder.mamba.in_proj"))
    small.save_pretrained(tmp_path)
    assert torch.equal(_logits(hw.load(tmp_path).model), _logits(small.model))


@pytest.mark.parametrize("heads", ["1.0", "1.0,3.1"])
def test_save_pruned_layers_that_shared_weights_loads_again(heads: str, tmp_path: Path) -> None:
    """Both layers have one head fewer in the second case, so tying them again would not change a shape."""
    attached = hw.attach(_zamba2())
    with attached.heads[heads].silenced():
        expected = _logits(attached.model)
    pruned = hw.prune(attached, heads=heads, fold_mean=False)
    pruned.save_pretrained(tmp_path / "first")
    loaded = hw.load(tmp_path / "first")
    torch.testing.assert_close(_logits(loaded.model), expected, rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "second")
    assert torch.equal(_logits(hw.load(tmp_path / "second").model), _logits(pruned.model))


def test_save_folded_layer_that_shared_weights_loads_again(tmp_path: Path) -> None:
    """Only layer 1 has an output bias."""
    attached = hw.attach(_zamba2(), byte_tokenizer())
    pruned = hw.prune(attached, heads="1.0", corpus=["abcdefgh" * 3, "hgfedcba" * 2])
    pruned.save_pretrained(tmp_path)
    assert torch.equal(_logits(hw.load(tmp_path).model), _logits(pruned.model))


def test_copying_scores_layer_that_reads_two_vectors_says_why() -> None:
    with pytest.raises(hw.HeadwiseError, match="vectors of width 48 and its output has width 24"):
        ov_eigenvalue_scores(hw.attach(_zamba2()), "1.0")
