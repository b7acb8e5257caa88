"""`prune`: a smaller model in one call."""

from typing import Unpack

from headwise.compression.plan import plan_pruning
from headwise.compression.prune_heads import M
from headwise.compression.prune_request import PruneOptions, PruneRequest
from headwise.model import check_model
from headwise.progress import Progress


def prune(
    model: M, request: PruneRequest | None = None, *, progress: Progress | None = None, **options: Unpack[PruneOptions]
) -> M:
    """A smaller model: the share `keep` of the heads stays, or those named in `heads` go. The given model stays as it is.

    Takes a `PruneRequest`, or its fields by name; `corpus` is what heads are ranked on and whose means are folded in:
    a text, a list of texts, a path. `plan_pruning` takes the same, with `prune` for `heads`, and gives the plan, to be
    looked at, saved and applied later; `prune_study` also tells what the cut cost.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> small = prune(Transformer(preset("nano")), keep=0.5, ranking="random", fold_mean=False)
    >>> len(small.spec.head_addresses)
    18
    """
    check_model(model)
    model = model.to_memory()
    return plan_pruning(model, PruneRequest.of(request, options), progress=progress).apply_unchecked(model)
