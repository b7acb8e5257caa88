"""Variability: how much of a head's attention depends on what is read, and not only on where it stands.

Texts of one length are read side by side, and at each place the weights are held against their mean over the texts:
Σ|p − p̄| / 2Σp (https://arxiv.org/abs/1906.04284). 0 is a head that looks at the same places whatever the text; N texts
that each send it to a place of its own give 1 − 1/N.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.heads.site import Seen
from headwise.kernels.batched import maps_of_rows
from headwise.look.measure.measure import LARGER, Number
from headwise.look.measure.tally import Tally
from headwise.look.record.reading import Reading
from headwise.look.record.recording import pick
from headwise.look.record.units import Unit, read
from headwise.model import AnyModel, quiet

LENGTH, TEXTS = 16, 16  # tokens of each text, and how many texts: sentences are short, and a look must be cheap
CELLS = 1 << 21  # weights held at once
VARIABILITY = Number("variability", "how far weights depend on the text", more="depends on what is read", merge=LARGER)
NAMES = (VARIABILITY.name,)


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
    addresses = tuple(address for site in model.all_sites() for address in site.addresses)
    wanted, chosen = set(pick(heads, addresses)), sample(Reading.of(model, corpus), length, texts)
    if len(chosen) < 2:
        raise HeadwiseError(
            f"{len(chosen)} texts have {length} tokens, and two are needed; give more texts, or a shorter length."
        )
    tally, first = Tally(len(addresses)), 0
    varying = Varying(tally, chosen, length)
    with quiet(model), ExitStack() as stack:
        for site in model.all_sites():
            if wanted & set(site.addresses):
                stack.enter_context(site.listen(lambda seen, first=first: varying.see(seen, first)))
            first += len(site.head_ids)
        read(model, varying.ids.to(model.device))
    found = zip(addresses, tally.mean(NAMES[0]).tolist(), strict=True)
    return {str(address): value for address, value in found if address in wanted}


def sample(units: Iterable[Unit], length: int = LENGTH, texts: int = TEXTS) -> list[Unit]:
    """The first so many units that are long enough."""
    return list(islice((unit for unit in units if len(unit.ids) >= length), texts))


class Varying:
    """Listens while the sample is read as one batch; what each text adds goes into its own bucket."""

    def __init__(self, tally: Tally, units: list[Unit], length: int = LENGTH) -> None:
        self.tally, self.buckets = tally, [unit.bucket for unit in units]
        self.ids = torch.tensor([unit.ids[:length] for unit in units], dtype=torch.long)  # (B, T)
        tally.expect(NAMES)

    def see(self, seen: Seen, first_head: int) -> None:
        """One call at one site."""
        B, H, T = seen.q.shape[:3]
        moved, weight = (torch.zeros(B, H, dtype=torch.float64) for _ in range(2))
        step = max(1, CELLS // max(1, B * H * seen.k.shape[2]))
        for start in range(0, T, step):
            p = maps_of_rows(seen.q, seen.k, seen.terms, range(start, min(start + step, T))).float()  # (B, H, R, S)
            weight += p.sum((2, 3)).double().cpu()
            moved += (p - p.mean(0)).abs().sum((2, 3)).double().cpu()
        heads = slice(first_head, first_head + H)
        self.tally.add(NAMES, heads, self.buckets, moved[..., None], 2 * weight[..., None])
