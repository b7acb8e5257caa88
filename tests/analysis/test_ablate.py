"""Ablation and patching, against editing the weights and against z put in by hand."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.ablate import ablated, mean_activations, mean_of, patched, record_z
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import SiteAddress
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from tests.analysis.models import TEXTS, encoded, reading
from tests.contract.layers import MODELS, assert_equal, make_model, model_inputs, run, token_ids

HEADS = dict.fromkeys(MODELS, "0.3") | {"encoder-decoder": "enc.1.2,dec.0.1,cross.1.3"}


def listened(model: Transformer, *args: Any, **options: Any) -> dict[SiteAddress, Tensor]:
    """z of every layer in one call, seen by plain listeners."""
    seen: dict[SiteAddress, Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for site in model.sites():
            stack.enter_context(site.listen(lambda call: seen.update({call.site.address: call.z})))
        model(*args, **options)
    return seen


def put(model: Transformer, address: str, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """The output with one head's z replaced by hand: value (B, T, e)."""
    head = model.heads[address]
    site = head.layer.site  # pyright: ignore

    def edit(z: Tensor) -> Tensor:
        return torch.stack([value.expand(z[:, h].shape) if h == head.index else z[:, h] for h in range(z.shape[1])], 1)  # pyright: ignore

    with site.replaced(edit):
        return model(*args, **options)


@pytest.mark.parametrize("name", MODELS)
def test_zero_is_zeroing_the_rows_of_W_O(name: str) -> None:
    model, same = make_model(MODELS[name]), make_model(MODELS[name])
    before = run(model)
    with ablated(model, HEADS[name], "zero"):
        got = run(model)
    with torch.no_grad():
        for head in same.heads.select(HEADS[name]):
            head.W_O.zero_()
    assert_equal(got, run(same))
    assert (got - before).abs().max() > 1e-3
    assert torch.equal(run(model), before)  # and afterwards nothing is left of it
    assert not any(site.is_open for site in model.sites())


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "encoder"])
@pytest.mark.parametrize("by", ["global", "position"])
def test_means_are_those_of_texts_read_one_by_one(name: str, by: Any) -> None:
    model = reading(MODELS[name])
    alone = [listened(model, ids) for ids in encoded(model)]
    made = mean_activations(model, TEXTS, by, tokens=40)  # padded, in more than one batch
    for head in model.heads:
        rows = [z[head.address.site][0, head.index] for z in alone]  # (T, e) each
        if by == "global":
            assert_equal(made[head.address], torch.cat(rows).mean(0))
            continue
        longest = max(map(len, rows))
        want = [torch.stack([row[i] for row in rows if len(row) > i]).mean(0) for i in range(longest)]
        assert_equal(made[str(head.address)], torch.stack(want))


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, cut", "encoder"])
def test_mean_ablation_is_cutting_and_folding_the_mean_into_the_bias(name: str) -> None:
    model = reading(MODELS[name], attention=replace(MODELS[name].attention, out_bias=True))
    folded = reading(MODELS[name], attention=replace(MODELS[name].attention, out_bias=True))
    means, ids = mean_activations(model, TEXTS), token_ids(3, 7)
    with ablated(model, "0.3", "mean", means=means):
        got = model(ids)
    with torch.no_grad():
        head = folded.heads["0.3"]
        head.layer.write.bias += means["0.3"] @ head.W_O  # pyright: ignore
        head.W_O.zero_()  # pyright: ignore
    assert_equal(got, folded(ids))


@pytest.mark.parametrize("side", ["left", "right"])
def test_means_by_position_follow_the_tokens_not_the_columns(side: str) -> None:
    model = reading(MODELS["decoder, rotary"])
    means = mean_activations(model, TEXTS, "position")
    ids, real = token_ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    short = real[1]
    short[: 3 if side == "left" else 0] = False
    short[7 if side == "left" else 4 :] = False
    with ablated(model, "1.2", means=means, padding=real):
        got = model(ids, padding=real)
    for row in range(2):
        alone = ids[row : row + 1, real[row]]
        want = put(model, "1.2", means["1.2"][: alone.shape[1]], alone)
        assert_equal(got[row, real[row]], want[0])


