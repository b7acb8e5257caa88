"""Reports of pruning: sizes against closed forms and torch's operation counter, losses against plain forward calls."""

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

from headwise.analysis.ablation.ablation_sweep import pass_cost
from headwise.analysis.ablation.recorded_head_outputs import mean_activations
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.paired_timing import PairedTiming
from headwise.compression.plan import prune
from headwise.compression.plan_report import ModelSizeAndFlops, report
from headwise.compression.pruning_curve import pruning_curve
from headwise.compression.recovery_finetune import recover
from headwise.compression.select_heads import rank_heads
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import preset
from headwise.text.sentence_embeddings import embed
from headwise.ui.figures.tradeoff_curves import draw_pruning
from headwise.ui.print_pruning import show_prune_report
from tests.analysis.models import TEXTS, character_model, encode_texts, text_loss
from tests.contract.layers import MODELS, make_model, token_ids

MORE_TEXTS = [*TEXTS, "that mat was there", "a cat sat at it"]


def losses(model: Transformer) -> np.ndarray:
    with torch.no_grad():
        return np.array([float(text_loss(model, ids)) for ids in encode_texts(model)])


COUNTS = np.array([len(text) - 1 for text in TEXTS])  # one token per letter


# Sizes.


def test_footprint_gpt2_equals_closed_form() -> None:
    spec = preset("gpt2")
    after = spec.without("0-5.*")  # six layers of twelve heads
    before, footprint_after = ModelSizeAndFlops.of(spec), ModelSizeAndFlops.of(after)
    head_parameters = 4 * 64 * 768 + 3 * 64  # W_Q, W_K, W_V, W_O and three biases; b_O stays
    assert before.parameters - footprint_after.parameters == 72 * head_parameters
    assert (before.heads, footprint_after.heads, footprint_after.kv_heads, footprint_after.layers_without_heads) == (
        144,
        72,
        72,
        6,
    )
    assert (before.cache_bytes_per_token, footprint_after.cache_bytes_per_token) == (12 * 2 * 768 * 4, 6 * 2 * 768 * 4)
    assert ModelSizeAndFlops.of(spec, element_bytes=2).cache_bytes_per_token == 12 * 2 * 768 * 2
    head_operations = 2 * (512 * 4 * 64 * 768 + 2 * 64 * 512 * 513 // 2)
    assert before.operations - footprint_after.operations == 72 * head_operations


def test_footprint_kv_head_removed_with_last_head() -> None:
    spec = preset("smollm2-135m")  # three query heads per KV head
    assert (
        ModelSizeAndFlops.of(spec.without("0.0-1")).cache_bytes_per_token
        == ModelSizeAndFlops.of(spec).cache_bytes_per_token
    )
    assert (
        ModelSizeAndFlops.of(spec.without("0.0-2")).cache_bytes_per_token
        == ModelSizeAndFlops.of(spec).cache_bytes_per_token - 2 * 64 * 4
    )
    assert (
        ModelSizeAndFlops.of(spec).parameters - ModelSizeAndFlops.of(spec.without("0.0-2")).parameters
        == (3 + 3 + 1 + 1) * 64 * 576
    )
    assert ModelSizeAndFlops.of(preset("bert-base")).cache_bytes_per_token == 0


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, windows"])
@torch.no_grad()
def test_footprint_cache_bytes_equal_allocated_cache(name: str) -> None:
    model = make_model(replace(MODELS[name], windows=()))
    for pattern in ("0.1", "0.0-1,1.2", "0.*"):
        small = prune(model, heads=pattern, fold_mean=False)
        cache = small.cache("static", 19)
        small(token_ids(2, 7), cache=cache)
        assert cache.nbytes == 2 * 19 * ModelSizeAndFlops.of(small.spec, element_bytes=8).cache_bytes_per_token


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_pass_cost_equals_torch_flop_counter(name: str) -> None:
    model = make_model(MODELS[name], backend="batched")
    source = {"source": token_ids(1, 11, seed=4)} if model.spec.kind == "encoder-decoder" else {}
    for small in (
        model,
        *([] if model.spec.kept_heads or source else [prune(model, heads="0.0-1,1.3", fold_mean=False)]),
    ):
        with FlopCounterMode(display=False) as counter:
            small(token_ids(1, 11), **source)
        assert pass_cost(small.spec, 11).total_flops(target_rows=11) == counter.get_total_flops()


def test_pass_cost_causal_skips_masked_pairs() -> None:
    for name, layers in (("decoder", 2), ("encoder", 0), ("encoder-decoder", 2)):
        spec = MODELS[name]
        hidden = 11 * 11 - 11 * 12 // 2
        saved = pass_cost(spec, 11).total_flops(11) - pass_cost(spec, 11, causal=True).total_flops(11)
        assert saved == layers * 2 * hidden * 4 * 12


# Losses.


def test_report_losses_equal_plain_calls() -> None:
    model = character_model(MODELS["decoder, rotary"])
    small = prune(model, keep=0.5, corpus=TEXTS)
    result = report(model, small, TEXTS, means=mean_activations(model, TEXTS), seeds=4, repeats=2)
    before, after = losses(model), losses(small)
    random_losses = [losses(prune(model, keep=0.5, ranking="random", corpus=TEXTS, seed=seed)) for seed in range(4)]
    total = COUNTS.sum()
    assert result.texts == len(TEXTS)
    assert result.metric == "nats per token"
    assert result.loss_before.mean == pytest.approx(before.sum() / total, abs=1e-9)
    assert result.loss_after.mean == pytest.approx(after.sum() / total, abs=1e-9)
    assert result.loss_increase.mean == pytest.approx((after - before).sum() / total, abs=1e-9)
    assert result.random == pytest.approx([sums.sum() / total for sums in random_losses], abs=1e-9)
    assert result.increase_over_random is not None
    assert result.increase_over_random.mean == pytest.approx(
        (after - np.mean(random_losses, 0)).sum() / total, abs=1e-9
    )
    for estimate in (result.loss_before, result.loss_after, result.loss_increase, result.increase_over_random):
        assert estimate.low < estimate.mean < estimate.high
    assert result.before == ModelSizeAndFlops.of(model.spec, 64, 8)
    assert result.after == ModelSizeAndFlops.of(small.spec, 64, 8)
    assert len(result.footprint_rows()) == 7
    assert result.footprint_rows()[-1] == [
        "seconds, 64 tokens",
        result.time.before,
        result.time.after,
        result.time.after / result.time.before,
    ]
    assert result.time.repeats == 3, "an odd number, so that one repeat is the median"


def test_report_recovery_compared_with_equally_trained_models() -> None:
    model = character_model(MODELS["decoder, rotary"])
    small = prune(model, keep=0.5, corpus=TEXTS)
    train = partial(
        recover, corpus=" ".join(MORE_TEXTS) * 5, steps=4, learning_rate=0.01, batch_size=2, context=16, progress=False
    )
    weights = [{name: value.clone() for name, value in candidate.state_dict().items()} for candidate in (model, small)]
    result = report(
        model, small, TEXTS, means=mean_activations(model, TEXTS), seeds=2, repeats=1, length=8, recover=train
    )
    for candidate, before in zip((model, small), weights, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in candidate.state_dict().items())

    def recovered_losses(source: Transformer) -> np.ndarray:
        copied = copy.deepcopy(source)
        train(copied)
        return losses(copied)

    total, before = COUNTS.sum(), losses(model).sum()
    random_models = [prune(model, keep=0.5, ranking="random", corpus=TEXTS, seed=seed) for seed in range(2)]
    pruned_loss, full_loss, random_losses = (
        recovered_losses(small).sum(),
        recovered_losses(model).sum(),
        [recovered_losses(candidate).sum() for candidate in random_models],
    )
    recovery = result.recovered
    assert recovery is not None
    assert recovery.increase_over_random is not None
    assert result.random == pytest.approx([losses(candidate).sum() / total for candidate in random_models], abs=1e-9), (
        "random losses before recovery"
    )
    assert recovery.loss.mean == pytest.approx(pruned_loss / total, abs=1e-9)
    assert recovery.loss_increase.mean == pytest.approx((pruned_loss - before) / total, abs=1e-9)
    assert recovery.full_loss.mean == pytest.approx(full_loss / total, abs=1e-9)
    assert recovery.increase_over_full.mean == pytest.approx((pruned_loss - full_loss) / total, abs=1e-9)
    assert recovery.random == pytest.approx([candidate / total for candidate in random_losses], abs=1e-9)
    assert recovery.increase_over_random.mean == pytest.approx((pruned_loss - np.mean(random_losses)) / total, abs=1e-9)
    assert abs(pruned_loss - losses(small).sum()) > 1e-3, "recovery changed the loss"
    named = {str(row[0]): row[1] for row in result.loss_rows()}
    assert named["before, same training"] == recovery.full_loss.mean
    assert named["random pruning, recovered, 2 seeds: mean, min, max"] == pytest.approx(np.mean(recovery.random))
    recovered = copy.deepcopy(small)
    train(recovered)
    second = report(model, small, TEXTS, seeds=0, repeats=1, length=8, recover=train, recovered=recovered)
    assert second.recovered is not None
    assert second.recovered.loss == recovery.loss
    assert second.to_dict()["recovered"]["increase_over_random"] is None
    for options in ({"recovered": recovered}, {"recovered": model, "recover": train}):
        with pytest.raises(HeadwiseError, match="recovered: must be a trained copy"):
            report(model, small, TEXTS, **options)  # pyright: ignore


def make_evaluation(counts: list[int]) -> PairedEvaluator:
    return PairedEvaluator((), (), np.array(counts))


def test_difference_from_draws_equals_t_interval() -> None:
    """It is the Student t interval over draws if texts do not differ, and over texts if draws do not differ."""
    draws = [2.0, 2.5, 2.1, 2.9]
    estimate = make_evaluation([3] * 5).difference_from_random(
        np.full(5, 3 * 1.7), [np.full(5, 3 * loss) for loss in draws]
    )
    expected = stats.ttest_1samp(1.7 - np.array(draws), 0).confidence_interval()
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))
    texts = np.array([4.0, 6.5, 5.0, 7.5, 5.5, 6.0])
    estimate = make_evaluation([3] * 6).difference_from_random(texts, [np.full(6, 5.0)] * 3)
    expected = stats.ttest_1samp((texts - 5) / 3, 0).confidence_interval()
    assert estimate.mean == pytest.approx(np.mean(texts - 5) / 3)
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))
    single = make_evaluation([3] * 6).difference_from_random(texts, [np.full(6, 5.0)])
    assert single.mean == pytest.approx(np.mean(texts - 5) / 3)
    assert math.isnan(single.low), "a single draw has no interval"
    same = make_evaluation([2, 3]).difference_from_random(np.array([2.0, 3.0]), [np.array([4.0, 6.0])] * 2)
    assert (same.mean, same.low, same.high) == (-1, -1, -1)


