"""Decode steps may use other matrix products than F.linear: the results are equal, and the choice never changes."""

import copy
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import headwise as hw
from headwise.kernels.matmul_tuner import (
    AUTOTUNED,
    KERNEL_ENV_VAR,
    MATMUL_KERNELS,
    MAX_DECODE_ROWS,
    MatmulTuner,
    is_matmul_supported,
    large_products,
    linear,
)

SIZES = [(34, 51), (35, 17), (37, 8), (1024, 96)]  # outputs divisible by 2, by 5, by none of the counts and by 2


def decoder(kernel: str | None = None) -> hw.Transformer:
    torch.manual_seed(0)
    heads = hw.AttentionSpec(width=34, heads=4, kv_heads=2, head_dim=8, bias=True)
    model = hw.Transformer(hw.ModelSpec(vocab=35, context=40, layers=2, attention=heads, mlp_width=51)).eval()
    model.matmul_tuner = MatmulTuner(kernel)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MATMUL_KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, MAX_DECODE_ROWS])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lies", ["rows", "columns"])
def test_matmul_kernels_any_shape_equal_linear(name: str, rows: int, size: tuple[int, int], lies: str) -> None:
    if not is_matmul_supported(name, size[0], lies):
        pytest.skip("not for such a weight")
    torch.manual_seed(0)
    weight = torch.randn(size) if lies == "rows" else torch.randn(size[::-1]).T
    for x in (torch.randn(rows, size[1]), torch.randn(rows, 1, 2 * size[1])[..., ::2]):
        for bias in (torch.randn(size[0]), None):
            want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            got = MATMUL_KERNELS[name](x, weight, bias)
            assert got.shape == want.shape
            assert (got.double() - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", MATMUL_KERNELS)
def test_generate_any_matmul_kernel_gives_same_tokens(name: str) -> None:
    model, ids = decoder(name), torch.tensor([[3, 1, 4], [1, 5, 9]])
    want = decoder("torch").generate(ids, 20)
    logits = model(want)[:, -1]
    assert torch.equal(model.generate(ids, 20), want)
    with torch.no_grad():
        cache = model.cache()
        steps = [model(token, cache=cache) for token in want.split(1, 1)]
    assert torch.allclose(steps[-1][:, -1], logits, atol=1e-5)
    assert set(model.matmul_tuner.choices.values()) <= {name, "torch"}
    assert name in model.matmul_tuner.choices.values()


@torch.no_grad()
def test_tuner_choice_is_made_once_and_kept() -> None:
    model, ids = decoder(AUTOTUNED), torch.tensor([[3]])

    def steps() -> Tensor:
        cache = model.cache()
        return torch.cat([model(ids + i, cache=cache) for i in range(4)], 1)

    first, choices = steps(), dict(model.matmul_tuner.choices)
    assert choices
    with hw.record(model):
        assert torch.equal(steps(), first)
    with model.heads["0.1"].scaled(1.0):
        assert torch.equal(steps(), first)
    model.generate(ids, 5)
    assert torch.equal(steps(), first)
    assert {shape: name for shape, name in model.matmul_tuner.choices.items() if shape in choices} == choices


@torch.no_grad()
def test_load_saved_model_same_decode_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MATMUL_KERNELS:
        monkeypatch.setenv(KERNEL_ENV_VAR, name)
        model = decoder()
        again = hw.load(model.save(tmp_path / name))
        assert isinstance(again, hw.Transformer)
        assert again.matmul_tuner.kernel == name
        original, loaded = (m(torch.tensor([[7]]), cache=m.cache()) for m in (model, again))
        assert torch.equal(original, loaded)


def test_tuner_only_decode_steps_choose() -> None:
    """Calls without a cache, with gradients, with many rows or with another dtype use F.linear, and gradients are correct."""
    model, ids = decoder("parts"), torch.arange(MAX_DECODE_ROWS + 1)[None]
    with torch.no_grad():
        model(ids[:, :3])
        model(ids, cache=model.cache())
        doubled = decoder("parts").double()
        doubled(ids[:, :3], cache=doubled.cache())
    assert not doubled.matmul_tuner.choices
    assert not model.matmul_tuner.choices
    model(ids[:, :3], cache=model.cache()).sum().backward()
    assert not model.matmul_tuner.choices
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "embed.pos" not in name)
    with torch.no_grad():
        model(ids[:, :3], cache=model.cache())
    assert "parts" in model.matmul_tuner.choices.values()


