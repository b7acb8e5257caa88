"""Ablation and patching, compared with edited weights and with z replaced by hand."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.ablate import ablated, mean_activations, mean_of_outputs, patched, record_z
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import LayerAddress
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS, character_model, encode_texts
from tests.contract.layers import MODELS, assert_equal, make_model, model_inputs, run_model, token_ids

HEADS = dict.fromkeys(MODELS, "0.3") | {"encoder-decoder": "enc.1.2,dec.0.1,cross.1.3"}


def record_by_listening(model: Transformer, *args: Any, **options: Any) -> dict[LayerAddress, Tensor]:
    """Record z of every layer in one call with plain listeners."""
    z_by_address: dict[LayerAddress, Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(lambda call: z_by_address.update({call.hook_point.address: call.z})))
        model(*args, **options)
    return z_by_address


def run_with_replaced_z(model: Transformer, address: str, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return the output with z of one head replaced by a value (B, T, e)."""
    head = model.heads[address]
    hook_point = head.layer.hook_point  # pyright: ignore

    def edit(z: Tensor) -> Tensor:
        return torch.stack([value.expand(z[:, h].shape) if h == head.index else z[:, h] for h in range(z.shape[1])], 1)  # pyright: ignore

    with hook_point.replaced(edit):
        return model(*args, **options)


@pytest.mark.parametrize("name", MODELS)
def test_ablated_zero_equals_zeroing_W_O_rows(name: str) -> None:
    model, same = make_model(MODELS[name]), make_model(MODELS[name])
    before = run_model(model)
    with ablated(model, HEADS[name], "zero"):
        got = run_model(model)
    with torch.no_grad():
        for head in same.heads.select(HEADS[name]):
            head.W_O.zero_()
    assert_equal(got, run_model(same))
    assert (got - before).abs().max() > 1e-3
    assert torch.equal(run_model(model), before)  # the model is restored afterwards
    assert not any(hook_point.is_active for hook_point in model.hook_points())


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "encoder"])
@pytest.mark.parametrize("grouping", ["global", "position"])
def test_mean_activations_batched_equal_single_texts(name: str, grouping: Any) -> None:
    model = character_model(MODELS[name])
    alone = [record_by_listening(model, ids) for ids in encode_texts(model)]
    means = mean_activations(model, TEXTS, grouping, batch_tokens=40)  # padded, in more than one batch
    for head in model.heads:
        rows = [z[head.address.layer_address][0, head.index] for z in alone]  # (T, e) each
        if grouping == "global":
            assert_equal(means[head.address], torch.cat(rows).mean(0))
            continue
        max_length = max(map(len, rows))
        want = [torch.stack([row[i] for row in rows if len(row) > i]).mean(0) for i in range(max_length)]
        assert_equal(means[str(head.address)], torch.stack(want))


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, cut", "encoder"])
def test_ablated_mean_equals_folding_mean_into_bias(name: str) -> None:
    model = character_model(MODELS[name], attention=replace(MODELS[name].attention, out_bias=True))
    folded = character_model(MODELS[name], attention=replace(MODELS[name].attention, out_bias=True))
    means, ids = mean_activations(model, TEXTS), token_ids(3, 7)
    with ablated(model, "0.3", "mean", means=means):
        got = model(ids)
    with torch.no_grad():
        head = folded.heads["0.3"]
        head.layer.output_projection.bias += means["0.3"] @ head.W_O  # pyright: ignore
        head.W_O.zero_()  # pyright: ignore
    assert_equal(got, folded(ids))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ablated_position_means_follow_tokens_under_padding(side: str) -> None:
    model = character_model(MODELS["decoder, rotary"])
    means = mean_activations(model, TEXTS, "position")
    ids, attention_mask = token_ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    short = attention_mask[1]
    short[: 3 if side == "left" else 0] = False
    short[7 if side == "left" else 4 :] = False
    with ablated(model, "1.2", means=means, attention_mask=attention_mask):
        got = model(ids, attention_mask=attention_mask)
    for row in range(2):
        alone = ids[row : row + 1, attention_mask[row]]
        want = run_with_replaced_z(model, "1.2", means["1.2"][: alone.shape[1]], alone)
        assert_equal(got[row, attention_mask[row]], want[0])


def test_ablated_constant_head_changes_output_only_by_zero() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(3, 6)
    head = model.heads["0.1"]
    with torch.no_grad():
        head.W_V.zero_()  # pyright: ignore
    clean = model(ids)
    for method in ("mean", "resample"):
        with ablated(model, "0.1", method, means=mean_of_outputs([record_z(model, ids)])):  # pyright: ignore
            assert_equal(model(ids), clean)
    with ablated(model, "0.1", "zero"):
        assert (model(ids) - clean).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, parallel", "encoder"])
