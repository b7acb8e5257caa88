"""Configuration of a distillation: losses, their weights, and the pairing of heads and layers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import ArgumentError, suggest_names

LOSSES = ("logits", "hidden", "maps", "qkv")
PAIRINGS = ("order", "best")
DistillLosses = str | Sequence[str] | Mapping[str, float]


@dataclass(frozen=True)
class DistillConfig:
    """The losses of a distillation.

    The loss "logits" is alpha · T² · KL(teacher ‖ student) + (1 − alpha) · cross-entropy (https://arxiv.org/abs/1503.02531),
    where T is the temperature. Without "logits", the cross-entropy of the text has weight 1.

    Attributes:
        losses: One or several of "logits", "hidden" (hidden states), "maps" (attention maps) and "qkv" (relations of q, k
            and v), or a dict of weights.
        temperature: Temperature of the logits, above 0.
        alpha: Weight of the teacher logits, from 0 to 1. The text has weight 1 − alpha.
        ce_weight: Weight of the cross-entropy. None: 1 − alpha with logits, otherwise 1.
        head_pairs: Heads for "maps": pairs of (student head, teacher head), "order" (by position) or "best" (assignment by
            the distance of attention maps).
        layers: Layers for "hidden": pairs of (student layer, teacher layer). None pairs them evenly.
        relation_layers: Layers for "qkv": student layer and teacher layer. −1 is the last layer.
        relation_heads: Number of relation heads for "qkv". None: as many as both widths allow, at most 48, with at least 16
            channels each.

    >>> DistillConfig("logits").loss_weights, DistillConfig(("logits", "maps")).loss_weights
    ({'logits': 1.0}, {'logits': 1.0, 'maps': 1.0})
    >>> DistillConfig({"qkv": 0.5}).effective_ce_weight
    1.0
    """

    losses: DistillLosses = "logits"
    temperature: float = 2.0
    alpha: float = 0.9
    ce_weight: float | None = None
    head_pairs: str | Sequence[tuple[str, str]] = "best"
    layers: Sequence[tuple[int, int]] | None = None
    relation_layers: tuple[int, int] = (-1, -1)
    relation_heads: int | None = None

    def __post_init__(self) -> None:
        for name in self.loss_weights:
            if name not in LOSSES:
                raise ArgumentError(f"losses: unknown loss. Got {name!r}; {suggest_names(str(name), LOSSES)}")
        for name, weight in self.loss_weights.items():
            if not _is_number(weight) or not 0 < weight < float("inf"):
                raise ArgumentError(
                    f"losses: the weight of {name} must be a finite number above 0. Got {weight!r}. "
                    f"Use {{{name!r}: 1.0}}, or leave the loss out."
                )
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise ArgumentError(
                f"temperature: must be a finite number above 0. Got {self.temperature!r}. Use temperature=2.0."
            )
        if not _is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise ArgumentError(f"alpha: must be from 0 to 1. Got {self.alpha!r}. Use alpha=0.9.")
        if self.ce_weight is not None and (not _is_number(self.ce_weight) or not 0 <= self.ce_weight < float("inf")):
            raise ArgumentError(
                f"ce_weight: the weight of the cross-entropy must be a finite number of at least 0. Got {self.ce_weight!r}. "
                "Use ce_weight=None for the default."
            )
        if isinstance(self.head_pairs, str) and self.head_pairs not in PAIRINGS:
            raise ArgumentError(
                f"head_pairs: unknown pairing. Got {self.head_pairs!r}. "
                'Use "order", "best" or a list of pairs: [("1.0", "5.2")].'
            )
        if self.relation_heads is not None and self.relation_heads < 1:
            raise ArgumentError(
                f"relation_heads: must be at least 1. Got {self.relation_heads}. Use relation_heads=None for the default."
            )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each loss."""
        if isinstance(self.losses, Mapping):
            return dict(self.losses)
        names = (self.losses,) if isinstance(self.losses, str) else tuple(self.losses)
        if not names:
            raise ArgumentError(
                f"losses: at least one loss is needed. Got none. Use one or several of {', '.join(LOSSES)}."
            )
        return dict.fromkeys(names, 1.0)

    @property
    def effective_ce_weight(self) -> float:
        """Weight of the cross-entropy."""
        if self.ce_weight is not None:
            return self.ce_weight
        return self.loss_weights["logits"] * (1 - self.alpha) if "logits" in self.loss_weights else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data for JSON."""
        return {
            **asdict(self),
            "losses": self.loss_weights,
            "head_pairs": self.head_pairs if isinstance(self.head_pairs, str) else list(self.head_pairs),
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
