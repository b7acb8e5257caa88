"""Attention maps cost n² memory, unless attention is computed in blocks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.memory import rise
from headwise.experiments.engine.pool import apart
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.kernels import attention, causal
from headwise.model import AnyModel

LENGTHS = (256, 512, 1024, 2048)
FORMS = ("batched", "blockwise", "fused")
SQUARE, LINE = 1.7, 1.3  # exponents from which memory grows like n², and below which it grows like n


def memory(form: str, tokens: int, heads: int, head_dim: int, batch: int = 2) -> float:
    """Megabytes that causal attention takes at its peak, forward and backward, above its inputs. In a fresh process."""
    return apart(_memory, form, tokens, heads, head_dim, batch)


def _memory(form: str, tokens: int, heads: int, head_dim: int, batch: int) -> float:
    torch.manual_seed(0)
    given = [torch.randn(batch, heads, tokens, head_dim, requires_grad=True) for _ in "qkv"]  # (B, H, T, d)
    small = [x[:, :, :32].detach().requires_grad_() for x in given]  # (B, H, 32, d)
    return rise(partial(_step, form, given), partial(_step, form, small))


def _step(form: str, qkv: Sequence[Tensor]) -> None:
    attention(*qkv, mask=causal(), backend=form).sum().backward()


def exponent(by_length: Mapping[int, float]) -> float:
    """The power of n by which something grows: the slope of the straight line through its logarithms, by least squares.

    >>> round(exponent({256: 3 * 256**2, 512: 3 * 512**2, 2048: 3 * 2048**2}), 6)
    2.0
    """
    x, y = (np.log(np.maximum(1e-3, list(numbers))) for numbers in (by_length.keys(), by_length.values()))
    return float(np.polyfit(x, y, 1)[0])


def measure(lab: Lab, lengths: Sequence[int] = LENGTHS) -> Figures:
    """Heads as the lab's usual model has them."""
    return _figures(lab.size.heads, lab.size.width // lab.size.heads, lengths)


def on(model: AnyModel, text: Any = None, lengths: Sequence[int] = LENGTHS) -> Figures:
    """Heads as the model has them."""
    return _figures(model.spec.attention.heads, model.spec.attention.head_dim, lengths)


def _figures(heads: int, head_dim: int, lengths: Sequence[int]) -> Figures:
    figures = Figures()
    for form in FORMS:
        held = {tokens: memory(form, tokens, heads, head_dim) for tokens in lengths}
        for tokens, megabytes in held.items():
            figures.add(form, tokens, megabytes)
        figures.add("exponent", form, exponent(held))
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    grows = {str(form): figure for form, figure in figures.at("exponent").items()}
    in_blocks = [form for form in grows if form != "batched"]
    straight = [form for form in in_blocks if grows[form].below(LINE)]
    if not grows["batched"].above(SQUARE) or not straight:
        return Verdict("does not hold")
    if straight == in_blocks:
        return Verdict("holds")
    return Verdict("depends", f"on the form: only that of {', '.join(straight)} grows like n")


CLAIM = Claim(
    number=17,
    name="map-memory",
    says="Attention maps cost memory that grows with the square of the length, unless attention is computed in blocks.",
    against="Materialised maps whose memory grows more slowly, or attention in blocks whose memory grows as fast.",
    setup=f"Causal attention of two texts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, forward and backward, with heads as in "
    "the usual model, each time in a fresh process: peak memory above what q, k and v take (megabytes), and the power of the "
    "length by which it grows (exponent), fitted to the logarithms by least squares.",
    rule=f"Holds if the exponent is above {SQUARE:g} for the batched form and below {LINE:g} for both the blockwise and the "
    "fused one; depends if only one of the two is below; does not hold if neither is, or if the batched form is not above.",
    measure=measure,
    judge=judge,
    picture=Picture(FORMS, x="tokens", y="MB above the inputs", log=True),
    timed=True,
    on=on,
)
