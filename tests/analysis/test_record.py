"""Recording: the selected tensors are stored unchanged, and the outputs of the model keep every bit."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.analysis.recording.recording import ModelRecording, record
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.kernels import attention_weights
from headwise.model import Transformer
from headwise.spec import Address
from tests.contract.layers import (
    HEADS,
    LAYERS,
    MODELS,
    B,
    T,
    assert_equal,
    call_layer,
    make_layer,
    make_model,
    run_model,
    token_ids,
)

each_model = pytest.mark.parametrize("name", MODELS)


class SingleLayerModel:
    """A single layer with the interface of a model."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        self.layer = layer

    def gathered_hook_points(self) -> list[Any]:
        return [self.layer.hook_point]


@each_model
@torch.no_grad()
def test_record_keeps_outputs_and_head_outputs_sum_to_layer(name: str) -> None:
    model, outputs = make_model(MODELS[name]), {}
    before = run_model(model)
    for layer in model.attention_layers():
        layer.register_forward_hook(
            lambda m, i, out, address_of_layer=layer.hook_point.address: outputs.update({address_of_layer: out})
        )
    with record(model) as recording:
        during = run_model(model)
    assert torch.equal(before, during)
    assert recording.addresses == model.spec.head_addresses
    for layer in model.attention_layers():
        writes = [recording[address].output for address in layer.hook_point.head_addresses]
        total = sum(writes, torch.zeros_like(outputs[layer.hook_point.address]))
        assert_equal(outputs[layer.hook_point.address], total + (0 if layer.b_O is None else layer.b_O))
    assert not any(hook_point.is_active for hook_point in model.hook_points())


@pytest.mark.parametrize("name", [name for name, spec in LAYERS.items() if spec.head_ids])
@torch.no_grad()
def test_record_map_times_v_equals_z(name: str) -> None:
    layer = make_layer(LAYERS[name])
    with record(SingleLayerModel(layer)) as recording:
        call_layer(layer)
    for head in layer.heads:
        head_recording = recording[head.address]
        z = head_recording.map() @ head_recording.v
        z = z if head_recording.token_gate is None else z * head_recording.token_gate
        assert_equal(head_recording.z, z if head.gate is None else z * head.gate)


@each_model
@torch.no_grad()
def test_record_map_rows_and_columns_equal_full_map(name: str) -> None:
    model = make_model(MODELS[name])
    last = str(model.spec.head_addresses[-1])
    with record(model, last, tensors="map") as recording:
        run_model(model)
    full_map = recording[last].map()  # (B, T, S)
    head_recording = recording[last]
    assert_equal(head_recording.map(rows=3), full_map[:, 3:4])
    assert_equal(head_recording.map(rows=[4, 0, 1, -1]), full_map[:, [4, 0, 1, 4]])
    assert_equal(head_recording.map(rows=slice(1, 4), cols=[2, 0]), full_map[:, 1:4][:, :, [2, 0]])
    assert_equal(head_recording.map(rows=range(2), cols=-1), full_map[:, :2, -1:])
    assert head_recording.map(rows=[]).shape == (B, 0, full_map.shape[2])
    for row in (T, -T - 1):
        with pytest.raises(HeadwiseError, match=f"query index {row} is out of range"):
            head_recording.map(rows=[row])


@torch.no_grad()
def test_record_map_is_rebuilt_in_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.analysis.recording import recording as module

    rows: list[int] = []
    scores = module.raw_scores

    def counting(q: Tensor, k: Tensor, params: Any) -> Tensor:
        rows.append(q.shape[2])
        return scores(q, k, params)

    model = make_model(MODELS["decoder, rotary"])
    with record(model, "1.2", tensors="map") as recording:
        model(token_ids(1, 300))
    monkeypatch.setattr(module, "raw_scores", counting)
    recording["1.2"].map(rows=[7, 8, 200])
    assert rows == [2, 1]
    rows.clear()
    recording["1.2"].map()
    assert rows == [128, 128, 44]


