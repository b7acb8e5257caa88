"""What a model reads while it is looked at: texts as units, units in batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.text import Tokenizer
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from headwise.text.tokenizer import trim

LONGEST = 512  # tokens of a unit of plain text


@dataclass(frozen=True, eq=False)
class Unit:
    """One text as a model reads it: the unit of the statistics. Long texts are cut into several."""

    number: int
    ids: tuple[int, ...]
    document: Document | None  # None: a piece of plain text
    _align: partial[Alignment]

    @cached_property
    def alignment(self) -> Alignment:
        """Its tokens and words."""
        return self._align()


@dataclass(frozen=True, eq=False)
class Batch:
    """Some units side by side, padded."""

    units: tuple[Unit, ...]
    ids: Tensor  # (B, T)
    real: Tensor  # (B, T): True at tokens, False at padding
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # what is the same for all heads, worked out once

    @cached_property
    def first(self) -> Tensor:
        """Where each row's first token stands, (B,)."""
        return self.real.long().argmax(1)

    @property
    def whole(self) -> bool:
        """Whether there is no padding at all."""
        return bool(self.real.all())


def read_units(model: AnyModel, corpus: Any, longest: int | None = None) -> Iterator[Unit]:
    """Every text of a corpus; plain text in units of at most `longest` tokens, documents whole."""
    tokenizer = tokenizer_of(model)
    before, behind = around(tokenizer)
    room = model.spec.context if model.spec.positions == "learned" else max(model.spec.context, longest or 0)
    if longest is not None and longest > room:
        raise HeadwiseError(
            f"{longest} tokens are more than the {room} positions of the model; choose a smaller length."
        )
    longest = min(LONGEST if longest is None else longest, room)
    if longest <= len(before) + len(behind):
        raise HeadwiseError(f"a length of {longest} tokens leaves no room for text; choose a longer one.")
    number = 0
    for item in Corpus.of(corpus).items():
        if isinstance(item, Document):
            unit = _of_document(number, item, tokenizer)
            if len(unit.ids) > room:
                raise HeadwiseError(
                    f"document {number} has {len(unit.ids)} tokens, more than the {room} positions of the model: "
                    f"{item.text[:60]!r}…; leave it out or cut it."
                )
            yield unit
            number += 1
            continue
        made = tokenizer.backend.encode(item.text, add_special_tokens=False)
        tokens, places = made.ids, made.offsets  # each asking makes a new list
        step = longest - len(before) - len(behind)
        for start in range(0, len(tokens), step):
            ids = (*before, *tokens[start : start + step], *behind)
            spans = [(0, 0)] * len(before) + places[start : start + step] + [(0, 0)] * len(behind)
            yield Unit(number, ids, None, partial(_align, tokenizer, item.text, ids, spans))
            number += 1
    if number == 0:
        raise HeadwiseError("there is no text to look at; the corpus is empty.")


def make_batches(
    units: Iterable[Unit], tokens: int = 4096, side: str = "right", device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Units in their order, as many as fit into so many tokens; sorted within a handful, so that little is padding."""
    waiting: list[Unit] = []

    def flush() -> Iterator[Batch]:
        waiting.sort(key=lambda unit: len(unit.ids))
        some: list[Unit] = []
        for unit in waiting:
            if some and (len(some) + 1) * len(unit.ids) > tokens:
                yield make_batch(some, side, device)
                some = []
            some.append(unit)
        if some:
            yield make_batch(some, side, device)
        waiting.clear()

    for unit in units:
        waiting.append(unit)
        if sum(len(one.ids) for one in waiting) > 8 * tokens:
            yield from flush()
    yield from flush()


def make_batch(units: list[Unit], side: str = "right", device: torch.device | str = "cpu") -> Batch:
    """Units of any lengths, padded on one side."""
    longest = max(len(unit.ids) for unit in units)
    ids = torch.zeros(len(units), longest, dtype=torch.long)
    real = torch.zeros(len(units), longest, dtype=torch.bool)
    for row, unit in enumerate(units):
        place = slice(0, len(unit.ids)) if side == "right" else slice(longest - len(unit.ids), longest)
        ids[row, place], real[row, place] = torch.tensor(unit.ids), True
    return Batch(tuple(units), ids.to(device), real.to(device))


def run(model: AnyModel, batch: Batch, hidden: bool = True) -> Tensor:
    """One forward pass over a batch; padding is named only where there is some, so that the plain path stays plain."""
    return read(model, batch.ids, None if batch.whole else batch.real, hidden)


def read(model: AnyModel, ids: Tensor, padding: Tensor | None = None, hidden: bool = True) -> Tensor:
    """One forward pass over texts, (B, T); an encoder-decoder reads each as its source and as its target."""
    both = {"source": ids, "source_padding": padding} if model.spec.kind == "encoder-decoder" else {}
    return model(ids, padding=padding, hidden=hidden, **both)


def tokenizer_of(model: AnyModel) -> Tokenizer:
    """The model's tokenizer, or an error that says what to do."""
    if not isinstance(model.tokenizer, Tokenizer):
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; set model.tokenizer.")
    return model.tokenizer


def around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and behind a text: ([CLS],) and ([SEP],) for BERT."""
    bare, dressed = tokenizer.encode("a", special=False), tokenizer.encode("a")
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return tuple(dressed[:start]), tuple(dressed[start + len(bare) :])
    return (), ()


def _of_document(number: int, document: Document, tokenizer: Tokenizer) -> Unit:
    ids = tuple(tokenizer.encode(document.text))
    return Unit(number, ids, document, partial(tokenizer.align, document.text, document.words))


def _align(tokenizer: Tokenizer, text: str, ids: tuple[int, ...], spans: list[tuple[int, int]]) -> Alignment:
    """The part of a long text that a unit covers."""
    covered = [span for span in spans if span[1] > span[0]]
    low, high = (covered[0][0], covered[-1][1]) if covered else (0, 0)
    inside = [(a - low, b - low) if b > a else (0, 0) for a, b in spans]
    return Alignment.of(
        text[low:high], ids, [tokenizer.token(i) for i in ids], [trim(text[low:high], span) for span in inside]
    )
