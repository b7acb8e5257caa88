"""What a student learns from, as plain data: which losses, their weights, which heads and layers belong together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError, close_names

LOSSES = ("logits", "hidden", "maps", "qkv")
PAIRINGS = ("order", "best")
By = str | Sequence[str] | Mapping[str, float]


@dataclass(frozen=True)
class Lesson:
    """The losses of a distillation. `by` names one or several of `logits`, `hidden`, `maps`, `qkv`, or weighs them.

    `logits` is alpha · T² · KL(teacher ‖ student) + (1 − alpha) · cross-entropy (https://arxiv.org/abs/1503.02531). Without
    it the cross-entropy of the text has weight 1. `text` sets that weight, with or without it.

    >>> Lesson("logits").weights, Lesson(("logits", "maps")).weights, Lesson({"qkv": 0.5}).text_weight
    ({'logits': 1.0}, {'logits': 1.0, 'maps': 1.0}, 1.0)
    """

    by: By = "logits"
    temperature: float = 2.0
    alpha: float = 0.9  # of the logits, beside the text
    text: float | None = None  # the weight of the cross-entropy; None: 1 − alpha with logits, else 1
    pairs: str | Sequence[tuple[str, str]] = (
        "best"  # maps: (student's head, teacher's head), by order, or by assignment
    )
    layers: Sequence[tuple[int, int]] | None = None  # hidden: (student's layer, teacher's layer); None: spread evenly
    relation_layers: tuple[int, int] = (-1, -1)  # qkv: the student's layer and the teacher's; −1 is the last
    relation_heads: int | None = (
        None  # qkv: how many; None: as many as both widths allow, at most 48 of 16 channels or more
    )

    def __post_init__(self) -> None:
        for name in self.weights:
            if name not in LOSSES:
                raise HeadwiseError(f"there is no loss {name!r} to distil by; {close_names(str(name), LOSSES)}")
        for name, weight in self.weights.items():
            if not _is_number(weight) or not 0 < weight < float("inf"):
                raise HeadwiseError(f"the weight of {name} must be a number above 0, got {weight!r}.")
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise HeadwiseError(f"the temperature must be above 0, got {self.temperature!r}.")
        if not _is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise HeadwiseError(f"alpha must lie between 0 and 1, got {self.alpha!r}.")
        if self.text is not None and (not _is_number(self.text) or not 0 <= self.text < float("inf")):
            raise HeadwiseError(f"the weight of the text must be 0 or more, got {self.text!r}.")
        if isinstance(self.pairs, str) and self.pairs not in PAIRINGS:
            raise HeadwiseError(f'pairs are "order", "best" or a list of pairs of heads, got {self.pairs!r}.')
        if self.relation_heads is not None and self.relation_heads < 1:
            raise HeadwiseError(f"relation_heads must be 1 or more, got {self.relation_heads}.")

    @property
    def weights(self) -> dict[str, float]:
        """Every loss with its weight."""
        if isinstance(self.by, Mapping):
            return dict(self.by)
        names = (self.by,) if isinstance(self.by, str) else tuple(self.by)
        if not names:
            raise HeadwiseError(f"by names one or several of {', '.join(LOSSES)}; got none.")
        return dict.fromkeys(names, 1.0)

    @property
    def text_weight(self) -> float:
        """Of the cross-entropy."""
        if self.text is not None:
            return self.text
        return self.weights["logits"] * (1 - self.alpha) if "logits" in self.weights else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **asdict(self),
            "by": self.weights,
            "pairs": self.pairs if isinstance(self.pairs, str) else list(self.pairs),
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
