"""The naive loop, the batched form and the fused form give the same numbers."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.batching import read
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.heads.hook_point import Seen
from headwise.kernels import causal
from headwise.kernels.blockwise import blockwise
from headwise.kernels.dispatch import BACKENDS
from headwise.model import AnyModel, quiet

FORMS = ("batched", "fused", "blockwise")
ROWS, HEADS = 13, 2  # of a block; by itself the kernel would take a small call in one block, which is the batched form
TOKENS = 32  # that a given model reads
BAR = 1e-5  # of float32, relative: sums are made in another order


def furthest(layer: MultiHeadAttention, x: Tensor) -> dict[str, float]:
    """How far each form strays from the loop over heads, in z and the gradients of q, k, v: the largest relative difference.

    >>> made = furthest(MultiHeadAttention(width=8, heads=2), torch.randn(1, 5, 8))
    >>> max(made.values()) < 1e-5
    True
    """
    caught: list[Seen] = []
    with torch.no_grad(), layer.site.listen(caught.append):
        layer(x, mask=causal())
    return _furthest(caught[0])


def _furthest(seen: Seen) -> dict[str, float]:
    """The same of one call."""
    kernels = {**BACKENDS, "blockwise": partial(blockwise, row_block=ROWS, head_block=HEADS)}

    def numbers(form: str) -> list[Tensor]:
        qkv = [part.detach().clone().requires_grad_() for part in (seen.q, seen.k, seen.v)]  # (B, H or K, ·, ·)
        z = kernels[form](*qkv, seen.terms)  # (B, H, T, e)
        return [z.detach(), *torch.autograd.grad(z.square().sum(), qkv)]

    wanted = numbers("reference")
    return {
        form: max(float((got - want).norm() / want.norm()) for got, want in zip(numbers(form), wanted, strict=True))
        for form in FORMS
    }


def measure(lab: Lab) -> Figures:
    """Random layers of several sizes, in float32; the worst of them for each form and seed."""
    figures = Figures()
    worst: dict[str, list[float]] = {form: [] for form in FORMS}
    for seed in lab.seeds:
        torch.manual_seed(seed)
        shapes = ((64, 1, 64), (64, 8, 96), (64, 64, 32), (128, 4, 128))  # width, heads, tokens
        made = [furthest(MultiHeadAttention(width=D, heads=H), torch.randn(2, T, D)) for D, H, T in shapes]
        for form in FORMS:
            worst[form].append(max(each[form] for each in made))
    for form in FORMS:
        figures.add("relative difference", form, worst[form])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """The same with the calls of a model's own layers, on random tokens."""
    ids = torch.randint(
        model.spec.vocab, (1, min(TOKENS, model.spec.context)), generator=torch.Generator().manual_seed(0)
    )
    caught: list[Seen] = []
    with quiet(model), torch.no_grad(), ExitStack() as stack:
        for site in model.sites():
            stack.enter_context(site.listen(caught.append))
        read(model, ids.to(model.device))
    made = [_furthest(seen) for seen in caught]
    figures = Figures()
    for form in FORMS:
        figures.add("relative difference", form, max(each[form] for each in made))
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    apart = [str(form) for form, figure in figures.at("relative difference").items() if max(figure.values) > BAR]
    if not apart:
        return Verdict("holds")
    if len(apart) < len(FORMS):
        return Verdict("depends", f"on the form: {', '.join(apart)} strays")
    return Verdict("does not hold")


CLAIM = Claim(
    number=1,
    name="same-numbers",
    says="The naive loop over heads, the batched form and the fused form compute the same numbers.",
    against="A form whose output or gradient differs from the loop's by more than rounding.",
    setup="Random causal layers of 1, 4, 8 and 64 heads in float32: what every head gathers (z), and the gradients of q, k "
    f"and v, held against a loop over heads. The blockwise form runs in blocks of {ROWS} rows and {HEADS} heads, at "
    "least three.",
    rule=f"Holds if every form stays within {BAR:g} (relative, worst seed); depends if only some do.",
    measure=measure,
    judge=judge,
    picture=Picture(("relative difference",), y="relative difference"),
    on=on,
)
