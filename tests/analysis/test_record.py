"""Recording: what was asked is kept, as it was; outputs keep every bit."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.analysis.recording.recording import Recording, record
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.kernels import maps
from headwise.model import Transformer
from headwise.spec import Address
from tests.contract.layers import (
    HEADS,
    LAYERS,
    MODELS,
    B,
    T,
    assert_equal,
    call,
    make_layer,
    make_model,
    run,
    token_ids,
)

each_model = pytest.mark.parametrize("name", MODELS)


class OneLayer:
    """A lone layer, seen as a model."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        self.layer = layer

    def all_sites(self) -> list[Any]:
        return [self.layer.site]


@each_model
@torch.no_grad()
def test_outputs_are_bitwise_the_same_and_writes_add_up_to_the_layers_output(name: str) -> None:
    model, outputs = make_model(MODELS[name]), {}
    before = run(model)
    for layer in model.attention_layers():
        layer.register_forward_hook(lambda m, i, out, here=layer.site.address: outputs.update({here: out}))
    with record(model) as recording:
        during = run(model)
    assert torch.equal(before, during)
    assert recording.addresses == model.spec.addresses
    for layer in model.attention_layers():
        writes = [recording[address].write for address in layer.site.addresses]
        total = sum(writes, torch.zeros_like(outputs[layer.site.address]))
        assert_equal(outputs[layer.site.address], total + (0 if layer.b_O is None else layer.b_O))
    assert not any(site.is_open for site in model.sites())


@pytest.mark.parametrize("name", [name for name, spec in LAYERS.items() if spec.head_ids])
@torch.no_grad()
def test_maps_of_every_kind_of_layer_times_v_are_z(name: str) -> None:
    layer = make_layer(LAYERS[name])
    with record(OneLayer(layer)) as recording:
        call(layer)
    for head in layer.heads:
        seen = recording[head.address]
        z = seen.map() @ seen.v
        assert_equal(seen.z, z if head.gate is None else z * head.gate)


@each_model
@torch.no_grad()
def test_rows_and_columns_are_those_of_the_whole_map(name: str) -> None:
    model = make_model(MODELS[name])
    last = str(model.spec.addresses[-1])
    with record(model, last, what="map") as recording:
        run(model)
    whole = recording[last].map()  # (B, T, S)
    seen = recording[last]
    assert_equal(seen.map(rows=3), whole[:, 3:4])
    assert_equal(seen.map(rows=[4, 0, 1, -1]), whole[:, [4, 0, 1, 4]])
    assert_equal(seen.map(rows=slice(1, 4), cols=[2, 0]), whole[:, 1:4][:, :, [2, 0]])
    assert_equal(seen.map(rows=range(2), cols=-1), whole[:, :2, -1:])
    assert seen.map(rows=[]).shape == (B, 0, whole.shape[2])
    for place in (T, -T - 1):
        with pytest.raises(HeadwiseError, match=f"there is no query {place}; this call has 5"):
            seen.map(rows=[place])


@torch.no_grad()
def test_a_map_of_many_rows_is_rebuilt_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.analysis.recording import recording as module

    rows: list[int] = []
    scores = module.raw_scores

    def counting(q: Tensor, k: Tensor, terms: Any) -> Tensor:
        rows.append(q.shape[2])
        return scores(q, k, terms)

    model = make_model(MODELS["decoder, rotary"])
    with record(model, "1.2", what="map") as recording:
        model(token_ids(1, 300))
    monkeypatch.setattr(module, "raw_scores", counting)
    recording["1.2"].map(rows=[7, 8, 200])
    assert rows == [2, 1]
    rows.clear()
    recording["1.2"].map()
    assert rows == [128, 128, 44]


def generate_with(cache: Any, model: Transformer, ids: Tensor, **options: Any) -> Recording:
    """Read all but the last four tokens at once, and those one by one."""
    with record(model, **options) as recording:
        model(ids[:, :-4], cache=cache)
        for step in range(4, 0, -1):
            model(ids[:, ids.shape[1] - step : ids.shape[1] - step + 1], cache=cache)
    return recording


