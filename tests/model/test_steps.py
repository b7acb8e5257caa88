"""A step with a cache is atomic, and results do not depend on how a text is split into steps."""

from collections.abc import Callable

import pytest
import torch

import headwise as hw
from headwise.cache import ModelCache

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])
ENCODER_DECODER = {"kind": "encoder-decoder", "positions": "sinusoidal"}


def make_model(context: int = 12, heads: dict | None = None, **model: object) -> hw.Transformer:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=8, heads=2, **(heads or {}))
    spec = hw.ModelSpec(vocab=11, context=context, layers=2, attention=attention, **model)  # pyright: ignore
    return hw.Transformer(spec).eval()


FAILING_STEPS: dict[str, tuple[dict, Callable[[hw.Transformer, ModelCache], object]]] = {
    "another batch": ({}, lambda model, cache: model(IDS[:1], cache=cache)),
    "an unknown token": ({}, lambda model, cache: model(torch.full((2, 1), 99), cache=cache)),
    "too many positions": ({}, lambda model, cache: model(IDS, cache=cache)),
    "a mask that does not fit": (
        {},
        lambda model, cache: model(IDS[:, :1], mask=hw.Mask.of(torch.ones(3, 3)), cache=cache),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FAILING_STEPS)
def test_forward_failed_step_restores_cache(name: str) -> None:
    model, step = make_model(**FAILING_STEPS[name][0]), FAILING_STEPS[name][1]
    cache = model.cache()
    model(IDS[:, :6], cache=cache)
    with pytest.raises((hw.HeadwiseError, RuntimeError)):
        step(model, cache)
    assert cache.length == 6
    assert torch.allclose(model(IDS[:, 6:], cache=cache), model(IDS)[:, 6:], atol=1e-6)


@torch.no_grad()
def test_forward_missing_source_can_be_retried() -> None:
    model = make_model(**ENCODER_DECODER)  # pyright: ignore[reportArgumentType]
    cache = model.cache()
    with pytest.raises(hw.HeadwiseError, match="source=source_ids"):
        model(IDS[:, :3], cache=cache)
    got = model(IDS[:, :3], source=IDS, cache=cache)
    assert torch.allclose(got, model(IDS[:, :3], source=IDS), atol=1e-6)
    with pytest.raises(hw.HeadwiseError, match="already contains a source"):
        model(IDS[:, 3:4], source=IDS, cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4], [5, 1, 1]])
def test_sliding_cache_any_split_equals_window(pieces: list[int]) -> None:
    model = make_model()
    cache = model.cache("sliding", size=3)
    got = torch.cat([model(piece, cache=cache) for piece in IDS.split(pieces, 1)], 1)
    assert torch.allclose(got, model(IDS, mask=hw.window(3)), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("heads", [{"window": 3}, {"alibi": True}, {"t5_buckets": 8}])
def test_forward_right_padding_with_distances_raises(heads: dict) -> None:
    model = make_model(heads=heads)
    right = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    with pytest.raises(hw.HeadwiseError, match="padding follows a token"):
        model(IDS, attention_mask=right, cache=model.cache())
    model(IDS, attention_mask=right.flip(1), cache=model.cache())


def test_forward_cache_of_wrong_type_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match=r"cache='dynamic': must be created by model\.cache"):
        make_model()(IDS, cache="dynamic")


def test_forward_cache_with_checkpointing_raises() -> None:
    model = make_model()
    model.checkpointing = True
    with pytest.raises(hw.HeadwiseError, match="not supported with checkpointing"):
        model(IDS, cache=model.cache())
    with torch.no_grad():
        model(IDS, cache=model.cache())


def test_generate_frozen_parts_stay_in_eval() -> None:
    model = make_model().train()
    model.blocks[0].eval()
    model.generate(IDS[:, :2], 2)
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].training


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_forward_any_integer_dtype_gives_same_output(dtype: torch.dtype) -> None:
    model = make_model()
    assert torch.equal(model(IDS.to(dtype)), model(IDS))


def test_gates_bare_layer_number_raises() -> None:
    """5,1 is one keystroke from 5.1 and would silence two full layers."""
    with pytest.raises(hw.HeadwiseError, match=r"heads='0': this selects a layer, not heads\. Use '0\.\*'"):
        make_model()(IDS, gates={"0,1": 0.0})


def test_gates_or_prompt_of_wrong_type_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match="keys must be head patterns"):
        make_model()(IDS, gates={0: 0.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(hw.HeadwiseError, match="Got ndarray"):
        make_model().generate(IDS[0].numpy(), 2)  # pyright: ignore[reportArgumentType]
