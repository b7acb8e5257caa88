"""What holds for every architecture: the same bits, silence that is W_O without the head, maps that are the eager path's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, PLAIN, SIDES, Case, each_case, first, results, transformers


@each_case
@pytest.mark.parametrize("side", SIDES)
def test_outputs_stay_bitwise_what_they_were(case: Case, side: str) -> None:
    model, given = case.build(), case.inputs(side)
    with torch.no_grad():
        before = results(model(**given))
        theirs = hw.attach(model)
        attached = results(model(**given))
        with hw.record(theirs) as recording:
            looked = results(model(**given))
        theirs.detach()
        after = results(model(**given))
    assert len(recording) == len(theirs.heads)
    for others in (attached, looked, after):
        assert len(others) == len(before)
        assert all(torch.equal(a, b) for a, b in zip(before, others, strict=True))


@each_case
def test_detaching_restores_the_model_exactly(case: Case) -> None:
    model = case.build()
    before = _state(model)
    with hw.attach(model) as theirs:
        assert _state(model) != before
        assert theirs.attached
    assert _state(model) == before


@each_case
def test_silence_is_w_o_without_the_head(case: Case) -> None:
    model, given = case.build().double(), {k: _double(v) for k, v in case.inputs("right").items()}
    theirs = hw.attach(model)
    for address in _some(theirs):
        with torch.no_grad():
            with theirs.heads.select(str(address)).silenced():
                silent = first(model(**given))
            whole = first(model(**given))
            W_O = one(theirs, address).W_O
            kept = W_O.clone()
            W_O.zero_()
            zeroed = first(model(**given))
            W_O.copy_(kept)
        real = given.get("attention_mask")
        if real is not None and real.shape == silent.shape[:2]:
            silent, zeroed, whole = (x[real.bool()] for x in (silent, zeroed, whole))
        assert (silent - zeroed).abs().max() <= 1e-9
        assert (silent - whole).abs().max() > 1e-4


@each_case
@pytest.mark.parametrize("side", SIDES)
def test_maps_are_those_of_the_eager_path(case: Case, side: str) -> None:
    given = case.inputs(side)
    eager = case.build(attn_implementation="eager")
    with torch.no_grad():
        theirs_maps = eager(**given, output_attentions=True)
    model = case.build()
    theirs = hw.attach(model)
    with torch.no_grad(), hw.record(theirs, what="map") as recording:
        model(**given)
    real = given.get("attention_mask")
    compared = 0
    for address in theirs.heads.addresses:
        name = {"enc": "encoder_attentions", "dec": "decoder_attentions", "cross": "cross_attentions", "": "attentions"}
        want = getattr(theirs_maps, name[address.stack])[address.layer][:, address.head]  # (B, T, S)
        got = recording[address].map()
        rows = torch.ones(want.shape[:2], dtype=torch.bool)
        if real is not None and address.stack in ("", "enc"):
            rows = real.bool()  # what padding looks at is nobody's business
        assert got.shape == want.shape
        assert (got - want)[rows].abs().max() <= 1e-5
        compared += 1
    assert compared == len(theirs.heads) > 0


@each_case
def test_what_heads_write_adds_up_to_what_the_layer_writes(case: Case) -> None:
    model, given = case.build().double(), {k: _double(v) for k, v in case.inputs().items()}
    theirs = hw.attach(model)
    outputs: dict[Any, Tensor] = {}
    for layer in theirs.attention_layers():
        assert layer.found.writes is not None
        layer.found.writes.register_forward_hook(partial(_keep, outputs, layer.site.address))
    with torch.no_grad(), hw.record(theirs, what="write") as recording:
        model(**given)
    for layer in theirs.attention_layers():
        total = sum(recording[address].write for address in layer.site.addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (total - outputs[layer.site.address].reshape(total.shape)).abs().max() <= 1e-9  # pyright: ignore


@each_case
def test_addresses_name_every_head(case: Case) -> None:
    theirs = hw.attach(case.build())
    stacks = {address.stack for address in theirs.heads.addresses}
    assert stacks == ({"enc", "dec", "cross"} if case.kind in ("two", "speech") else {""})
    assert theirs.spec.addresses == theirs.heads.addresses
    kinds = {"two": "encoder-decoder", "speech": "encoder-decoder", "image": "encoder"}
    assert theirs.spec.kind == kinds.get(case.kind, case.kind)


@each_case
def test_q_k_v_follow_from_the_weights(case: Case) -> None:
    """v carries no positions and no norms, so it is what W_V reads; its weights are live views."""
    model, given = case.build().double(), {k: _double(v) for k, v in case.inputs().items()}
    theirs = hw.attach(model)
    reads: dict[Any, Tensor] = {}
    for layer in theirs.attention_layers():
        assert layer.found.reads is not None
        last = layer.found.reader(-1 if layer.found.reads[0] == "apart" else 0)
        last.register_forward_pre_hook(
            lambda module, given, address=layer.site.address: reads.__setitem__(address, given[0])
        )
    with torch.no_grad(), hw.record(theirs, what="v") as recording:
        model(**given)
    for address in _some(theirs):
        head = one(theirs, address)
        made = reads[address.site] @ head.W_V
        made = made if head.b_V is None else made + head.b_V
        assert (made - recording[address].v).abs().max() <= 1e-9
        assert head.W_Q.shape[1] == head.W_K.shape[1] == head.layer.spec.head_dim


def _keep(kept: dict[Any, Tensor], address: Any, module: Any, given: Any, made: Tensor) -> None:
    kept[address] = made


def _some(theirs: Any) -> list[Any]:
    """A few heads: of every stack the first layer's last head, and the last layer's second."""
    by_stack: dict[str, list[Any]] = {}
    for address in theirs.heads.addresses:
        by_stack.setdefault(address.stack, []).append(address)
    some = []
    for there in by_stack.values():
        some += [
            max(a for a in there if a.layer == 0),
            next(a for a in there if a.layer == there[-1].layer and a.head == 1),
        ]
    return some


def one(theirs: Any, address: Any) -> hw.Head:
    """One head by its address."""
    head = theirs.heads[address]
    assert isinstance(head, hw.Head)
    return head


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _state(model: Any) -> Any:
    """Everything a model is besides its numbers: what its parts hold, their hooks, which attention runs."""
    parts = [
        (name, sorted(part.__dict__), len(part._forward_pre_hooks), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    return parts, model.config._attn_implementation, model.config.to_dict(), model.training


# What the model itself takes.


def test_a_handle_takes_what_the_model_takes() -> None:
    case = BY_NAME["llama"]
    model, given = case.build(), case.inputs("right")
    ids, mask = given["input_ids"], given["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, labels=labels)
        with hw.attach(model) as theirs:
            for told in (
                theirs(ids, attention_mask=mask, labels=labels),
                theirs(ids, padding=mask > 0, labels=labels),
                theirs(**given, labels=labels),
            ):
                assert type(told) is type(plain)
                assert torch.equal(told.loss, plain.loss)
                assert torch.equal(told.logits, plain.logits)
            half = theirs(ids, attention_mask=mask, labels=labels, gates={"*.*": 0.5})
            assert float(half.loss) != float(plain.loss)
            assert isinstance(theirs(ids, padding=mask > 0), torch.Tensor)
            with pytest.raises(hw.HeadwiseError, match="attention_mask is given twice"):
                theirs(ids, padding=mask > 0, attention_mask=mask)
            with pytest.raises(hw.HeadwiseError, match="output_hidden_states"):
                theirs(ids, labels=labels, hidden=True)


def test_an_encoder_decoder_takes_labels_with_its_source() -> None:
    case = BY_NAME["bart"]
    model, given = case.build(), case.inputs("right")
    ids, source, mask = given["decoder_input_ids"], given["input_ids"], given["attention_mask"]
    with torch.no_grad(), hw.attach(model) as theirs:
        told = theirs(ids, source=source, source_padding=mask > 0, labels=ids)
        alone = theirs(source, attention_mask=mask, labels=ids)  # as the model itself is called: it writes labels
    with torch.no_grad():
        assert torch.equal(told.loss, model(**given, labels=ids).loss)
        assert torch.equal(alone.loss, model(source, attention_mask=mask, labels=ids).loss)


def test_what_is_not_token_ids_goes_to_the_model_by_its_name() -> None:
    case = BY_NAME["vit"]
    model, given = case.build(), case.inputs()
    with torch.no_grad(), hw.attach(model) as theirs:
        assert torch.equal(theirs(**given).last_hidden_state, model(**given).last_hidden_state)


def test_saving_a_cut_model_says_who_can_load_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = BY_NAME["llama"].build()
    theirs = hw.attach(model)
    theirs.save(tmp_path / "uncut")
    assert "heads were cut" not in capsys.readouterr().err
    theirs.cut("1.4")
    theirs.save(tmp_path / "cut")
    assert "hw.load(folder) loads what is written, plain transformers does not" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    capsys.readouterr()
    hw.export(theirs, tmp_path / "whole")
    assert "heads were cut" not in capsys.readouterr().err
    given = BY_NAME["llama"].inputs()
    with torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(**given).logits
        assert (whole - model(**given).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MPNet", {"pad_token_id": 0}),  # it counts by token 1, whatever its configuration says
        ("Esm", {"pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "absolute", "token_dropout": False}),
        ("Roberta", {"pad_token_id": 0}),
        ("XLMRoberta", {"pad_token_id": 1}),
    ],
)
def test_positions_counted_by_the_padding_token_stay_so_on_the_left(kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**PLAIN, **more)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    ids = torch.tensor([[9, 9, 9, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17]])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, :3] = False
    with torch.no_grad(), hw.attach(model) as theirs:
        together = theirs(ids, padding=real)
        assert (together[0, 3:] - model(ids[:1, 3:]).logits[0]).abs().max() <= 1e-9
        assert (together[1] - model(ids[1:]).logits[0]).abs().max() <= 1e-9
