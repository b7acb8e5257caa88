"""What a model is asked for while heads are taken from it: which tokens at which places, and how badly it answers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.ablation.head_outputs import Run, record_z
from headwise.analysis.recording.batching import Batch, Unit, tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel
from headwise.model.loss import IGNORE
from headwise.spec import SiteAddress

Metric = Literal["loss", "last"]
WHOLE = 1 << 24  # logits computed at once
HIDDEN = 0.15  # the share of tokens an encoder is asked to guess (https://arxiv.org/abs/1810.04805)


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """Texts, and the token asked for at each place, IGNORE where none is; no targets: the mean state is what counts."""

    ids: Tensor  # (B, T)
    real: Tensor  # (B, T)
    targets: Tensor | None  # (B, T)
    padding: Tensor | None  # (B, T), as the model must be told it
    units: tuple[int, ...] = ()
    source: Tensor | None = None  # (B, S), what an encoder-decoder reads
    source_real: Tensor | None = None  # (B, S)
    rivals: Tensor | None = (
        None  # (B, T), tokens whose surprise is subtracted: answers are then minus the lead over them
    )

    def run(self, model: AnyModel, gates: Any = None) -> Tensor:
        """One forward pass: final states (B, T, D)."""
        return model(
            self.ids, padding=self.padding, source=self.source, source_padding=self.source_real, gates=gates, hidden=True
        )  # fmt: skip

    def record(self, model: AnyModel, heads: Pattern) -> Run:
        """What heads gave in such a pass."""
        return record_z(model, self.ids, heads, padding=self.real, source=self.source, source_padding=self.source_real)

    def real_at(self, site: SiteAddress) -> Tensor | None:
        """Which tokens are real where a layer's queries stand: those of the sources in an encoder's layer."""
        return self.source_real if site.stack == "enc" else self.real

    def past(self, tokens: int) -> "TargetBatch":
        """The same, asked for nothing at the first so many places: what a head that forgets cannot have forgotten yet."""
        if not tokens or self.targets is None:
            return self
        return replace(self, targets=self.targets.masked_fill(self.real.cumsum(1) <= tokens, IGNORE))

    @cached_property
    def counts(self) -> Tensor:
        """How many answers each text gives, (B,)."""
        if self.targets is None:
            return torch.ones(len(self.ids), dtype=torch.float64)
        return (self.targets != IGNORE).sum(1).double().cpu()

    @cached_property
    def rows(self) -> Tensor | None:
        """The places asked about, (B, R), filled up with other places; None where they are nearly all."""
        if self.targets is None:
            return None
        asked = self.targets != IGNORE
        R = max(1, int(asked.sum(1).max()))
        if 3 * asked.shape[1] < 4 * R:
            return None
        return asked.int().topk(R, dim=1).indices  # those asked about first

    def pick(self, x: Tensor, copies: int = 1) -> Tensor:
        """The rows asked about, of so many copies of the batch: (n·B, T, D) → (n·B, R, D)."""
        if self.rows is None:
            return x
        rows = self.rows.repeat(copies, 1)[..., None]  # (n·B, R, 1)
        return x.gather(1, rows.expand(-1, -1, x.shape[-1]))

    def answers(self, model: AnyModel, hidden: Tensor) -> Tensor:
        """Final states of the rows asked about → the summed surprise of each text, minus that of its rivals (n·B,), or its
        mean state (n·B, D)."""
        copies = len(hidden) // len(self.ids)
        if self.targets is None:
            real = self.real.repeat(copies, 1)[..., None]  # (n·B, T, 1)
            return hidden.masked_fill(~real, 0).double().sum(1) / real.sum(1)
        targets, rivals = (
            some if some is None or self.rows is None else some.gather(1, self.rows)  # (B, R)
            for some in (self.targets, self.rivals)
        )
        assert targets is not None
        made = _surprise(model, hidden, targets.repeat(copies, 1))
        return made if rivals is None else made - _surprise(model, hidden, rivals.repeat(copies, 1))

    def lost(self, answers: Tensor, clean: Tensor) -> Tensor:
        """How much worse answers are than the untouched model's: (B, …), (B, …) → (B,)."""
        if self.targets is None:
            return 1 - F.cosine_similarity(answers, clean, dim=-1)
        return answers - clean