def test_a_constant_head_is_worth_nothing_but_by_zero() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(3, 6)
    head = model.heads["0.1"]
    with torch.no_grad():
        head.W_V.zero_()  # pyright: ignore
    clean = model(ids)
    for how in ("mean", "resample"):
        with ablated(model, "0.1", how, means=mean_of([record_z(model, ids)])):  # pyright: ignore
            assert_equal(model(ids), clean)
    with ablated(model, "0.1", "zero"):
        assert (model(ids) - clean).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, parallel", "encoder"])
def test_resampling_borrows_from_another_example_or_run(name: str) -> None:
    model, ids = make_model(MODELS[name]), token_ids(3, 6)
    head, order = model.heads["0.2"], torch.tensor([2, 2, 0])
    z = listened(model, ids)[head.address.site][:, head.index]  # pyright: ignore
    with ablated(model, "0.2", "resample", other=order):
        assert_equal(model(ids), put(model, "0.2", z[order], ids))
    with ablated(model, "0.2", "resample"):
        assert_equal(model(ids), put(model, "0.2", z[[2, 0, 1]], ids))
    other = token_ids(1, 4, seed=9)
    there = listened(model, other)[head.address.site][:, head.index]  # pyright: ignore
    with ablated(model, "0.2", "resample", other=record_z(model, other, "0.*")):
        assert_equal(
            model(ids), put(model, "0.2", there[:, [0, 1, 2, 3, 0, 1]], ids)
        )  # four tokens, then from the start


@pytest.mark.parametrize("side", ["left", "right"])
def test_borrowing_never_takes_padding(side: str) -> None:
    model, ids, real = make_model(MODELS["decoder"]), token_ids(2, 5), torch.ones(2, 5, dtype=torch.bool)
    gone = slice(0, 2) if side == "left" else slice(3, 5)
    real[1, gone] = False
    short = ids[1:, real[1]]  # (1, 3)
    z = [listened(model, one)[SiteAddress("", 1)][:, 3] for one in (ids[:1], short)]
    with ablated(model, "1.3", "resample", padding=real):
        got = model(ids, padding=real)
    assert_equal(got[:1], put(model, "1.3", z[1][:, [0, 1, 2, 0, 1]], ids[:1]))
    assert_equal(got[1, real[1]], put(model, "1.3", z[0][:, :3], short)[0])


@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, windows", "encoder", "encoder-decoder"])
def test_patching_puts_in_what_heads_gave_elsewhere(name: str) -> None:
    model, here = make_model(MODELS[name]), model_inputs(MODELS[name])
    there = here | {"ids": token_ids(*here["ids"].shape, seed=8)}
    address = "cross.1.2" if name == "encoder-decoder" else "1.2"
    recorded = record_z(model, heads=address, **there)
    head, before = model.heads[address], model(**here)
    z = listened(model, **there)[head.address.site][:, head.index]  # pyright: ignore
    with patched(model, address, recorded):
        assert_equal(model(**here), put(model, address, z, **here))
        assert_equal(model(**there), model(**there))
    mine = listened(model, **here)[head.address.site][:, head.index]  # pyright: ignore
    mine[:, [1, -1]] = z[:, [1, -1]]
    with patched(model, address, recorded, positions=[1, -1]):
        assert_equal(model(**here), put(model, address, mine, **here))
    assert torch.equal(model(**here), before)


def test_patching_every_head_of_one_layer_model_moves_all_that_attention_says() -> None:
    model = make_model(replace(MODELS["decoder"], layers=1))
    clean, corrupt = token_ids(1, 6), token_ids(1, 6, seed=5)
    corrupt[:, -1] = clean[:, -1]  # the stream of the last token is the same, so attention is all that differs
    with patched(model, "*", record_z(model, clean)):
        assert_equal(model(corrupt)[:, -1], model(clean)[:, -1])


def test_contexts_nest_and_end_with_an_error() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 5)
    before, recorded = model(ids), record_z(model, ids)
    with ablated(model, "0.*", "zero"), patched(model, "0.1", recorded), ablated(model, "1.2", "zero"):
        got = model(ids)
    with model.heads["0.0,0.2,0.3,1.2"].silenced():
        assert_equal(got, model(ids))  # the inner context has the last word on 0.1
    with pytest.raises(ZeroDivisionError), ablated(model, "0.*", "zero"):
        raise ZeroDivisionError
    assert torch.equal(model(ids), before)


