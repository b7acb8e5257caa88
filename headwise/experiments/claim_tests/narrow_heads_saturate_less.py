"""Narrower heads keep scores from saturating."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.analysis import TokenizedCorpus
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.compared_head_counts import fit_log2_slopes, head_counts
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import AttentionCall
from headwise.kernels import add_bias_and_mask, raw_scores, repeat_kv, softmax_weights
from headwise.model import ModelProtocol, eval_mode

KEYS = 64  # keys per random row
ROWS = 512  # random rows per head_dim
MIN_KEYS = 8  # smallest number of visible keys: shorter rows are neither sharp nor flat
UNSCALED_HEADS = (1, 8, 32)  # head counts that are also trained without the scale
MIN_SLOPE = 0.01  # relative entropy per doubling of head_dim, 0.06 over six doublings
TRAINED, UNSCALED = "trained, by 1/√d", "trained, unscaled"
RANDOM = {"unscaled": False, "by 1/√d": True}  # whether random q and k are scaled


def score_std_and_entropy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard deviation of each row of scores (…, S), −inf if hidden, and its entropy over ln(visible keys).

    >>> sd, entropy = score_std_and_entropy(torch.tensor([[0.0, 0.0, 0.0, 0.0, -torch.inf]]))
    >>> sd.item(), round(entropy.item(), 6)
    (0.0, 1.0)
    """
    visible = scores > -torch.inf
    num_visible = visible.sum(-1)
    finite_scores = scores.masked_fill(~visible, 0)
    mean = finite_scores.sum(-1) / num_visible
    variance = (finite_scores - mean[..., None]).masked_fill(~visible, 0).square().sum(-1) / num_visible
    p = scores.softmax(-1)
    return variance.sqrt(), torch.special.entr(p).sum(-1) / num_visible.clamp(min=2).log()


def random_std_and_entropy(head_dim: int, *, scaled: bool, seed: int = 0) -> tuple[float, float]:
    """Return both for random q and k with unit variance: the standard deviation is √d, or 1 if scaled by 1/√d."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, 1, head_dim, generator=generator, device="cpu")  # one query per row
    k = torch.randn(ROWS, KEYS, head_dim, generator=generator, device="cpu")
    scores = (q @ k.mT)[:, 0] / (math.sqrt(head_dim) if scaled else 1)  # (ROWS, KEYS)
    sd, entropy = score_std_and_entropy(scores)
    return float(sd.square().mean().sqrt()), float(entropy.mean())


@torch.no_grad()
def model_std_and_entropy(model: ModelProtocol, corpus: Any = None, texts: int = 64) -> dict[str, float]:
    """Return means over heads and text rows: `sd` of scores, `raw sd` before the scale, `entropy`."""
    rows_by_name: dict[str, list[Tensor]] = {"sd": [], "raw sd": [], "entropy": []}

    def on_call(call: AttentionCall) -> None:
        T, S = call.q.shape[2], call.k.shape[2]
        q, k = call.q.float(), repeat_kv(call.k, call.params.kv_of_head).float()
        unscaled_params = replace(call.params, scale=1.0, softcap=None, bias=None)
        scores, raw = (
            add_bias_and_mask(raw_scores(q, k, params), params, range(T), range(S), T, S)
            for params in (call.params, unscaled_params)
        )  # (B, H, T, S)
        long_rows = (scores > -torch.inf).sum(-1) >= MIN_KEYS  # (B, H, T)
        sd, _ = score_std_and_entropy(scores)
        p = softmax_weights(scores, call.params, may_have_empty_rows=call.params.may_have_empty_rows(T, S))
        entropy = torch.special.entr(p).sum(-1) / (scores > -torch.inf).sum(-1).clamp(min=2).log()
        for name, rows in (("sd", sd), ("raw sd", score_std_and_entropy(raw)[0]), ("entropy", entropy)):
            rows_by_name[name].append(rows[long_rows].cpu())

    with eval_mode(model), ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(on_call))
        for sample in islice(TokenizedCorpus.of(model, corpus), texts):
            model(torch.tensor([sample.ids], device=model.device), hidden=True)
    return {name: float(torch.cat(rows).mean()) for name, rows in rows_by_name.items()}


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return every head count with the scale, some also without."""
    return [
        experiment.make_config(seed, heads, **overrides)
        for _, heads, overrides in _variants(experiment)
        for seed in experiment.seeds
    ]