def ask(model: AnyModel, batch: Batch, metric: Metric = "loss") -> TargetBatch:
    """What a model is asked on a batch: next tokens (all, or the last), hidden tokens, or its state."""
    units = tuple(unit.number for unit in batch.units)
    check_askable(model, metric)
    # What stands behind a text is never seen where a model reads forwards: no mask, and the plain causal kernel.
    unseen = model.spec.kind != "encoder" and not bool(batch.first.any())
    padding = None if batch.whole or unseen else batch.real
    if model.output is None:
        return TargetBatch(batch.ids, batch.real, None, padding, units, batch.source, batch.source_padding)
    if model.spec.kind == "encoder":
        ids, targets = _hide(model, batch)
        return TargetBatch(ids, batch.real, targets, padding, units)
    # Nobody reads a text's last token to guess another, so it is not read at all.
    asks = batch.real[:, :-1] & batch.real[:, 1:]  # (B, T − 1): a token, and one behind it
    targets = batch.ids[:, 1:].masked_fill(~asks, IGNORE)  # (B, T − 1)
    if metric == "last":
        behind = asks.flip(1).cumsum(1).flip(1)  # (B, T − 1): how many are asked for from here on
        targets = targets.masked_fill(behind != 1, IGNORE)
    padding = None if padding is None else padding[:, :-1]
    return TargetBatch(batch.ids[:, :-1], asks, targets, padding, units, batch.source, batch.source_padding)


def askable_units(model: AnyModel, reading: Iterable[Unit]) -> Iterator[Unit]:
    """The texts of a reading that a model can be asked about."""
    units = (unit for unit in reading if len(unit.ids) >= fewest_tokens(model))
    first = next(units, None)
    if first is None:
        raise HeadwiseError("no text is long enough to ask for a token; a decoder needs texts of two tokens.")
    yield first
    yield from units


def fewest_tokens(model: AnyModel) -> int:
    """Shorter texts ask nothing: a decoder needs a token to start from and one to guess."""
    return 2 if model.spec.kind != "encoder" and model.output is not None else 1


def check_askable(model: AnyModel, metric: str) -> None:
    """Whether this can be asked of this model."""
    if metric not in ("loss", "last"):
        raise HeadwiseError(f"the metric is 'loss', over all tokens, or 'last', the last one alone; got {metric!r}.")
    if metric == "last" and (model.spec.kind == "encoder" or model.output is None):
        raise HeadwiseError("metric='last' asks for the last token, so it needs a decoder with an output; use 'loss'.")


def _surprise(model: AnyModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """−log p of the tokens asked for, summed by text, never holding more than WHOLE logits: (N, R, D), (N, R) → (N,)."""
    assert model.output is not None
    asked = targets != IGNORE
    states, wanted = hidden[asked], targets[asked]  # (n, D), (n,)
    step = max(1, WHOLE // model.spec.vocab)
    parts = [
        F.cross_entropy(at_least_float32(model.output(some)), of, reduction="none")
        for some, of in zip(states.split(step), wanted.split(step), strict=True)
    ]
    made = torch.zeros(targets.shape, dtype=torch.float64, device=hidden.device)
    made[asked] = torch.cat(parts).double()
    return made.sum(1)


def _hide(model: AnyModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Some tokens of each text become the mask; which ones follows from the text's number alone. (B, T), (B, T)"""
    tokenizer = tokenizer_of(model)
    if tokenizer.mask is None:
        raise HeadwiseError("this encoder's tokenizer has no mask, so it cannot be asked for hidden tokens.")
    special = {number for number in tokenizer.special.values() if number is not None}
    ids, targets = batch.ids.clone(), torch.full_like(batch.ids, IGNORE)
    for row, unit in enumerate(batch.units):
        columns = batch.real[row].nonzero()[:, 0]
        where = columns[_drawn(unit, special)]
        targets[row, where] = ids[row, where]
        ids[row, where] = tokenizer.mask
    return ids, targets


def _drawn(unit: Unit, special: set[int]) -> list[int]:
    words = [place for place, token in enumerate(unit.ids) if token not in special]
    hidden = min(len(words), max(1, round(HIDDEN * len(words))))
    return sorted(np.random.default_rng(unit.number).permutation(words)[:hidden].tolist())