def test_ablated_resample_uses_another_example_or_run(name: str) -> None:
    model, ids = make_model(MODELS[name]), token_ids(3, 6)
    head, order = model.heads["0.2"], torch.tensor([2, 2, 0])
    z = record_by_listening(model, ids)[head.address.layer_address][:, head.index]  # pyright: ignore
    with ablated(model, "0.2", "resample", other=order):
        assert_equal(model(ids), run_with_replaced_z(model, "0.2", z[order], ids))
    with ablated(model, "0.2", "resample"):
        assert_equal(model(ids), run_with_replaced_z(model, "0.2", z[[2, 0, 1]], ids))
    other = token_ids(1, 4, seed=9)
    other_z = record_by_listening(model, other)[head.address.layer_address][:, head.index]  # pyright: ignore
    with ablated(model, "0.2", "resample", other=record_z(model, other, "0.*")):
        assert_equal(
            model(ids), run_with_replaced_z(model, "0.2", other_z[:, [0, 1, 2, 3, 0, 1]], ids)
        )  # four tokens, then again from the start


@pytest.mark.parametrize("side", ["left", "right"])
def test_ablated_resample_never_uses_padding(side: str) -> None:
    model, ids, attention_mask = make_model(MODELS["decoder"]), token_ids(2, 5), torch.ones(2, 5, dtype=torch.bool)
    padded = slice(0, 2) if side == "left" else slice(3, 5)
    attention_mask[1, padded] = False
    short = ids[1:, attention_mask[1]]  # (1, 3)
    z = [record_by_listening(model, text_ids)[LayerAddress("", 1)][:, 3] for text_ids in (ids[:1], short)]
    with ablated(model, "1.3", "resample", attention_mask=attention_mask):
        got = model(ids, attention_mask=attention_mask)
    assert_equal(got[:1], run_with_replaced_z(model, "1.3", z[1][:, [0, 1, 2, 0, 1]], ids[:1]))
    assert_equal(got[1, attention_mask[1]], run_with_replaced_z(model, "1.3", z[0][:, :3], short)[0])


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, windows", "encoder", "encoder-decoder"])
def test_patched_inserts_z_of_recorded_run(name: str) -> None:
    model, inputs = make_model(MODELS[name]), model_inputs(MODELS[name])
    other_inputs = inputs | {"ids": token_ids(*inputs["ids"].shape, seed=8)}
    address = "cross.1.2" if name == "encoder-decoder" else "1.2"
    recorded = record_z(model, heads=address, **other_inputs)
    head, before = model.heads[address], model(**inputs)
    z = record_by_listening(model, **other_inputs)[head.address.layer_address][:, head.index]  # pyright: ignore
    with patched(model, address, recorded):
        assert_equal(model(**inputs), run_with_replaced_z(model, address, z, **inputs))
        assert_equal(model(**other_inputs), model(**other_inputs))
    own_z = record_by_listening(model, **inputs)[head.address.layer_address][:, head.index]  # pyright: ignore
    own_z[:, [1, -1]] = z[:, [1, -1]]
    with patched(model, address, recorded, positions=[1, -1]):
        assert_equal(model(**inputs), run_with_replaced_z(model, address, own_z, **inputs))
    assert torch.equal(model(**inputs), before)


def test_patched_all_heads_of_one_layer_gives_clean_logits() -> None:
    model = make_model(replace(MODELS["decoder"], layers=1))
    clean, corrupt = token_ids(1, 6), token_ids(1, 6, seed=5)
    corrupt[:, -1] = clean[:, -1]  # the residual stream of the last token is the same, so only attention differs
    with patched(model, "*", record_z(model, clean)):
        assert_equal(model(corrupt)[:, -1], model(clean)[:, -1])


def test_ablated_nested_contexts_undo_after_error() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 5)
    before, recorded = model(ids), record_z(model, ids)
    with ablated(model, "0.*", "zero"), patched(model, "0.1", recorded), ablated(model, "1.2", "zero"):
        got = model(ids)
    with model.heads["0.0,0.2,0.3,1.2"].silenced():
        assert_equal(got, model(ids))  # the inner context determines 0.1
    with pytest.raises(ZeroDivisionError), ablated(model, "0.*", "zero"):
        raise ZeroDivisionError
    assert torch.equal(model(ids), before)


