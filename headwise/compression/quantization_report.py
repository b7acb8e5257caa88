"""What few bits save and cost: bytes as they lie there, and the loss beside the model that it came from."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from headwise.compression.evaluation import Estimate, PairedEvaluation, finite
from headwise.compression.quantize import Stored, stored
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL


@dataclass(frozen=True)
class Judged:
    """A model at few bits beside the one it came from; losses with 95 % intervals over texts, the difference paired."""

    before: tuple[Stored, ...]
    after: tuple[Stored, ...]
    metric: str = ""
    texts: int = 0
    loss_before: Estimate | None = None
    loss_after: Estimate | None = None
    more: Estimate | None = None  # after − before

    def rows(self) -> list[list[str | int | float]]:
        """Part, numbers, bytes before, bytes after, bits a number after; scales are counted."""
        pairs = zip(self.before, self.after, strict=True)
        return [[b.part, b.numbers, b.bytes, a.bytes, round(a.bits, 3)] for b, a in pairs if b.numbers]

    def losses(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        named = {"before": self.loss_before, "after": self.loss_after, "after − before": self.more}
        return [[name, *asdict(figure).values()] for name, figure in named.items() if figure is not None]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        made = asdict(self, dict_factory=finite)
        for side in ("before", "after"):
            made[side] = [asdict(one) | {"bits": one.bits} for one in getattr(self, side)]
        return made


def judge(before: Transformer, after: Transformer, on: Any = None) -> Judged:
    """Count what both take, and ask both about texts, where any are given.

    >>> from headwise.compression.quantize import quantise
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> judge(model, quantise(model, 4)).rows()[0]  # 6 layers of four matrices of 384 × 384
    ['heads', 3538944, 14155776, 2211840, 5.0]
    """
    if _as_floats(before) != _as_floats(after):
        raise HeadwiseError("the second model is not the first at few bits; give the model it was made from first.")
    sizes = tuple(stored(before)), tuple(stored(after))
    if on is None:
        return Judged(*sizes)
    evaluation = PairedEvaluation.of(before, on)
    losses = evaluation.losses(after)
    return Judged(
        *sizes,
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        loss_before=evaluation.estimate(evaluation.full),
        loss_after=evaluation.estimate(losses),
        more=evaluation.difference(losses, evaluation.full),
    )


def _as_floats(model: Transformer) -> ModelSpec:
    """What a model is but for its bits."""
    return replace(model.spec, weights=(), activations=FULL)
