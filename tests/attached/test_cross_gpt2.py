"""GPT-2 as a decoder with cross-attention: addresses, maps and silencing of its heads."""

from typing import Any

import pytest
import torch

import headwise as hw
from tests.attached.models import BY_NAME

EMBEDDING = 24


def build(**more: Any) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = BY_NAME["gpt2"].build(add_cross_attention=True, **more)
    inputs = {"input_ids": torch.randint(3, 61, (2, 7)), "encoder_hidden_states": torch.randn(2, 5, EMBEDDING)}
    return model, inputs


@torch.no_grad()
def test_gpt2_with_cross_attention_attaches_with_equal_logits() -> None:
    model, inputs = build()
    before = model(**inputs).logits
    attached = hw.attach(model)
    assert [str(hook_point.address) for hook_point in attached.hook_points()] == [
        "0",
        "1",
        "2",
        "cross.0",
        "cross.1",
        "cross.2",
    ]
    assert torch.equal(model(**inputs).logits, before)
    alone = {"input_ids": inputs["input_ids"]}  # without encoder states transformers skips cross-attention
    logits = model(**alone).logits
    with attached.heads["cross.*.*"].silenced():
        assert torch.equal(model(**alone).logits, logits)


@torch.no_grad()
def test_gpt2_cross_attention_maps_are_those_of_the_eager_path() -> None:
    model, inputs = build()
    with hw.attach(model) as attached, hw.record(attached, tensors="map") as recording:
        model(**inputs)
    model.set_attn_implementation("eager")
    eager = model(**inputs, output_attentions=True)
    for layer in range(3):
        for head in range(4):
            for name, maps in (
                (f"{layer}.{head}", eager.attentions),
                (f"cross.{layer}.{head}", eager.cross_attentions),
            ):
                assert (recording[name].map() - maps[layer][:, head]).abs().max() < 1e-6


@torch.no_grad()
def test_gpt2_silenced_cross_head_is_the_model_without_its_rows_of_w_o() -> None:
    model, inputs = build()
    attached = hw.attach(model)
    before = model(**inputs).logits
    with attached.heads["cross.1.2"].silenced():
        silenced = model(**inputs).logits
    model.transformer.h[1].crossattention.c_proj.weight[12:18] = 0  # head 2 of 4 with 6 channels each
    assert (model(**inputs).logits - silenced).abs().max() < 1e-5
    assert (before - silenced).abs().max() > 1e-3


def test_gpt2_cross_attention_says_which_weights_cannot_be_shown_or_cut() -> None:
    model, inputs = build()
    attached = hw.attach(model)
    assert attached.heads["0.1"].W_Q.shape == (EMBEDDING, 6)  # pyright: ignore
    assert attached.heads["cross.0.1"].W_O.shape == (6, EMBEDDING)  # pyright: ignore
    for name in ("W_Q", "W_K", "W_V"):
        with pytest.raises(hw.HeadwiseError, match="not found"):
            getattr(attached.heads["cross.0.1"], name)
    before = model(**inputs).logits
    with pytest.raises(hw.HeadwiseError, match="cannot be pruned"):
        attached.prune("cross.0.1", in_place=True)
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_gpt2_with_cross_attention_is_pruned_in_self_attention() -> None:
    model, inputs = build()
    attached = hw.attach(model)
    with attached.heads["0.1,2.*"].silenced():
        silenced = model(**inputs).logits
    small = hw.prune(attached, heads="0.1,2.*", fold_mean=False)
    assert (small.model(**inputs).logits - silenced).abs().max() < 1e-5
