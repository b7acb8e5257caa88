"""More heads at the same width cost bandwidth: the same products, but more maps to write and read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.statistic import At, Figure, Figures
from headwise.experiments.engine.threads import one_thread
from headwise.experiments.engine.timing import race
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import AnyModel

HEADS = (1, 2, 4, 8, 16, 32, 64)
BASE = 8
BAR = 1.1  # times as long: less is not worth a word
FORMS = ("batched", "fused")
PASSES = ("forward", "with backward")
TURNS = 15


def times(
    width: int,
    tokens: int,
    heads: Sequence[int] = HEADS,
    *,
    form: str = "fused",
    backward: bool = False,
    turns: int = TURNS,
) -> dict[int, Figure]:
    """How long a causal layer of each head count takes, one of 8 heads being 1.

    >>> list(times(16, 8, (8, 16), turns=3))
    [8, 16]
    """
    if BASE not in heads or any(width % h for h in heads):
        raise HeadwiseError(f"head counts {tuple(heads)} must divide the width {width} and have {BASE} among them.")
    torch.manual_seed(0)
    x = torch.randn(1, tokens, width)
    calls = {str(h): _step(MultiHeadAttention(width=width, heads=h, backend=form), x, backward) for h in heads}
    with one_thread():
        made = race(calls, str(BASE), turns, least=0.01)
    return {h: made[str(h)] for h in heads}


def _step(layer: MultiHeadAttention, x: Tensor, backward: bool) -> Callable[[], None]:
    mask = causal()

    def forward() -> None:
        with torch.inference_mode():
            layer(x, mask=mask)

    def both() -> None:
        layer.zero_grad()
        layer(x, mask=mask).sum().backward()

    return both if backward else forward


def measure(lab: Lab, turns: int = TURNS) -> Figures:
    """Layers of four times the lab's width, on four times its context: for the usual size 256 and 512."""
    return _figures(4 * lab.size.width, 4 * lab.size.context, turns)


def on(model: AnyModel, text: Any = None, turns: int = TURNS) -> Figures:
    """Layers of the model's width on as many tokens as it reads, at most 512."""
    return _figures(model.spec.width, min(512, model.spec.context), turns)


def _figures(width: int, tokens: int, turns: int) -> Figures:
    heads = tuple(h for h in HEADS if width % h == 0)
    figures = Figures()
    for form in FORMS:
        for which in PASSES:
            made = times(width, tokens, heads, form=form, backward=which != "forward", turns=turns)
            for h, ratio in made.items():
                figures.add(f"{form} {which}", h, ratio)
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    most = max(int(h) for h in figures.at(figures.names[0]) if h is not None)
    names = figures.names
    rising = [name for name in names if figures[name, most].above(BAR)]
    cheap = [name for name in names if figures[name, 1].below(1 / BAR)]
    if all(figures[name, most].below(BAR) for name in names):
        return Verdict("does not hold")
    if len(rising) == len(cheap) == len(names):
        return Verdict("holds")
    if not rising:
        return Verdict("depends", f"on the turn of the clock: whether {most} heads take longer than {BASE} stays open")
    told = []
    if len(rising) < len(figures.names):
        told.append(f"from {BASE} to {most} heads it surely costs only {', '.join(rising)}")
    if len(cheap) < len(figures.names):
        told.append(f"from 1 to {BASE} heads it surely costs {'only ' + ', '.join(cheap) if cheap else 'nothing'}")
    return Verdict("depends", f"on the head count and the form: {'; '.join(told)}")


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    """The fewest and the most heads of every form and pass."""
    for name in figures.names:
        counts = [h for h in figures.at(name) if isinstance(h, int)]
        yield from ((name, h) for h in {1, max(counts)})


CLAIM = Claim(
    number=22,
    name="bandwidth",
    says="More heads at the same width cost bandwidth: the products stay the same, but the layer takes longer.",
    against="A layer of many heads that takes no longer than one of few.",
    setup=f"Causal layers of {HEADS[0]} to {HEADS[-1]} heads at one width (four times the lab's) on one thread of this "
    "machine, with materialised maps (batched) and without (fused), forward and with the backward pass, in turns. Figures "
    f"are times over that of {BASE} heads, medians over turns with intervals by ranks; the products "
    "are as many, as the claim on FLOPs shows. Time alone is measured, not its cause: that bandwidth is what costs it "
    "is not tested.",
    rule=f"Holds if in every form and pass the most heads surely take more than {BAR:g} times as long as {BASE}, and 1 head "
    f"surely less than 1/{BAR:g} of it. Does not hold if the most heads surely take less than {BAR:g} times as long "
    "everywhere. Else depends: on the turn of the clock if they surely take more nowhere, or on the head count and the form.",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(
        tuple(f"{form} {which}" for form in FORMS for which in PASSES), x="heads", y=f"time, {BASE} heads = 1", log=True
    ),
    timed=True,
    on=on,
)
