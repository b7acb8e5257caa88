"""Variability: how much of a head's attention depends on what is read, and not only on where it stands.

Texts of one length are read side by side, and at each place the weights are held against their mean over the texts:
Σ|p − p̄| / 2Σp (https://arxiv.org/abs/1906.04284). 0 is a head that looks at the same places whatever the text; N texts
that each send it to a place of its own give 1 − 1/N.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.metric import LARGER, Measure, Number, Taker
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Unit, make_batch, read_sites
from headwise.analysis.recording.recording import pick
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.model import AnyModel, quiet

LENGTH, TEXTS = 16, 16  # tokens of each text, and how many texts: sentences are short, and a look must be cheap
VARIABILITY = Number("variability", "how far weights depend on the text", more="depends on what is read", merge=LARGER)


@torch.no_grad()
def variability(
    model: AnyModel, corpus: Any = None, heads: Pattern = "*", *, length: int = LENGTH, texts: int = TEXTS
) -> dict[str, float]:
    """For each head Σ|p − p̄| / 2Σp over the first so many texts that have so many tokens, cut to that length.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text import Tokenizer
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat"])
    >>> variability(model, ["the cat sat", "the cat sat"], "5.1", length=4)  # the same text twice
    {'5.1': 0.0}
    """
    if length < 1 or texts < 2:
        raise HeadwiseError(f"texts are compared with each other: two of one token at least; got {texts} of {length}.")
    addresses = tuple(address for site in read_sites(model, heads) for address in site.addresses)
    wanted, chosen = set(pick(heads, addresses)), sample(Reading.of(model, corpus), length, texts)
    if len(chosen) < 2:
        raise HeadwiseError(
            f"{len(chosen)} texts have {length} tokens, and two are needed; give more texts, or a shorter length."
        )
    tally = Tally(len(addresses))
    with quiet(model):
        read_alike(model, chosen, tally, length)
    found = zip(addresses, tally.mean(VARIABILITY.name).tolist(), strict=True)
    return {str(address): value for address, value in found if address in wanted}


def sample(units: Iterable[Unit], length: int = LENGTH, texts: int = TEXTS) -> list[Unit]:
    """The first so many units that are long enough."""
    return list(islice((unit for unit in units if len(unit.ids) >= length), texts))


def read_alike(model: AnyModel, units: list[Unit], tally: Tally, length: int = LENGTH) -> None:
    """Read texts side by side, cut to one length, and count; of fewer than two nothing can be said."""
    runner = Runner(tally, [Variability()])
    if len(units) > 1:
        cut = [replace(unit, ids=unit.ids[:length], source=()) for unit in units]
        runner.read(model, [make_batch(cut, device=model.device)])


class Variability(Measure):
    """For texts of one length, read as one batch; what each text adds goes into its own bucket."""

    numbers = (VARIABILITY,)

    def at(self, call: Call) -> "Moved":
        """One call at one site."""
        return Moved(call)


class Moved(Taker):
    """Σ|p − p̄| and 2Σp of each text and head, over the blocks of a call."""

    def __init__(self, call: Call) -> None:
        B, H = call.seen.q.shape[:2]
        self.moved, self.weight = (torch.zeros(B, H, dtype=torch.float64) for _ in range(2))

    def see(self, block: RowBlock) -> None:
        """One block of rows, the same places of every text."""
        p = block.share(block.e)  # (B, h, R, C)
        self.weight[:, block.heads] += p.sum((2, 3)).double().cpu()
        self.moved[:, block.heads] += (p - p.mean(0)).abs().sum((2, 3)).double().cpu()

    def take(self) -> tuple[Tensor, Tensor]:
        """(B, H, 1) each."""
        return self.moved[..., None], 2 * self.weight[..., None]