def test_difference_from_draws_interval_has_nominal_coverage() -> None:
    """Sample prunings and texts a thousand times with a true difference of 0. Intervals over texts alone mostly miss it."""
    rng, n, S, times = np.random.default_rng(3), 24, 3, 1000
    counts = rng.integers(5, 30, n)
    covered = covered_over_texts = 0
    for _ in range(times):
        difficulty, offsets = rng.normal(4, 1, n), rng.normal(0, 0.3, S)
        loss = counts * (difficulty + rng.normal(0, 0.2, n))
        others = [counts * (difficulty + offset + rng.normal(0, 0.2, n)) for offset in offsets]
        trial = make_evaluation(counts.tolist())
        estimate = trial.difference_from_random(loss, others)
        covered += estimate.low <= 0 <= estimate.high
        plain = trial.difference(loss, np.mean(others, 0))
        covered_over_texts += plain.low <= 0 <= plain.high
    assert 0.93 <= covered / times <= 0.99
    assert covered_over_texts / times < 0.6


# Timing.


def test_timing_reports_median_turn() -> None:
    """The medians of each side, 0.083 and 0.086, do not give the median ratio of 1.34."""
    turns = [(0.083, 0.111), (0.060, 0.086), (0.080, 0.070), (0.090, 0.085), (0.085, 0.115)]
    timing = PairedTiming.median_of(turns)
    assert (timing.before, timing.after) == (0.083, 0.111)
    assert timing.ratio == pytest.approx(0.111 / 0.083)
    assert timing.low == pytest.approx(0.085 / 0.090)
    assert timing.high == pytest.approx(0.115 / 0.085)
    assert not timing.is_clearly_different
    assert str(timing) == "0.944–1.353, no difference seen"
    slower = PairedTiming.median_of([(1.0, 1.2), (1.0, 1.1), (1.0, 1.3)])
    assert slower.is_clearly_different
    assert str(slower) == "1.150–1.250"
    assert str(PairedTiming.median_of([(2.0, 1.0)])) == "one repeat"
    assert not PairedTiming.median_of([(2.0, 1.0)]).is_clearly_different


