"""In a generation step a product may be another than torch's; it is the same product, and the choice never changes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.kernels.autotuned_linear import FEW_ROWS, PRODUCTS, SETTING, _chosen, can, chosen, linear, step

SIZES = [(34, 51), (35, 17), (37, 8), (1024, 96)]  # outputs that 2, 5, nothing and 2 divide


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test makes its own choices."""
    before = dict(_chosen)
    _chosen.clear()
    yield
    _chosen.clear()
    _chosen.update(before)


def decoder(width: int = 34) -> hw.Transformer:
    torch.manual_seed(0)
    heads = hw.AttentionSpec(width=width, heads=4, kv_heads=2, head_dim=8, bias=True)
    return hw.Transformer(hw.ModelSpec(vocab=35, context=40, layers=2, attention=heads, hidden=51)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, FEW_ROWS])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lies", ["rows", "columns"])
def test_every_product_is_the_same_product(name: str, rows: int, size: tuple[int, int], lies: str) -> None:
    if not can(name, size[0], lies):
        pytest.skip("not for such a weight")
    torch.manual_seed(0)
    weight = torch.randn(size) if lies == "rows" else torch.randn(size[::-1]).T
    for x in (torch.randn(rows, size[1]), torch.randn(rows, 1, 2 * size[1])[..., ::2]):
        for bias in (torch.randn(size[0]), None):
            want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            got = PRODUCTS[name](x, weight, bias)
            assert got.shape == want.shape
            assert (got.double() - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_model_writes_the_same_by_every_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(), torch.tensor([[3, 1, 4], [1, 5, 9]])
    want = model.generate(ids, 20)
    logits = model(want)[:, -1]
    monkeypatch.setenv(SETTING, name)
    _chosen.clear()
    assert torch.equal(decoder().generate(ids, 20), want)
    with torch.no_grad():
        cache = model.cache()
        steps = [model(token, cache=cache) for token in want.split(1, 1)]
    assert torch.allclose(steps[-1][:, -1], logits, atol=1e-5)
    assert set(chosen().values()) <= {name, "torch"}
    assert name in chosen().values()


@torch.no_grad()
def test_the_choice_holds_whoever_listens_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "measured")
    model, ids = decoder(), torch.tensor([[3]])

    def steps() -> Tensor:
        cache = model.cache()
        return torch.cat([model(ids + i, cache=cache) for i in range(4)], 1)

    first, made = steps(), chosen()
    assert made
    with hw.record(model):
        assert torch.equal(steps(), first)
    with model.heads["0.1"].scaled(1.0):
        assert torch.equal(steps(), first)
    model.generate(ids, 5)
    assert torch.equal(steps(), first)
    assert {shape: name for shape, name in chosen().items() if shape in made} == made


@torch.no_grad()
def test_what_is_saved_and_loaded_steps_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRODUCTS:
        monkeypatch.setenv(SETTING, name)
        _chosen.clear()
        model = decoder()
        again = hw.load(model.save(tmp_path / name))
        assert isinstance(again, hw.Transformer)
        one, other = (m(torch.tensor([[7]]), cache=m.cache()) for m in (model, again))
        assert torch.equal(one, other)


def test_only_steps_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a call without a cache, one with gradients, many rows, another dtype; and gradients flow as ever."""
    monkeypatch.setenv(SETTING, "parts")
    model, many = decoder(), torch.arange(FEW_ROWS + 1)[None]
    with torch.no_grad():
        model(many[:, :3])
        model(many, cache=model.cache())
        doubled = decoder().double()
        doubled(many[:, :3], cache=doubled.cache())
    assert not chosen()
    model(many[:, :3], cache=model.cache()).sum().backward()
    assert not chosen()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "embed.pos" not in name)
    with torch.no_grad():
        model(many[:, :3], cache=model.cache())
    assert "parts" in chosen().values()


@torch.no_grad()
def test_threads_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "measured")
    model, made = decoder(), []

    def run() -> None:
        with torch.no_grad():
            made.append(model(torch.tensor([[3]]), cache=model.cache()))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(torch.equal(one, made[0]) for one in made)


@torch.no_grad()
def test_weights_of_another_kind_go_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(Tensor):
        """As one that is spread over processes."""

    monkeypatch.setenv(SETTING, "parts")
    weight = nn.Parameter(torch.randn(4, 6).as_subclass(Special), requires_grad=False)
    with step(nn.Identity(), 1):
        linear(torch.randn(1, 6), weight.data)
        assert not chosen()
        empty = linear(torch.randn(1, 6), torch.zeros(0, 6))
    assert empty.shape == (1, 0)


def test_a_product_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "onedn")
    with pytest.raises(hw.HeadwiseError, match=r"HEADWISE_PRODUCT is 'onedn'; .*onednn"):
        decoder().generate(torch.tensor([[3]]), 2)


def test_queries_with_a_strange_stride_stay_on_the_flash_kernel() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 64).transpose(-1, -2).unbind()  # (1, 2, 64, 8), channels not neighbours
    with torch.profiler.profile() as seen:
        got = hw.attention(q, k, v, mask=hw.causal())
    names = {event.key for event in seen.key_averages()}
    assert any("flash_attention_for_cpu" in name for name in names)
    assert torch.allclose(got, hw.attention(q, k, v, mask=hw.causal(), backend="reference"), atol=1e-5)
