"""Ways to rank heads, one entry each: whoever ranks, checks, draws curves, prints scores or tells of ways reads this table.

What is heavy is imported by the way that needs it: the command line tells of ways before anything is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from headwise.errors import HeadwiseError, close_names

if TYPE_CHECKING:
    from headwise.analysis.ablation.head_outputs import Means
    from headwise.analysis.recording.tokenized_corpus import Reading
    from headwise.model import AnyModel
    from headwise.progress import Progress
    from headwise.spec import Address

Scores = dict["Address", float]


@dataclass(frozen=True)
class RankingInput:
    """What a way is given beside the model; each takes what it needs."""

    on: "Reading | None"
    keep: float  # the share of heads that will stay
    means: "Means | None"  # what stands in for a head, where it will be folded
    seed: int
    steps: int
    progress: "Progress | None"
    called: str  # in notes of how far it is


@dataclass(frozen=True)
class Way:
    """One way to rank heads: those with the least score are cut first."""

    rank: "Callable[[AnyModel, RankingInput], Scores]"
    score: str = ""  # what a head's score is; nothing where it says nothing
    reads: bool = True  # asks the model about texts
    output: bool = False  # and needs its output over the vocabulary
    usual: bool = True  # on every curve
    drawn: bool = False  # a draw, the same for every corpus: one of many, which any other way must beat


def _importance(model: "AnyModel", ask: RankingInput, by: Literal["ablation", "gradient"]) -> Scores:
    """What is lost without a head; its mean stands in where means are given, else nothing. Or the mean of |∂L/∂ξ| over
    texts, ξ a gate on the head (https://arxiv.org/abs/1905.10650)."""
    from headwise.analysis.ablation.importance import importance

    how, told = "zero" if ask.means is None else "mean", ask.progress
    progress = None if told is None else lambda what, done, of: told(ask.called, done, of)
    worth = importance(model, ask.on, by=by, how=how, means=ask.means, progress=progress)  # pyright: ignore[reportArgumentType]
    return dict(zip(worth.addresses, worth.mean.tolist(), strict=True))


def _gates(model: "AnyModel", ask: RankingInput) -> Scores:
    """How probably a head's learned gate is open when the share `keep` is (https://arxiv.org/abs/1905.09418)."""
    from headwise.compression.l0_gates import learn_gates

    return learn_gates(model, ask.on, keep=ask.keep, steps=ask.steps, seed=ask.seed, progress=ask.progress)


def _random(model: "AnyModel", ask: RankingInput) -> Scores:
    """A number drawn with the seed."""
    import numpy as np

    draws = np.random.default_rng(ask.seed).random(len(model.spec.addresses))
    return dict(zip(model.spec.addresses, draws.tolist(), strict=True))


WAYS = {
    "ablation": Way(partial(_importance, by="ablation"), "what the loss gains without it, nats"),
    "gradient": Way(partial(_importance, by="gradient"), "how steeply the loss falls with it", output=True),
    "random": Way(_random, reads=False, drawn=True),
    "gates": Way(_gates, "how far its gate was left open", usual=False),
}


def way_of(by: str) -> Way:
    """A way by its name.

    >>> way_of("random").reads
    False
    """
    if by not in WAYS:
        raise HeadwiseError(f"heads cannot be ranked by {by!r}; {close_names(str(by), WAYS)}")
    return WAYS[by]
