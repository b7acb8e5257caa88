"""One large projection is much faster than one small one for each head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.threads import one_thread
from headwise.experiments.engine.timing import race
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.model import AnyModel
from headwise.spec import AttentionSpec

MUCH = 1.5  # times as long
SIZES = (
    (64, 8, 64),
    (64, 64, 64),
    (256, 8, 64),
    (256, 8, 512),
    (512, 8, 1),
    (768, 12, 1),
    (768, 12, 64),
    (768, 12, 512),
)
PASSES = ("forward", "with backward")
TURNS = 15


class LoopedHeads(nn.Module):
    """The same layer as beginners write it: every head has projections of its own, and comes after the one before it."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.groups, self.scale = layer.spec.kv_of_head, layer.spec.head_dim**-0.5
        self.q, self.k, self.v = (_apart(layer.read.weight(letter)) for letter in "qkv")
        self.out = nn.Parameter(layer.write.weight.detach().clone())

    def project(self, x: Tensor) -> list[Tensor]:
        """Every head's q, then every k, then every v: (B, T, D) → (B, T, d) each."""
        return [F.linear(x, weight) for weight in (*self.q, *self.k, *self.v)]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        made = self.project(x)
        q, k, v = made[: len(self.q)], made[len(self.q) : -len(self.v)], made[-len(self.v) :]
        z = []
        for head, group in enumerate(self.groups):
            share = (q[head] * self.scale @ k[group].mT).softmax(-1)  # (B, T, T)
            z.append(share @ v[group])  # (B, T, e)
        return F.linear(torch.cat(z, -1), self.out)


def slower(
    spec: AttentionSpec, tokens: int, batch: int = 1, turns: int = TURNS, least: float = 0.01
) -> dict[str, Figure]:
    """How many times as long a loop over heads takes as one product: projections alone, and the whole layer, each pass.

    >>> made = slower(AttentionSpec(width=8, heads=2), 4, turns=3, least=0.001)
    >>> list(made)
    ['projections forward', 'projections with backward', 'layer forward', 'layer with backward']
    """
    torch.manual_seed(0)
    layer = MultiHeadAttention(spec, backend="batched")
    loop, x = LoopedHeads(layer), torch.randn(batch, tokens, spec.width)
    pairs: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
        "projections": (layer.read, loop.project),
        "layer": (layer, loop),
    }
    found = {}
    for what, (one, many) in pairs.items():
        for which, timed in zip(PASSES, (_forward, _backward), strict=True):
            calls = {"one": timed(one, layer, x), "loop": timed(many, loop, x)}
            with one_thread():
                found[f"{what} {which}"] = race(calls, "one", turns, least)["loop"]
    return found


def _apart(weight: Tensor) -> nn.ParameterList:
    """(heads, channels, width) → a weight of its own for each head."""
    return nn.ParameterList(nn.Parameter(one.detach().clone()) for one in weight)


def _forward(call: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode():
            call(x)

    return step


def _backward(call: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()
    given = call(x)
    slopes = [torch.randn_like(part) for part in ([given] if isinstance(given, Tensor) else given)]

    def step() -> None:
        module.zero_grad()
        x.grad = None
        made = call(x)
        torch.autograd.backward([made] if isinstance(made, Tensor) else list(made), slopes)

    return step


def measure(lab: Lab, sizes: Sequence[tuple[int, int, int]] = SIZES, turns: int = TURNS) -> Figures:
    """Random layers of several sizes: width, heads, tokens."""
    figures = Figures()
    for width, heads, tokens in sizes:
        _add(figures, AttentionSpec(width=width, heads=heads), tokens, turns)
    return figures


def on(model: AnyModel, text: Any = None, turns: int = TURNS) -> Figures:
    """Layers of the model's sizes, for one token, for 64 and for as many as it reads, at most 512."""
    own = model.spec.attention
    spec = AttentionSpec(own.width, own.heads, own.head_dim, own.value_dim, own.kv_heads)
    figures = Figures()
    for tokens in sorted({1, min(64, model.spec.context), min(512, model.spec.context)}):
        _add(figures, spec, tokens, turns)
    return figures


def _add(figures: Figures, spec: AttentionSpec, tokens: int, turns: int) -> None:
    for name, ratio in slower(spec, tokens, turns=turns).items():
        figures.add(name, f"{spec.width}x{spec.heads}x{tokens}", ratio)


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    ratios = {which: figures.at(f"projections {which}") for which in PASSES}
    every_one = [(f"{at} {which}", ratio) for which, some in ratios.items() for at, ratio in some.items()]
    so = [name for name, ratio in every_one if ratio.above(MUCH)]
    not_so = [name for name, ratio in every_one if ratio.below(MUCH)]
    unsure = [name for name, _ in every_one if name not in (*so, *not_so)]
    if len(so) == len(every_one):
        return Verdict("holds")
    if len(not_so) == len(every_one):
        return Verdict("does not hold")
    told = "; ".join(f"{word}: {', '.join(some)}" for word, some in (("not so", not_so), ("open", unsure)) if some)
    on = "the size (width x heads x tokens)" if so and not_so else "the turn of the clock"
    return Verdict("depends", f"on {on}; {told}")


CLAIM = Claim(
    number=2,
    name="one-projection",
    says="One large projection for all heads is much faster than a small one for each head.",
    against="A size at which a loop over the heads' own projections takes about as long as one product.",
    setup="Layers of several widths, head counts and lengths on one thread of this machine: q, k and v by one product and by "
    "one for each head and letter, forward and with the backward pass, in turns; and the whole layer, batched and as a loop "
    "over heads. Figures say how many times as long the loop takes: medians over turns, with intervals by ranks.",
    rule=f"Much faster: the loop surely takes more than {MUCH:g} times as long. Holds if that is so of the projections at "
    "every size in both passes; does not hold if at every size it surely takes less; else depends, on the size if some "
    "surely do and some surely do not, else on the turn of the clock. The whole layer is told beside it and not judged.",
    measure=measure,
    judge=judge,
    picture=Picture(
        ("projections forward", "projections with backward", "layer forward", "layer with backward"),
        x="width x heads x tokens",
        y="time of the loop, one product = 1",
    ),
    asks=every(*(f"projections {which}" for which in PASSES)),
    timed=True,
    on=on,
)
