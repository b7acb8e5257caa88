"""What cutting brings and costs: sizes against closed forms and torch's own counter, losses against those of plain calls."""

import copy
import io
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from headwise.analysis.ablation.head_outputs import mean_activations
from headwise.analysis.ablation.sweep import pass_cost
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.compression.curve import curve
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.prune import prune
from headwise.compression.recovery import heal
from headwise.compression.report import Footprint, report
from headwise.compression.select_heads import rank
from headwise.compression.timing import Timing
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import preset
from headwise.text.sentence_embeddings import embed
from headwise.ui.figures.tradeoff import draw_pruning
from headwise.ui.prune_view import show_report
from tests.analysis.models import TEXTS, encoded, reading, surprise
from tests.contract.layers import MODELS, make_model, token_ids

MORE = [*TEXTS, "that mat was there", "a cat sat at it"]


def losses(model: Transformer) -> np.ndarray:
    with torch.no_grad():
        return np.array([float(surprise(model, ids)) for ids in encoded(model)])


COUNTS = np.array([len(text) - 1 for text in TEXTS])  # a token a letter


# Sizes.


def test_sizes_of_gpt2_by_hand() -> None:
    spec = preset("gpt2")
    after = spec.without("0-5.*")  # six layers of twelve heads
    one, other = Footprint.of(spec), Footprint.of(after)
    a_head = 4 * 64 * 768 + 3 * 64  # W_Q, W_K, W_V, W_O and three biases; b_O stays
    assert one.parameters - other.parameters == 72 * a_head
    assert (one.heads, other.heads, other.kv_heads, other.layers_without_heads) == (144, 72, 72, 6)
    assert (one.cache_bytes_per_token, other.cache_bytes_per_token) == (12 * 2 * 768 * 4, 6 * 2 * 768 * 4)
    assert Footprint.of(spec, bytes_per_number=2).cache_bytes_per_token == 12 * 2 * 768 * 2
    a_head_of_512 = 2 * (512 * 4 * 64 * 768 + 2 * 64 * 512 * 513 // 2)
    assert one.operations - other.operations == 72 * a_head_of_512


def test_keys_go_with_their_last_head() -> None:
    spec = preset("smollm2-135m")  # three heads to a key
    assert Footprint.of(spec.without("0.0-1")).cache_bytes_per_token == Footprint.of(spec).cache_bytes_per_token
    assert (
        Footprint.of(spec.without("0.0-2")).cache_bytes_per_token
        == Footprint.of(spec).cache_bytes_per_token - 2 * 64 * 4
    )
    assert Footprint.of(spec).parameters - Footprint.of(spec.without("0.0-2")).parameters == (3 + 3 + 1 + 1) * 64 * 576
    assert Footprint.of(preset("bert-base")).cache_bytes_per_token == 0


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, windows"])
@torch.no_grad()
def test_bytes_are_those_a_cache_holds(name: str) -> None:
    model = make_model(replace(MODELS[name], windows=()))
    for pattern in ("0.1", "0.0-1,1.2", "0.*"):
        small = prune(model, heads=pattern, fold=False)
        cache = small.cache("fixed", 19)
        small(token_ids(2, 7), cache=cache)
        assert cache.bytes == 2 * 19 * Footprint.of(small.spec, bytes_per_number=8).cache_bytes_per_token


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_operations_are_those_torch_counts(name: str) -> None:
    model = make_model(MODELS[name], backend="batched")
    source = {"source": token_ids(1, 11, seed=4)} if model.spec.kind == "encoder-decoder" else {}
    for small in (model, *([] if model.spec.kept or source else [prune(model, heads="0.0-1,1.3", fold=False)])):
        with FlopCounterMode(display=False) as counter:
            small(token_ids(1, 11), **source)
        assert pass_cost(small.spec, 11).whole(rows=11) == counter.get_total_flops()


def test_hidden_pairs_cost_nothing() -> None:
    for name, layers in (("decoder", 2), ("encoder", 0), ("encoder-decoder", 2)):
        spec = MODELS[name]
        hidden = 11 * 11 - 11 * 12 // 2
        saved = pass_cost(spec, 11).whole(11) - pass_cost(spec, 11, causal=True).whole(11)
        assert saved == layers * 2 * hidden * 4 * 12


# Losses.


def test_losses_are_those_of_plain_calls() -> None:
    model = reading(MODELS["decoder, rotary"])
    small = prune(model, keep=0.5, on=TEXTS)
    made = report(model, small, TEXTS, means=mean_activations(model, TEXTS), seeds=4, turns=2)
    before, after = losses(model), losses(small)
    randoms = [losses(prune(model, keep=0.5, by="random", on=TEXTS, seed=seed)) for seed in range(4)]
    total = COUNTS.sum()
    assert made.texts == len(TEXTS)
    assert made.metric == "nats a token"
    assert made.loss_before.mean == pytest.approx(before.sum() / total, abs=1e-9)
    assert made.loss_after.mean == pytest.approx(after.sum() / total, abs=1e-9)
    assert made.more.mean == pytest.approx((after - before).sum() / total, abs=1e-9)
    assert made.random == pytest.approx([one.sum() / total for one in randoms], abs=1e-9)
    assert made.more_than_random is not None
    assert made.more_than_random.mean == pytest.approx((after - np.mean(randoms, 0)).sum() / total, abs=1e-9)
    for figure in (made.loss_before, made.loss_after, made.more, made.more_than_random):
        assert figure.low < figure.mean < figure.high
    assert made.before == Footprint.of(model.spec, 64, 8)
    assert made.after == Footprint.of(small.spec, 64, 8)
    assert len(made.rows()) == 7
    assert made.rows()[-1] == [
        "seconds, 64 tokens",
        made.time.before,
        made.time.after,
        made.time.after / made.time.before,
    ]
    assert made.time.turns == 3, "an odd number, so that one of them is the median"


def test_healing_is_told_beside_others_that_were_healed_alike() -> None:
    model = reading(MODELS["decoder, rotary"])
    small = prune(model, keep=0.5, on=TEXTS)
    train = partial(heal, corpus=" ".join(MORE) * 5, steps=4, rate=0.01, batch=2, context=16, progress=False)
    weights = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, small)]
    made = report(model, small, TEXTS, means=mean_activations(model, TEXTS), seeds=2, turns=1, length=8, heal=train)
    for one, before in zip((model, small), weights, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())

    def healed(of: Transformer) -> np.ndarray:
        trained = copy.deepcopy(of)
        train(trained)
        return losses(trained)

    total, before = COUNTS.sum(), losses(model).sum()
    random = [prune(model, keep=0.5, by="random", on=TEXTS, seed=seed) for seed in range(2)]
    cut, whole, others = healed(small).sum(), healed(model).sum(), [healed(one).sum() for one in random]
    told = made.healed
    assert told is not None
    assert told.more_than_random is not None
    assert made.random == pytest.approx([losses(one).sum() / total for one in random], abs=1e-9), "as before healing"
    assert told.loss.mean == pytest.approx(cut / total, abs=1e-9)
    assert told.more.mean == pytest.approx((cut - before) / total, abs=1e-9)
    assert told.whole.mean == pytest.approx(whole / total, abs=1e-9)
    assert told.more_than_whole.mean == pytest.approx((cut - whole) / total, abs=1e-9)
    assert told.random == pytest.approx([one / total for one in others], abs=1e-9)
    assert told.more_than_random.mean == pytest.approx((cut - np.mean(others)) / total, abs=1e-9)
    assert abs(cut - losses(small).sum()) > 1e-3, "healing did something"
    named = {str(row[0]): row[1] for row in made.losses()}
    assert named["before, trained alike"] == told.whole.mean
    assert named["random cuts, healed, 2 seeds: mean, least, most"] == pytest.approx(np.mean(told.random))
    done = copy.deepcopy(small)
    train(done)
    again = report(model, small, TEXTS, seeds=0, turns=1, length=8, heal=train, healed=done)
    assert again.healed is not None
    assert again.healed.loss == told.loss
    assert again.to_dict()["healed"]["more_than_random"] is None
    for options in ({"healed": done}, {"healed": model, "heal": train}):
        with pytest.raises(HeadwiseError, match="must be trained alike"):
            report(model, small, TEXTS, **options)  # pyright: ignore


