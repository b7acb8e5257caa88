"""Result of `find_steering`: the steering, its held-out effect, baselines and side effects."""

import csv
import json
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from headwise.analysis.steering.steering import Steering
from headwise.io.atomic_write import write_atomic


@dataclass(frozen=True)
class MeanEstimate:
    """A mean with its 95% interval over texts.

    Attributes:
        mean: Mean.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class SideEffects:
    """Changes on other text. A decoder has a loss and a KL divergence, an encoder a distance.

    Attributes:
        loss: Increase of the loss, in nats per token.
        kl: KL divergence of the steered from the plain model, in nats per token.
        distance: Cosine distance between the steered and the plain embedding of a text.
    """

    loss: MeanEstimate | None = None
    kl: MeanEstimate | None = None
    distance: MeanEstimate | None = None

    @property
    def divergence(self) -> MeanEstimate:
        """KL divergence of a decoder, distance of an encoder."""
        divergence = self.kl or self.distance
        assert divergence is not None
        return divergence

    def __str__(self) -> str:
        if self.loss is None:
            return f"embedding distance {self.divergence}"
        return f"loss {self.loss}, KL {self.divergence.mean:.3f}"


@dataclass(frozen=True)
class SteeringPoint:
    """One strength.

    Attributes:
        strength: Strength.
        selection_effect: Effect on the half on which heads and strength are chosen.
        selection_divergence: KL divergence, or embedding distance of an encoder, on the other texts of that half.
        effect: Effect on the held-out half.
        side_effect: Side effects on the other texts of the held-out half.
    """

    strength: float
    selection_effect: MeanEstimate
    selection_divergence: float
    effect: MeanEstimate
    side_effect: SideEffects


@dataclass(frozen=True, eq=False, repr=False)
class SteeringResult:
    """A steering and its evaluation on held-out texts.

    Effects of a decoder are changes of log-probabilities in nats per token. Effects of an encoder are changes of the
    embedding margin: the cosine with the mean positive text minus that with the mean negative text.

    Attributes:
        steering: The steering with the chosen strength.
        points: Effect and side effects for each strength.
        effect: Held-out effect of the steering.
        side_effect: Side effects of the steering on other text.
        random_effects: Held-out effects of random heads with random directions of the same norms.
        p_value: (b + 1) / (B + 1), where b of B random effects reach the effect.
        above_random: Effect minus the mean of the random effects.
        residual_effect: Held-out effect of a residual-stream direction, or None if the stream is not accessible.
        residual_layer: Layer of the residual-stream direction.
        above_residual: Effect minus the residual effect, or None.
        num_texts: Number of texts of the selection half and of the held-out half.
        max_divergence: Limit of the KL divergence, or of the embedding distance, when the strength was chosen.
        unit: Unit of the effects.
    """

    steering: Steering
    points: tuple[SteeringPoint, ...]
    effect: MeanEstimate
    side_effect: SideEffects
    random_effects: tuple[float, ...]
    p_value: float
    above_random: MeanEstimate
    residual_effect: MeanEstimate | None
    residual_layer: str
    above_residual: MeanEstimate | None
    num_texts: tuple[int, int]
    max_divergence: float
    unit: str = "nats per token"

    @property
    def is_effective(self) -> bool:
        """True if the intervals of the effect and of its distance to random directions are above 0, and p is at most 0.05."""
        return self.effect.low > 0 and self.above_random.low > 0 and self.p_value <= 0.05

    def __repr__(self) -> str:
        random = f"{min(self.random_effects):+.3f} to {max(self.random_effects):+.3f}"
        lines = [
            str(self.steering),
            f"effect on {self.num_texts[1]} held-out texts  {self.effect} {self.unit}",
            f"{len(self.random_effects)} random steerings           {random}, p = {self.p_value:.3f}",
            f"effect above random           {self.above_random}",
        ]
        if self.residual_effect is not None:
            lines += [
                f"residual stream, layer {self.residual_layer:<6} {self.residual_effect}",
                f"effect above residual stream  {self.above_residual}",
            ]
        lines.append(f"other text                    {self.side_effect}")
        verdict = "effective" if self.is_effective else "no effect beyond random directions is shown"
        return "\n".join([*lines, f"verdict                       {verdict}"])

    def curve_rows(self) -> list[dict[str, Any]]:
        """Return a row per strength: effect and side effects with intervals, on held-out texts."""
        rows = []
        for point in self.points:
            row: dict[str, Any] = {"strength": point.strength} | _estimate_columns("effect", point.effect)
            for name in ("loss", "kl", "distance"):
                effect = getattr(point.side_effect, name)
                row |= {} if effect is None else _estimate_columns(name, effect)
            row |= {
                "selection_effect": point.selection_effect.mean, "selection_divergence": point.selection_divergence,
                "chosen": point.strength == self.steering.strength,
            }  # fmt: skip
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, without the vectors."""
        steering = self.steering
        return {
            "steering": {
                "name": steering.name, "strength": steering.strength, "edit": steering.edit, "origin": dict(steering.origin),
                "heads": {head: float(vector.double().norm()) for head, vector in steering.vectors.items()},
            },
            "effect": asdict(self.effect), "effective": self.is_effective, "p_value": self.p_value,
            "random_effects": list(self.random_effects), "above_random": asdict(self.above_random),
            "residual_effect": None if self.residual_effect is None else asdict(self.residual_effect),
            "residual_layer": self.residual_layer,
            "above_residual": None if self.above_residual is None else asdict(self.above_residual),
            "side_effect": asdict(self.side_effect), "num_texts": list(self.num_texts),
            "max_divergence": self.max_divergence, "unit": self.unit,
            "curve": self.curve_rows(),
        }  # fmt: skip

    def to_json(self, path: str | Path) -> Path:
        """Write the result without the vectors as JSON.

        Args:
            path: Output file.
        """
        return write_atomic(path, json.dumps(self.to_dict(), indent=1).encode())

    def to_csv(self, path: str | Path) -> Path:
        """Write the curve over strengths as CSV.

        Args:
            path: Output file.
        """
        buffer = StringIO()
        rows = self.curve_rows()
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return write_atomic(path, buffer.getvalue().encode())


def _estimate_columns(name: str, effect: MeanEstimate) -> dict[str, float]:
    return {name: effect.mean, f"{name}_low": effect.low, f"{name}_high": effect.high}
