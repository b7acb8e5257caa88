"""The options of pruning in one object: heads to prune, ranking method and folding."""

from dataclasses import dataclass
from typing import Any

from headwise.compression.rankers import get_ranker
from headwise.compression.select_heads import head_count_for_fraction
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol

PRUNE_USAGE = (
    "keep, heads, plan: exactly one of them must say which heads to prune. Use keep=0.5 (fraction of heads that remain), "
    "heads='5.1,6.*', or a saved plan."
)


@dataclass(frozen=True)
class PruneRequest:
    """The heads to prune: those that `heads` names, or the lowest-ranked ones so that the fraction `keep` remains.

    Attributes:
        keep: Fraction of the heads that remain, above 0 and at most 1.
        heads: Heads to prune, by address or pattern, instead of `keep`.
        ranking: Ranking method: ablation (loss increase without the head), gradient, random or gates (learned gates).
        fold_mean: Fold the mean output of each pruned head over `corpus` into the output bias of its layer.
        corpus: A text, a list of texts, a path or a Corpus. Heads are ranked and means are taken on it.
        rounds: Number of pruning rounds. Each round ranks the remaining heads again.
        seed: Seed of random rankings and gates.
        gate_steps: Training steps of learned gates.

    >>> PruneRequest(keep=0.5, ranking="random", fold_mean=False).needs_corpus
    False
    >>> PruneRequest(heads="5.1", keep=0.5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headwise.errors.ArgumentError: keep, heads, plan: exactly one of them must say which heads to prune. ...
    """

    keep: float | None = None
    heads: HeadPattern | None = None
    ranking: str = "ablation"
    fold_mean: bool = True
    corpus: Any = None
    rounds: int = 1
    seed: int = 0
    gate_steps: int = 200

    def __post_init__(self) -> None:
        if self.keep is not None and self.heads is not None:
            raise ArgumentError(PRUNE_USAGE)
        get_ranker(self.ranking)
        if type(self.rounds) is not int or self.rounds < 1:
            raise ArgumentError(
                f"rounds: must be an integer of at least 1. Got {self.rounds!r}. Use rounds=1 for one round."
            )

    @property
    def has_heads_to_prune(self) -> bool:
        """Whether the request names heads or a fraction. A pruning curve needs only the ranking method."""
        return self.keep is not None or self.heads is not None

    @property
    def ranks_on_corpus(self) -> bool:
        """Whether heads are ranked on a corpus."""
        return self.keep is not None and get_ranker(self.ranking).needs_corpus

    @property
    def needs_corpus(self) -> bool:
        """Whether a corpus is needed."""
        return self.fold_mean or self.ranks_on_corpus

    def check(self, model: ModelProtocol) -> None:
        """Raise if the request does not suit this model."""
        if not self.has_heads_to_prune:
            raise ArgumentError(PRUNE_USAGE)
        if self.keep is not None:
            head_count_for_fraction(len(model.spec.head_addresses), self.keep)
        if self.corpus is None and self.needs_corpus:
            reason = "folding the mean outputs of heads" if self.fold_mean else f"the ranking method {self.ranking!r}"
            needed = "pairs of a source and a text" if model.spec.kind == "encoder-decoder" else "texts"
            raise ArgumentError(
                f"corpus: {reason} needs {needed}. Got None. Give corpus=…{', or set fold_mean=False' * self.fold_mean}."
            )
