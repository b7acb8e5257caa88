"""`prune`: a smaller model in one call."""

from typing import Any

from headwise.change.cut import M
from headwise.change.plan import Plan
from headwise.heads.head import Pattern
from headwise.look.profile.make import Note


def prune(
    model: M,
    *,
    keep: float | None = None,
    heads: Pattern | None = None,
    by: str = "ablation",
    fold: bool = True,
    on: Any = None,
    rounds: int = 1,
    seed: int = 0,
    steps: int = 200,
    note: Note | None = None,
) -> M:
    """A smaller model: the share `keep` of the heads stays, or those named in `heads` go. The given model stays as it is.

    This makes a plan and applies it; `Plan.make` takes the same and gives the plan, to be looked at, saved and applied
    later. `on` is the corpus that heads are ranked on and whose means are folded in: a text, a list of texts, a path.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> small = prune(Transformer(preset("nano")), keep=0.5, by="random", fold=False)
    >>> len(small.spec.addresses)
    18
    """
    plan = Plan.make(
        model, keep=keep, heads=heads, by=by, fold=fold, on=on, rounds=rounds, seed=seed, steps=steps, note=note
    )
    return plan.apply(model)
