"""The options of pruning in one object: which heads are pruned, how they are chosen, and what replaces them."""

from dataclasses import dataclass
from typing import Any

from headwise.compression.rankers import get_ranker
from headwise.compression.select_heads import kept_head_count
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol

PRUNE_USAGE = (
    "say which heads go, in one way: keep=0.5, the share that stays; heads='5.1,6.*'; or a plan that was saved."
)


@dataclass(frozen=True)
class PruneRequest:
    """The heads to prune: those that `heads` names, or the lowest-ranked ones so that the fraction `keep` remains.

    Attributes:
        keep: Fraction of the heads that remain, above 0 and at most 1.
        heads: Heads to prune, by address or pattern, instead of `keep`.
        ranking: Ranking method: ablation (loss increase without the head), gradient, random or gates (learned gates).
        fold_mean: Fold the mean output of each pruned head over `corpus` into the output bias of its layer.
        corpus: A text, a list of texts, a path or a Corpus, on which heads are ranked and means are taken.
        rounds: Number of pruning rounds. Each round ranks the remaining heads again.
        seed: Seed of random rankings and gates.
        gate_steps: Training steps of learned gates.

    >>> PruneRequest(keep=0.5, ranking="random", fold_mean=False).needs_corpus
    False
    >>> PruneRequest(heads="5.1", keep=0.5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headwise.errors.HeadwiseError: say which heads go, in one way: keep=0.5, the share that stays; heads='5.1,6.*'; or a ...
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
            raise HeadwiseError(PRUNE_USAGE)
        get_ranker(self.ranking)
        if type(self.rounds) is not int or self.rounds < 1:
            raise HeadwiseError(f"rounds must be a whole number of at least 1, got {self.rounds!r}.")

    @property
    def has_heads_to_prune(self) -> bool:
        """Whether the request says which heads are pruned; a curve needs only the ranking method."""
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
        """Raise if the request cannot be met by this model; called before any work is done."""
        if not self.has_heads_to_prune:
            raise HeadwiseError(PRUNE_USAGE)
        if self.keep is not None:
            kept_head_count(len(model.spec.head_addresses), self.keep)
        if self.corpus is None and self.needs_corpus:
            reason = (
                "folding leaves heads' means behind" if self.fold_mean else f"ranking by {self.ranking} asks the model"
            )
            needed = "pairs" if model.spec.kind == "encoder-decoder" else "a text"
            raise HeadwiseError(
                f"{reason}, so it needs {needed}: give corpus=…{', or fold_mean=False' * self.fold_mean}."
            )
