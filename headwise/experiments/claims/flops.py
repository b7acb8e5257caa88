"""At a fixed width, the number of heads does not change the work of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.model import AnyModel
from headwise.spec import AttentionSpec

HEADS = (1, 2, 4, 8, 16, 32, 64)
SOFTMAX = 5  # operations a score: the largest of its row, take it off, exponentiate, add up, divide
BAR = 0.05  # of the work: more than that, and it is not the same any more
LARGER = ((768, 1024), (4096, 4096))  # width and tokens of GPT-2 and of a Llama, beside the lab's own


@dataclass(frozen=True)
class Work:
    """Operations of one layer on one text."""

    products: int  # of matrices, a multiplication and an addition counted as two
    softmax: int

    @property
    def total(self) -> int:
        """Both."""
        return self.products + self.softmax


def count(spec: AttentionSpec, tokens: int) -> Work:
    """The operations of a layer that materialises its maps, counted while it runs on tensors without numbers.

    >>> count(AttentionSpec(width=64, heads=4), 10) == Work(8 * 10 * 64**2 + 4 * 10**2 * 64, 5 * 4 * 10**2)
    True
    """
    with torch.device("meta"):
        layer, x = MultiHeadAttention(spec, backend="batched"), torch.empty(1, tokens, spec.width)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._softmax: _softmax})
    with counter, torch.no_grad():
        layer(x)
    by_name = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    softmax = by_name.pop("aten._softmax", 0)
    return Work(sum(by_name.values()), softmax)


def _softmax(shape: torch.Size, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    return SOFTMAX * shape.numel()


def count_over(width: int, tokens: int, heads: Sequence[int] = HEADS, **fields: Any) -> dict[int, Work]:
    """The same for every head count that divides the width; other fields of the spec by name."""
    return {h: count(AttentionSpec(width=width, heads=h, **fields), tokens) for h in heads if width % h == 0}


def measure(lab: Lab, larger: Sequence[tuple[int, int]] = LARGER) -> Figures:
    """The lab's width and length, and those of larger models."""
    return _figures([(lab.size.width, lab.size.context), *larger])


def on(model: AnyModel, text: Any = None) -> Figures:
    """The model's width, with other head counts, on as many tokens as it reads: its context, or the longest given text."""
    width, tokens = model.spec.width, model.spec.context
    if text is not None:
        tokens = max(len(unit.ids) for unit in Reading.of(model, text))
    if width % 2:
        raise HeadwiseError(
            f"a width of {width} cannot be shared out over several heads; take a model of an even width."
        )
    return _figures([(width, tokens)], model.spec.attention.kv_heads < model.spec.attention.heads)


def _figures(sizes: Sequence[tuple[int, int]], shared: bool = True) -> Figures:
    figures = Figures()
    first = count_over(*sizes[0])
    for h, work in first.items():
        figures.add("products", h, work.products / 1e6).add("softmax", h, work.softmax / 1e6)
    for width, tokens in sizes:
        made = count_over(width, tokens).values()
        figures.add("most over fewest", f"products {width}x{tokens}", _spread([work.products for work in made]))
        figures.add("most over fewest", f"with softmax {width}x{tokens}", _spread([work.total for work in made]))
    if shared:
        made = count_over(*sizes[0], kv_heads=1).values()
        figures.add("most over fewest", "products, one key head", _spread([work.products for work in made]))
    return figures


def _spread(counts: Sequence[int]) -> float:
    return max(counts) / min(counts)


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    spreads = {str(at): figure.mean for at, figure in figures.at("most over fewest").items()}
    plain = [ratio for at, ratio in spreads.items() if at.startswith("products ")]
    moved = {at: ratio for at, ratio in spreads.items() if not at.startswith("products ") and ratio > 1 + BAR}
    if any(ratio != 1 for ratio in plain):
        return Verdict("does not hold")
    if moved:
        told = "; ".join(f"{at} moves it up to {ratio:.3g} times" for at, ratio in moved.items())
        return Verdict("depends", f"on what is counted, the products alone being equal: {told}")
    return Verdict("true by construction")


CLAIM = Claim(
    number=4,
    name="flops",
    says="At a fixed width, the total work of attention (FLOPs) does not depend on the number of heads.",
    against="A head count at which a layer of the same width needs more operations on the same text.",
    setup=f"Layers of {HEADS[0]} to {HEADS[-1]} heads at the lab's width and length and at those of larger models (width x "
    "tokens). Matrix products (projections, scores, mixing of values) are counted as the layer runs, two for each "
    "multiplication with its addition; softmax is counted apart, "
    f"{SOFTMAX} for each of the heads x tokens² scores. Figures in millions.",
    rule=f"Does not hold if the products of a plain layer move at all. Depends if counting softmax too, or sharing one key "
    f"head, moves the total by more than {BAR:.0%} from the fewest to the most; else it is true by construction.",
    identity="the products of a plain layer are heads x head_dim wide, which is the width",
    words=("true by construction", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    picture=Picture(("products", "softmax"), x="heads", y="million operations of a layer", log=True),
    on=on,
)
