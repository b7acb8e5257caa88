"""Cutting an encoder-decoder that is asked about pairs: ranked, folded, judged and healed, against a loop over pairs."""

import math
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.head_outputs import mean_activations, read_on
from headwise.compression.curve import curve
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.l0_gates import learn_gates
from headwise.compression.plan import Plan
from headwise.compression.recovery import heal
from headwise.compression.report import report
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import character_tokenizer
from headwise.text.corpus import Corpus
from headwise.training import Recipe, train
from tests.analysis.models import TEXTS
from tests.analysis.models import reading as reading_texts
from tests.analysis.pair_models import PAIRS, SPECS, behind, given, mean_loss, reading, surprises, worths
from tests.contract.layers import MODELS, cut_model
from tests.training.test_pairs import reversals
from tests.training.tiny import same_weights

CLOSE = 1e-10  # the models compute in double precision
SOME = "enc.0.2,enc.1.*,dec.0.0,cross.1.1,cross.1.3"
CHANCE = (4 * math.log(8) + math.log(5)) / 5  # of reversed words, for who cannot see the source: 1.985 nats a token


def average(model: Transformer, head: Address) -> Tensor:
    """What a head gives on average, (e,): over sources in the encoder, over texts elsewhere."""
    return torch.cat(given(model, head, whole=True)).mean(0)


def standing(model: Transformer) -> Any:
    """For `worths`: a head's own average in every row of every pair."""
    return lambda head: [average(model, head).expand(len(row), -1) for row in given(model, head)]


def loss_without(model: Transformer, heads: str, folded: bool = True) -> float:
    """The mean loss of the model sliced by hand, what its heads gave on average added behind each layer."""
    small = cut_model(model, heads)
    small.tokenizer = model.tokenizer
    layers = {layer.site.address: layer for layer in small.attention_layers()}
    gone = set(model.spec.addresses) - set(small.spec.addresses)
    with torch.no_grad(), ExitStack() as stack:
        for head in gone if folded else ():
            W_O: Tensor = model.heads[str(head)].W_O  # pyright: ignore
            stack.enter_context(behind(layers[head.site], average(model, head) @ W_O))
        return mean_loss(small)


# The trial.


@pytest.mark.parametrize("name", SPECS)
def test_a_trial_asks_for_every_text_of_every_pair(name: str) -> None:
    model = reading(SPECS[name])
    trial = PairedEvaluation.of(model, PAIRS)
    order = [number for asked in trial.batches for number in asked.units]
    with torch.no_grad():
        want = [float(one.sum()) for one in surprises(model)]
        lengths = [len(one) for one in surprises(model)]
    assert sorted(order) == list(range(len(PAIRS)))
    np.testing.assert_allclose(trial.full, [want[number] for number in order], atol=CLOSE)
    assert trial.counts.tolist() == [lengths[number] for number in order]
    assert trial.estimate(trial.full).mean == pytest.approx(mean_loss(model), abs=CLOSE)
    assert trial.metric == "nats a token"
    other = reading(SPECS[name], seed=1)
    assert trial.estimate(trial.losses(other)).mean == pytest.approx(mean_loss(other), abs=CLOSE)


def test_pairs_are_dealt_out_whole(tmp_path: Path) -> None:
    model = reading(SPECS["plain"])
    assert [unit.item for unit in read_on(model, PAIRS).first(3)] == PAIRS[:3]
    assert [unit.item for unit in read_on(model, PAIRS, 4).first(99)] == PAIRS, "pairs are never cut"
    some, others = ([(u.source_text, u.text) for u in half] for half in read_on(model, PAIRS).first(5).halves())
    assert abs(len(some) - len(others)) <= 1
    assert sorted([*some, *others]) == sorted(PAIRS[:5])
    assert list(Corpus.of(read_on(model, Corpus.pairs(["a"], ["mat"])).first(5)).items()) == [("a", "mat")]


# The plan.


@pytest.mark.parametrize("name", ["plain", "rotary, windows", "learned, post"])
def test_what_is_folded_in_is_each_stacks_own_average(name: str, tmp_path: Path) -> None:
    model = reading(SPECS[name])
    heads = SOME if name != "rotary, windows" else "enc.0.*,dec.1.2,cross.0.0,cross.1.3"
    plan = Plan.make(model, cut=heads, on=PAIRS)
    plan.save(tmp_path / "plan.json")
    for made in (plan, Plan.load(tmp_path / "plan.json")):
        assert mean_loss(made.apply(model)) == pytest.approx(loss_without(model, heads), abs=CLOSE)
    bare = Plan.make(model, cut=heads, fold=False).apply(model)
    assert mean_loss(bare) == pytest.approx(loss_without(model, heads, folded=False), abs=CLOSE)
    assert abs(mean_loss(bare) - mean_loss(plan.apply(model))) > 1e-4, "folding does something here"


