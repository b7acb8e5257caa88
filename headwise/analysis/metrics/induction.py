"""Random tokens, said twice: whoever looks back at the first copy does so for the repetition, for there is nothing else.

R R is compared with R R′, where the second half is other tokens: the same offsets without repetition are the null
(induction: https://arxiv.org/abs/2209.11895).
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.metric import ALIKE, Number, Target, WeightAt
from headwise.analysis.metrics.row_stats import Rows
from headwise.analysis.metrics.tasks import TextTask, bare_unit
from headwise.analysis.metrics.token_classes import CLASSES, class_flags
from headwise.analysis.recording.batching import Unit, tokenizer_of
from headwise.model import AnyModel

_BASE = Number("", placed=True, merge=ALIKE, on="random tokens said twice", hue=305)
INDUCTION = replace(
    _BASE, name="induction", label="weight on the token behind the first copy", target=Target("echo", 0)
).three()
DUPLICATE = replace(_BASE, name="duplicate", label="weight on the first copy", target=Target("echo", 1)).three()
NUMBERS = (*INDUCTION, *DUPLICATE)
TOGETHER = 32  # sequences read side by side


@dataclass(frozen=True, eq=False)
class Repeats:
    """Sequences of ids: `twice` is R R, `once` is R R′, (N, T) each, `start` tokens before R, `length` tokens in R."""

    twice: Tensor
    once: Tensor
    start: int
    length: int

    @property
    def second(self) -> slice:
        """Where the second copy stands."""
        return slice(self.start + self.length, self.start + 2 * self.length)


def make_repeats(model: AnyModel, sequences: int = 24, length: int = 32, seed: int = 0) -> Repeats:
    """Sequences of ordinary tokens, none twice within R; framed as the model's tokenizer frames a text. None at all where the
    vocabulary or the context leave no room to repeat two tokens."""
    tokenizer = tokenizer_of(model)
    flags = class_flags(tokenizer, model.spec.vocab)
    plain = (flags[:, CLASSES.index(SPECIAL)] == 0).nonzero()[:, 0].numpy()
    plain = plain[plain < len(tokenizer)]
    before, behind = tokenizer.around
    room = model.spec.room
    length = min(length, (room - len(before) - len(behind)) // 2, len(plain) // 2)
    if length < 2:
        nothing = torch.zeros(0, len(before) + len(behind), dtype=torch.long, device=model.device)
        return Repeats(nothing, nothing, len(before), 0)
    dice = np.random.default_rng(seed)
    drawn = np.stack([dice.permutation(plain)[: 2 * length] for _ in range(sequences)])
    drawn = torch.from_numpy(drawn)  # (N, 2 m)
    frame = [torch.tensor(ids, dtype=torch.long).expand(sequences, -1) for ids in (before, behind)]
    copied = torch.cat((drawn[:, :length], drawn[:, :length]), 1)
    twice, once = (torch.cat((frame[0], half, frame[1]), 1).to(model.device) for half in (copied, drawn))
    return Repeats(twice, once, len(before), length)


class Echo(TextTask):
    """The weight on the token behind the first copy (induction), and on the first copy (duplicate), from the second one."""

    numbers = NUMBERS

    def __init__(self, repeats: Repeats) -> None:
        self.repeats, self.tokens = repeats, TOGETHER * max(1, repeats.twice.shape[1])
        behind, first = repeats.length - 1, repeats.length
        self.parts = [
            WeightAt(name, partial(self._places, offset=offset), everywhere=True)
            for name, offset in (("induction", behind), ("duplicate", first))
        ]
        self.aims = tuple(aim for part in self.parts for aim in part.aims)

    def texts(self, model: AnyModel, seed: int = 0) -> tuple[list[Unit], list[Unit]]:
        """R R, and R R′."""
        tokenizer, both = tokenizer_of(model), (self.repeats.twice, self.repeats.once)
        twice, once = (
            [bare_unit(number, tuple(ids), tokenizer) for number, ids in enumerate(some.tolist())] for some in both
        )
        return twice, once

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Three numbers for each."""
        sums, counts = zip(*(part.take(rows) for part in self.parts), strict=True)
        return torch.cat(sums, -1), torch.cat([count.expand(*count.shape[:2], 3) for count in counts], -1)

    def _places(self, text: Unit, offset: int) -> list[int]:
        """For each token of the second copy the one so far back; never the first token of the text."""
        second = range(self.repeats.second.start, self.repeats.second.stop)
        return [row - offset if row in second else -1 for row in range(len(text.ids))]
