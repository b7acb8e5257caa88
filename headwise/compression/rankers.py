"""Ways to rank heads, one entry each: whoever ranks, checks, draws curves, prints scores or tells of ways reads this table.

What is heavy is imported by the way that needs it: the command line tells of ways before anything is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from headwise.errors import HeadwiseError, suggest_names

if TYPE_CHECKING:
    from headwise.analysis.ablation.head_outputs import MeanActivations
    from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
    from headwise.model import ModelProtocol
    from headwise.progress import Progress
    from headwise.spec import Address

Scores = dict["Address", float]


@dataclass(frozen=True)
class RankingInput:
    """What a way is given beside the model; each takes what it needs."""

    corpus: "TokenizedCorpus | None"
    keep: float  # the share of heads that will stay
    means: "MeanActivations | None"  # what stands in for a head, where it will be folded
    seed: int
    gate_steps: int
    progress: "Progress | None"
    progress_label: str  # in notes of how far it is


@dataclass(frozen=True)
class HeadRanker:
    """One way to rank heads: those with the least score are cut first."""

    rank: "Callable[[ModelProtocol, RankingInput], Scores]"
    score_description: str = ""  # what a head's score is; nothing where it says nothing
    needs_corpus: bool = True  # asks the model about texts
    needs_lm_head: bool = False  # and needs its output over the vocabulary
    is_default: bool = True  # on every curve
    is_random: bool = False  # a draw, the same for every corpus: one of many, which any other way must beat


def _rank_by_importance(
    model: "ModelProtocol", inputs: RankingInput, ranking: Literal["ablation", "gradient"]
) -> Scores:
    """What is lost without a head; its mean stands in where means are given, else nothing. Or the mean of |∂L/∂ξ| over
    texts, ξ a gate on the head (https://arxiv.org/abs/1905.10650)."""
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
    """How probably a head's learned gate is open when the share `keep` is (https://arxiv.org/abs/1905.09418)."""
    from headwise.compression.l0_gates import learn_gates

    return learn_gates(
        model, inputs.corpus, keep=inputs.keep, steps=inputs.gate_steps, seed=inputs.seed, progress=inputs.progress
    )


def _rank_randomly(model: "ModelProtocol", inputs: RankingInput) -> Scores:
    """A number drawn with the seed."""
    import numpy as np

    values = np.random.default_rng(inputs.seed).random(len(model.spec.head_addresses))
    return dict(zip(model.spec.head_addresses, values.tolist(), strict=True))


RANKERS = {
    "ablation": HeadRanker(partial(_rank_by_importance, ranking="ablation"), "what the loss gains without it, nats"),
    "gradient": HeadRanker(
        partial(_rank_by_importance, ranking="gradient"), "how steeply the loss falls with it", needs_lm_head=True
    ),
    "random": HeadRanker(_rank_randomly, needs_corpus=False, is_random=True),
    "gates": HeadRanker(_rank_by_gates, "how far its gate was left open", is_default=False),
}


def get_ranker(ranking: str) -> HeadRanker:
    """A way by its name.

    >>> get_ranker("random").needs_corpus
    False
    """
    if ranking not in RANKERS:
        raise HeadwiseError(f"heads cannot be ranked by {ranking!r}; {suggest_names(str(ranking), RANKERS)}")
    return RANKERS[ranking]