def record_decoding(cache: Any, model: Transformer, ids: Tensor, **options: Any) -> ModelRecording:
    """Run all but the last four tokens at once, then these one by one."""
    with record(model, **options) as recording:
        model(ids[:, :-4], cache=cache)
        for step in range(4, 0, -1):
            model(ids[:, ids.shape[1] - step : ids.shape[1] - step + 1], cache=cache)
    return recording


@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, windows"])
@torch.no_grad()
def test_record_decoding_steps_equal_single_call(name: str, kind: str) -> None:
    model, ids = make_model(MODELS[name]), token_ids(3, 11)
    size = {"dynamic": None, "static": 13, "sliding": 6}[kind]
    cache = model.cache(kind, size)
    maps_by_layer: dict[Any, list[Tensor]] = {hook_point.address: [] for hook_point in model.hook_points()}
    with ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(
                hook_point.listen(
                    lambda s: maps_by_layer[s.hook_point.address].append(attention_weights(s.q, s.k, s.params))
                )
            )
        recording = record_decoding(cache, model, ids)
    for address in recording.addresses:
        recorded = recording[address]
        assert len(recorded.calls) == 5
        index = model.heads[str(address)].index  # pyright: ignore[reportAttributeAccessIssue]
        for step_index, head_call in enumerate(recorded.calls):
            assert_equal(head_call.map(), maps_by_layer[address.layer_address][step_index][:, index])
            assert_equal(head_call.map() @ head_call.v, head_call.z)
        with pytest.raises(HeadwiseError, match="5 calls of head"):
            recorded.z
        with pytest.raises(HeadwiseError, match="index=5"):
            recorded.call(5)
    with record(model) as single_call:
        model(ids)
    if kind != "sliding":
        last = recording["1.3"].call(-1)
        assert_equal(last.z, single_call["1.3"].z[:, -1:])
        assert_equal(last.output, single_call["1.3"].output[:, -1:])


@torch.no_grad()
def test_record_cached_keys_are_stored_once() -> None:
    model, ids = make_model(MODELS["decoder, parallel"]), token_ids(1, 40)
    with record(model, tensors="k") as recording:
        cache = model.cache()
        for position in range(40):
            model(ids[:, position : position + 1], cache=cache)
    once = 2 * 4 * 40 * 6 * 8  # layers, heads, tokens, channels, bytes; the capacity doubles, so up to twice that
    assert recording.nbytes <= 2 * once
    assert len({id(c._call.k.storage) for c in recording["0.1"].calls if c._call.k is not None}) == 1


@torch.no_grad()
def test_record_keeps_keys_after_cache_restore_or_reorder() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 6)
    other = (ids + 1) % 17
    cache = model.cache("static", 12)
    with record(model, "1.1") as recording:
        model(ids[:, :4], cache=cache)
        layers = {layer: layer.snapshot() for layer in cache.layers.values()}
        model(ids[:, 4:], cache=cache)
        expected_k = recording["1.1"].call(1).k.clone()
        for layer, state in layers.items():  # reset to four tokens; the memory is overwritten
            layer.restore(state)
        cache.length = 4
        model(other[:, 4:], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        model(ids[:, :1], cache=cache)
    assert torch.equal(recording["1.1"].call(1).k, expected_k)
    with record(model, "1.1") as fresh:
        model(torch.cat((ids[:, :4], other[:, 4:]), 1))
    assert_equal(recording["1.1"].call(2).k, fresh["1.1"].k)
    assert_equal(recording["1.1"].call(3).k[:, :6], fresh["1.1"].k.flip(0))


@torch.no_grad()
def test_record_cross_attention_stores_source_once() -> None:
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
    assert first._call.k.storage is second._call.k.storage
    assert len(recording["enc.0.1"].calls) == 1
    with pytest.raises(HeadwiseError, match=r"dec\.0\.1 was not recorded"):
        recording["dec.0.1"]


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_record_maps_never_attend_to_padding(side: str) -> None:
    model = make_model(MODELS["decoder, rotary"])
    attention_mask = torch.ones(2, 7, dtype=torch.bool)
    attention_mask[1, :3] = False
    attention_mask = attention_mask if side == "left" else attention_mask.flip(1)
    with record(model, tensors="map") as recording:
        model(token_ids(2, 7), attention_mask=attention_mask)
    for recorded in recording:
        weights = recorded.map()
        assert (weights.masked_select(~attention_mask[:, None].expand_as(weights)) == 0).all()
        assert_equal(weights.sum(-1)[attention_mask], torch.ones(int(attention_mask.sum()), dtype=torch.float64))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_record_keeps_gradients_and_holds_no_graph(checkpointing: bool) -> None:
    model = make_model(MODELS["decoder, rotary"])
    model.checkpointing = checkpointing

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(token_ids(2, 7)).square().sum(), list(model.parameters())))

    plain = gradients()
    with record(model) as recording:
        watched = gradients()
    assert all(torch.equal(expected, actual) for expected, actual in zip(plain, watched, strict=True))
    assert len(recording["1.3"].calls) == 1
    assert not recording["1.3"].z.requires_grad
    assert not recording["1.3"].map().requires_grad