def test_show_report_printed_ratio_is_consistent() -> None:
    model = character_model(MODELS["decoder"])
    result = report(model, prune(model, heads="0.1", fold_mean=False), TEXTS, seeds=0, repeats=1)
    result = replace(result, time=PairedTiming.median_of([(0.08349, 0.08557), (0.08, 0.09), (0.09, 0.08)]))
    console = Console(width=120, record=True, file=io.StringIO())
    show_prune_report(result, console)
    row = next(line for line in console.export_text().splitlines() if "seconds, 64 tokens" in line)
    before, after, ratio = row.split()[3:6]
    assert float(ratio) == pytest.approx(float(after) / float(before), abs=1e-3)
    assert row.rstrip().endswith("no difference seen")


def test_report_intervals_are_bootstrap_over_texts() -> None:
    model = character_model(MODELS["decoder"])
    small = prune(model, heads="0.1", fold_mean=False)
    result = report(model, small, TEXTS, seeds=0, repeats=1)
    before, draws = losses(model), np.random.default_rng(5).integers(0, 4, (4000, 4))
    means = before[draws].sum(1) / COUNTS[draws].sum(1)
    spread = np.ptp(means)
    low, high = np.quantile(means, [0.025, 0.975])
    assert result.loss_before.low == pytest.approx(low, abs=0.05 * spread)
    assert result.loss_before.high == pytest.approx(high, abs=0.05 * spread)
    assert result.increase_over_random is None


