"""Weights at few bits, by head and part: rounded as by hand, packed as counted, and otherwise the model they came from."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import headwise as hw
from headwise.compression.prune_heads import cut
from headwise.compression.quantize import dequantise, quantise, stored
from headwise.errors import HeadwiseError
from headwise.heads.quantized_weights import Packed, PackedLinear
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import MODELS, assert_equal, fill, make_model, run

MIXED = {"*": 8, "0.1": 4, "0.2:qk": 3, "0.3:vo": 2, "mlp": 3, "vocabulary": 4}


def by_hand(x: Tensor, bits: int, group: int = 32) -> Tensor:
    """s = max|x| / (2^(b−1) − 1) of each group of a row, s · round(x / s); in float32, as it is packed."""
    made = x.detach().float().clone()
    for row in made.view(-1, x.shape[-1]):
        for start in range(0, len(row), group):
            part = row[start : start + group]
            s = part.abs().max() / (2 ** (bits - 1) - 1)
            part.copy_(s * (part / s).round() if s > 0 else part)
    return made


def model_of(name: str) -> Transformer:
    return make_model(MODELS[name]).float()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)


def wide(**more: object) -> Transformer:
    """Sizes that are no multiples of a group, several groups a row, and a key head for two heads."""
    attention = AttentionSpec(width=72, heads=4, kv_heads=2, head_dim=34, rotary=Rotary())
    spec = ModelSpec(vocab=31, context=19, layers=2, attention=attention, hidden=50, positions="none")
    model = Transformer(replace(spec, **more)).eval()  # pyright: ignore[reportArgumentType]
    fill(model)
    return model


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_every_part_is_rounded_as_by_hand(bits: int) -> None:
    model = wide()
    small = quantise(model, bits)
    for old, new in zip(model.heads, small.heads, strict=True):
        for name in ("W_Q", "W_K", "W_V"):  # (D, d): along the input, which is D
            close(getattr(new, name).mT, by_hand(getattr(old, name).mT, bits))
        close(new.W_O.mT, by_hand(old.W_O.mT, bits))  # (e, D): along e, inside the head
    for name in ("up", "down"):
        old, new = (getattr(m.blocks[1].mlp, name).weight for m in (model, small))  # pyright: ignore
        close(new, by_hand(old, bits))
    close(small.embed.tokens.weight, by_hand(model.embed.tokens.weight, bits))
    ids = torch.tensor([[3, 30, 0]])
    assert torch.equal(small.embed.tokens(ids), small.embed.tokens.weight[ids])


def test_one_number_means_heads_mlps_and_vocabulary() -> None:
    model = make_model(MODELS["encoder"])
    assert model.spec.quantised(4) == model.spec.quantised({"*": 4, "mlp": 4, "vocabulary": 4})
    small = quantise(model, 4)
    floats = {name for name, _ in small.named_parameters()}
    assert {"embed.positions.weight", "pooler.dense.weight"} < floats
    gone = ("up.weight", "down.weight", "tokens.weight", "qkv_weight", "write.weight")
    assert not any(name.endswith(gone) for name in floats)


def test_by_head_and_pair_and_the_later_counts() -> None:
    model = wide()
    small = quantise(model, {"*": 8, "0.*": 4, "0.1": 8, "0.2:qk": 3, "1.3": 32})
    layer, last = (small.spec.attention_at(site).weights for site in small.spec.sites)
    assert layer is not None
    assert (layer.q, layer.o) == ((4, 8, 3, 4), (4, 8, 4, 4))
    assert (layer.k, layer.v) == ((8, 4), (8, 4))  # the most that the two heads ask for
    assert last is not None
    assert (last.q, last.k) == ((8, 8, 8, 32), (8, 32))
    for name in ("W_Q", "W_O"):
        assert torch.equal(getattr(small.heads["1.3"], name), getattr(model.heads["1.3"], name))


def test_a_head_is_rounded_whatever_its_neighbours_are() -> None:
    model = wide()
    loud = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(loud.heads["0.3"], name).mul_(1000)
    one, other = quantise(model, 4), quantise(loud, 4)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        for head in ("0.0", "0.1", "1.3"):
            assert torch.equal(getattr(one.heads[head], name), getattr(other.heads[head], name))
    assert torch.equal(*(getattr(model.heads["0.2"], "W_O") for model in (one, other)))  # noqa: B009


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_model_of_the_unpacked_numbers(name: str) -> None:
    model = model_of(name)
    weights = 4 if name == "encoder-decoder" or "cut" in name else MIXED
    small = quantise(model, weights)
    floats = dequantise(small)
    assert floats.spec == model.spec
    torch.testing.assert_close(run(small), run(floats), rtol=1e-5, atol=1e-5)
    assert not torch.equal(run(small), run(model))
    again = dequantise(quantise(floats, weights))  # what was rounded once is rounded to itself
    for one, other in zip(floats.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_counted_as_they_lie(name: str, tmp_path: Path) -> None:
    small = quantise(model_of(name), 3)
    folder = small.save(tmp_path / "small")
    counted = stored(small)[-1].bytes
    assert counted == small.spec.weight_bytes()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sum(file.get_tensor(key).nbytes for key in file.keys()) == counted  # noqa: SIM118
    assert stored(small)[-1].numbers == small.spec.parameters


def test_bytes_by_hand() -> None:
    """A row of 72 numbers at 4 bits: 36 bytes and three scales of 4. A head of 34 channels; W_O has 72 rows of 34."""
    small = quantise(wide(), {"*": 4})
    row, write = 36 + 12, 17 + 8
    heads = 2 * (4 + 2 + 2) * 34 * row + 2 * 4 * 72 * write
    assert stored(small)[0].bytes == heads
    assert small.spec.weight_bytes() == 4 * (small.spec.parameters - 2 * (8 * 34 * 72 + 4 * 72 * 34)) + heads
    three = Packed.nbytes.fget(small.blocks[0].attention.read.q)  # pyright: ignore
    assert three == 4 * 34 * row


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded_it_is_the_same_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    small = quantise(model, 4 if name == "encoder-decoder" or "cut" in name else MIXED, group=5)
    back = hw.load(small.save(tmp_path / "small"))
    assert back.spec == small.spec
    for (one, here), (other, there) in zip(small.state_dict().items(), back.state_dict().items(), strict=True):
        assert (one, here.dtype) == (other, there.dtype)
        assert torch.equal(here, there)
    assert torch.equal(run(back), run(small))
    kept = hw.load(tmp_path / "small", dtype=None)
    assert torch.equal(run(kept), run(small))


def test_a_file_with_other_types_is_refused(tmp_path: Path) -> None:
    from headwise.io.aligned_safetensors import write_tensors

    small = quantise(wide(), 8)
    folder = small.save(tmp_path / "small")
    state = dict(small.state_dict())
    state["embed.tokens.codes8"] = state["embed.tokens.codes8"].float()
    write_tensors(state, folder / "model.safetensors", {"format": "headwise-1", "storage": "qkv"})
    with pytest.raises(HeadwiseError, match=r"embed.tokens.codes8 as torch.float32"):
        hw.load(folder)


def test_cutting_leaves_the_others_bitwise() -> None:
    model = wide(layers=3)
    bits = {"0.0": 8, "0.1": 4, "0.2": 4, "1.*:qk": 3, "1.2:vo": 2, "2.*": 2}
    small = quantise(model, bits)
    gone = "0.0,0.3,1.2,2.*"
    less = cut(small, gone)
    assert less.spec == small.spec.without(gone)
    for head in less.heads:
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(head, name), getattr(small.heads[head.address], name))
    torch.testing.assert_close(run(less), run(cut(dequantise(small), gone)), rtol=1e-5, atol=1e-5)
    biases = {site: torch.ones(72) for site in model.spec.sites}
    folded, want = cut(small, gone, biases), cut(dequantise(small), gone, biases)
    torch.testing.assert_close(run(folded), run(want), rtol=1e-5, atol=1e-5)
    assert not torch.equal(run(folded), run(less))


def test_another_dtype_is_that_of_the_numbers() -> None:
    small = quantise(wide(), 4)
    double = copy.deepcopy(small).double()
    assert next(iter(double.heads)).W_Q.dtype == torch.float64
    assert run(double).dtype == torch.float64
    back = copy.deepcopy(double).bfloat16().float()
    assert run(back).dtype == torch.float32
    for (name, one), other in zip(small.state_dict().items(), back.state_dict().values(), strict=True):
        if name.rsplit(".", 1)[-1].startswith(("codes", "scales")):
            assert torch.equal(one, other)


def test_looking_and_silencing_work() -> None:
    small = quantise(wide(), 4)
    floats = dequantise(small)
    with small.heads["0.1,1.*"].silenced(), floats.heads["0.1,1.*"].silenced():
        torch.testing.assert_close(run(small), run(floats), rtol=1e-5, atol=1e-5)
    before = run(small)
    with hw.record(small) as seen:
        assert torch.equal(run(small), before)
    assert seen is not None
    sizes = [model.heads["1.2"].OV.singular_values() for model in (small, floats)]  # pyright: ignore
    torch.testing.assert_close(*sizes, rtol=1e-5, atol=1e-5)


def test_activations_are_rounded_only_where_asked() -> None:
    model = wide()
    eight, both = quantise(model, 8), quantise(model, 8, activations=8)
    torch.testing.assert_close(run(eight), run(dequantise(eight)), rtol=1e-5, atol=1e-5)
    up = both.blocks[0].mlp.up  # pyright: ignore
    assert isinstance(up, PackedLinear)
    x = torch.randn(5, 72)
    want = torch.nn.functional.linear(by_hand(x, 8, 72), up.weight, up.bias)
    torch.testing.assert_close(up(x), want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(run(both), run(eight))
    loud = torch.cat((x, 1000 * x[:1]))  # a loud row does not make the others coarse
    assert torch.equal(up(loud)[:5], up(x))
    with pytest.raises(HeadwiseError, match="rounded to 8 bits, or not at all"):
        quantise(model, 8, activations=4)


@pytest.mark.parametrize("name", MODELS)
def test_the_balanced_basis_is_the_same_model(name: str) -> None:
    """At 8 bits both are near the model; and heads whose weights stay as they are, only turned, compute the same."""
    model = make_model(MODELS[name])
    first = next(iter(model.spec.addresses))
    only = {str(first): 8}
    turned = dequantise(quantise(model, only, basis="balanced"))
    for head in model.heads:
        if head.address.site == first.site and head.kv_index != model.heads[first].kv_index:
            assert_equal(turned.heads[head.address].OV.dense(), head.OV.dense(), 1e-9)
            if head.layer.spec.rotary is None:
                assert_equal(turned.heads[head.address].QK.dense(), head.QK.dense(), 1e-9)


def test_what_is_refused() -> None:
    model = wide()
    small = quantise(model, 4)
    for weights, told in [
        (5, "8, 4, 3 or 2 bits; got 5"),
        ({"*": "4"}, "got '4'"),
        ({"9.*": 4}, "names no head here"),
        ({"0.1:ov": 4}, "has the pairs qk and vo"),
        ({3: 4}, "named by head and part"),
    ]:
        with pytest.raises(HeadwiseError, match=told):
            quantise(model, weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="beside those of heads are mlp and vocabulary; got 'mpl'"):
        quantise(model, {"mpl": 4})
    with pytest.raises(HeadwiseError, match="needs a headwise model; got Linear"):
        quantise(torch.nn.Linear(2, 2), 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="at few bits already"):
        quantise(small, 4)
    with pytest.raises(HeadwiseError, match="group counts"):
        quantise(model, 4, group=0)
    with pytest.raises(HeadwiseError, match="no basis 'svd'"):
        quantise(model, 4, basis="svd")  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"hw.dequantise"):
        hw.train(small, "to be or not to be " * 20, progress=False)
    with pytest.raises(HeadwiseError, match=r"hw.dequantise"):
        hw.export(small, "nowhere")
    with pytest.raises(HeadwiseError, match=r"use hw.quantise"):
        Transformer(small.spec)
