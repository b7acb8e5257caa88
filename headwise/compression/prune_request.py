"""What is asked of a cut, in one object: which heads go, how they are chosen, what is left behind for them."""

from dataclasses import dataclass, fields
from typing import Any, TypedDict

from headwise.compression.rankers import way_of
from headwise.compression.select_heads import heads_left
from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import Pattern
from headwise.model import AnyModel

WHICH = "say which heads go, in one way: keep=0.5, the share that stays; heads='5.1,6.*'; or a plan that was saved."


class PruneWords(TypedDict, total=False):
    """The fields of a `PruneRequest` by name, as `prune` and `Plan.make` take them."""

    keep: float | None
    heads: Pattern | None
    by: str
    fold: bool
    on: Any
    rounds: int
    seed: int
    steps: int


@dataclass(frozen=True)
class PruneRequest:
    """Which heads go: those that `heads` names, or all but the share `keep`, the others having the least worth.

    `by` ranks heads on the corpus `on`: ablation (what is lost without each), gradient, random (`seed`), or gates that are
    learned (`steps`). `fold` leaves the heads' means over `on` behind. `rounds` cuts a little at a time and ranks what is
    left anew.

    >>> PruneRequest(keep=0.5, by="random", fold=False).reads
    False
    >>> PruneRequest(heads="5.1", keep=0.5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headwise.errors.HeadwiseError: say which heads go, in one way: keep=0.5, the share that stays; heads='5.1,6.*'; or a ...
    """

    keep: float | None = None
    heads: Pattern | None = None
    by: str = "ablation"
    fold: bool = True
    on: Any = None  # a text, a list of texts, a path, a Corpus
    rounds: int = 1
    seed: int = 0
    steps: int = 200

    def __post_init__(self) -> None:
        if self.keep is not None and self.heads is not None:
            raise HeadwiseError(WHICH)
        way_of(self.by)
        if type(self.rounds) is not int or self.rounds < 1:
            raise HeadwiseError(f"rounds must be a whole number of at least 1, got {self.rounds!r}.")

    @staticmethod
    def of(given: "PruneRequest | None", words: PruneWords) -> "PruneRequest":
        """A request that is given, or one of these words."""
        known = [field.name for field in fields(PruneRequest)]
        for name in words.keys() - set(known):
            raise HeadwiseError(f"a cut is not asked for by {name}=; {close_names(name, known)}")
        if given is None:
            return PruneRequest(**words)
        if words or not isinstance(given, PruneRequest):
            raise HeadwiseError(f"give a PruneRequest alone, or its fields by name: keep=0.5, on=…; got {given!r}.")
        return given

    @property
    def cuts(self) -> bool:
        """Whether it says which heads go; a curve needs only how they are ranked."""
        return self.keep is not None or self.heads is not None

    @property
    def ranks(self) -> bool:
        """Whether heads are ranked on a corpus."""
        return self.keep is not None and way_of(self.by).reads

    @property
    def reads(self) -> bool:
        """Whether a corpus is needed."""
        return self.fold or self.ranks

    def check(self, model: AnyModel) -> None:
        """Refuse what can be told to be wrong before any work is done."""
        if not self.cuts:
            raise HeadwiseError(WHICH)
        if self.keep is not None:
            heads_left(len(model.spec.addresses), self.keep)
        if self.on is None and self.reads:
            what = "folding leaves heads' means behind" if self.fold else f"ranking by {self.by} asks the model"
            needed = "pairs" if model.spec.kind == "encoder-decoder" else "a text"
            raise HeadwiseError(f"{what}, so it needs {needed}: give on=…{', or fold=False' * self.fold}.")
