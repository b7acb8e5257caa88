"""What is asked of a cut, in one object: which heads go, how they are chosen, what is left behind for them."""

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from headwise.compression.rankers import get_ranker
from headwise.compression.select_heads import kept_head_count
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol

PRUNE_USAGE = (
    "say which heads go, in one way: keep=0.5, the share that stays; heads='5.1,6.*'; or a plan that was saved."
)


class PruneOptions(TypedDict, total=False):
    """The fields of a `PruneRequest` by name, as `prune` and `plan_pruning` take them."""

    keep: float | None
    heads: HeadPattern | None
    ranking: str
    fold_mean: bool
    corpus: Any
    rounds: int
    seed: int
    gate_steps: int


@dataclass(frozen=True)
class PruneRequest:
    """Which heads go: those that `heads` names, or all but the share `keep`, the others having the least worth.

    `ranking` ranks heads on the `corpus`: ablation (what is lost without each), gradient, random (`seed`), or gates that
    are learned (`gate_steps`). `fold_mean` leaves the heads' means over `corpus` behind. `rounds` cuts a little at
    a time and ranks what is left anew.

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
    corpus: Any = None  # a text, a list of texts, a path, a Corpus
    rounds: int = 1
    seed: int = 0
    gate_steps: int = 200

    def __post_init__(self) -> None:
        if self.keep is not None and self.heads is not None:
            raise HeadwiseError(PRUNE_USAGE)
        get_ranker(self.ranking)
        if type(self.rounds) is not int or self.rounds < 1:
            raise HeadwiseError(f"rounds must be a whole number of at least 1, got {self.rounds!r}.")

    @staticmethod
    def of(request: "PruneRequest | None", options: PruneOptions) -> "PruneRequest":
        """A request that is given, or one of these words."""
        field_names = [field.name for field in fields(PruneRequest)]
        for name in options.keys() - set(field_names):
            raise HeadwiseError(f"a cut is not asked for by {name}=; {suggest_names(name, field_names)}")
        if request is None:
            return PruneRequest(**options)
        if options or not isinstance(request, PruneRequest):
            raise HeadwiseError(
                f"give a PruneRequest alone, or its fields by name: keep=0.5, corpus=…; got {request!r}."
            )
        return request

    @property
    def selects_heads(self) -> bool:
        """Whether it says which heads go; a curve needs only how they are ranked."""
        return self.keep is not None or self.heads is not None

    @property
    def needs_ranking(self) -> bool:
        """Whether heads are ranked on a corpus."""
        return self.keep is not None and get_ranker(self.ranking).needs_corpus

    @property
    def needs_corpus(self) -> bool:
        """Whether a corpus is needed."""
        return self.fold_mean or self.needs_ranking

    def check(self, model: ModelProtocol) -> None:
        """Refuse what can be told to be wrong before any work is done."""
        if not self.selects_heads:
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
