"""Compare a quantized model with its original: bytes of the stored weights, and losses on the same texts."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.quantize import ModelPartFootprint, weight_footprints
from headwise.errors import ArgumentError
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION


@dataclass(frozen=True)
class QuantizationReport:
    """Sizes and losses of a model before and after quantization.

    Losses have 95% confidence intervals over texts. Differences are paired by text.

    Attributes:
        before: Size of each part of the original model.
        after: Size of each part of the quantized model.
        metric: Unit of the losses. Empty if no texts were given.
        texts: Number of texts.
        loss_before: Loss of the original model. None if no texts were given.
        loss_after: Loss of the quantized model.
        loss_increase: Loss after minus loss before.
    """

    before: tuple[ModelPartFootprint, ...]
    after: tuple[ModelPartFootprint, ...]
    metric: str = ""
    texts: int = 0
    loss_before: LossEstimate | None = None
    loss_after: LossEstimate | None = None
    loss_increase: LossEstimate | None = None

    def footprint_rows(self) -> list[list[str | int | float]]:
        """Return rows of part, number of weights, bytes before, bytes after, and bits per weight with scales after."""
        pairs = zip(self.before, self.after, strict=True)
        return [[b.part, b.parameters, b.nbytes, a.nbytes, round(a.bits, 3)] for b, a in pairs if b.parameters]

    def loss_rows(self) -> list[list[str | float]]:
        """Return rows of label, mean, low and high."""
        estimates = {"before": self.loss_before, "after": self.loss_after, "after − before": self.loss_increase}
        return [[name, *asdict(estimate).values()] for name, estimate in estimates.items() if estimate is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        result = asdict(self, dict_factory=nan_to_none)
        for side in ("before", "after"):
            result[side] = [asdict(footprint) | {"bits": footprint.bits} for footprint in getattr(self, side)]
        return result


def compare_size_and_loss(before: Transformer, after: Transformer, corpus: Any = None) -> QuantizationReport:
    """Compare the sizes of two models, and their losses if a corpus is given.

    Args:
        before: The original model.
        after: The same model with quantized weights.
        corpus: A text, a list of texts, a path or a Corpus. None compares only sizes.

    Returns:
        Sizes by part, and losses with 95% confidence intervals.

    >>> from headwise.compression.quantize import quantize
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> compare_size_and_loss(model, quantize(model, 4)).footprint_rows()[0]  # 6 layers of four matrices of 384 × 384
    ['heads', 3538944, 14155776, 2211840, 5.0]
    """
    if _unquantized_spec(before) != _unquantized_spec(after):
        raise ArgumentError(
            "after: it is not a quantized copy of the model `before`; their specs differ in more than weight bits. "
            "Pass the original model first, then hw.quantize(original, …)."
        )
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
    """Return the spec of a model without its weight bits."""
    return replace(model.spec, weight_rules=(), activation_bits=FULL_PRECISION)
