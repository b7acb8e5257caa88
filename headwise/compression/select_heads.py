"""Which heads to keep: what each is worth, and the choice that follows, at once or in rounds."""

from headwise.analysis.ablation.head_outputs import Means
from headwise.analysis.recording.batching import read_sites
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.compression.prune_heads import cut, fold
from headwise.compression.rankers import RankingInput, Scores, way_of
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import Address


def rank(
    model: AnyModel,
    on: Reading | None,
    by: str,
    *,
    keep: float = 0.5,
    means: Means | None = None,
    seed: int = 0,
    steps: int = 200,
    progress: Progress | None = None,
    called: str = "",
) -> Scores:
    """What each head is worth by one of `headwise.compression.rankers.WAYS`: those with the least are cut first."""
    if on is not None:
        read_sites(model, model.spec.addresses)  # heads that texts do not reach cannot be ranked beside those they do
    ask = RankingInput(on, keep, means, seed, steps, progress, called or f"ranking by {by}")
    return way_of(by).rank(model, ask)


def choose(
    model: AnyModel,
    on: Reading | None,
    keep: float,
    by: str,
    *,
    means: Means | None = None,
    rounds: int = 1,
    seed: int = 0,
    steps: int = 200,
    progress: Progress | None = None,
) -> tuple[tuple[Address, ...], Scores]:
    """The heads that go so that the share `keep` stays, and every head's score; in rounds, each as it last was ranked.

    One ablation is a lower bound: another head takes over, until it is cut as well. So with `rounds` only a part goes at a
    time, and what is left is ranked anew in the smaller model.
    """
    every = model.spec.addresses
    left = heads_left(len(every), keep)
    gone: tuple[Address, ...] = ()
    scores: Scores = {}
    rounds = min(rounds, len(every) - left)
    for turn in range(1, rounds + 1):
        target = (len(every) - left) * turn // rounds
        here = model if not gone else cut(model, gone, None if means is None else fold(model, gone, means))
        share = (len(every) - target) / len(here.spec.addresses)
        called = f"ranking by {by}" + (f", round {turn} of {rounds}" if rounds > 1 else "")
        scores |= rank(here, on, by, keep=share, means=means, seed=seed, steps=steps, progress=progress, called=called)
        gone = (*gone, *worst(here.spec.addresses, scores, target - len(gone)))
    return tuple(head for head in every if head in gone), scores


def worst(heads: tuple[Address, ...], scores: Scores, count: int) -> tuple[Address, ...]:
    """So many heads with the lowest scores; among equals the first."""
    return tuple(sorted(heads, key=lambda head: scores[head])[:count])


def heads_left(total: int, keep: float) -> int:
    """How many heads a share is, at least one.

    >>> heads_left(270, 0.5), heads_left(270, 0.001), heads_left(270, 1)
    (135, 1, 270)
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise HeadwiseError(f"keep is the share of heads that stay, above 0 and at most 1; got {keep!r}.")
    if not total:
        raise HeadwiseError("this model has no heads left to cut.")
    return max(1, round(keep * total))
