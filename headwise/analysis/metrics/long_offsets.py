"""What lies farther back than the window of the offset profile: texts laid end to end, so that there is something.

    far offset    the weight a fixed number of tokens away, farther than the window; the number that suits a head best is
                  chosen on every other text, and told on the rest
    fixed place   the weight on a fixed place of the text from rows farther away than the window, chosen and told alike; the
                  first token, and what a tokenizer puts around a text, is no place
    beyond        the weight on what a key head would forget that keeps the first tokens and the last alone: what
                  `Plan.streaming` ranks key heads by. Next to nothing there does not mean that a head can stream: an
                  induction head attends to the first token until something is repeated

Heads that see no farther than a window of their own are not asked. The baseline of the first two is one token in all
visible. Texts are drawn by chance, so no word stands at the same place.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.metric import ALIKE, Number
from headwise.analysis.metrics.prompts import ENOUGH
from headwise.analysis.metrics.row_blocks import fetched
from headwise.analysis.metrics.tasks import TaskMeasure
from headwise.analysis.recording.batching import read, read_sites, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import Keeps
from headwise.text.corpus import Corpus

TEXTS, LENGTH = 40, 112  # and the tokens of each
FEWEST_ROWS = WINDOW  # rows that an offset or a place needs
KEEPS = Keeps(first=4, last=WINDOW)  # what a key head that streams would keep
TOGETHER = 8  # texts read side by side

_BASE = Number("", placed=True, merge=ALIKE, on="texts laid end to end")
FAR = replace(
    _BASE, name="far offset", label=f"weight at its best offset of {WINDOW} or more", more="looks a fixed way far off"
).three()
FIXED = replace(
    _BASE, name="fixed place", label=f"weight on its best place, from {WINDOW} tokens away", more="looks at one place"
).three()
BEYOND = replace(
    _BASE, name="beyond", label=f"weight on what a cache of {KEEPS.first} + {KEEPS.last} forgets", column=True,
    more="needs its whole cache",
)  # fmt: skip


class FarPlaces(TaskMeasure):
    """`hw.profile(model, prompts=True)`; of an encoder, which has no cache, `beyond` is not asked.

    >>> [number.name for number in FarPlaces().numbers if number.shown]
    ['far offset', 'fixed place', 'beyond']
    """

    numbers = (*FAR, *FIXED, BEYOND)

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus  # whose texts are laid end to end; none: as for a profile
        self._chosen: dict[str, list[int]] = {}

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The offset and the place of each head."""
        return self._chosen

    def run(self, model: AnyModel, tally: Tally, seed: int = 0, progress: Progress | None = None) -> str:
        """Read, choose, and add up; or why nothing is asked."""
        tally.expect(self.names)
        if model.spec.kind == "encoder-decoder":
            return "far places are asked in one stack that reads one text."
        before, behind = tokenizer_of(model).around
        inner = range(max(1, len(before)), LENGTH - len(behind))
        ids = long_texts(model, self.corpus, seed)
        if len(ids) < ENOUGH:
            return f"there is no room, or no text, for {LENGTH} tokens; {ENOUGH} such texts are needed."
        sites = read_sites(model)
        whole = [site.window is None or site.window >= LENGTH for site in sites for _ in site.head_ids]
        seen = _Sums(tally.heads, len(ids), inner, ahead=model.spec.kind == "encoder")
        for first in range(0, len(ids), TOGETHER):
            if progress is not None:
                progress(FAR[0].on, first, len(ids))
            some = torch.tensor(ids[first : first + TOGETHER], device=model.device)
            with listening(sites, seen.see, first):
                read(model, some)
        if progress is not None:
            progress(FAR[0].on, len(ids), len(ids))
        self._add(tally, seen, np.array(whole))
        return ""

    def _add(self, tally: Tally, seen: "_Sums", whole: np.ndarray) -> None:
        """`whole` (heads,): those that see a whole text; a window would hide what is asked about."""
        sums, counts = (made[self.names[0]] for made in (tally.sums, tally.counts))
        heads = np.arange(tally.heads)
        for group, (name, made) in enumerate(seen.found.items()):
            best = made[0, 0::2].mean(0).argmax(1)  # (heads,), on the texts for choosing
            self._chosen[name] = [seen.labels[name][place] for place in best]
            for kind in range(3):
                value = seen.nulls[name][best][None] if kind == 1 else made[kind // 2][:, heads, best]
                sums[: len(made[0]), :, 3 * group + kind] += value * whole
                counts[: len(made[0]), :, 3 * group + kind] += whole
        if not seen.ahead:
            sums[: len(seen.beyond), :, -1] += seen.beyond * whole
            counts[: len(seen.beyond), :, -1] += whole


class _Sums:
    """Means over the rows of each text: at every far offset and place, as they are and valued; and beyond."""

    def __init__(self, heads: int, texts: int, inner: range, ahead: bool) -> None:
        self.ahead, T = ahead, LENGTH
        row, key = np.arange(T)[:, None], np.arange(T)[None]
        visible = np.full(T, T) if ahead else np.arange(1, T + 1)
        target, away = (key >= inner.start) & (key < inner.stop) & (ahead | (key <= row)), row - key
        offsets = [
            o for o in range(1 - T, T) if abs(o) >= WINDOW and (target & (away == o)).any(1).sum() >= FEWEST_ROWS
        ]
        places = [j for j in inner if (target & (np.abs(away) >= WINDOW))[:, j].sum() >= FEWEST_ROWS]
        self.labels = {FAR[0].name: offsets, FIXED[0].name: places}
        cells = {
            FAR[0].name: np.stack([target & (away == o) for o in offsets]),
            FIXED[0].name: np.stack([target & (np.abs(away) >= WINDOW) & (key == j) for j in places]),
        }  # (choices, T, T): the cells of each, one in a row
        self.nulls = {name: (some.any(2) / visible).sum(1) / some.any(2).sum(1) for name, some in cells.items()}
        self.where = {name: [np.nonzero(one) for one in some] for name, some in cells.items()}
        self.found = {name: np.zeros((2, texts, heads, len(some))) for name, some in cells.items()}
        self.beyond = np.zeros((texts, heads))

    def see(self, seen: Seen, first: int, first_head: int) -> None:
        """One call, for the texts from `first` on."""
        maps = seen.maps()  # (B, H, T, T)
        B, H = maps.shape[:2]
        if not H:
            return
        valued = maps * fetched(seen)[:, :, None]
        valued = valued / valued.sum(-1, keepdim=True).clamp(min=1e-30)
        at = (slice(first, first + B), slice(first_head, first_head + H))
        for kind, some in enumerate((maps, valued)):
            for name, cells in self.where.items():
                for choice, (rows, keys) in enumerate(cells):
                    self.found[name][(kind, *at, choice)] = some[:, :, rows, keys].mean(-1).double().cpu().numpy()
        if not self.ahead:
            rows = range(KEEPS.tokens(LENGTH), LENGTH)
            self.beyond[at] = mass_beyond(maps[:, :, rows.start :], rows, KEEPS).mean(-1).double().cpu().numpy()


def mass_beyond(shares: Tensor, rows: Sequence[int], keeps: Keeps) -> Tensor:
    """The share of weight on keys that a key head which keeps so much has forgotten: (…, rows, S) → (…, rows).

    >>> mass_beyond(torch.full((1, 8), 0.125), [7], Keeps(first=1, last=3))
    tensor([0.5000])
    """
    assert keeps.last is not None
    keys = torch.arange(shares.shape[-1], device=shares.device)
    place = torch.tensor(list(rows), device=shares.device)[:, None]
    forgotten = (keys >= keeps.first) & (keys <= place - keeps.last)  # (rows, S)
    return (shares * forgotten.to(shares)).sum(-1)


def long_texts(model: AnyModel, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[list[int]]:
    """Texts laid end to end in an order drawn anew, within what a tokenizer puts around a text: LENGTH tokens each. None
    where a model cannot read so many, or the texts are too few to make one."""
    tokenizer = tokenizer_of(model)
    before, behind = tokenizer.around
    given = documents_for(model) if corpus is None else Corpus.of(corpus)
    bare = [tokenizer.encode(item.text, special=False) for item in given.items()]
    inner = LENGTH - len(before) - len(behind)
    if model.spec.room < LENGTH or sum(map(len, bare)) < inner:
        return []
    dice = np.random.default_rng(seed)
    made = []
    for _ in range(texts):
        ids: list[int] = []
        for i in dice.permutation(len(bare)):
            ids += bare[i]
            if len(ids) >= inner:
                break
        made.append([*before, *ids[:inner], *behind])
    return made