@torch.no_grad()
def test_record_silenced_head_has_zero_z_and_its_map() -> None:
    model = make_model(MODELS["decoder"])
    with record(model, "0.2,0.3") as recording, model.heads["0.2"].silenced():
        run_model(model)
    assert (recording["0.2"].z == 0).all()
    assert recording["0.2"].map().sum() > 0
    assert recording["0.3"].z.abs().sum() > 0


@torch.no_grad()
def test_record_stores_only_requested_tensors() -> None:
    model = make_model(MODELS["decoder, rotary"])  # 4 heads, 2 KV heads, 6 channels, float64
    sizes = {"q": 6, "k": 6, "z": 6, "output": 6, "map": 12}
    for tensor_name, channels in sizes.items():
        with record(model, "1.3", tensors=tensor_name) as recording:
            run_model(model)
        assert recording.nbytes == B * T * channels * 8, tensor_name
    with record(model, "1.2,1.3", tensors=["k"]) as recording:
        run_model(model)
    assert recording.nbytes == B * T * 6 * 8, "both read the same keys"
    for name in ("q", "v", "z", "output"):
        with pytest.raises(HeadwiseError, match=f"{name} was not recorded"):
            getattr(recording["1.3"], name)
    with pytest.raises(HeadwiseError, match="map was not recorded"):
        recording["1.3"].map()


def test_record_invalid_request_raises() -> None:
    model = make_model(MODELS["decoder"])
    with (
        pytest.raises(HeadwiseError, match=r"'maps' cannot be recorded; did you mean map\?"),
        record(model, tensors="maps"),
    ):
        pass
    with pytest.raises(HeadwiseError, match="the list is empty"), record(model, tensors=()):
        pass
    with pytest.raises(HeadwiseError, match=f"'0.{HEADS}': the model has no such head"), record(model, f"0.{HEADS}"):
        pass
    with record(model, "0.1") as recording:
        pass
    with pytest.raises(HeadwiseError, match=r"0\.1: nothing was recorded"):
        recording["0.1"]
    with pytest.raises(HeadwiseError, match=r"1\.1 was not recorded.*0\.1"):
        recording[Address("", 1, 1)]


def test_record_output_after_weight_change_raises() -> None:
    model = make_model(MODELS["decoder"])
    with torch.no_grad(), record(model, "0.1") as recording:
        run_model(model)
        recording["0.1"].output
        model.heads["0.1"].W_O.mul_(2)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(HeadwiseError, match=r"W_O of head 0\.1 has changed"):
        recording["0.1"].output


def test_record_error_inside_removes_listeners() -> None:
    model = make_model(MODELS["decoder"])
    with pytest.raises(RuntimeError, match="mine"), record(model):
        raise RuntimeError("mine")
    assert not any(hook_point.is_active for hook_point in model.hook_points())
