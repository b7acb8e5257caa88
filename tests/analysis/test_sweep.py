"""The quick sweep over heads against a whole forward pass for each, one text at a time; and its cost against a counter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from headwise.analysis.ablation.ablate import ablated, mean_of, record_z, stand_in
from headwise.analysis.ablation.eval_targets import TargetBatch, ask
from headwise.analysis.ablation.importance import importance
from headwise.analysis.ablation.sweep import sweep, sweep_cost
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.model.block import Block
from headwise.model.loss import IGNORE
from headwise.spec import ModelSpec
from tests.analysis.models import TEXTS, encoded, reading, surprise
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids

DECODERS = [name for name in MODELS if name.startswith("decoder")]
ENCODER = MODELS["encoder"]
HEADLESS = replace(ENCODER, output="none", form="pre")


# Walking through blocks by hand is what forward does.


@pytest.mark.parametrize("name", [name for name in MODELS if name != "encoder-decoder"])
def test_begin_and_the_parts_of_a_block_are_the_forward_pass(name: str) -> None:
    model, ids, real = make_model(MODELS[name]), token_ids(2, 7), torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    x, beside = model.begin(ids, padding=real)
    rows = torch.tensor([1, 3])
    for block in model.blocks:
        assert isinstance(block, Block)
        read = block.reads(x)
        wrote = block.attend(read, beside)
        some = block.finish(x[:, rows], read[:, rows], wrote[:, rows], beside)
        x = block.finish(x, read, wrote, beside)
        assert_equal(some, x[:, rows])
    x = x if model.norm is None else model.norm(x)
    assert torch.equal(x, model(ids, padding=real, hidden=True))


# The quick sweep equals the naive loop.


@pytest.mark.parametrize("metric", ["loss", "last"])
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_sweep_is_the_naive_loop_over_decoders(name: str, how: Any, metric: Any) -> None:
    model = reading(MODELS[name])
    texts, last = encoded(model), metric == "last"
    inputs = [ids[:, :-1] for ids in texts]  # what is read to answer: nothing is asked behind the last token
    means = mean_of(record_z(model, ids) for ids in inputs)
    tokens = len(texts) if last else sum(ids.shape[1] for ids in inputs)
    made = importance(model, TEXTS, how=how, metric=metric, tokens=120)
    with torch.no_grad():
        clean = [surprise(model, ids, last) for ids in texts]
        for head in model.heads:
            lost = 0.0
            for number, ids in enumerate(texts):
                other = record_z(model, inputs[(number + 1) % len(texts)])
                with ablated(model, head.address, how, means=means, other=other):
                    lost += float(surprise(model, ids, last) - clean[number])
            assert made[head.address].worth == pytest.approx(lost / tokens, abs=1e-9)
    assert made.clean == pytest.approx(float(sum(clean)) / tokens, abs=1e-9)
    assert made.addresses == model.spec.addresses
    assert made.texts == len(texts)


@pytest.mark.parametrize("how", ["zero", "resample"])
def test_the_sweep_is_the_naive_loop_over_a_masked_encoder(how: Any) -> None:
    model = reading(ENCODER)
    units = list(Reading.of(model, TEXTS, 64))
    asks = [ask(model, make_batch([unit])) for unit in units]  # each text alone: no padding
    made = importance(model, TEXTS, how=how, tokens=100)
    for head in model.heads:
        lost, asked = 0.0, 0
        for number, one in enumerate(asks):
            assert one.targets is not None
            where = one.targets[0] != IGNORE
            assert bool((one.ids[0, where] == model.tokenizer.mask).all())  # pyright: ignore
            other = record_z(model, asks[(number + 1) % len(asks)].ids)
            losses = []
            for context in (ablated(model, head.address, how, other=other), torch.no_grad()):
                with torch.no_grad(), context:
                    losses.append(F.cross_entropy(model(one.ids)[0, where], one.targets[0, where], reduction="sum"))
            lost, asked = lost + float(losses[0] - losses[1]), asked + int(where.sum())
        assert made[head.address].worth == pytest.approx(lost / asked, abs=1e-9)


@pytest.mark.parametrize("spec", [HEADLESS, replace(MODELS["decoder"], output="none")], ids=["encoder", "decoder"])
def test_without_an_output_the_mean_state_is_what_moves(spec: ModelSpec) -> None:
    model = reading(spec)
    made = importance(model, TEXTS, how="zero", tokens=100)
    with torch.no_grad():
        for head in model.heads:
            moved = []
            for ids in encoded(model):
                clean = model(ids).mean(1)
                with head.silenced():
                    moved.append(1 - F.cosine_similarity(model(ids).mean(1), clean))
            assert made[head.address].worth == pytest.approx(float(torch.cat(moved).mean()), abs=1e-9)


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "encoder"])
def test_single_precision_and_padding_on_either_side(name: str) -> None:
    model = make_model(MODELS[name]).float()
    ids, real = token_ids(3, 11), torch.ones(3, 11, dtype=torch.bool)
    real[0, :4], real[2, 6:] = False, False
    targets = torch.full_like(ids, IGNORE)
    targets[real] = token_ids(1, int(real.sum()), seed=5)[0]
    heads = model.spec.addresses
    lost, _ = sweep(model, TargetBatch(ids, real, targets, real), heads, lambda s, c: stand_in(s, c, "zero"), tokens=80)
    with torch.no_grad():
        for row in range(3):
            alone, wanted = ids[row : row + 1, real[row]], targets[row, real[row]]
            clean = F.cross_entropy(model(alone)[0], wanted, reduction="sum")
            for place, head in enumerate(model.heads):
                with head.silenced():
                    want = F.cross_entropy(model(alone)[0], wanted, reduction="sum") - clean
                assert float(lost[place, row]) == pytest.approx(float(want), abs=1e-4, rel=1e-5)  # sums over 11 tokens


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut", "decoder, parallel"])
def test_the_cost_is_what_is_counted(name: str, rows: int | None) -> None:
    spec = replace(MODELS[name], layers=3, tied=False)
    model = make_model(spec, backend="batched")
    T = 13
    ids = token_ids(1, T)
    targets = ids.clone()
    if rows is not None:
        targets[:, :-1] = IGNORE
    asked = TargetBatch(ids, torch.ones(1, T).bool(), targets, None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sweep(model, asked, spec.addresses, lambda s, c: stand_in(s, c, "zero"))
    cost = sweep_cost(spec, T, rows)
    assert counter.get_total_flops() == cost.sweep
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.output(model(ids, hidden=True)[:, -(rows or T) :])  # pyright: ignore
    assert counter.get_total_flops() * len(spec.addresses) == cost.naive
    assert cost.ratio < 1
