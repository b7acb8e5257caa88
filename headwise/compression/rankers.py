"""Table of head ranking methods. Pruning, pruning curves, reports and the command line all read it.

Rankers import their dependencies when they run, so that the command line can list them without loading torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from headwise.errors import ArgumentError, suggest_names

if TYPE_CHECKING:
    from headwise.analysis.ablation.recorded_head_outputs import MeanActivations
    from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
    from headwise.model import ModelProtocol
    from headwise.progress import Progress
    from headwise.spec import Address

Scores = dict["Address", float]


@dataclass(frozen=True)
class RankingInput:
    """Inputs of a ranker other than the model. Each ranker uses the ones that it needs.

    Attributes:
        corpus: Texts on which heads are ranked. None for rankers that need no texts.
        keep: Fraction of the heads that will remain.
        means: Mean activations that replace an ablated head. None replaces it by zeros.
        seed: Seed of random rankings and gates.
        gate_steps: Training steps of learned gates.
        progress: Called with a label, the work done and the total.
        progress_label: Label for progress reports.
    """

    corpus: "TokenizedCorpus | None"
    keep: float
    means: "MeanActivations | None"
    seed: int
    gate_steps: int
    progress: "Progress | None"
    progress_label: str


@dataclass(frozen=True)
class HeadRanker:
    """One ranking method. Heads with the lowest scores are pruned first.

    Attributes:
        rank: Function that returns the score of each head.
        score_description: Meaning of a score. Empty for random scores.
        needs_corpus: Whether the method runs the model on texts.
        needs_lm_head: Whether the method needs the language modeling head of the model.
        is_default: Whether pruning curves show the method by default.
        is_random: Whether scores are random numbers that depend only on the seed: a baseline for the other methods.
    """

    rank: "Callable[[ModelProtocol, RankingInput], Scores]"
    score_description: str = ""
    needs_corpus: bool = True
    needs_lm_head: bool = False
    is_default: bool = True
    is_random: bool = False


def _rank_by_importance(
    model: "ModelProtocol", inputs: RankingInput, ranking: Literal["ablation", "gradient"]
) -> Scores:
    """Rank by the loss increase without the head, or by the mean of |∂L/∂ξ| over texts, where ξ is a gate on the head
    (https://arxiv.org/abs/1905.10650). An ablated head is replaced by its mean if means are given, else by zeros."""
    from headwise.analysis.ablation.importance import importance

    ablation, callback = "zero" if inputs.means is None else "mean", inputs.progress
    progress = None if callback is None else lambda label, done, total: callback(inputs.progress_label, done, total)
    head_importance = importance(
        model,
        inputs.corpus,
        ranking=ranking,
        ablation=ablation,
        means=inputs.means,
        progress=progress,
    )
    return dict(zip(head_importance.addresses, head_importance.mean.tolist(), strict=True))


def _rank_by_gates(model: "ModelProtocol", inputs: RankingInput) -> Scores:
    """Rank by the probability that the learned gate of a head is open if the fraction `keep` of all gates is
    (https://arxiv.org/abs/1905.09418)."""
    from headwise.compression.l0_gates import learn_gates

    return learn_gates(
        model, inputs.corpus, keep=inputs.keep, steps=inputs.gate_steps, seed=inputs.seed, progress=inputs.progress
    )


def _rank_randomly(model: "ModelProtocol", inputs: RankingInput) -> Scores:
    """Return random scores."""
    import numpy as np

    values = np.random.default_rng(inputs.seed).random(len(model.spec.head_addresses))
    return dict(zip(model.spec.head_addresses, values.tolist(), strict=True))


RANKERS = {
    "ablation": HeadRanker(partial(_rank_by_importance, ranking="ablation"), "loss increase without the head, nats"),
    "gradient": HeadRanker(
        partial(_rank_by_importance, ranking="gradient"),
        "mean |gradient| of the loss with respect to a gate on the head",
        needs_lm_head=True,
    ),
    "random": HeadRanker(_rank_randomly, needs_corpus=False, is_random=True),
    "gates": HeadRanker(_rank_by_gates, "probability that the learned gate of the head is open", is_default=False),
}


def get_ranker(ranking: str) -> HeadRanker:
    """Return a ranking method by its name.

    >>> get_ranker("random").needs_corpus
    False
    """
    if ranking not in RANKERS:
        raise ArgumentError(f"ranking: unknown method. Got {ranking!r}; {suggest_names(str(ranking), RANKERS)}")
    return RANKERS[ranking]
