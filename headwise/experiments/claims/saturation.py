"""Narrower heads keep scores from saturating."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.head_counts import head_counts, trends
from headwise.heads.hook_point import Seen
from headwise.kernels.score_params import raw_scores, spread, visible_scores, weights
from headwise.model import AnyModel, quiet

KEYS = 64  # of a random row
ROWS = 512  # random rows, for each head_dim
FEWEST = 8  # keys a row of a text must see: a shorter one is neither sharp nor flat
WITHOUT = (1, 8, 32)  # head counts that are trained without the scale as well
BAR = 0.01  # of relative entropy, a doubling of head_dim; over six doublings .06
TRAINED, UNSCALED = "trained, by 1/√d", "trained, unscaled"
RANDOM = {"unscaled": False, "by 1/√d": True}  # whether random q and k are scaled


def saturation(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows of scores (…, S), −inf where a key is hidden: their standard deviation, and entropy over ln(visible keys).

    >>> sd, entropy = saturation(torch.tensor([[0.0, 0.0, 0.0, 0.0, -torch.inf]]))
    >>> sd.item(), round(entropy.item(), 6)
    (0.0, 1.0)
    """
    seen = scores > -torch.inf
    many = seen.sum(-1)
    there = scores.masked_fill(~seen, 0)
    mean = there.sum(-1) / many
    square = (there - mean[..., None]).masked_fill(~seen, 0).square().sum(-1) / many
    p = scores.softmax(-1)
    return square.sqrt(), torch.special.entr(p).sum(-1) / many.clamp(min=2).log()


def of_random(head_dim: int, scaled: bool, seed: int = 0) -> tuple[float, float]:
    """The same of random q and k, whose channels have spread 1: the scores' spread is √d, or 1 when scaled by 1/√d."""
    dice = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, 1, head_dim, generator=dice)  # a row each
    k = torch.randn(ROWS, KEYS, head_dim, generator=dice)
    scores = (q @ k.mT)[:, 0] / (math.sqrt(head_dim) if scaled else 1)  # (ROWS, KEYS)
    sd, entropy = saturation(scores)
    return float(sd.square().mean().sqrt()), float(entropy.mean())


@torch.no_grad()
def of_model(model: AnyModel, corpus: Any = None, texts: int = 64) -> dict[str, float]:
    """The mean over a model's heads and the rows of some texts: `sd` of scores, `raw sd` before the scale, `entropy`."""
    made: dict[str, list[Tensor]] = {"sd": [], "raw sd": [], "entropy": []}

    def see(seen: Seen) -> None:
        T, S = seen.q.shape[2], seen.k.shape[2]
        q, k = seen.q.float(), spread(seen.k, seen.terms.groups).float()
        bare = replace(seen.terms, scale=1.0, softcap=None, bias=None)
        scores, raw = (
            visible_scores(raw_scores(q, k, terms), terms, range(T), range(S), T, S) for terms in (seen.terms, bare)
        )  # (B, H, T, S)
        enough = (scores > -torch.inf).sum(-1) >= FEWEST  # (B, H, T)
        sd, _ = saturation(scores)
        p = weights(scores, seen.terms, seen.terms.may_be_empty(T, S))
        entropy = torch.special.entr(p).sum(-1) / (scores > -torch.inf).sum(-1).clamp(min=2).log()
        for name, rows in (("sd", sd), ("raw sd", saturation(raw)[0]), ("entropy", entropy)):
            made[name].append(rows[enough].cpu())

    with quiet(model), ExitStack() as stack:
        for site in model.sites():
            stack.enter_context(site.listen(see))
        for unit in islice(Reading.of(model, corpus), texts):
            model(make_batch([unit], device=model.device).ids, hidden=True)
    return {name: float(torch.cat(rows).mean()) for name, rows in made.items()}


def points(lab: Lab) -> list[Point]:
    """Every head count with the scale, some without."""
    return [lab.point(seed, heads, **more) for _, heads, more in _kinds(lab) for seed in lab.seeds]