@torch.no_grad()
def test_tuner_copies_keep_choices() -> None:
    model, step = decoder(AUTOTUNED), torch.tensor([[3]])
    first = model(step, cache=model.cache())
    shapes = model.matmul_tuner.choices.keys()
    for kind in (copy.deepcopy, lambda original: original.prune([])):
        same = kind(model)
        assert same.matmul_tuner is not model.matmul_tuner
        assert torch.equal(same(step, cache=same.cache()), first)
        assert same.matmul_tuner.choices.keys() == shapes
    assert not decoder(AUTOTUNED).matmul_tuner.choices


@torch.no_grad()
def test_tuner_threads_get_same_outputs() -> None:
    model, outputs = decoder(AUTOTUNED), []

    def run() -> None:
        with torch.no_grad():
            outputs.append(model(torch.tensor([[3]]), cache=model.cache()))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    assert all(torch.equal(item, outputs[0]) for item in outputs)


@torch.no_grad()
def test_linear_tensor_subclass_uses_torch() -> None:
    class Special(Tensor):
        """A tensor subclass, like a tensor that is split over processes."""

    tuner = MatmulTuner("parts")
    weight = nn.Parameter(torch.randn(4, 6).as_subclass(Special), requires_grad=False)
    with tuner.decode_step(nn.Identity(), 1):
        linear(torch.randn(1, 6), weight.data)
        assert not tuner.choices
        empty = linear(torch.randn(1, 6), torch.zeros(0, 6))
    assert empty.shape == (1, 0)


def test_matmul_kernel_unknown_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_ENV_VAR, "onedn")
    with pytest.raises(hw.HeadwiseError, match=r"HEADWISE_MATMUL='onedn': unknown matrix product kernel; .*onednn"):
        decoder().generate(torch.tensor([[3]]), 2)


def test_attention_strided_queries_use_flash_kernel() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 64).transpose(-1, -2).unbind()  # (1, 2, 64, 8), with noncontiguous channels
    with torch.profiler.profile() as profiler:
        got = hw.attention(q, k, v, mask=hw.causal())
    names = {event.key for event in profiler.key_averages()}
    assert any("flash_attention_for_cpu" in name for name in names)
    assert torch.allclose(got, hw.attention(q, k, v, mask=hw.causal(), backend="reference"), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", MATMUL_KERNELS)
def test_large_products_equal_torch_in_any_layer(name: str) -> None:
    torch.manual_seed(0)
    linear_layer, conv, x = nn.Linear(24, 36), Conv1D(36, 24), torch.randn(5, 17, 24)
    for layer in (linear_layer, conv):
        expected, tuner = layer(x), MatmulTuner(name)
        with large_products(tuner):
            assert torch.allclose(layer(x), expected, atol=1e-5)
            assert torch.equal(layer(x[:1, :3]), layer(x[:1, :3])), "a small product does not need a choice"
        assert len(tuner.choices) == 1
        layout = next(iter(tuner.choices)).weight_layout
        assert next(iter(tuner.choices.values())) == (name if is_matmul_supported(name, 36, layout) else "torch")
        assert torch.equal(layer(x), expected), "the context has ended"


def test_large_products_leave_gradients_and_float64_to_torch() -> None:
    layer, x, tuner = nn.Linear(24, 36), torch.randn(80, 24), MatmulTuner(AUTOTUNED)
    with large_products(tuner):
        layer(x).sum().backward()
        with torch.no_grad():
            layer.double()(x.double())
    assert layer.weight.grad is not None
    assert not tuner.choices
    with torch.no_grad(), large_products(tuner):
        layer.float()(x)
    assert len(tuner.choices) == 1
