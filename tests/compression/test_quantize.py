"""Quantized weights by head and part: compared with explicit rounding, sizes by formula, and unchanged parts."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import headwise as hw
from headwise.compression.quantize import dequantize, quantize, weight_footprints
from headwise.errors import HeadwiseError
from headwise.heads.quantized_layers import QuantizedLinear, QuantizedWeight
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import MODELS, assert_equal, make_model, randomize, run_model

MIXED = {"*": 8, "0.1": 4, "0.2:qk": 3, "0.3:vo": 2, "mlp": 3, "vocabulary": 4}


def quantize_by_hand(x: Tensor, bits: int, group: int = 32) -> Tensor:
    """s = max|x| / (2^(b−1) − 1) for each group of a row, s · round(x / s), in float32 as in the package."""
    result = x.detach().float().clone()
    for row in result.view(-1, x.shape[-1]):
        for start in range(0, len(row), group):
            part = row[start : start + group]
            s = part.abs().max() / (2 ** (bits - 1) - 1)
            part.copy_(s * (part / s).round() if s > 0 else part)
    return result


def make_float_model(name: str) -> Transformer:
    return make_model(MODELS[name]).float()


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7)


def make_wide_model(**fields: object) -> Transformer:
    """Return a model with sizes that are not multiples of the group size, several groups per row, and shared KV heads."""
    attention = AttentionSpec(width=72, heads=4, kv_heads=2, head_dim=34, rotary=Rotary())
    spec = ModelSpec(vocab=31, context=19, layers=2, attention=attention, mlp_width=50, positions="none")
    model = Transformer(replace(spec, **fields)).eval()  # pyright: ignore[reportArgumentType]
    randomize(model)
    return model


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_quantize_every_part_equals_closed_form(bits: int) -> None:
    model = make_wide_model()
    small = quantize(model, bits)
    for old, new in zip(model.heads, small.heads, strict=True):
        for name in ("W_Q", "W_K", "W_V"):  # (D, d): groups along the input D
            assert_close(getattr(new, name).mT, quantize_by_hand(getattr(old, name).mT, bits))
        assert_close(new.W_O.mT, quantize_by_hand(old.W_O.mT, bits))  # (e, D): groups along e, within the head
    for name in ("up", "down"):
        old, new = (getattr(m.blocks[1].mlp, name).weight for m in (model, small))  # pyright: ignore
        assert_close(new, quantize_by_hand(old, bits))
    assert_close(small.embed.tokens.weight, quantize_by_hand(model.embed.tokens.weight, bits))
    ids = torch.tensor([[3, 30, 0]])
    assert torch.equal(small.embed.tokens(ids), small.embed.tokens.weight[ids])


def test_quantize_single_number_covers_heads_mlp_vocabulary() -> None:
    model = make_model(MODELS["encoder"])
    assert model.spec.quantized(4) == model.spec.quantized({"*": 4, "mlp": 4, "vocabulary": 4})
    small = quantize(model, 4)
    floats = {name for name, _ in small.named_parameters()}
    assert {"embed.positions.weight", "pooler.dense.weight"} < floats
    quantized_names = ("up.weight", "down.weight", "tokens.weight", "qkv_weight", "output_projection.weight")
    assert not any(name.endswith(quantized_names) for name in floats)


def test_quantize_later_rules_override_earlier() -> None:
    model = make_wide_model()
    small = quantize(model, {"*": 8, "0.*": 4, "0.1": 8, "0.2:qk": 3, "1.3": 32})
    layer, last = (small.spec.attention_at(hook_point).weight_bits for hook_point in small.spec.layer_addresses)
    assert layer is not None
    assert (layer.q, layer.o) == ((4, 8, 3, 4), (4, 8, 4, 4))
    assert (layer.k, layer.v) == ((8, 4), (8, 4))  # the maximum over the two query heads
    assert last is not None
    assert (last.q, last.k) == ((8, 8, 8, 32), (8, 32))
    for name in ("W_Q", "W_O"):
        assert torch.equal(getattr(small.heads["1.3"], name), getattr(model.heads["1.3"], name))


def test_quantize_head_is_independent_of_other_heads() -> None:
    model = make_wide_model()
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(scaled.heads["0.3"], name).mul_(1000)
    quantized, scaled_quantized = quantize(model, 4), quantize(scaled, 4)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        for head in ("0.0", "0.1", "1.3"):
            assert torch.equal(getattr(quantized.heads[head], name), getattr(scaled_quantized.heads[head], name))
    assert torch.equal(*(getattr(model.heads["0.2"], "W_O") for model in (quantized, scaled_quantized)))  # noqa: B009


@pytest.mark.parametrize("name", MODELS)
def test_quantize_equals_dequantized_model(name: str) -> None:
    model = make_float_model(name)
    weights = 4 if name == "encoder-decoder" or "cut" in name else MIXED
    small = quantize(model, weights)
    floats = dequantize(small)
    assert floats.spec == model.spec
    torch.testing.assert_close(run_model(small), run_model(floats), rtol=1e-5, atol=1e-5)
    assert not torch.equal(run_model(small), run_model(model))
    requantized = dequantize(quantize(floats, weights))  # quantization is idempotent
    for value, requantized_value in zip(floats.state_dict().values(), requantized.state_dict().values(), strict=True):
        assert torch.equal(value, requantized_value)


@pytest.mark.parametrize("name", MODELS)
def test_weight_footprint_equals_file_bytes(name: str, tmp_path: Path) -> None:
    small = quantize(make_float_model(name), 3)
    folder = small.save(tmp_path / "small")
    num_bytes = weight_footprints(small)[-1].nbytes
    assert num_bytes == small.spec.weight_bytes()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(key).nbytes for key in file.keys()) == num_bytes  # noqa: SIM118
    assert weight_footprints(small)[-1].parameters == small.spec.num_parameters


def test_weight_footprint_equals_closed_form() -> None:
    """A row of 72 weights at 4 bits has 36 bytes and three scales of 4 bytes. Heads have 34 channels: W_O has 72 × 34."""
    small = quantize(make_wide_model(), {"*": 4})
    row, output_row = 36 + 12, 17 + 8
    heads = 2 * (4 + 2 + 2) * 34 * row + 2 * 4 * 72 * output_row
    assert weight_footprints(small)[0].nbytes == heads
    assert small.spec.weight_bytes() == 4 * (small.spec.num_parameters - 2 * (8 * 34 * 72 + 4 * 72 * 34)) + heads
    query_bytes = QuantizedWeight.nbytes.fget(small.blocks[0].attention.qkv.q)  # pyright: ignore
    assert query_bytes == 4 * 34 * row


@pytest.mark.parametrize("name", MODELS)
def test_quantized_model_save_load_is_bitwise(name: str, tmp_path: Path) -> None:
    model = make_float_model(name)
    small = quantize(model, 4 if name == "encoder-decoder" or "cut" in name else MIXED, group_size=5)
    loaded = hw.load(small.save(tmp_path / "small"))
    assert loaded.spec == small.spec
    for (name_before, value), (name_after, loaded_value) in zip(
        small.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert (name_before, value.dtype) == (name_after, loaded_value.dtype)
        assert torch.equal(value, loaded_value)
    assert torch.equal(run_model(loaded), run_model(small))
    loaded_same_dtype = hw.load(tmp_path / "small", dtype=None)
    assert torch.equal(run_model(loaded_same_dtype), run_model(small))


def test_load_quantized_file_with_wrong_dtype_raises(tmp_path: Path) -> None:
    from headwise.io.aligned_safetensors import write_tensors

    small = quantize(make_wide_model(), 8)
    folder = small.save(tmp_path / "small")
    state = dict(small.state_dict())
    state["embed.tokens.codes8"] = state["embed.tokens.codes8"].float()
    write_tensors(state, folder / "model.safetensors", {"format": "headwise-2", "storage": "qkv"})
    with pytest.raises(HeadwiseError, match=r"but quantized weights require torch"):
        hw.load(folder)


def test_prune_heads_quantized_model_keeps_others_bitwise() -> None:
    model = make_wide_model(layers=3)
    bits = {"0.0": 8, "0.1": 4, "0.2": 4, "1.*:qk": 3, "1.2:vo": 2, "2.*": 2}
    small = quantize(model, bits)
    pruned_heads = "0.0,0.3,1.2,2.*"
    pruned = small.prune(pruned_heads)
    assert pruned.spec == small.spec.without(pruned_heads)
    for head in pruned.heads:
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(head, name), getattr(small.heads[head.address], name))
    torch.testing.assert_close(
        run_model(pruned), run_model(dequantize(small).prune(pruned_heads)), rtol=1e-5, atol=1e-5
    )
    biases = {hook_point: torch.ones(72) for hook_point in model.spec.layer_addresses}
    folded, expected = small.prune(pruned_heads, biases), dequantize(small).prune(pruned_heads, biases)
    torch.testing.assert_close(run_model(folded), run_model(expected), rtol=1e-5, atol=1e-5)
    assert not torch.equal(run_model(folded), run_model(pruned))


def test_quantized_model_dtype_cast_keeps_codes() -> None:
    small = quantize(make_wide_model(), 4)
    double = copy.deepcopy(small).double()
    assert next(iter(double.heads)).W_Q.dtype == torch.float64
    assert run_model(double).dtype == torch.float64
    round_trip = copy.deepcopy(double).bfloat16().float()
    assert run_model(round_trip).dtype == torch.float32
    for (name, value), round_trip_value in zip(
        small.state_dict().items(), round_trip.state_dict().values(), strict=True
    ):
        if name.rsplit(".", 1)[-1].startswith(("codes", "scales")):
            assert torch.equal(value, round_trip_value)


def test_quantized_model_record_and_silence() -> None:
    small = quantize(make_wide_model(), 4)
    floats = dequantize(small)
    with small.heads["0.1,1.*"].silenced(), floats.heads["0.1,1.*"].silenced():
        torch.testing.assert_close(run_model(small), run_model(floats), rtol=1e-5, atol=1e-5)
    before = run_model(small)
    with hw.record(small) as recording:
        assert torch.equal(run_model(small), before)
    assert recording is not None
    singular_values = [model.heads["1.2"].OV.singular_values() for model in (small, floats)]  # pyright: ignore
    torch.testing.assert_close(*singular_values, rtol=1e-5, atol=1e-5)


def test_quantize_activations_only_if_requested() -> None:
    model = make_wide_model()
    eight, with_activations = quantize(model, 8), quantize(model, 8, activation_bits=8)
    torch.testing.assert_close(run_model(eight), run_model(dequantize(eight)), rtol=1e-5, atol=1e-5)
    up = with_activations.blocks[0].mlp.up  # pyright: ignore
    assert isinstance(up, QuantizedLinear)
    x = torch.randn(5, 72)
    expected = torch.nn.functional.linear(quantize_by_hand(x, 8, 72), up.weight, up.bias)
    torch.testing.assert_close(up(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(run_model(with_activations), run_model(eight))
    with_large_row = torch.cat((x, 1000 * x[:1]))  # a large row does not change the scale of other rows
    assert torch.equal(up(with_large_row)[:5], up(x))
    with pytest.raises(HeadwiseError, match="activation_bits=4"):
        quantize(model, 8, activation_bits=4)


@pytest.mark.parametrize("name", MODELS)
def test_quantize_balanced_basis_keeps_other_heads(name: str) -> None:
    """At 8 bits both models are close to the original. Unquantized heads are only rotated and compute the same output."""
    model = make_model(MODELS[name])
    first = next(iter(model.spec.head_addresses))
    weights = {str(first): 8}
    rebased = dequantize(quantize(model, weights, basis="balanced"))
    for head in model.heads:
        if head.address.layer_address == first.layer_address and head.kv_index != model.heads[first].kv_index:
            assert_equal(rebased.heads[head.address].OV.dense(), head.OV.dense(), 1e-9)
            if head.layer.spec.rotary is None:
                assert_equal(rebased.heads[head.address].QK.dense(), head.QK.dense(), 1e-9)


def test_quantize_invalid_arguments_raise() -> None:
    model = make_wide_model()
    small = quantize(model, 4)
    for weights, message in [
        (5, "bits=5: not supported"),
        ({"*": "4"}, "bits='4'"),
        ({"9.*": 4}, "no such head"),
        ({"0.1:ov": 4}, "Use :qk or :vo"),
        ({3: 4}, "keys must be strings"),
    ]:
        with pytest.raises(HeadwiseError, match=message):
            quantize(model, weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="unknown part 'mpl'"):
        quantize(model, {"mpl": 4})
    with pytest.raises(HeadwiseError, match=r"must be a headwise model\. Got Linear"):
        quantize(torch.nn.Linear(2, 2), 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="already quantized"):
        quantize(small, 4)
    with pytest.raises(HeadwiseError, match="group_size=0"):
        quantize(model, 4, group_size=0)
    with pytest.raises(HeadwiseError, match="basis='svd'"):
        quantize(model, 4, basis="svd")  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"hw.dequantize"):
        hw.train(small, "to be or not to be " * 20, progress=False)
    with pytest.raises(HeadwiseError, match=r"hw.dequantize"):
        hw.export(small, "nowhere")
    with pytest.raises(HeadwiseError, match=r"use hw.quantize"):
        Transformer(small.spec)