@pytest.mark.parametrize("kind", ["growing", "fixed", "sliding"])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, windows"])
@torch.no_grad()
def test_steps_with_a_cache_have_the_rows_of_one_call_and_the_keys_of_then(name: str, kind: str) -> None:
    model, ids = make_model(MODELS[name]), token_ids(3, 11)
    size = {"growing": None, "fixed": 13, "sliding": 6}[kind]
    cache = model.cache(kind, size)
    seen: dict[Any, list[Tensor]] = {site.address: [] for site in model.sites()}
    with ExitStack() as listening:
        for site in model.sites():
            listening.enter_context(site.listen(lambda s: seen[s.site.address].append(maps(s.q, s.k, s.terms))))
        recording = generate_with(cache, model, ids)
    for address in recording.addresses:
        recorded = recording[address]
        assert len(recorded.calls) == 5
        index = model.heads[str(address)].index  # pyright: ignore[reportAttributeAccessIssue]
        for number, one in enumerate(recorded.calls):
            assert_equal(one.map(), seen[address.site][number][:, index])
            assert_equal(one.map() @ one.v, one.z)
        with pytest.raises(HeadwiseError, match="was called 5 times"):
            recorded.z
        with pytest.raises(HeadwiseError, match="there is no call 5"):
            recorded.call(5)
    with record(model) as whole:
        model(ids)
    if kind != "sliding":
        last = recording["1.3"].call(-1)
        assert_equal(last.z, whole["1.3"].z[:, -1:])
        assert_equal(last.write, whole["1.3"].write[:, -1:])


@torch.no_grad()
def test_keys_in_a_cache_are_kept_once_not_once_a_step() -> None:
    model, ids = make_model(MODELS["decoder, parallel"]), token_ids(1, 40)
    with record(model, what="k") as recording:
        cache = model.cache()
        for place in range(40):
            model(ids[:, place : place + 1], cache=cache)
    once = 2 * 4 * 40 * 6 * 8  # layers, heads, tokens, channels, bytes; room doubles, so up to twice that
    assert recording.bytes <= 2 * once
    assert len({id(c._call.k.of) for c in recording["0.1"].calls if c._call.k is not None}) == 1


@torch.no_grad()
def test_a_cache_that_is_set_back_or_reordered_does_not_change_what_was_recorded() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 6)
    other = (ids + 1) % 17
    cache = model.cache("fixed", 12)
    with record(model, "1.1") as recording:
        model(ids[:, :4], cache=cache)
        layers = {layer: layer.state for layer in cache.layers.values()}
        model(ids[:, 4:], cache=cache)
        kept = recording["1.1"].call(1).k.clone()
        for layer, state in layers.items():  # back to four tokens; the memory is written again
            layer.state = state
        cache.length = 4
        model(other[:, 4:], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        model(ids[:, :1], cache=cache)
    assert torch.equal(recording["1.1"].call(1).k, kept)
    with record(model, "1.1") as fresh:
        model(torch.cat((ids[:, :4], other[:, 4:]), 1))
    assert_equal(recording["1.1"].call(2).k, fresh["1.1"].k)
    assert_equal(recording["1.1"].call(3).k[:, :6], fresh["1.1"].k.flip(0))


@torch.no_grad()
def test_cross_attention_keeps_the_source_once() -> None:
    model = make_model(MODELS["encoder-decoder"])
    cache = model.cache()
    with record(model, "cross.*.*,enc.0.1") as recording:
        model(token_ids(2, 3), source=token_ids(2, 7, seed=4), cache=cache)
        model(token_ids(2, 1), cache=cache)
    first, second = recording["cross.1.2"].calls
    assert first.map().shape == (2, 3, 7)
    assert second.map().shape == (2, 1, 7)
    assert first._call.k is not None
    assert second._call.k is not None
    assert first._call.k.of is second._call.k.of
    assert len(recording["enc.0.1"].calls) == 1
    with pytest.raises(HeadwiseError, match=r"dec\.0\.1 was not recorded"):
        recording["dec.0.1"]


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_never_looked_at(side: str) -> None:
    model = make_model(MODELS["decoder, rotary"])
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, :3] = False
    real = real if side == "left" else real.flip(1)
    with record(model, what="map") as recording:
        model(token_ids(2, 7), padding=real)
    for recorded in recording:
        weights = recorded.map()
        assert (weights.masked_select(~real[:, None].expand_as(weights)) == 0).all()
        assert_equal(weights.sum(-1)[real], torch.ones(int(real.sum()), dtype=torch.float64))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_bitwise_the_same_and_nothing_recorded_holds_the_graph(checkpointing: bool) -> None:
    model = make_model(MODELS["decoder, rotary"])
    model.checkpointing = checkpointing

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(token_ids(2, 7)).square().sum(), list(model.parameters())))

    plain = gradients()
    with record(model) as recording:
        watched = gradients()
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert len(recording["1.3"].calls) == 1
    assert not recording["1.3"].z.requires_grad
    assert not recording["1.3"].map().requires_grad


