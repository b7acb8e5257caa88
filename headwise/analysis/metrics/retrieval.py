"""The retrieval score: of the tokens a model copies from a needle in a haystack, the share at which the head's largest weight
is on the token being copied (https://arxiv.org/abs/2404.15574).

Texts, of the probe set if no others are given, are laid end to end; among them stands a needle, and at the end the needle is
begun again. The model goes on with it; a token counts if the model itself would have written it. The null is how often the
largest weight is on the same place when another needle stands there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.analysis.metrics.metric import ALIKE, WeightAt
from headwise.analysis.metrics.tasks import TOKENS, TextTask, bare_unit
from headwise.analysis.recording.batching import Unit, make_batches, run, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.model import AnyModel
from headwise.text.corpus import Corpus

TEXTS, NEEDLE, CUE, HAY = 32, 10, 3, 48  # haystacks; tokens of a needle, of its beginning that is given, and around it


@dataclass(frozen=True, eq=False)
class Needle:
    """A haystack with a needle, the same with another needle in its place, and where each copied token comes from."""

    ids: tuple[int, ...]
    other: tuple[int, ...]
    start: int  # where the needle stands
    again: int  # where it is begun again

    @property
    def places(self) -> list[int]:
        """For each row the place of the token to be written next, in the needle; -1: nothing is copied there."""
        made = [-1] * len(self.ids)
        for step in range(CUE - 1, NEEDLE - 1):
            made[self.again + step] = self.start + step + 1
        return made


class Retrieval(TextTask, WeightAt):
    """`hw.profile(model, measures=[Retrieval()])`; for decoders, whose next token is known. Others have none of it.

    >>> Retrieval().names
    ('retrieval', 'retrieval null', 'retrieval valued')
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus  # where needles and haystacks are taken from
        self.places: dict[tuple[int, ...], list[int]] = {}  # where each row should look, by the ids of a text
        super().__init__(
            "retrieval", lambda text: self.places[text.ids], label="copied tokens it looks at hardest",
            more="finds what is copied", hue=285, hits=True, merge=ALIKE, on="needles in texts",
        )  # fmt: skip

    def texts(self, model: AnyModel, seed: int) -> tuple[list[Unit], list[Unit]]:
        """Haystacks, and the same with other needles."""
        if model.spec.kind != "decoder" or model.output is None:
            return [], []
        needles, tokenizer = make_needles(model, self.corpus, seed), tokenizer_of(model)
        units = [bare_unit(number, needle.ids, tokenizer) for number, needle in enumerate(needles)]
        others = [bare_unit(number, needle.other, tokenizer) for number, needle in enumerate(needles)]
        copied = _copied(model, units)
        for needle in needles:  # the same rows of both
            right = [place if place in copied[needle.ids] else -1 for place in needle.places]
            self.places[needle.ids] = self.places[needle.other] = right
        return units, others


def make_needles(model: AnyModel, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[Needle]:
    """Needles are beginnings of texts without a repeated token, haystacks the other texts; none where there is no room."""
    tokenizer = tokenizer_of(model)
    before, behind = tokenizer.around
    room = model.spec.room
    given = documents_for(model) if corpus is None else Corpus.of(corpus)
    read = [tokenizer.encode(item.text) for item in given.items()]
    bare = [tuple(ids[len(before) : len(ids) - len(behind)]) for ids in read]
    long = list(dict.fromkeys(ids[:NEEDLE] for ids in bare if len(set(ids[:NEEDLE])) == NEEDLE))
    around = min(2 * HAY, room - len(before) - 2 * NEEDLE)
    if around < NEEDLE or len(long) < 2:
        return []
    dice, made = np.random.default_rng(seed), []
    for _ in range(texts):
        needle, other = (long[i] for i in dice.permutation(len(long))[:2])
        hay = [
            token for i in dice.permutation(len(bare)) if bare[i][:NEEDLE] not in (needle, other) for token in bare[i]
        ]
        hay = hay[:around]
        first = int(dice.integers(len(hay) // 4, len(hay) // 2 + 1))  # no fixed distance leads there
        left, right = hay[:first], hay[first:]
        start = len(before) + len(left)
        ids, twin = ((*before, *left, *one, *right, *needle) for one in (needle, other))
        made.append(Needle(ids, twin, start, start + NEEDLE + len(right)))
    return made


def _copied(model: AnyModel, units: list[Unit]) -> dict[tuple[int, ...], set[int]]:
    """For each text the places from which the model copies: there it would write the next token of the needle itself."""
    made = {}
    for batch in make_batches(units, TOKENS, device=model.device):
        best = run(model, batch, hidden=False).argmax(-1)[:, :-1]  # (B, T - 1)
        right = (best == batch.ids[:, 1:]).cpu()
        for row, unit in enumerate(batch.units):
            again = len(unit.ids) - NEEDLE
            asked = range(again + CUE - 1, again + NEEDLE - 1)
            start = next(i for i in range(again) if unit.ids[i : i + NEEDLE] == unit.ids[again:])
            made[unit.ids] = {start + i - again + 1 for i in asked if bool(right[row, i])}
    return made
