"""Heads act like an ensemble: several heads of one model versus the average of as many one-head models."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis import tokenizer_of
from headwise.errors import ArgumentError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.engine.train_model import EVAL_DOCUMENTS, evaluate_synthetic
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import Transformer
from headwise.text import Corpus

MEMBERS = 4
MAX_GAP = 0.02  # nats, about 2% of perplexity
WIDE, NARROW = "wide members", "narrow members"
UNDECIDED = "possibly"


class ProbabilityEnsemble(nn.Module):
    """Decoders whose probabilities are averaged. `forward` returns the logarithm of the mean probability."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        super().__init__()
        if not models or len({model.spec.vocab for model in models}) > 1:
            raise ArgumentError(
                "models: an ensemble needs at least one model, and all models need the same vocabulary size. "
                f"Got sizes {[model.spec.vocab for model in models]}. Use models with one tokenizer."
            )
        self.models = nn.ModuleList(models)
        self.tokenizer, self.device = tokenizer_of(models[0]), models[0].device

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to log probabilities (B, T, vocab)."""
        log_probs = torch.stack([model(ids).log_softmax(-1) for model in self.models])  # (models, B, T, vocab)
        return log_probs.logsumexp(0) - math.log(len(log_probs))


@torch.no_grad()
def ensemble_loss(models: Sequence[Transformer], corpus: Any) -> float:
    """Return the loss of the ensemble in nats per token. Each text starts a new context."""
    ensemble = ProbabilityEnsemble(models).eval()
    total, count = 0.0, 0
    for text in Corpus.of(corpus).items():
        ids = torch.tensor([ensemble.tokenizer.encode(text.text)])  # (1, T)
        log_probs = ensemble(ids[:, :-1].to(ensemble.device))  # (1, T − 1, vocab)
        total -= float(log_probs.gather(-1, ids[:, 1:, None].to(ensemble.device)).double().sum())
        count += ids.shape[1] - 1
    return total / count


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Compare one multi-head model per seed with two ensembles on the same held-out documents."""
    texts, statistics = experiment.held_out_corpus(), StatisticTable()
    trained = [experiment.train_or_load(experiment.make_config(seed, MEMBERS)) for seed in experiment.seeds]
    losses = [ensemble_loss([run.load_model()], texts) for run in trained]
    statistics.add("loss", f"{MEMBERS} heads", losses)
    for relation in trained[0].probe_accuracy:
        statistics.add(f"right, {MEMBERS} heads", relation, [run.probe_accuracy[relation] for run in trained])
    for name, members in _member_configs(experiment).items():
        models = [experiment.train_or_load(config).load_model() for config in members]
        averaged_loss = ensemble_loss(models, texts)
        statistics.add("loss", f"{name}, each alone", [ensemble_loss([model], texts) for model in models])
        statistics.add("loss", f"{name}, averaged", averaged_loss)
        statistics.add("above the ensemble", name, [loss - averaged_loss for loss in losses])
        statistics.add(
            "parameters, of the heads' model 1", name, _parameters(members) / trained[0].config.spec.num_parameters
        )
        for score in evaluate_synthetic(ProbabilityEnsemble(models).eval(), experiment.seeds[0], EVAL_DOCUMENTS):  # pyright: ignore[reportArgumentType]
            statistics.add(f"right, {name} averaged", score.probe, score.accuracy)
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    comparisons = {
        str(name): _compare(statistic) for name, statistic in statistics.by_condition("above the ensemble").items()
    }
    details = "; ".join(f"{word} {name} averaged" for name, word in comparisons.items())
    words = set(comparisons.values())
    if words == {"as good as"}:
        return Verdict("holds")
    if words == {"better than"} or words == {"worse than"}:
        return Verdict("does not hold", f"the heads are {details}")
    if any(word.startswith(UNDECIDED) for word in words):
        return Verdict("undecided", f"the heads are {details}")
    return Verdict("depends", f"on the members: the heads are {details}")


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return the multi-head model of each seed, and all ensemble members."""
    return [experiment.make_config(seed, MEMBERS) for seed in experiment.seeds] + [
        config for members in _member_configs(experiment).values() for config in members
    ]


def _member_configs(experiment: TrainedModelProvider) -> dict[str, list[ExperimentConfig]]:
    """Return one-head models, with a head as wide as the model or as narrow as one of several heads."""
    seeds, narrow = range(experiment.seeds[0], experiment.seeds[0] + MEMBERS), experiment.size.width // MEMBERS
    return {
        WIDE: [experiment.make_config(seed, 1) for seed in seeds],
        NARROW: [experiment.make_config(seed, 1, head_dim=narrow) for seed in seeds],
    }


def _parameters(members: Iterable[ExperimentConfig]) -> int:
    return sum(config.spec.num_parameters for config in members)


def _compare(gap: Statistic) -> str:
    if gap.is_interval_above(MAX_GAP):
        return "worse than"
    if gap.is_interval_below(-MAX_GAP):
        return "better than"
    return (
        "as good as"
        if gap.is_interval_above(-MAX_GAP) and gap.is_interval_below(MAX_GAP)
        else f"{UNDECIDED} better or worse than"
    )


CLAIM = Claim(
    number=24,
    name="ensemble",
    statement="Heads act like an ensemble: a model with h heads is as good as h one-head models whose predictions are "
    "averaged.",
    counterevidence="A model with h heads that is clearly worse or clearly better than the average. If better, heads "
    "achieve together what averaging predictions cannot.",
    setup=f"One model with {MEMBERS} heads per seed, versus {MEMBERS} one-head models of {MEMBERS} consecutive seeds "
    "(different weights and documents) whose probabilities are averaged. Wide members have a head as wide as the model. "
    f"Each has as many parameters as the model with {MEMBERS} heads, so that the ensemble has {MEMBERS} times as many. "
    f"Narrow members have a head of 1/{MEMBERS} of the width. Their attention parameters add up to those of the multi-head "
    "model, but their MLPs and embeddings do not. All models are evaluated on the same held-out documents. There is one "
    "ensemble of each kind, so the intervals are over seeds of the multi-head model.",
    rule=f"As good means a loss significantly within {MAX_GAP:g} nats per token of the ensemble's loss. Holds if the "
    "multi-head model is as good as both ensembles. Does not hold if it is significantly better than both, or "
    "significantly worse than both. Otherwise undecided if either is inconclusive, else depends on the members.",
    judged=statistic_key_selector("above the ensemble"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("loss",), y="held-out loss, nats per token"),
    training_configs=training_configs,
)