@torch.no_grad()
def test_silenced_heads_are_recorded_as_they_were() -> None:
    model = make_model(MODELS["decoder"])
    with record(model, "0.2,0.3") as recording, model.heads["0.2"].silenced():
        run(model)
    assert (recording["0.2"].z == 0).all()
    assert recording["0.2"].map().sum() > 0
    assert recording["0.3"].z.abs().sum() > 0


@torch.no_grad()
def test_only_what_was_asked_is_kept() -> None:
    model = make_model(MODELS["decoder, rotary"])  # 4 heads, 2 key heads, 6 channels, float64
    sizes = {"q": 6, "k": 6, "z": 6, "write": 6, "map": 12}
    for what, channels in sizes.items():
        with record(model, "1.3", what=what) as recording:
            run(model)
        assert recording.bytes == B * T * channels * 8, what
    with record(model, "1.2,1.3", what=["k"]) as recording:
        run(model)
    assert recording.bytes == B * T * 6 * 8, "both read the same keys"
    for name in ("q", "v", "z", "write"):
        with pytest.raises(HeadwiseError, match=f"{name} was not recorded; ask for it"):
            getattr(recording["1.3"], name)
    with pytest.raises(HeadwiseError, match="map was not recorded"):
        recording["1.3"].map()


def test_what_cannot_be_recorded_is_refused_clearly() -> None:
    model = make_model(MODELS["decoder"])
    with (
        pytest.raises(HeadwiseError, match=r"'maps' cannot be recorded; did you mean map\?"),
        record(model, what="maps"),
    ):
        pass
    with pytest.raises(HeadwiseError, match="nothing is to be recorded"), record(model, what=()):
        pass
    with pytest.raises(HeadwiseError, match=f"'0.{HEADS}' names no head"), record(model, f"0.{HEADS}"):
        pass
    with record(model, "0.1") as recording:
        pass
    with pytest.raises(HeadwiseError, match=r"nothing was recorded of 0\.1; call the model inside"):
        recording["0.1"]
    with pytest.raises(HeadwiseError, match=r"1\.1 was not recorded; recorded are 0\.1"):
        recording[Address("", 1, 1)]


def test_writes_are_refused_when_the_weights_have_changed() -> None:
    model = make_model(MODELS["decoder"])
    with torch.no_grad(), record(model, "0.1") as recording:
        run(model)
        recording["0.1"].write
        model.heads["0.1"].W_O.mul_(2)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(HeadwiseError, match=r"W_O of 0\.1 has changed"):
        recording["0.1"].write


def test_an_error_inside_stops_the_recording() -> None:
    model = make_model(MODELS["decoder"])
    with pytest.raises(RuntimeError, match="mine"), record(model):
        raise RuntimeError("mine")
    assert not any(site.is_open for site in model.sites())