def test_report_nothing_pruned_costs_zero() -> None:
    model = character_model(MODELS["encoder"])
    result = report(model, prune(model, keep=1, corpus=TEXTS), TEXTS, repeats=1)
    single = report(model, model, TEXTS[:1], repeats=1)  # one text has no variance
    assert math.isnan(single.loss_increase.low)
    assert single.to_dict()["loss_increase"] == {"mean": 0.0, "low": None, "high": None}
    assert (result.loss_increase.mean, result.loss_increase.low, result.loss_increase.high) == (0, 0, 0)
    assert result.random == ()
    assert all(ratio == pytest.approx(1) for _, before, _, ratio in result.footprint_rows()[:-1] if before)


def test_report_encoder_without_output_uses_cosine() -> None:
    model = character_model(MODELS["encoder"], output="none")
    small = prune(model, keep=0.5, corpus=TEXTS)
    result = report(model, small, TEXTS, seeds=0, repeats=1)
    cosine_distance = 1 - (embed(model, TEXTS).double() * embed(small, TEXTS).double()).sum(1)
    assert result.metric == "1 − cosine"
    assert result.loss_before.mean == pytest.approx(0, abs=1e-12)
    assert result.loss_after.mean == pytest.approx(float(cosine_distance.mean()), abs=1e-6)


