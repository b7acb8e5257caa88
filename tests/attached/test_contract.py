"""Properties of every architecture: bitwise equal outputs, silencing equal to zeroed W_O, maps equal to the eager path."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, PLAIN, SIDES, Case, each_case, main_output, output_tensors, transformers


@each_case
@pytest.mark.parametrize("side", SIDES)
def test_attach_record_detach_keep_outputs_bitwise(case: Case, side: str) -> None:
    model, inputs = case.build(), case.inputs(side)
    with torch.no_grad():
        before = output_tensors(model(**inputs))
        attached = hw.attach(model)
        attached_outputs = output_tensors(model(**inputs))
        with hw.record(attached) as recording:
            recorded_outputs = output_tensors(model(**inputs))
        attached.detach()
        detached_outputs = output_tensors(model(**inputs))
    assert len(recording) == len(attached.heads)
    for others in (attached_outputs, recorded_outputs, detached_outputs):
        assert len(others) == len(before)
        assert all(torch.equal(a, b) for a, b in zip(before, others, strict=True))


@each_case
def test_detach_restores_model_state(case: Case) -> None:
    model = case.build()
    before = _state(model)
    with hw.attach(model) as attached:
        assert _state(model) != before
        assert attached.is_attached
    assert _state(model) == before


@each_case
def test_silenced_head_equals_zeroed_w_o(case: Case) -> None:
    model, inputs = case.build().double(), {k: _double(v) for k, v in case.inputs("right").items()}
    attached = hw.attach(model)
    for address in _sample_heads(attached):
        with torch.no_grad():
            with attached.heads.select(str(address)).silenced():
                silent = main_output(model(**inputs))
            full = main_output(model(**inputs))
            W_O = head_at(attached, address).W_O
            saved = W_O.clone()
            W_O.zero_()
            zeroed = main_output(model(**inputs))
            W_O.copy_(saved)
        real = inputs.get("attention_mask")
        if real is not None and real.shape == silent.shape[:2]:
            silent, zeroed, full = (x[real.bool()] for x in (silent, zeroed, full))
        assert (silent - zeroed).abs().max() <= 1e-9
        assert (silent - full).abs().max() > 1e-4


@each_case
@pytest.mark.parametrize("side", SIDES)
def test_record_maps_equal_eager_attentions(case: Case, side: str) -> None:
    inputs = case.inputs(side)
    eager = case.build(attn_implementation="eager")
    with torch.no_grad():
        eager_output = eager(**inputs, output_attentions=True)
    model = case.build()
    attached = hw.attach(model)
    with torch.no_grad(), hw.record(attached, tensors="map") as recording:
        model(**inputs)
    real = inputs.get("attention_mask")
    compared = 0
    for address in attached.heads.addresses:
        name = {"enc": "encoder_attentions", "dec": "decoder_attentions", "cross": "cross_attentions", "": "attentions"}
        want = getattr(eager_output, name[address.stack])[address.layer][:, address.head]  # (B, T, S)
        got = recording[address].map()
        rows = torch.ones(want.shape[:2], dtype=torch.bool)
        if real is not None and address.stack in ("", "enc"):
            rows = real.bool()  # the maps of padding tokens are arbitrary
        assert got.shape == want.shape
        assert (got - want)[rows].abs().max() <= 1e-5
        compared += 1
    assert compared == len(attached.heads) > 0


@each_case
def test_record_head_outputs_sum_to_layer_output(case: Case) -> None:
    model, inputs = case.build().double(), {k: _double(v) for k, v in case.inputs().items()}
    attached = hw.attach(model)
    outputs: dict[Any, Tensor] = {}
    for layer in attached.attention_layers():
        assert layer.info.output_module is not None
        layer.info.output_module.register_forward_hook(partial(_store_output, outputs, layer.hook_point.address))
    with torch.no_grad(), hw.record(attached, tensors="output") as recording:
        model(**inputs)
    for layer in attached.attention_layers():
        total = sum(recording[address].output for address in layer.hook_point.head_addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (total - outputs[layer.hook_point.address].reshape(total.shape)).abs().max() <= 1e-9  # pyright: ignore


@each_case
def test_attach_addresses_cover_every_head(case: Case) -> None:
    attached = hw.attach(case.build())
    stacks = {address.stack for address in attached.heads.addresses}
    assert stacks == ({"enc", "dec", "cross"} if case.kind in ("two", "speech") else {""})
    assert attached.spec.head_addresses == attached.heads.addresses
    kinds = {"two": "encoder-decoder", "speech": "encoder-decoder", "image": "encoder"}
    assert attached.spec.kind == kinds.get(case.kind, case.kind)


@each_case
def test_head_w_v_reproduces_recorded_v(case: Case) -> None:
    """v has no positions and no norms, so it equals W_V times the input. The weights are live views."""
    model, inputs = case.build().double(), {k: _double(v) for k, v in case.inputs().items()}
    attached = hw.attach(model)
    layer_inputs: dict[Any, Tensor] = {}
    for layer in attached.attention_layers():
        assert layer.info.qkv_modules is not None
        last = layer.info.qkv_module(-1 if layer.info.qkv_modules[0] == "separate" else 0)
        last.register_forward_pre_hook(
            lambda module, inputs, address=layer.hook_point.address: layer_inputs.__setitem__(address, inputs[0])
        )
    with torch.no_grad(), hw.record(attached, tensors="v") as recording:
        model(**inputs)
    for address in _sample_heads(attached):
        head = head_at(attached, address)
        values = layer_inputs[address.layer_address] @ head.W_V
        values = values if head.b_V is None else values + head.b_V
        assert (values - recording[address].v).abs().max() <= 1e-9
        assert head.W_Q.shape[1] == head.W_K.shape[1] == head.layer.spec.head_dim


def _store_output(store: dict[Any, Tensor], address: Any, module: Any, inputs: Any, output: Tensor) -> None:
    store[address] = output


def _sample_heads(attached: Any) -> list[Any]:
    """Return two heads of every stack: the last head of the first layer and the second head of the last layer."""
    by_stack: dict[str, list[Any]] = {}
    for address in attached.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    sample = []
    for addresses in by_stack.values():
        sample += [
            max(a for a in addresses if a.layer == 0),
            next(a for a in addresses if a.layer == addresses[-1].layer and a.head == 1),
        ]
    return sample


def head_at(attached: Any, address: Any) -> hw.Head:
    """Return one head by its address."""
    head = attached.heads[address]
    assert isinstance(head, hw.Head)
    return head


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _state(model: Any) -> Any:
    """Return the state of a model without its weights: attributes, hooks and attention implementation."""
    parts = [
        (name, sorted(part.__dict__), len(part._forward_pre_hooks), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    return parts, model.config._attn_implementation, model.config.to_dict(), model.training


# Arguments of the transformers model.


def test_attached_call_model_arguments_match_model() -> None:
    case = BY_NAME["llama"]
    model, inputs = case.build(), case.inputs("right")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, labels=labels)
        with hw.attach(model) as attached:
            for output in (
                attached(ids, attention_mask=mask, labels=labels),
                attached(ids, attention_mask=mask > 0, labels=labels),
                attached(**inputs, labels=labels),
            ):
                assert type(output) is type(plain)
                assert torch.equal(output.loss, plain.loss)
                assert torch.equal(output.logits, plain.logits)
            half = attached(ids, attention_mask=mask, labels=labels, gates={"*.*": 0.5})
            assert float(half.loss) != float(plain.loss)
            assert isinstance(attached(ids, attention_mask=mask > 0), torch.Tensor)
            own_output = attached(input_ids=ids, attention_mask=mask)
            assert type(own_output) is type(plain)
            assert torch.equal(own_output.logits, plain.logits)
            with pytest.raises(hw.HeadwiseError, match="input_ids: given twice"):
                attached(ids, attention_mask=mask > 0, input_ids=ids)
            with pytest.raises(hw.HeadwiseError, match="output_hidden_states"):
                attached(ids, labels=labels, hidden=True)


def test_attached_encoder_decoder_with_labels_matches_model() -> None:
    case = BY_NAME["bart"]
    model, inputs = case.build(), case.inputs("right")
    ids, source, mask = inputs["decoder_input_ids"], inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), hw.attach(model) as attached:
        output = attached(ids, source=source, source_attention_mask=mask > 0, labels=ids)
        alone = attached(source, attention_mask=mask, labels=ids)  # called like the transformers model, with labels
    with torch.no_grad():
        assert torch.equal(output.loss, model(**inputs, labels=ids).loss)
        assert torch.equal(alone.loss, model(source, attention_mask=mask, labels=ids).loss)


def test_attached_call_pixel_values_matches_model() -> None:
    case = BY_NAME["vit"]
    model, inputs = case.build(), case.inputs()
    with torch.no_grad(), hw.attach(model) as attached:
        assert torch.equal(attached(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_save_pruned_model_warns_who_can_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = BY_NAME["llama"].build()
    attached = hw.attach(model)
    attached.save(tmp_path / "uncut")
    assert "is pruned" not in capsys.readouterr().err
    attached.prune("1.4", in_place=True)
    attached.save(tmp_path / "cut")
    assert "plain transformers cannot" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    capsys.readouterr()
    hw.export(attached, tmp_path / "whole")
    assert "is pruned" not in capsys.readouterr().err
    inputs = BY_NAME["llama"].inputs()
    with torch.no_grad():
        full = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(**inputs).logits
        assert (full - model(**inputs).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MPNet", {"pad_token_id": 0}),  # it counts positions from token 1, regardless of its configuration
        ("Esm", {"pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "absolute", "token_dropout": False}),
        ("Roberta", {"pad_token_id": 0}),
        ("XLMRoberta", {"pad_token_id": 1}),
    ],
)
def test_attached_left_padding_keeps_padding_token_positions(kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**PLAIN, **more)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    ids = torch.tensor([[9, 9, 9, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17]])
    real_tokens = torch.ones_like(ids, dtype=torch.bool)
    real_tokens[0, :3] = False
    with torch.no_grad(), hw.attach(model) as attached:
        batched = attached(ids, attention_mask=real_tokens)
        assert (batched[0, 3:] - model(ids[:1, 3:]).logits[0]).abs().max() <= 1e-9
        assert (batched[1] - model(ids[1:]).logits[0]).abs().max() <= 1e-9