def test_ablated_passes_gradients_and_record_z_keeps_mode() -> None:
    model, ids = make_model(MODELS["decoder"]).train(), token_ids(2, 5)
    record_z(model, ids)
    assert model.training
    with ablated(model, "1.1", "zero"):
        model(ids).square().mean().backward()
    grad = model.blocks[1].attention.output_projection.weight.grad.unflatten(1, (4, -1))  # pyright: ignore
    assert float(grad[:, 1].abs().max()) == 0
    assert float(grad[:, 2].abs().max()) > 0


def test_ablated_default_uses_probe_set_means() -> None:
    model, ids = make_model(replace(MODELS["decoder"], vocab=257, context=512)), token_ids(2, 5)
    model.tokenizer = tokenizer = byte_tokenizer()
    embedded = [item.text for item in Corpus.probe_set().items()]
    hook_point = model.hook_points()[0]
    for corpus, texts in ((TEXTS, TEXTS), (None, embedded)):
        total, count = torch.zeros(6), 0
        for text in texts:
            z = record_by_listening(model, torch.tensor([tokenizer.encode(text)]))[hook_point.address][0, 1]  # (T, e)
            total, count = total + z.sum(0), count + len(z)
        with hw.ablated(model, "0.1", corpus=corpus):
            got = model(ids)
        assert_equal(got, run_with_replaced_z(model, "0.1", total / count, ids))
    assert not torch.equal(got, model(ids))


def test_patched_accepts_text_or_ids() -> None:
    model = character_model(MODELS["decoder"])
    assert model.tokenizer is not None
    ids, other_ids = (torch.tensor([model.tokenizer.encode(text)]) for text in ("the cat", "the mat"))
    recorded = record_z(model, other_ids)
    with patched(model, "0.1,1.2", recorded, [4]):
        want = model(ids)
    for other in ("the mat", other_ids, other_ids[0].tolist()):
        with hw.patched(model, "0.1,1.2", other, [4]):
            assert_equal(model(ids), want)
    with ablated(model, "0.1", "resample", other=recorded):
        want = model(ids)
    with hw.ablated(model, "0.1", "resample", other="the mat"):
        assert_equal(model(ids), want)


def test_mean_activations_merge_equals_single_pass() -> None:
    model = character_model(MODELS["decoder"])
    for grouping in ("global", "position"):
        full = mean_activations(model, TEXTS, grouping)  # pyright: ignore
        merged = mean_activations(model, TEXTS[:2], grouping).merge(mean_activations(model, TEXTS[2:], grouping))  # pyright: ignore
        for hook_point, sums in full.sums.items():
            assert_equal(merged.sums[hook_point], sums)
            assert_equal(merged.counts[hook_point], full.counts[hook_point])


def test_ablated_and_patched_invalid_arguments_raise() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 5)
    recorded = record_z(model, ids, "0.*")
    short = mean_of_outputs([record_z(model, ids[:, :3])], granularity="position")

    def run_with(context: Any, input_ids: Tensor = ids) -> None:
        with context:
            model(input_ids)

    for context, input_ids, message in (
        (ablated(model, "0.1", "mean"), ids, "no tokenizer"),
        (ablated(model, "0.1", "zero", corpus=TEXTS), ids, "only to compute the means"),
        (ablated(model, "0.1", corpus=TEXTS, means=short), ids, "only to compute the means"),
        (patched(model, "0.1", "the cat"), ids, "no tokenizer"),
        (patched(model, "0.1", []), ids, "must be a text"),
        (ablated(model, "0.1", "some"), ids, "unknown ablation method"),  # pyright: ignore
        (ablated(model, "0.9", "zero"), ids, "no such head"),
        (ablated(model, "0.1", "resample"), ids[:1], "the batch has only one example, so"),
        (ablated(model, "0.1", "resample", other=torch.tensor([0, 2])), ids, "must be an integer tensor of shape"),
        (
            ablated(model, "0.1", "resample", other=record_z(model, token_ids(3, 5))),
            ids,
            "Record a run with the same batch size",
        ),
        (ablated(model, "0.1", means=short), ids, "for 3 positions"),
        (patched(model, "1.1", recorded), ids, "not in the recorded run"),
        (patched(model, "0.1", recorded), ids[:, :4], "same number of tokens"),
        (patched(model, "0.1", recorded, [5]), ids, "out of range for 5 tokens"),
        (ablated(model, "0.1", "resample", attention_mask=torch.ones(2, 4)), ids, "does not match the call"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            run_with(context, input_ids)
    with pytest.raises(HeadwiseError, match="no runs to average"):
        mean_of_outputs([])
    with pytest.raises(HeadwiseError, match="'global' or 'position'"):
        mean_of_outputs([recorded], granularity="row")  # pyright: ignore
    with pytest.raises(HeadwiseError, match="cannot be merged"):
        mean_of_outputs([recorded]).merge(short)