def _kinds(lab: Lab) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """What trained models are called, their head count and what differs in their attention."""
    width = lab.size.width
    for heads in reversed(head_counts(width)):
        yield TRAINED, heads, {}
        if heads == width:
            yield UNSCALED, heads, {}  # 1/√1 is no scale: the same model
        elif heads in WITHOUT:
            yield UNSCALED, heads, {"scale": 1.0}


def measure(lab: Lab) -> Figures:
    """Trained models, with the scale and without, and random q and k, of every head_dim."""
    figures, width = Figures(), lab.size.width
    trained: dict[str, dict[int, list[float]]] = {TRAINED: {}, UNSCALED: {}}
    for name, heads, more in _kinds(lab):
        models = [lab.made(lab.point(seed, heads, **more)).model() for seed in lab.seeds]
        made = [of_model(model, lab.documents(seed)) for model, seed in zip(models, lab.seeds, strict=True)]
        figures.add(f"sd: {name}", width // heads, [one["sd"] for one in made])
        if name == TRAINED:
            figures.add("sd: trained, before the scale", width // heads, [one["raw sd"] for one in made])
        trained[name][width // heads] = [one["entropy"] for one in made]
    for name, by_size in trained.items():
        _add(figures, name, by_size)
        figures.add("entropy gained by a doubling of head_dim", name, trends(by_size))
    for name, scaled in RANDOM.items():
        sizes = [width // heads for heads in reversed(head_counts(width))]
        drawn = {d: [of_random(d, scaled, seed) for seed in lab.seeds] for d in sizes}
        for d, found in drawn.items():
            figures.add(f"sd: random, {name}", d, [sd for sd, _ in found])
        by_size = {d: [entropy for _, entropy in found] for d, found in drawn.items()}
        _add(figures, f"random, {name}", by_size)
        figures.add("slope of random q and k", name, trends(by_size))
    return figures


def _add(figures: Figures, name: str, by_size: dict[int, list[float]]) -> None:
    for d, values in by_size.items():
        figures.add(f"entropy: {name}", d, values)


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    gained = figures.at("entropy gained by a doubling of head_dim")
    so = [str(name) for name, figure in gained.items() if figure.below(-BAR)]
    not_so = [str(name) for name, figure in gained.items() if figure.above(-BAR)]
    unsure = [str(name) for name in gained if name not in (*so, *not_so)]
    if len(so) == len(gained):
        return Verdict("holds")
    if len(not_so) == len(gained):
        return Verdict("does not hold")
    told = (("so", so), ("not so", not_so), ("open", unsure))
    listed = [f"{word}: {', '.join(some)}" for word, some in told if some]
    return Verdict("depends", f"on the {'seed' if unsure else 'scale'}; {'; '.join(listed)}")


CLAIM = Claim(
    number=7,
    name="saturation",
    says="Narrower heads keep attention scores from saturating.",
    against="Wide heads whose softmax is no sharper than that of narrow ones.",
    setup="Models of one width: of every head count trained with scores scaled by 1/√d, and of some "
    f"({', '.join(map(str, WITHOUT))} heads) trained without the scale; where head_dim is 1 both are the same. The spread of "
    "scores in a row and the entropy of its softmax, over the logarithm of the keys it sees, are measured on held-out text, "
    f"on rows of at least {FEWEST} keys. Random q and k of unit channels, {KEYS} keys, are shown beside and not judged: "
    "their slope is known beforehand.",
    rule="For both kinds of trained models the entropy's slope on log₂(head_dim), by seed. Holds if it is surely below "
    f"−{BAR:g} for both, does not hold if surely above −{BAR:g} for both; else depends on the seed if either is neither, or "
    "on the scale.",
    asks=every("entropy gained by a doubling of head_dim"),
    measure=measure,
    judge=judge,
    picture=Picture(
        tuple(f"entropy: {name}" for name in (TRAINED, UNSCALED, *(f"random, {name}" for name in RANDOM))),
        x="head_dim", y="entropy / ln(keys seen)", log=True,
    ),
    points=points,
)  # fmt: skip
