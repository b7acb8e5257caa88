"""A student with its teacher: one pass of each, and the losses of a lesson between them."""

from typing import Any

import torch
from torch import Tensor

from headwise.distillation.activations import Glimpse, Watcher
from headwise.distillation.distill_config import Lesson
from headwise.distillation.distill_losses import Hidden, Maps, RelationTerm
from headwise.distillation.head_pairs import Pair
from headwise.distillation.logits import kl_and_surprise, kl_of_kept, logits_of
from headwise.distillation.teacher_logits_cache import KeptLogits
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet
from headwise.model.loss import IGNORE
from headwise.training.batches import TokenRows
from headwise.training.loss import Loss


class Distillation(Loss):
    """ids and targets (B, T) → every loss of the lesson, weighed; all are means over the tokens that count."""

    def __init__(
        self, model: AnyModel, teacher: AnyModel, lesson: Lesson, pairs: list[Pair], kept: KeptLogits | None, name: str
    ) -> None:
        super().__init__(model)
        if model.output is None or teacher.output is None:
            raise HeadwiseError(
                "a student and its teacher both need an output over the vocabulary, to be asked for tokens."
            )
        self._teacher = [teacher]  # in a list: its weights are not this module's, and never learn
        self.lesson, self.kept, self.name = lesson, kept, name
        self._last: Glimpse | None = None  # the teacher's pass of this call
        wanted = lesson.weights
        self.states = Hidden(model, teacher, lesson.layers) if "hidden" in wanted else None
        self.maps = Maps(pairs) if "maps" in wanted else None
        self.relations = (
            RelationTerm(model, teacher, lesson.relation_layers, lesson.relation_heads) if "qkv" in wanted else None
        )
        self.watchers = [Watcher(one, *self._wanted(side)) for side, one in enumerate((model, teacher))]

    def _wanted(self, side: int) -> tuple[list[int], list[Any]]:
        """Layers and sites of the student (0) or the teacher (1) that the losses look at."""
        layers = [pair[side] for pair in self.states.layers] if self.states is not None else []
        sites = [pair[side].site for pair in self.maps.pairs] if self.maps is not None else []
        return layers, [*sites, *([self.relations.sites[side]] if self.relations is not None else [])]

    @property
    def teacher(self) -> AnyModel:
        """The model that is learned from; it stays as it is."""
        return self._teacher[0]

    def lost(self, rows: TokenRows, total: int | None) -> dict[str, Tensor]:
        """(B, T), (B, T) → the weighed losses, by name."""
        places = rows.targets != IGNORE  # (B, T)
        count = places.sum().clamp(min=1)
        share = torch.ones((), device=places.device) if total is None else places.sum() / total
        self._last = None
        ours = self.watchers[0](rows.ids, **rows.context)
        made = self._from_logits(ours, rows, places, share / count)
        if self.states is not None or self.maps is not None or self.relations is not None:
            theirs, real, weights = self._taught(rows), self._real(rows, places), self.lesson.weights
            if self.states is not None:
                made["hidden"] = weights["hidden"] * share * self.states(ours, theirs, real[""])
            if self.maps is not None:
                made["maps"] = weights["maps"] * share * self.maps(ours, theirs, real)
            if self.relations is not None:
                made["qkv"] = weights["qkv"] * share * self.relations(ours, theirs, real)
        self._last = None
        return made

    def _from_logits(self, ours: Glimpse, rows: TokenRows, places: Tensor, share: Tensor) -> dict[str, Tensor]:
        """The losses of what comes out: the teacher's logits and the text."""
        lesson, made = self.lesson, {}
        assert ours.hidden is not None
        hidden, wanted = ours.hidden[places], rows.targets[places]  # (n, D), (n,)
        T, alpha = lesson.temperature, lesson.alpha
        if "logits" in lesson.weights:
            if self.kept is not None:
                read = (rows.ids, places, *(value for value in rows.context.values() if value is not None))
                taught = self.kept.take(read, lambda: self._logits(rows, places))
                apart, surprise = kl_of_kept(self.model, hidden, wanted, taught, T)
            else:
                states = self._taught(rows).hidden
                assert states is not None
                apart, surprise = kl_and_surprise(self.model, self.teacher, (hidden, states[places]), wanted, T)
            made["logits"] = lesson.weights["logits"] * alpha * T * T * apart * share
        elif lesson.text_weight:
            assert self.model.output is not None
            surprise = self.model.output.cross_entropy(hidden, wanted, 1)
        else:
            return made
        if lesson.text_weight:
            made["text"] = lesson.text_weight * surprise * share
        return made

    def _taught(self, rows: TokenRows) -> Glimpse:
        """The teacher's pass, once for a call."""
        if self._last is None:
            with torch.no_grad(), quiet(self.teacher):
                self._last = self.watchers[1](rows.ids, **rows.context)
        return self._last

    def _logits(self, rows: TokenRows, places: Tensor) -> Tensor:
        """The teacher's logits at the tokens asked for, (n, V)."""
        states = self._taught(rows).hidden
        assert states is not None
        with torch.no_grad():
            return logits_of(self.teacher, states[places])

    def _real(self, rows: TokenRows, places: Tensor) -> dict[str, Tensor]:
        """The tokens whose states and rows count, (B, T), by stack: of a decoder those that are followed by one."""
        own = places if self.model.spec.kind != "encoder" else _seen(rows.ids, rows.padding)
        made = {"": own, "dec": own, "cross": own}
        return made if rows.source is None else {**made, "enc": _seen(rows.source, rows.source_padding)}


def _seen(ids: Tensor, padding: Tensor | None) -> Tensor:
    """Where there are tokens, (B, T)."""
    return torch.ones_like(ids, dtype=torch.bool) if padding is None else padding.bool()
