"""A model as it is and as a change leaves it: what each text loses, and how far the model drifts on it.

A clean walk keeps the stream before each block, so that a change in a layer costs a pass from there on.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from headwise.analysis.ablation.eval_targets import WHOLE, TargetBatch
from headwise.heads.head import HasHeads
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, Transformer
from headwise.model.block import Block
from headwise.model.loss import IGNORE

KEPT = 2**26  # log-probabilities of the untouched model that are kept of a batch
Change = Callable[[int], AbstractContextManager[None]]  # what is changed while a batch, by its number, is run


class Whole:
    """Every question by whole passes: for models that are not walked through block by block."""

    def __init__(self, model: AnyModel, batches: list[TargetBatch]) -> None:
        self.model, self.batches = model, batches
        self.states = [self.run(i) for i in range(len(batches))]  # untouched, (B, R, D) each
        self.clean = [batch.answers(model, x) for batch, x in zip(batches, self.states, strict=True)]
        pairs = zip(batches, self.states, strict=True)
        self.said = [Said(model, batch, x) if batch.targets is not None else None for batch, x in pairs]

    def run(self, batch: int) -> Tensor:
        """Final states as they are now, at the places asked about: (B, R, D)."""
        return self.batches[batch].pick(self.batches[batch].run(self.model))

    def come_to(self, layer: HasHeads) -> None:
        """Changes in this layer or behind it are asked about next."""

    def lost(self, change: Change) -> list[list[float]]:
        """What each text loses by a change, and how far the model drifts on it."""
        made: list[Tensor] = []
        for i, asked in enumerate(self.batches):
            with change(i):
                states = self.run(i)
            said = self.said[i]
            if said is None:
                lost = asked.lost(asked.answers(self.model, states), self.clean[i]).double().cpu()  # (B,)
                made.append(torch.stack((lost, lost)))
            else:
                made.append(said.apart(states))
        return torch.cat(made, 1).tolist()

    def seen(self, layer: HasHeads) -> list[Seen]:
        """The clean call of a layer, on each batch."""
        calls: list[Seen] = []
        for i in range(len(self.batches)):
            with layer.site.listen(calls.append):
                self.run(i)
        return calls

    def clean_loss(self) -> float | None:
        """The mean loss of the untouched model."""
        if self.batches[0].targets is None:
            return None
        return float(
            sum(made.double().sum() for made in self.clean) / sum(asked.counts.sum() for asked in self.batches)
        )


class FromLayer(Whole):
    """The stream before the layer the walk has come to is kept, and passes begin there."""

    def __init__(self, model: Transformer, batches: list[TargetBatch]) -> None:
        self.ours, self.blocks = model, [block for block in model.blocks if isinstance(block, Block)]
        self.place = 0
        begun = [model.begin(batch.ids, padding=batch.padding) for batch in batches]
        self.streams, self.beside = [x for x, _ in begun], [beside for _, beside in begun]
        super().__init__(model, batches)

    def run(self, batch: int) -> Tensor:
        """From the block the walk has come to."""
        x, beside = self.streams[batch], self.beside[batch]
        for block in self.blocks[self.place :]:
            x = block(x, beside)
        x = self.batches[batch].pick(x)
        return x if self.ours.norm is None else self.ours.norm(x)

    def seen(self, layer: HasHeads) -> list[Seen]:
        """The clean call of a layer, on each batch."""
        self.come_to(layer)
        calls: list[Seen] = []
        for x, beside in zip(self.streams, self.beside, strict=True):
            with layer.site.listen(calls.append):
                self.blocks[self.place](x, beside)
        return calls

    def come_to(self, layer: HasHeads) -> None:
        """Take the streams on, clean, to the block of this layer; changes before it can no longer be asked about."""
        while self.blocks[self.place].attention is not layer:
            pairs = zip(self.streams, self.beside, strict=True)
            self.streams = [self.blocks[self.place](x, beside) for x, beside in pairs]
            self.place += 1


class Said:
    """What the untouched model says at the places asked about, to hold what it says later against."""

    def __init__(self, model: AnyModel, batch: TargetBatch, states: Tensor) -> None:
        assert batch.targets is not None
        targets = batch.targets if batch.rows is None else batch.targets.gather(1, batch.rows)  # (B, R)
        self.model, self.states = model, states
        self.wanted = targets != IGNORE  # (B, R)
        self.rows = max(1, WHOLE // model.spec.vocab)
        self.targets = targets[self.wanted].split(self.rows)
        kept = int(self.wanted.sum()) * model.spec.vocab <= KEPT
        self.kept = list(self._log_odds(states)) if kept else None  # else worked out anew each time

    def _log_odds(self, states: Tensor) -> Iterator[Tensor]:
        """log p of every token, a few places at a time: (n, V)."""
        assert self.model.output is not None
        for some in states[self.wanted].split(self.rows):
            yield self.model.output(some).double().log_softmax(-1)  # small drifts are differences of near-equal numbers

    def apart(self, states: Tensor) -> Tensor:
        """What each text loses by these states (B, R, D), and KL(untouched ‖ these), summed over its places: (2, B)."""
        made = torch.zeros(2, *self.wanted.shape, dtype=torch.float64, device=states.device)  # (2, B, R)
        both = []
        for sure, now, target in zip(
            self.kept or self._log_odds(self.states), self._log_odds(states), self.targets, strict=True
        ):
            lost = (sure - now).gather(1, target[:, None])[:, 0]  # (n,)
            both.append(torch.stack((lost, (sure.exp() * (sure - now)).sum(-1).clamp_min(0))))  # but for rounding
        made[:, self.wanted] = torch.cat(both, 1).double() if both else made.new_zeros(2, 0)
        return made.sum(2).cpu()