def _variants(experiment: TrainedModelProvider) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the name, head count and attention fields of each trained model."""
    width = experiment.size.width
    for heads in reversed(head_counts(width)):
        yield TRAINED, heads, {}
        if heads == width:
            yield UNSCALED, heads, {}  # 1/√1 = 1, so this is the scaled model
        elif heads in UNSCALED_HEADS:
            yield UNSCALED, heads, {"scale": 1.0}


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure trained models with and without the scale, and random q and k, for every head_dim."""
    statistics, width = StatisticTable(), experiment.size.width
    trained: dict[str, dict[int, list[float]]] = {TRAINED: {}, UNSCALED: {}}
    for name, heads, overrides in _variants(experiment):
        models = [
            experiment.train_or_load(experiment.make_config(seed, heads, **overrides)).load_model()
            for seed in experiment.seeds
        ]
        results = [
            model_std_and_entropy(model, experiment.held_out_corpus(seed))
            for model, seed in zip(models, experiment.seeds, strict=True)
        ]
        statistics.add(f"sd: {name}", width // heads, [entry["sd"] for entry in results])
        if name == TRAINED:
            statistics.add("sd: trained, before the scale", width // heads, [entry["raw sd"] for entry in results])
        trained[name][width // heads] = [entry["entropy"] for entry in results]
    for name, by_size in trained.items():
        _add_entropy(statistics, name, by_size)
        statistics.add("entropy gained by a doubling of head_dim", name, fit_log2_slopes(by_size))
    for name, scaled in RANDOM.items():
        sizes = [width // heads for heads in reversed(head_counts(width))]
        random_results = {
            d: [random_std_and_entropy(d, scaled=scaled, seed=seed) for seed in experiment.seeds] for d in sizes
        }
        for d, samples in random_results.items():
            statistics.add(f"sd: random, {name}", d, [sd for sd, _ in samples])
        by_size = {d: [entropy for _, entropy in samples] for d, samples in random_results.items()}
        _add_entropy(statistics, f"random, {name}", by_size)
        statistics.add("slope of random q and k", name, fit_log2_slopes(by_size))
    return statistics


def _add_entropy(statistics: StatisticTable, name: str, by_size: dict[int, list[float]]) -> None:
    for d, values in by_size.items():
        statistics.add(f"entropy: {name}", d, values)


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    gained = statistics.by_condition("entropy gained by a doubling of head_dim")
    confirmed = [str(name) for name, statistic in gained.items() if statistic.is_interval_below(-MIN_SLOPE)]
    refuted = [str(name) for name, statistic in gained.items() if statistic.is_interval_above(-MIN_SLOPE)]
    unsure = [str(name) for name in gained if name not in (*confirmed, *refuted)]
    if len(confirmed) == len(gained):
        return Verdict("holds")
    if len(refuted) == len(gained):
        return Verdict("does not hold")
    groups = (("so", confirmed), ("not so", refuted), ("open", unsure))
    parts = [f"{label}: {', '.join(names)}" for label, names in groups if names]
    return Verdict("undecided", "; ".join(parts)) if unsure else Verdict("depends", f"on the scale; {'; '.join(parts)}")


CLAIM = Claim(
    number=7,
    name="saturation",
    statement="Narrower heads keep attention scores from saturating.",
    counterevidence="Wide heads whose softmax is no sharper than that of narrow ones.",
    setup="Models of one width: every head count trained with scores scaled by 1/√d, and some "
    f"({', '.join(map(str, UNSCALED_HEADS))} heads) trained without the scale. For head_dim 1 both are the same. "
    "The standard deviation of the scores in a row and the entropy of its softmax, relative to the logarithm of the number "
    f"of visible keys, are measured on held-out text, on rows with at least {MIN_KEYS} keys. Random q and k with unit "
    f"variance and {KEYS} keys are reported but not judged, because their slope is known.",
    rule="For both kinds of trained models: the slope of the entropy over log₂(head_dim), per seed. Holds if it is "
    f"significantly below −{MIN_SLOPE:g} for both, does not hold if significantly above −{MIN_SLOPE:g} for both. Otherwise "
    "undecided if either is inconclusive, else depends on the scale.",
    judged=statistic_key_selector("entropy gained by a doubling of head_dim"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        tuple(f"entropy: {name}" for name in (TRAINED, UNSCALED, *(f"random, {name}" for name in RANDOM))),
        x="head_dim", y="entropy / ln(visible keys)", log_x=True,
    ),
    training_configs=training_configs,
)  # fmt: skip
