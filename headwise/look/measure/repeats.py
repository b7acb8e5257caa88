"""Random tokens, said twice: whoever looks back at the first copy does so for the repetition, for there is nothing else.

R R is compared with R R′, where the second half is other tokens: the same offsets without repetition are the null
(induction: https://arxiv.org/abs/2209.11895).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headwise.heads.site import Seen
from headwise.look.measure.cases import Cases
from headwise.look.measure.classes import CLASSES, class_flags
from headwise.look.measure.measure import ALIKE, Number, Target
from headwise.look.measure.rows import fetched, walk
from headwise.look.measure.scene import SPECIAL
from headwise.look.measure.tally import Tally
from headwise.look.record.units import tokenizer_of
from headwise.model import AnyModel

_TOLD = Number("", placed=True, merge=ALIKE, on="random tokens said twice", hue=305)
INDUCTION = replace(
    _TOLD, name="induction", label="weight on the token behind the first copy", target=Target("echo", 0)
).three()
DUPLICATE = replace(_TOLD, name="duplicate", label="weight on the first copy", target=Target("echo", 1)).three()
NUMBERS = (*INDUCTION, *DUPLICATE)
NAMES = tuple(number.name for number in NUMBERS)


@dataclass(frozen=True, eq=False)
class Repeats:
    """Sequences of ids: `twice` is R R, `once` is R R′, (N, T) each, `start` tokens before R, `length` tokens in R."""

    twice: Tensor
    once: Tensor
    start: int
    length: int

    def batches(self, size: int = 16) -> Iterator[tuple[slice, Tensor, bool]]:
        """Which sequences, their ids, and whether they repeat."""
        for first in range(0, len(self.twice), size):
            some = slice(first, min(first + size, len(self.twice)))
            yield some, self.twice[some], True
            yield some, self.once[some], False

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
    room = model.spec.context if model.spec.positions == "learned" else 1 << 30
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


class Echo:
    """Listens while repeats are read: the weight on the token behind the first copy (induction) and on it (duplicate)."""

    def __init__(self, tally: Tally, repeats: Repeats, cases: Cases | None = None) -> None:
        self.tally, self.repeats, self.cases = tally, repeats, cases
        tally.expect(NAMES)

    def see(self, seen: Seen, some: slice, repeated: bool, first_head: int) -> None:
        """One call at one site."""
        start, m = self.repeats.start, self.repeats.length
        B, H = seen.q.shape[:2]
        if repeated and self.cases is not None:
            self.cases.see_echoes(seen, some, first_head)
        norms = fetched(seen)  # (B, H, S)
        inputs = torch.stack((torch.ones_like(norms), norms), -1)  # (B, H, S, 2)
        sums = torch.zeros(B, H, len(NAMES), dtype=torch.float64)
        counts = torch.zeros(len(NAMES), dtype=torch.float64)
        for block in walk(seen, inputs):
            rows = torch.arange(block.rows.start, block.rows.stop) + block.past
            for number, offset in enumerate((m - 1, m)):
                target = rows - offset
                asked = (rows >= start + m) & (rows < start + 2 * m) & (target > 0)  # never the first token
                if not bool(asked.any()):
                    continue
                e = block.at(offset, offset + 1)[..., 0]  # (B, h, R)
                p = block.share(e)[..., asked].sum(-1)
                if repeated:
                    valued = (
                        e * norms[:, block.heads][..., target.clamp(min=0)] / block.features[..., 1].clamp(min=1e-30)
                    )
                    sums[:, block.heads, 3 * number] += p.double().cpu()
                    sums[:, block.heads, 3 * number + 2] += valued[..., asked].sum(-1).double().cpu()
                else:
                    sums[:, block.heads, 3 * number + 1] += p.double().cpu()
                if block.heads.start == 0:
                    places = [3 * number, 3 * number + 2] if repeated else [3 * number + 1]
                    counts[places] += int(asked.sum())
        told = ~sums.isnan()  # what is weighed by W_O was not measured where that is not known
        counts = counts if bool(told.all()) or not bool(norms.isnan().any()) else counts * told
        sums = sums.nan_to_num(0.0) if bool(norms.isnan().any()) else sums
        self.tally.add(NAMES, slice(first_head, first_head + H), range(some.start, some.stop), sums, counts)