def test_gradients_pass_and_recording_leaves_the_mode_alone() -> None:
    model, ids = make_model(MODELS["decoder"]).train(), token_ids(2, 5)
    record_z(model, ids)
    assert model.training
    with ablated(model, "1.1", "zero"):
        model(ids).square().mean().backward()
    grad = model.blocks[1].attention.write.weight.grad.unflatten(1, (4, -1))  # pyright: ignore
    assert float(grad[:, 1].abs().max()) == 0
    assert float(grad[:, 2].abs().max()) > 0


def test_the_plain_call_takes_means_over_the_embedded_texts() -> None:
    model, ids = make_model(replace(MODELS["decoder"], vocab=257, context=512)), token_ids(2, 5)
    model.tokenizer = tokenizer = byte_tokenizer()
    embedded = [item.text for item in Corpus.probe().items()]
    site = model.sites()[0]
    for on, texts in ((TEXTS, TEXTS), (None, embedded)):
        total, count = torch.zeros(6), 0
        for text in texts:
            z = listened(model, torch.tensor([tokenizer.encode(text)]))[site.address][0, 1]  # (T, e)
            total, count = total + z.sum(0), count + len(z)
        with hw.ablated(model, "0.1", on=on):
            got = model(ids)
        assert_equal(got, put(model, "0.1", total / count, ids))
    assert not torch.equal(got, model(ids))


def test_another_text_is_patched_in_by_its_words() -> None:
    model = reading(MODELS["decoder"])
    assert model.tokenizer is not None
    here, there = (torch.tensor([model.tokenizer.encode(text)]) for text in ("the cat", "the mat"))
    recorded = record_z(model, there)
    with patched(model, "0.1,1.2", recorded, [4]):
        want = model(here)
    for other in ("the mat", there, there[0].tolist()):
        with hw.patched(model, "0.1,1.2", other, [4]):
            assert_equal(model(here), want)
    with ablated(model, "0.1", "resample", other=recorded):
        want = model(here)
    with hw.ablated(model, "0.1", "resample", other="the mat"):
        assert_equal(model(here), want)


def test_means_merge() -> None:
    model = reading(MODELS["decoder"])
    for by in ("global", "position"):
        whole = mean_activations(model, TEXTS, by)  # pyright: ignore
        parts = mean_activations(model, TEXTS[:2], by).merge(mean_activations(model, TEXTS[2:], by))  # pyright: ignore
        for site, sums in whole.sums.items():
            assert_equal(parts.sums[site], sums)
            assert_equal(parts.counts[site], whole.counts[site])


def test_what_is_wrong_is_said() -> None:
    model, ids = make_model(MODELS["decoder"]), token_ids(2, 5)
    recorded = record_z(model, ids, "0.*")
    short = mean_of([record_z(model, ids[:, :3])], by="position")

    def run_with(context: Any, given: Tensor = ids) -> None:
        with context:
            model(given)

    for context, given, message in (
        (ablated(model, "0.1", "mean"), ids, "needs the means"),
        (ablated(model, "0.1", "zero", on=TEXTS), ids, "which texts means are taken over"),
        (ablated(model, "0.1", on=TEXTS, means=short), ids, "which texts means are taken over"),
        (patched(model, "0.1", "the cat"), ids, "no tokenizer"),
        (patched(model, "0.1", []), ids, "another run is a text"),
        (ablated(model, "0.1", "some"), ids, "no ablation 'some'"),  # pyright: ignore
        (ablated(model, "0.9", "zero"), ids, "names no head"),
        (ablated(model, "0.1", "resample"), ids[:1], "a batch of one"),
        (ablated(model, "0.1", "resample", other=torch.tensor([0, 2])), ids, "which one it borrows from"),
        (ablated(model, "0.1", "resample", other=record_z(model, token_ids(3, 5))), ids, "3 texts and this one 2"),
        (ablated(model, "0.1", means=short), ids, "for 3 positions"),
        (patched(model, "1.1", recorded), ids, "not in the recorded run"),
        (patched(model, "0.1", recorded), ids[:, :4], "texts of one length"),
        (patched(model, "0.1", recorded, [5]), ids, "no position 5"),
        (ablated(model, "0.1", "resample", padding=torch.ones(2, 4)), ids, "padding is"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            run_with(context, given)
    with pytest.raises(HeadwiseError, match="nothing to take a mean over"):
        mean_of([])
    with pytest.raises(HeadwiseError, match="'global' or by 'position'"):
        mean_of([recorded], by="row")  # pyright: ignore
    with pytest.raises(HeadwiseError, match="cannot be merged"):
        mean_of([recorded]).merge(short)
