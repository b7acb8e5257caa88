"""`prune`: a smaller model in one call."""

from typing import Unpack

from headwise.compression.plan import Plan
from headwise.compression.prune_heads import M
from headwise.compression.prune_request import PruneRequest, PruneWords
from headwise.model import check_model
from headwise.progress import Progress


def prune(
    model: M, request: PruneRequest | None = None, *, progress: Progress | None = None, **words: Unpack[PruneWords]
) -> M:
    """A smaller model: the share `keep` of the heads stays, or those named in `heads` go. The given model stays as it is.

    Takes a `PruneRequest`, or its fields by name; `on` is the corpus that heads are ranked on and whose means are folded in:
    a text, a list of texts, a path. `Plan.make` takes the same, with `cut` for `heads`, and gives the plan, to be looked at,
    saved and applied later; `prune_study` also tells what the cut cost.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> small = prune(Transformer(preset("nano")), keep=0.5, by="random", fold=False)
    >>> len(small.spec.addresses)
    18
    """
    check_model(model)
    model = model.in_memory()
    return Plan.make(model, PruneRequest.of(request, words), progress=progress).carry_out(model)