def trial_of(counts: list[int]) -> PairedEvaluation:
    return PairedEvaluation((), (), np.array(counts))


def test_a_difference_from_random_cuts_knows_that_they_were_drawn() -> None:
    """Where texts do not differ, it is the interval of Student's test over the draws; where draws do not, over texts."""
    draws = [2.0, 2.5, 2.1, 2.9]
    got = trial_of([3] * 5).difference_from_draws(np.full(5, 3 * 1.7), [np.full(5, 3 * loss) for loss in draws])
    want = stats.ttest_1samp(1.7 - np.array(draws), 0).confidence_interval()
    assert (got.low, got.high) == pytest.approx((want.low, want.high))
    texts = np.array([4.0, 6.5, 5.0, 7.5, 5.5, 6.0])
    got = trial_of([3] * 6).difference_from_draws(texts, [np.full(6, 5.0)] * 3)
    want = stats.ttest_1samp((texts - 5) / 3, 0).confidence_interval()
    assert got.mean == pytest.approx(np.mean(texts - 5) / 3)
    assert (got.low, got.high) == pytest.approx((want.low, want.high))
    alone = trial_of([3] * 6).difference_from_draws(texts, [np.full(6, 5.0)])
    assert alone.mean == pytest.approx(np.mean(texts - 5) / 3)
    assert math.isnan(alone.low), "one draw says nothing of others"
    same = trial_of([2, 3]).difference_from_draws(np.array([2.0, 3.0]), [np.array([4.0, 6.0])] * 2)
    assert (same.mean, same.low, same.high) == (-1, -1, -1)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Cuts and texts drawn anew a thousand times, the true difference 0: intervals over texts alone miss it mostly."""
    dice, n, S, times = np.random.default_rng(3), 24, 3, 1000
    counts = dice.integers(5, 30, n)
    held = over_texts = 0
    for _ in range(times):
        hard, good = dice.normal(4, 1, n), dice.normal(0, 0.3, S)
        loss = counts * (hard + dice.normal(0, 0.2, n))
        others = [counts * (hard + own + dice.normal(0, 0.2, n)) for own in good]
        trial = trial_of(counts.tolist())
        figure = trial.difference_from_draws(loss, others)
        held += figure.low <= 0 <= figure.high
        plain = trial.difference(loss, np.mean(others, 0))
        over_texts += plain.low <= 0 <= plain.high
    assert 0.93 <= held / times <= 0.99
    assert over_texts / times < 0.6


# Seconds.


def test_seconds_and_their_share_are_of_one_turn() -> None:
    """Medians of each side alone, .083 and .086, say nothing of turns whose median share is 1.34."""
    turns = [(0.083, 0.111), (0.060, 0.086), (0.080, 0.070), (0.090, 0.085), (0.085, 0.115)]
    made = Timing.of(turns)
    assert (made.before, made.after) == (0.083, 0.111)
    assert made.share == pytest.approx(0.111 / 0.083)
    assert made.low == pytest.approx(0.085 / 0.090)
    assert made.high == pytest.approx(0.115 / 0.085)
    assert not made.differs
    assert str(made) == "0.944–1.353, no difference seen"
    slower = Timing.of([(1.0, 1.2), (1.0, 1.1), (1.0, 1.3)])
    assert slower.differs
    assert str(slower) == "1.150–1.250"
    assert str(Timing.of([(2.0, 1.0)])) == "one turn"
    assert not Timing.of([(2.0, 1.0)]).differs


def test_a_printed_report_agrees_with_itself() -> None:
    model = reading(MODELS["decoder"])
    made = report(model, prune(model, heads="0.1", fold=False), TEXTS, seeds=0, turns=1)
    made = replace(made, time=Timing.of([(0.08349, 0.08557), (0.08, 0.09), (0.09, 0.08)]))
    console = Console(width=120, record=True, file=io.StringIO())
    show_report(made, console)
    row = next(line for line in console.export_text().splitlines() if "seconds, 64 tokens" in line)
    before, after, share = row.split()[3:6]
    assert float(share) == pytest.approx(float(after) / float(before), abs=1e-3)
    assert row.rstrip().endswith("no difference seen")


def test_intervals_are_over_texts() -> None:
    model = reading(MODELS["decoder"])
    small = prune(model, heads="0.1", fold=False)
    made = report(model, small, TEXTS, seeds=0, turns=1)
    before, draws = losses(model), np.random.default_rng(5).integers(0, 4, (4000, 4))
    means = before[draws].sum(1) / COUNTS[draws].sum(1)
    spread = np.ptp(means)
    low, high = np.quantile(means, [0.025, 0.975])
    assert made.loss_before.low == pytest.approx(low, abs=0.05 * spread)
    assert made.loss_before.high == pytest.approx(high, abs=0.05 * spread)
    assert made.more_than_random is None


def test_nothing_cut_costs_nothing() -> None:
    model = reading(MODELS["encoder"])
    made = report(model, prune(model, keep=1, on=TEXTS), TEXTS, turns=1)
    alone = report(model, model, TEXTS[:1], turns=1)  # one text has no spread
    assert math.isnan(alone.more.low)
    assert alone.to_dict()["more"] == {"mean": 0.0, "low": None, "high": None}
    assert (made.more.mean, made.more.low, made.more.high) == (0, 0, 0)
    assert made.random == ()
    assert all(share == pytest.approx(1) for _, before, _, share in made.rows()[:-1] if before)


def test_an_encoder_without_output_is_compared_by_its_vectors() -> None:
    model = reading(MODELS["encoder"], output="none")
    small = prune(model, keep=0.5, on=TEXTS)
    made = report(model, small, TEXTS, seeds=0, turns=1)
    turned = 1 - (embed(model, TEXTS).double() * embed(small, TEXTS).double()).sum(1)
    assert made.metric == "1 − cosine"
    assert made.loss_before.mean == pytest.approx(0, abs=1e-12)
    assert made.loss_after.mean == pytest.approx(float(turned.mean()), abs=1e-6)


def test_what_cannot_be_reported() -> None:
    model = reading(MODELS["decoder"])
    small = prune(model, heads="0.1", fold=False)
    for before, after, on, message in (
        (small, model, TEXTS, "give the full model first"),
        (model, small, "a", "two tokens"),
        (model, small, [], "is empty"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            report(before, after, on)
    with pytest.raises(HeadwiseError, match="needs pairs"):
        PairedEvaluation.of(reading(MODELS["encoder-decoder"]), TEXTS)


# Two halves.


def test_texts_are_dealt_out_in_turn() -> None:
    model = reading(MODELS["decoder"])

    def halves(given: list[str]) -> list[list[str]]:
        return [[unit.text for unit in half] for half in Reading.of(model, given).halves()]

    assert [unit.text for unit in Reading.of(model, TEXTS).first(3)] == TEXTS[:3]
    some, others = halves(TEXTS)
    assert abs(len(some) - len(others)) <= 1
    assert sorted([*some, *others]) == sorted(TEXTS)
    assert halves(TEXTS[::-1]) == [some[::-1], others[::-1]], "wherever a text stands, it is in the same half"
    pairs = [f"{kind} {number}" for number in range(100) for kind in ("question", "answer")]
    asked = sum(text.startswith("question") for text in halves(pairs)[0])
    assert 30 < asked < 70, "a file of alternating pairs is not split along the pair"
    twice = halves(["a b", "c d", "a b", "e f"])
    assert ["a b" in half for half in twice].count(True) == 1, (
        "a text that comes twice is chosen on or judged by, not both"
    )
    cut = Reading.of(model, "the cat sat " * 30, 12).first(10)
    assert [unit.text for unit in cut] == ["the cat sat "] * 10
    assert [unit.number for half in Reading.of(model, TEXTS).halves() for unit in half] == [0, 1, 0, 1]
    with pytest.raises(HeadwiseError, match="a single text"):
        halves(["the cat"])
    with pytest.raises(HeadwiseError, match="a limit of 0"):
        Reading.of(model, TEXTS).first(0)


# The curve.


def test_a_curve_is_cuts_at_every_share() -> None:
    model = reading(MODELS["decoder"])
    heard: list[Any] = []
    made = curve(model, TEXTS, keeps=(0.25, 0.75), seeds=2, progress=lambda *told: heard.append(told))
    assert [(p.by, p.kept, p.heads) for p in made.points] == [
        (by, keep, left) for by in ("ablation", "gradient", "random") for keep, left in ((0.75, 6), (0.25, 2))
    ]
    total, full = COUNTS.sum(), losses(model).sum()
    assert made.full.mean == pytest.approx(full / total, abs=1e-9)
    for point in made.points:
        seeds = range(2) if point.by == "random" else (0,)
        cuts = [prune(model, keep=point.kept, by=point.by, on=TEXTS, seed=seed) for seed in seeds]
        want = [losses(small).sum() / total for small in cuts]
        assert point.loss.mean == pytest.approx(np.mean(want), abs=1e-9)
        assert point.more.mean == pytest.approx(np.mean(want) - full / total, abs=1e-9)
        if point.by == "random":
            assert (point.loss.low, point.loss.high) == pytest.approx((min(want), max(want)), abs=1e-9)
    assert heard[-1] == ("measuring cuts", 8, 8)
    assert len(made.of("random")) == 2
    assert len(made.rows()) == 6


def test_a_curve_tells_the_share_that_is_really_kept() -> None:
    model = reading(MODELS["decoder"])  # 8 heads: .3 of them are 2, and so are .28; .7 are 6
    made = curve(model, TEXTS, keeps=(0.7, 0.3, 0.28), bys=("random",), seeds=1)
    assert [(p.kept, p.heads) for p in made.points] == [(0.75, 6), (0.25, 2)]
    assert [row[1] for row in made.rows()] == [0.75, 0.25]
    drawn = draw_pruning(made)
    assert [row["x"] for row in drawn.rows] == [0.75, 0.25]
    assert drawn.figure.axes[0].lines[0].get_xdata().tolist() == [0.25, 0.75, 1.0]  # pyright: ignore


def test_a_curve_is_measured_on_other_texts_and_takes_rankings_that_are_there() -> None:
    model = reading(MODELS["decoder"])
    backwards = {head: -worth for head, worth in rank(model, None, "random").items()}
    made = curve(model, MORE, TEXTS, keeps=(0.5,), bys=("ablation",), folded=False, scores={"ablation": backwards})
    gone = sorted(backwards, key=lambda head: backwards[head])[:4]
    assert made.points[0].loss.mean == pytest.approx(
        losses(prune(model, heads=gone, fold=False)).sum() / COUNTS.sum(), abs=1e-9
    )
    assert [p.by for p in curve(reading(MODELS["encoder"], output="none"), TEXTS, keeps=(0.5,)).points] == [
        "ablation",
        "random",
    ]
    with pytest.raises(HeadwiseError, match="a curve needs"):
        curve(model, TEXTS, keeps=())
    with pytest.raises(HeadwiseError, match="above 0 and at most 1"):
        curve(model, TEXTS, keeps=(0.5, 0.0))
