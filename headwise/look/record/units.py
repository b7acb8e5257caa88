"""What a model reads while it is looked at: texts as units, units in batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.look.record.buckets import bucket_of
from headwise.model import AnyModel
from headwise.text import Tokenizer
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus, Pair, Piece
from headwise.text.documents import Document
from headwise.text.little import VOCABULARY
from headwise.text.tokenizer import trim

DOCUMENTS = 500  # of the little language, where no text is given
LONGEST = 512  # tokens of a unit of plain text


@dataclass(frozen=True, eq=False)
class Unit:
    """One text as a model reads it: the unit of the statistics. Long texts are cut into several.

    Of a pair `ids` are the text behind the token a decoder starts from, and `source` is what the encoder reads.
    """

    number: int  # where it stands in the corpus
    bucket: int  # where its sums go, by its text
    ids: tuple[int, ...]
    document: Document | None  # None: a piece of plain text
    _align: partial[Alignment]
    source: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Tokens that it takes in a batch."""
        return max(len(self.ids), len(self.source))

    @cached_property
    def alignment(self) -> Alignment:
        """Its tokens and words."""
        return self._align()

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Its tokens as a person would write them."""
        aligned = self.alignment
        spans = zip(aligned.spans, aligned.tokens, strict=True)
        return tuple(aligned.text[start:end].strip() or token for (start, end), token in spans)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some units side by side, padded."""

    units: tuple[Unit, ...]
    ids: Tensor  # (B, T)
    real: Tensor  # (B, T): True at tokens, False at padding
    source: Tensor | None = None  # (B, S), of pairs
    source_real: Tensor | None = None  # (B, S)

    @cached_property
    def first(self) -> Tensor:
        """Where each row's first token stands, (B,)."""
        return self.real.long().argmax(1)

    @property
    def whole(self) -> bool:
        """Whether there is no padding at all."""
        return bool(self.real.all())

    @property
    def source_padding(self) -> Tensor | None:
        """Which tokens of the sources are real, where there is padding among them."""
        return None if self.source_real is None or bool(self.source_real.all()) else self.source_real