def test_report_invalid_arguments_raise() -> None:
    model = character_model(MODELS["decoder"])
    small = prune(model, heads="0.1", fold_mean=False)
    for before, after, corpus, message in (
        (small, model, TEXTS, "Pass the full model first"),
        (model, small, "a", "no text is long enough to have a target"),
        (model, small, [], "is empty"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            report(before, after, corpus)
    with pytest.raises(HeadwiseError, match="needs pairs"):
        PairedEvaluator.of(character_model(MODELS["encoder-decoder"]), TEXTS)


# Splitting a corpus in halves.


def test_halves_split_texts_deterministically() -> None:
    model = character_model(MODELS["decoder"])

    def halves(texts: list[str]) -> list[list[str]]:
        return [[sample.text for sample in half] for half in TokenizedCorpus.of(model, texts).halves()]

    assert [sample.text for sample in TokenizedCorpus.of(model, TEXTS).first(3)] == TEXTS[:3]
    first_half, second_half = halves(TEXTS)
    assert abs(len(first_half) - len(second_half)) <= 1
    assert sorted([*first_half, *second_half]) == sorted(TEXTS)
    assert halves(TEXTS[::-1]) == [first_half[::-1], second_half[::-1]], (
        "the half of a text does not depend on its position"
    )
    pairs = [f"{kind} {number}" for number in range(100) for kind in ("question", "answer")]
    num_questions = sum(text.startswith("question") for text in halves(pairs)[0])
    assert 30 < num_questions < 70, "a file with alternating questions and answers is not split into the two kinds"
    duplicate_halves = halves(["a b", "c d", "a b", "e f"])
    assert ["a b" in half for half in duplicate_halves].count(True) == 1, "a duplicated text is in one half only"
    chunked = TokenizedCorpus.of(model, "the cat sat " * 30, 12).first(10)
    assert [sample.text for sample in chunked] == ["the cat sat "] * 10
    assert [sample.index for half in TokenizedCorpus.of(model, TEXTS).halves() for sample in half] == [0, 1, 0, 1]
    with pytest.raises(HeadwiseError, match="a single text"):
        halves(["the cat"])
    with pytest.raises(HeadwiseError, match="number of texts must be at least 1"):
        TokenizedCorpus.of(model, TEXTS).first(0)


# Pruning curves.


def test_curve_points_equal_prunes_at_every_fraction() -> None:
    model = character_model(MODELS["decoder"])
    progress_calls: list[Any] = []
    result = pruning_curve(
        model, TEXTS, keep_fractions=(0.25, 0.75), seeds=2, progress=lambda *args: progress_calls.append(args)
    )
    assert [(p.ranking, p.kept_fraction, p.heads) for p in result.points] == [
        (ranking, keep, num_heads)
        for ranking in ("ablation", "gradient", "random")
        for keep, num_heads in ((0.75, 6), (0.25, 2))
    ]
    total, full = COUNTS.sum(), losses(model).sum()
    assert result.full_loss.mean == pytest.approx(full / total, abs=1e-9)
    for point in result.points:
        seeds = range(2) if point.ranking == "random" else (0,)
        pruned = [
            prune(model, keep=point.kept_fraction, ranking=point.ranking, corpus=TEXTS, seed=seed) for seed in seeds
        ]
        expected = [losses(small).sum() / total for small in pruned]
        assert point.loss.mean == pytest.approx(np.mean(expected), abs=1e-9)
        assert point.loss_increase.mean == pytest.approx(np.mean(expected) - full / total, abs=1e-9)
        if point.ranking == "random":
            assert (point.loss.low, point.loss.high) == pytest.approx((min(expected), max(expected)), abs=1e-9)
    assert progress_calls[-1] == ("pruned models", 8, 8)
    assert len(result.points_by_ranking("random")) == 2
    assert len(result.rows()) == 6


def test_curve_reports_actual_kept_fraction() -> None:
    model = character_model(MODELS["decoder"])  # 8 heads: fractions 0.3 and 0.28 are 2 heads, 0.7 is 6
    result = pruning_curve(model, TEXTS, keep_fractions=(0.7, 0.3, 0.28), rankings=("random",), seeds=1)
    assert [(p.kept_fraction, p.heads) for p in result.points] == [(0.75, 6), (0.25, 2)]
    assert [row[1] for row in result.rows()] == [0.75, 0.25]
    saved_figure = draw_pruning(result)
    assert [row["x"] for row in saved_figure.rows] == [0.75, 0.25]
    assert saved_figure.figure.axes[0].lines[0].get_xdata().tolist() == [0.25, 0.75, 1.0]  # pyright: ignore


def test_curve_separate_texts_and_given_scores() -> None:
    model = character_model(MODELS["decoder"])
    backwards = {head: -score for head, score in rank_heads(model, None, "random").items()}
    result = pruning_curve(
        model,
        MORE_TEXTS,
        TEXTS,
        keep_fractions=(0.5,),
        rankings=("ablation",),
        fold_mean=False,
        scores={"ablation": backwards},
    )
    pruned_heads = sorted(backwards, key=lambda head: backwards[head])[:4]
    assert result.points[0].loss.mean == pytest.approx(
        losses(prune(model, heads=pruned_heads, fold_mean=False)).sum() / COUNTS.sum(), abs=1e-9
    )
    assert [
        p.ranking
        for p in pruning_curve(character_model(MODELS["encoder"], output="none"), TEXTS, keep_fractions=(0.5,)).points
    ] == [
        "ablation",
        "random",
    ]
    with pytest.raises(HeadwiseError, match="at least one of each"):
        pruning_curve(model, TEXTS, keep_fractions=())
    with pytest.raises(HeadwiseError, match="above 0 and at most 1"):
        pruning_curve(model, TEXTS, keep_fractions=(0.5, 0.0))