@pytest.mark.parametrize("fold", [True, False])
def test_heads_worth_least_go_first(fold: bool) -> None:
    model = reading(SPECS["plain"])
    want = worths(model, standing(model) if fold else None)
    plan = Plan.make(model, keep=0.5, on=PAIRS, fold=fold)
    np.testing.assert_allclose(list(plan.worth.values()), want, atol=CLOSE)
    least = np.argsort(want)[: len(want) // 2]
    assert set(plan.addresses) == {model.spec.addresses[i] for i in least}
    assert plan.on.startswith("a list of 5 pairs (")
    small = hw.prune(model, keep=0.5, on=PAIRS, fold=fold)
    assert same_weights(small, plan.apply(model))
    assert mean_loss(small) == pytest.approx(loss_without(model, ",".join(plan.cut), fold), abs=CLOSE)


def test_in_rounds_what_is_left_is_ranked_anew() -> None:
    model = reading(SPECS["plain"])
    first = np.argsort(worths(model, standing(model)))[:6]
    gone = [model.spec.addresses[i] for i in first]
    between = Plan.make(model, cut=gone, on=PAIRS).apply(model)
    left = worths(between, lambda head: [average(model, head).expand(len(row), -1) for row in given(between, head)])
    gone += [between.spec.addresses[i] for i in np.argsort(left)[:6]]
    assert set(Plan.make(model, keep=0.5, on=PAIRS, rounds=2).addresses) == set(gone)


@pytest.mark.parametrize("by", ["gradient", "gates", "random"])
def test_every_way_to_choose_takes_pairs(by: str) -> None:
    model = reading(SPECS["plain"])
    plan = Plan.make(model, keep=0.75, by=by, on=PAIRS, steps=4)
    assert len(plan.apply(model).spec.addresses) == 18
    if by == "gradient":
        assert list(plan.worth.values()) == hw.importance(model, PAIRS, by="gradient").mean.tolist()


# What it cost.


def test_a_report_is_of_both_models_on_the_same_pairs() -> None:
    model = reading(SPECS["plain"])
    small = hw.prune(model, heads=SOME, on=PAIRS)
    made = report(model, small, PAIRS, means=mean_activations(model, PAIRS), seeds=2, turns=1)
    before, after = mean_loss(model), mean_loss(small)
    assert (made.loss_before.mean, made.loss_after.mean) == pytest.approx((before, after), abs=CLOSE)
    assert made.more.mean == pytest.approx(after - before, abs=CLOSE)
    assert made.texts == len(PAIRS)
    assert (made.before.heads, made.after.heads) == (24, 16)
    assert min(made.time.before, made.time.after) > 0
    others = [hw.prune(model, keep=16 / 24, by="random", seed=seed, on=PAIRS) for seed in range(2)]
    assert made.random == pytest.approx([mean_loss(other) for other in others], abs=CLOSE)
    assert made.more_than_random is not None
    assert made.more_than_random.mean == pytest.approx(after - np.mean(made.random), abs=CLOSE)


def test_a_curve_cuts_at_every_share() -> None:
    model = reading(SPECS["plain"])
    made = curve(model, PAIRS[:3], PAIRS[3:], keeps=(0.75, 0.5), seeds=1)
    assert made.full.mean == pytest.approx(mean_loss(model, PAIRS[3:]), abs=CLOSE)
    for by in ("ablation", "gradient", "random"):
        for point in made.of(by):
            small = hw.prune(model, keep=point.kept, by=by, on=PAIRS[:3])
            assert point.heads == len(small.spec.addresses) == round(24 * point.kept)
            assert point.loss.mean == pytest.approx(mean_loss(small, PAIRS[3:]), abs=CLOSE)


# Gates.


def test_gates_of_dead_heads_all_end_alike() -> None:
    """Nothing is lost or won by them, so they are moved by the price of an open gate alone, in whichever stack."""
    model, dead = reading(SPECS["plain"]), ("enc.0.1", "dec.1.2", "cross.0.3", "cross.1.0")
    with torch.no_grad():
        for head in dead:
            model.heads[head].W_O.zero_()  # pyright: ignore
    before = deepcopy(model)
    chances = learn_gates(model, PAIRS, keep=0.5, steps=12, batch=4)
    assert tuple(chances) == model.spec.addresses
    assert np.mean(list(chances.values())) == pytest.approx(0.5, abs=0.02)
    named = {str(head): chance for head, chance in chances.items()}
    assert len({named.pop(head) for head in dead}) == 1
    assert len(set(named.values())) == 20, "all others have a slope of their own"
    assert same_weights(model, before)
    assert learn_gates(model, PAIRS, keep=0.5, steps=12, batch=4) == chances


# A model that has learned something: words turned round, two to six letters out of eight.


@pytest.fixture(scope="module")
def turning() -> Transformer:
    attention = AttentionSpec(width=32, heads=4)
    spec = ModelSpec(vocab=1, context=12, layers=1, attention=attention, kind="encoder-decoder")
    recipe = Recipe(steps=300, batch=32, rate=1e-2, warmup=20, evaluate_every=300)
    made = train(spec, reversals(2000, 0), recipe, tokenizer=character_tokenizer("abcdefgh"), progress=False)
    assert made.valid_loss is not None
    assert made.valid_loss < CHANCE / 10
    return made.model


HELD_OUT = reversals(200, 1)


def test_who_loses_all_cross_heads_is_blind(turning: Transformer) -> None:
    small = hw.prune(turning, heads="cross.0.*", on=HELD_OUT)
    assert mean_loss(small, HELD_OUT) > CHANCE - 0.1
    healed = heal(deepcopy(small), reversals(500, 2), steps=60, rate=3e-3, progress=False).model
    assert CHANCE - 0.1 < mean_loss(healed, HELD_OUT) < CHANCE + 0.2, "it learns how often, never which"


def test_healing_on_pairs_brings_back_what_was_lost(turning: Transformer) -> None:
    small = hw.prune(turning, keep=0.5, on=reversals(100, 3))
    before = mean_loss(small, HELD_OUT)
    assert before > 3 * mean_loss(turning, HELD_OUT), "there is something to heal"
    healed = heal(small, reversals(1000, 2), steps=80, rate=3e-3, progress=False)
    assert healed.model is small
    assert len(small.spec.addresses) == 6
    assert mean_loss(small, HELD_OUT) < before / 2


def test_gates_stay_open_where_much_would_be_lost(turning: Transformer) -> None:
    pairs = HELD_OUT[:40]
    with torch.no_grad():
        lost = [
            float(torch.cat(surprises(turning, pairs, gates={str(head): 0.0})).mean())
            for head in turning.spec.addresses
        ]
    chances = learn_gates(turning, reversals(300, 5), keep=0.5, steps=100, batch=16)
    assert float(spearmanr(lost, list(chances.values())).statistic) > 0.7  # pyright: ignore


def test_a_ranking_beats_chance(turning: Transformer) -> None:
    choosing, judging = read_on(turning, reversals(120, 4)).first(99).halves()
    small = hw.prune(turning, keep=0.75, on=choosing)
    # Of 220 cuts that could be drawn; they differ more from each other than texts do.
    made = report(turning, small, judging, means=mean_activations(turning, choosing), seeds=100, turns=1)
    assert made.more_than_random is not None
    assert made.more_than_random.high < 0


# What is refused.


def test_what_cannot_be_done_is_refused() -> None:
    both, decoder = reading(SPECS["plain"]), reading_texts(MODELS["decoder"])
    small = hw.prune(both, heads="cross.0.0", fold=False)
    for model, on, message in ((both, TEXTS, "needs pairs"), (decoder, PAIRS, "texts alone")):
        for act in (
            lambda m, on: Plan.make(m, keep=0.5, on=on),
            lambda m, on: Plan.make(m, keep=0.5, on=on, fold=False),
            lambda m, on: Plan.make(m, keep=0.5, on=on, fold=False, by="gates", steps=1),
            lambda m, on: Plan.make(m, cut="cross.0.0" if m is both else "0.0", on=on),
            PairedEvaluation.of,
            curve,
            lambda m, on: learn_gates(m, on, keep=0.5, steps=1),
            lambda m, on: heal(deepcopy(m).float(), on, steps=1, progress=False),
        ):
            with pytest.raises(HeadwiseError, match=message):
                act(model, on)
        with pytest.raises(HeadwiseError, match=message):
            read_on(model, on).first(3)
    with pytest.raises(HeadwiseError, match="needs pairs"):
        report(both, small, TEXTS)
    for options in ({"keep": 0.5}, {"cut": "cross.0.0"}, {"keep": 0.5, "fold": False}):
        with pytest.raises(HeadwiseError, match="so it needs pairs: give on=…"):
            Plan.make(both, **options)  # pyright: ignore
    assert len(Plan.make(both, keep=0.5, by="random", fold=False).cut) == 12