def read_units(model: AnyModel, corpus: Any, longest: int | None = None, asked: bool = False) -> Iterator[Unit]:
    """Every text of a corpus (None: `documents_for` the model); plain text in units of at most `longest` tokens, documents
    whole.

    What is `asked` of a model is judged by the text it should give: then an encoder-decoder reads pairs, and only those.
    """
    tokenizer, corpus = tokenizer_of(model), documents_for(model) if corpus is None else Corpus.of(corpus)
    if asked or (corpus.paired and model.spec.kind != "encoder-decoder"):
        corpus.suits(model.spec.kind)
    elif corpus.paired:
        raise HeadwiseError("pairs are for what is asked of an encoder-decoder; give texts: each is source and target.")
    before, behind = tokenizer.around
    room = model.spec.context if model.spec.positions == "learned" else max(model.spec.context, longest or 0)
    if longest is not None and longest > room:
        raise HeadwiseError(
            f"{longest} tokens are more than the {room} positions of the model; choose a smaller length."
        )
    longest = min(LONGEST if longest is None else longest, room)
    if longest <= len(before) + len(behind):
        raise HeadwiseError(f"a length of {longest} tokens leaves no room for text; choose a longer one.")
    number = 0
    for item in corpus.items():
        if not isinstance(item, Piece):
            pair = isinstance(item, Pair)
            unit = _of_pair(number, item, model) if pair else _of_document(number, item, tokenizer)
            if unit.size > room:
                which = f"pair {number + 1}" if pair else f"document {number}"
                raise HeadwiseError(
                    f"{which} has {unit.size} tokens, more than the {room} positions of the model: "
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
            inside = [span for span in spans if span[1] > span[0]]
            bucket = bucket_of(item.text[inside[0][0] : inside[-1][1]] if inside else "")
            yield Unit(number, bucket, ids, None, partial(_align, tokenizer, item.text, ids, spans))
            number += 1
    if number == 0:
        raise HeadwiseError("there is no text to look at; the corpus is empty.")


def fitting(model: AnyModel, corpus: Corpus, most: int | None = None) -> Corpus:
    """The documents of a corpus that fit into a model's context, or so many of them; where none does, texts that are cut."""
    documents = [item for item in corpus.items() if isinstance(item, Document)]
    there = [one for one in documents if 0 < len(tokenizer_of(model).encode(one.text)) <= model.spec.context]
    if most is None:
        if len(there) == len(documents):
            return replace(corpus, _read=lambda: iter(there))  # as it is, and not made a second time
        return Corpus.of(there or [one.text for one in documents])
    return Corpus.of(there[:: max(1, len(there) // most)][:most] or [one.text for one in documents[:most]])


def make_batches(
    units: Iterable[Unit], tokens: int = 4096, side: str = "right", device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Units in their order, as many as fit into so many tokens; sorted within a handful, so that little is padding."""
    waiting: list[Unit] = []

    def flush() -> Iterator[Batch]:
        waiting.sort(key=lambda unit: unit.size)
        some: list[Unit] = []
        for unit in waiting:
            if some and (len(some) + 1) * unit.size > tokens:
                yield make_batch(some, side, device)
                some = []
            some.append(unit)
        if some:
            yield make_batch(some, side, device)
        waiting.clear()

    for unit in units:
        waiting.append(unit)
        if sum(one.size for one in waiting) > 8 * tokens:
            yield from flush()
    yield from flush()


def make_batch(units: list[Unit], side: str = "right", device: torch.device | str = "cpu") -> Batch:
    """Units of any lengths, padded on one side; sources on the right."""
    ids, real = _stacked([unit.ids for unit in units], side)
    made = Batch(tuple(units), ids.to(device), real.to(device))
    if not units[0].source:
        return made
    sources, there = _stacked([unit.source for unit in units])
    return replace(made, source=sources.to(device), source_real=there.to(device))


def run(model: AnyModel, batch: Batch, hidden: bool = True) -> Tensor:
    """One forward pass over a batch; padding is named only where there is some, so that the plain path stays plain."""
    return read(model, batch.ids, None if batch.whole else batch.real, hidden)


def read(model: AnyModel, ids: Tensor, padding: Tensor | None = None, hidden: bool = True) -> Tensor:
    """One forward pass over texts, (B, T); an encoder-decoder reads each as its source and as its target."""
    both = {"source": ids, "source_padding": padding} if model.spec.kind == "encoder-decoder" else {}
    return model(ids, padding=padding, hidden=hidden, **both)


def documents_for(model: AnyModel) -> Corpus:
    """What a model reads where nothing is given: the little language, if it knows its words, or the probe set; of these the
    documents that fit into its context, or, where none does, their texts, to be cut."""
    words = set(tokenizer_of(model).backend.get_vocab())
    corpus = Corpus.little("held-out", documents=DOCUMENTS, seed=1) if words >= set(VOCABULARY) else Corpus.probe()
    return fitting(model, corpus)


def tokenizer_of(model: AnyModel) -> Tokenizer:
    """The model's tokenizer, or an error that says what to do."""
    if not isinstance(model.tokenizer, Tokenizer):
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; set model.tokenizer.")
    return model.tokenizer


def _of_document(number: int, document: Document, tokenizer: Tokenizer) -> Unit:
    ids = tuple(tokenizer.encode(document.text))
    return Unit(
        number, bucket_of(document.text), ids, document, partial(tokenizer.align, document.text, document.words)
    )


def _of_pair(number: int, pair: Pair, model: AnyModel) -> Unit:
    tokenizer = tokenizer_of(model)
    source, text = (tokenizer.backend.encode(given, add_special_tokens=False) for given in pair)
    sources, ids = tokenizer.pair(source.ids, text.ids, model.start)
    first = 1 + len(tokenizer.around[0])
    spans = [(0, 0)] * first + text.offsets
    spans += [(0, 0)] * (len(ids) - len(spans))
    align = partial(_align, tokenizer, pair.text, tuple(ids), spans)
    return Unit(number, bucket_of("\n".join(pair)), tuple(ids), None, align, tuple(sources))


def _stacked(rows: Sequence[tuple[int, ...]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids of any lengths, padded on one side, and where they are real: (B, T) each."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[number, place], real[number, place] = torch.tensor(row), True
    return ids, real


def _align(tokenizer: Tokenizer, text: str, ids: tuple[int, ...], spans: list[tuple[int, int]]) -> Alignment:
    """The part of a long text that a unit covers."""
    covered = [span for span in spans if span[1] > span[0]]
    low, high = (covered[0][0], covered[-1][1]) if covered else (0, 0)
    inside = [(a - low, b - low) if b > a else (0, 0) for a, b in spans]
    return Alignment.of(
        text[low:high], ids, [tokenizer.token(i) for i in ids], [trim(text[low:high], span) for span in inside]
    )
