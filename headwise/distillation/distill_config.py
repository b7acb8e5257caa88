"""What a student learns from, as plain data: which losses, their weights, which heads and layers belong together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError, suggest_names

LOSSES = ("logits", "hidden", "maps", "qkv")
PAIRINGS = ("order", "best")
DistillLosses = str | Sequence[str] | Mapping[str, float]


@dataclass(frozen=True)
class DistillConfig:
    """The losses of a distillation. `losses` names one or several of `logits`, `hidden`, `maps`, `qkv`, or weighs them.

    `logits` is alpha · T² · KL(teacher ‖ student) + (1 − alpha) · cross-entropy (https://arxiv.org/abs/1503.02531). Without
    it the cross-entropy of the text has weight 1. `ce_weight` sets that weight, with or without it.

    >>> DistillConfig("logits").loss_weights, DistillConfig(("logits", "maps")).loss_weights
    ({'logits': 1.0}, {'logits': 1.0, 'maps': 1.0})
    >>> DistillConfig({"qkv": 0.5}).effective_ce_weight
    1.0
    """

    losses: DistillLosses = "logits"
    temperature: float = 2.0
    alpha: float = 0.9  # of the logits, beside the text
    ce_weight: float | None = None  # the weight of the cross-entropy; None: 1 − alpha with logits, else 1
    # maps: (student's head, teacher's head), by order, or by assignment
    head_pairs: str | Sequence[tuple[str, str]] = "best"
    layers: Sequence[tuple[int, int]] | None = None  # hidden: (student's layer, teacher's layer); None: spread evenly
    relation_layers: tuple[int, int] = (-1, -1)  # qkv: the student's layer and the teacher's; −1 is the last
    # qkv: how many; None: as many as both widths allow, at most 48 of 16 channels or more
    relation_heads: int | None = None

    def __post_init__(self) -> None:
        for name in self.loss_weights:
            if name not in LOSSES:
                raise HeadwiseError(f"there is no loss {name!r} to distill with; {suggest_names(str(name), LOSSES)}")
        for name, weight in self.loss_weights.items():
            if not _is_number(weight) or not 0 < weight < float("inf"):
                raise HeadwiseError(f"the weight of {name} must be a number above 0, got {weight!r}.")
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise HeadwiseError(f"the temperature must be above 0, got {self.temperature!r}.")
        if not _is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise HeadwiseError(f"alpha must lie between 0 and 1, got {self.alpha!r}.")
        if self.ce_weight is not None and (not _is_number(self.ce_weight) or not 0 <= self.ce_weight < float("inf")):
            raise HeadwiseError(f"the weight of the text must be 0 or more, got {self.ce_weight!r}.")
        if isinstance(self.head_pairs, str) and self.head_pairs not in PAIRINGS:
            raise HeadwiseError(f'head_pairs are "order", "best" or a list of pairs of heads, got {self.head_pairs!r}.')
        if self.relation_heads is not None and self.relation_heads < 1:
            raise HeadwiseError(f"relation_heads must be 1 or more, got {self.relation_heads}.")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Every loss with its weight."""
        if isinstance(self.losses, Mapping):
            return dict(self.losses)
        names = (self.losses,) if isinstance(self.losses, str) else tuple(self.losses)
        if not names:
            raise HeadwiseError(f"losses names one or several of {', '.join(LOSSES)}; got none.")
        return dict.fromkeys(names, 1.0)

    @property
    def effective_ce_weight(self) -> float:
        """Of the cross-entropy."""
        if self.ce_weight is not None:
            return self.ce_weight
        return self.loss_weights["logits"] * (1 - self.alpha) if "logits" in self.loss_weights else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **asdict(self),
            "losses": self.loss_weights,
            "head_pairs": self.head_pairs if isinstance(self.head_pairs, str) else list(self.head_pairs),
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
