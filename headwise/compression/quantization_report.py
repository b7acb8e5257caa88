"""What few bits save and cost: bytes as they lie there, and the loss beside the model that it came from."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.quantize import WeightFootprint, weight_footprints
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION


@dataclass(frozen=True)
class QuantizationReport:
    """A model at few bits beside the one it came from; losses with 95 % intervals over texts, the difference paired."""

    before: tuple[WeightFootprint, ...]
    after: tuple[WeightFootprint, ...]
    metric: str = ""
    texts: int = 0
    loss_before: LossEstimate | None = None
    loss_after: LossEstimate | None = None
    loss_increase: LossEstimate | None = None  # after − before

    def footprint_rows(self) -> list[list[str | int | float]]:
        """Part, numbers, bytes before, bytes after, bits a number after; scales are counted."""
        pairs = zip(self.before, self.after, strict=True)
        return [[b.part, b.parameters, b.nbytes, a.nbytes, round(a.bits, 3)] for b, a in pairs if b.parameters]

    def loss_rows(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        estimates = {"before": self.loss_before, "after": self.loss_after, "after − before": self.loss_increase}
        return [[name, *asdict(estimate).values()] for name, estimate in estimates.items() if estimate is not None]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        result = asdict(self, dict_factory=nan_to_none)
        for side in ("before", "after"):
            result[side] = [asdict(footprint) | {"bits": footprint.bits} for footprint in getattr(self, side)]
        return result


def compare_quantized(before: Transformer, after: Transformer, corpus: Any = None) -> QuantizationReport:
    """Count what both take, and ask both about texts, where any are given.

    >>> from headwise.compression.quantize import quantize
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> compare_quantized(model, quantize(model, 4)).footprint_rows()[0]  # 6 layers of four matrices of 384 × 384
    ['heads', 3538944, 14155776, 2211840, 5.0]
    """
    if _unquantized_spec(before) != _unquantized_spec(after):
        raise HeadwiseError("the second model is not the first at few bits; give the model it was made from first.")
    sizes = tuple(weight_footprints(before)), tuple(weight_footprints(after))
    if corpus is None:
        return QuantizationReport(*sizes)
    evaluation = PairedEvaluator.of(before, corpus)
    losses = evaluation.losses_per_text(after)
    return QuantizationReport(
        *sizes,
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        loss_before=evaluation.mean_loss(evaluation.full_losses_per_text),
        loss_after=evaluation.mean_loss(losses),
        loss_increase=evaluation.difference(losses, evaluation.full_losses_per_text),
    )


def _unquantized_spec(model: Transformer) -> ModelSpec:
    """What a model is but for its bits."""
    return replace(model.spec, weight_rules=(), activation_bits=FULL_PRECISION)
