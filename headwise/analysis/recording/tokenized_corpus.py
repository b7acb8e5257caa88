"""A reading: a corpus as a model reads it, tokenised once and passed on from one question to the next."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from headwise.analysis.recording.batching import Unit, tokenizer_of
from headwise.analysis.recording.text_buckets import bucket_of
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.text import Tokenizer
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus, Pair, Piece
from headwise.text.documents import Document
from headwise.text.synthetic import VOCABULARY
from headwise.text.tokenizer import trim

DOCUMENTS = 500  # of the little language, where no text is given
LONGEST = 512  # tokens of a unit of plain text, where nobody says it
KEPT = 1 << 16  # tokens that are kept; a larger corpus is read again from where it lies
PART, AROUND, TRIES = 1 << 15, 64, 8  # characters tokenised at once; those compared where a text is parted; how often
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Frame:
    """How a model cuts texts into units: what else a reading depends on beside the corpus and the tokenizer."""

    longest: int  # tokens of a unit of plain text
    room: int  # tokens the model can read at once
    start: int | None  # what a decoder that is given pairs starts from

    @staticmethod
    def of(model: AnyModel, longest: int | None, usual: int, paired: bool) -> "Frame":
        """For a model: `longest` as it is asked for, or what is usual."""
        before, behind = tokenizer_of(model).around
        room = model.spec.context if model.spec.positions == "learned" else max(model.spec.context, longest or 0)
        if longest is not None and longest > room:
            raise HeadwiseError(
                f"{longest} tokens are more than the {room} positions of the model; choose a smaller length."
            )
        longest = min(usual if longest is None else longest, room)
        if longest <= len(before) + len(behind):
            raise HeadwiseError(f"a length of {longest} tokens leaves no room for text; choose a longer one.")
        return Frame(longest, room, model.start if paired else None)


class Reading:
    """The units of a corpus, one after the other, as often as asked. Taken wherever a corpus is.

    What is small is kept, so it is tokenised once, whoever asks. A large corpus streams: each pass reads it from where it
    lies, and only what is under way is held.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> reading = Reading.of(model, ["to be", "or not"])
    >>> [unit.text for unit in reading], reading.texts, reading.tokens
    (['to be', 'or not'], 2, 11)
    >>> Reading.of(model, reading) is reading
    True
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, frame: Frame, make: Callable[[], Iterator[Unit]]) -> None:
        self.corpus, self.tokenizer, self.frame = corpus, tokenizer, frame
        self._make = make
        self._kept: list[Unit] | None = None
        self._ahead: Iterator[Unit] | None = None
        self._counts: tuple[int, int, str] | None = None  # known when all was read: texts, tokens, digest

    @staticmethod
    def of(
        model: AnyModel, corpus: Any = None, longest: int | None = None, *, answers: bool = False, usual: int = LONGEST
    ) -> "Reading":
        """A text, a list of texts, a path or a Corpus, as this model reads it; None: `documents_for` it. A reading for the
        same tokenizer stays as it is; where units shall be shorter they are cut, and not tokenised anew.

        Plain text is cut into units of at most `longest` tokens (None: the `usual`, or the model's context); documents and
        pairs stay whole. With `answers` a model is judged by the text it should give: then an encoder-decoder reads
        pairs, and only those.
        """
        if isinstance(corpus, Reading):
            corpus._check(model, answers)
            return corpus if longest is None else corpus.cut(longest)
        tokenizer, corpus = tokenizer_of(model), documents_for(model) if corpus is None else Corpus.of(corpus)
        _check_kind(model, corpus, answers)
        frame = Frame.of(model, longest, usual, corpus.paired)
        return Reading(corpus, tokenizer, frame, partial(_read, corpus, tokenizer, frame))

    def __iter__(self) -> Iterator[Unit]:
        if self._kept is not None:
            yield from map(replace, self._kept)  # copies: what is worked out about one goes with it
            return
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            yield from ahead
            return
        kept: list[Unit] | None = [] if self._counts is None else None  # what was too much once is so again
        texts, tokens, held, digest = 0, 0, 0, hashlib.sha256()
        for unit in self._make():
            digest.update(f"{', ' if texts else '['}{unit.ids!r}".encode())
            texts, tokens, held = texts + 1, tokens + len(unit.ids), held + _held(unit)
            if kept is not None:
                kept.append(replace(unit))
                kept = kept if held <= KEPT else None
            yield unit
        if not texts:
            raise HeadwiseError("there is no text to look at; the corpus is empty.")
        digest.update(b"]")
        self._counts, self._kept = (texts, tokens, digest.hexdigest()), kept

    @property
    def texts(self) -> int:
        """How many units there are. Like `tokens` and `fingerprint` it is counted while the corpus is first read."""
        return self._read_whole()[0]

    @property
    def tokens(self) -> int:
        """How many tokens they have, sources of pairs not counted."""
        return self._read_whole()[1]

    @property
    def fingerprint(self) -> str:
        """A digest of all ids: whether two readings are of the same units."""
        return self._read_whole()[2]

    def count_ahead(self) -> int | None:
        """How many units there are, if they are few enough to be kept: those are read now. None: only a whole pass tells."""
        if self._counts is None and self._ahead is None:
            units, ahead, held = iter(self), [], 0
            for unit in units:
                ahead.append(unit)
                held += _held(unit)
                if held > KEPT:
                    self._ahead = chain(ahead, units)  # the next pass begins with these
                    break
        return None if self._counts is None else self._counts[0]

    def documents(self) -> Iterator[Document]:
        """The documents with relations among the texts; they are not tokenised for it."""
        if self._kept is not None:
            return (unit.document for unit in self._kept if unit.document is not None)
        return (item for item in self.corpus.items() if isinstance(item, Document))

    def first(self, most: int) -> "Reading":
        """The first so many units, or all if there are not more; they are kept."""
        if most < 1:
            raise HeadwiseError(f"at least one text must be read; got a limit of {most}.")
        return self.only(list(islice(self, most)))

    def halves(self) -> "tuple[Reading, Reading]":
        """Some texts to choose heads on, some to judge the choice by: dealt in turn, in the order of a hash of them.

        What was chosen on a text looks better on it than it is; so nobody is judged by the texts of the choice. The order
        they stand in decides nothing: in a file of pairs every other line may be of one kind. A text that comes twice stays
        together.
        """
        units = list(self)
        keys = [
            hashlib.sha256(repr(Pair(u.source_text, u.text) if u.source else u.text).encode()).digest() for u in units
        ]
        places = {key: place for place, key in enumerate(sorted(set(keys)))}
        if len(places) < 2:
            raise HeadwiseError("a single text cannot both choose heads and judge the choice; give more text.")
        dealt = [[unit for unit, key in zip(units, keys, strict=True) if places[key] % 2 == half] for half in (0, 1)]
        return self.only(dealt[0]), self.only(dealt[1])

    def only(self, units: Sequence[Unit]) -> "Reading":
        """A reading of some of these units alone, counted from 0 on; nothing is tokenised."""
        numbered = [replace(unit, number=number) for number, unit in enumerate(units)]
        items = [unit.item for unit in units]
        alike = len({isinstance(item, Document) for item in items}) == 1
        made = Reading(
            Corpus.of(items if alike else [unit.text for unit in units]),
            self.tokenizer,
            self.frame,
            lambda: iter(numbered),
        )
        for _ in made:
            pass
        made._kept = numbered  # whatever their size: they are here
        return made

    def cut(self, longest: int) -> "Reading":
        """The same with units of plain text of at most so many tokens."""
        if longest == self.frame.longest:
            return self
        if longest > self.frame.longest:
            raise HeadwiseError(
                f"this reading has units of at most {self.frame.longest} tokens, so none of {longest} can be made of it; "
                f"give the corpus itself."
            )
        around = len(self.tokenizer.around[0]) + len(self.tokenizer.around[1])
        if longest <= around:
            raise HeadwiseError(f"a length of {longest} tokens leaves no room for text; choose a longer one.")
        return Reading(
            self.corpus, self.tokenizer, replace(self.frame, longest=longest), partial(_recut, self, longest)
        )

    def _read_whole(self) -> tuple[int, int, str]:
        if self._counts is None:
            for _ in self:
                pass
        assert self._counts is not None
        return self._counts

    def _check(self, model: AnyModel, answers: bool) -> None:
        """Whether a model can be given these units."""
        mine, theirs = self.tokenizer, tokenizer_of(model)
        if mine is not theirs and mine.backend.to_str() != theirs.backend.to_str():
            raise HeadwiseError(
                f"this reading of {self.corpus.name} was made with another tokenizer than this model's; make one for it, "
                f"Reading.of(model, corpus), or give the corpus itself."
            )
        _check_kind(model, self.corpus, answers)
        room = model.spec.context if model.spec.positions == "learned" else None
        if self.corpus.paired and self.frame.start != model.start:
            raise HeadwiseError(
                "this reading is of pairs for a decoder that starts from another token; make one for it."
            )
        if room is not None and self.frame.room > room and max(unit.size for unit in self) > room:
            raise HeadwiseError(
                f"this reading has units of more than the {room} positions of the model; make one for it."
            )


def documents_for(model: AnyModel) -> Corpus:
    """What a model reads where nothing is given: the little language, if it knows its words, or the probe set; of these the
    documents that fit into its context, or, where none does, their texts, to be cut."""
    words = set(tokenizer_of(model).backend.get_vocab())
    corpus = Corpus.little("held-out", documents=DOCUMENTS, seed=1) if words >= set(VOCABULARY) else Corpus.probe()
    return fitting(model, corpus)


def fitting(model: AnyModel, corpus: Corpus, most: int | None = None) -> Corpus:
    """The documents of a corpus that fit into a model's context, or so many of them; where none does, texts that are cut."""
    documents = [item for item in corpus.items() if isinstance(item, Document)]
    there = [one for one in documents if 0 < len(tokenizer_of(model).encode(one.text)) <= model.spec.context]
    if most is None:
        if len(there) == len(documents):
            return replace(corpus, _read=lambda: iter(there))  # as it is, and not made a second time
        return Corpus.of(there or [one.text for one in documents])
    return Corpus.of(there[:: max(1, len(there) // most)][:most] or [one.text for one in documents[:most]])


def _held(unit: Unit) -> int:
    return len(unit.ids) + len(unit.source)


def _check_kind(model: AnyModel, corpus: Corpus, answers: bool) -> None:
    if answers or (corpus.paired and model.spec.kind != "encoder-decoder"):
        corpus.suits(model.spec.kind)
    elif corpus.paired:
        raise HeadwiseError("pairs are for what is asked of an encoder-decoder; give texts: each is source and target.")


def _read(corpus: Corpus, tokenizer: Tokenizer, frame: Frame) -> Iterator[Unit]:
    """Every text of a corpus, tokenised as it comes."""
    number = 0
    for item in corpus.items():
        if isinstance(item, Piece):
            for unit in _of_text(number, item.text, tokenizer, frame.longest):
                yield unit
                number += 1
            continue
        pair = isinstance(item, Pair)
        unit = _of_pair(number, item, tokenizer, frame.start or 0) if pair else _of_document(number, item, tokenizer)
        if unit.size > frame.room:
            which = f"pair {number + 1}" if pair else f"document {number}"
            raise HeadwiseError(
                f"{which} has {unit.size} tokens, more than the {frame.room} positions of the model: "
                f"{item.text[:60]!r}…; leave it out or cut it."
            )
        yield unit
        number += 1


def _of_text(number: int, text: str, tokenizer: Tokenizer, longest: int) -> Iterator[Unit]:
    """A text in units, tokenised part by part: what is not full at the end of a part goes on in the next."""
    before, behind = tokenizer.around
    step = longest - len(before) - len(behind)
    tokens: list[int] = []
    places: list[Span] = []
    for first, last in _parts(text, tokenizer):
        made = tokenizer.encoding(text[first:last], special=False)
        tokens += made.ids
        places += ((start + first, end + first) for start, end in made.offsets)
        full = len(tokens) if last == len(text) else len(tokens) - len(tokens) % step
        for start in range(0, full, step):
            spans = [(0, 0)] * len(before) + places[start : start + step] + [(0, 0)] * len(behind)
            yield _plain(number, text, (*before, *tokens[start : start + step], *behind), spans, tokenizer)
            number += 1
        del tokens[:full], places[:full]


def _parts(text: str, tokenizer: Tokenizer) -> Iterator[Span]:
    """Where a long text can be parted so that the tokens are those of the whole: a tokenizer takes a hundred times the room
    of what it reads at once."""
    start = 0
    while len(text) - start > PART:
        cut = _cut_before(text, start + PART, start + PART // 2, tokenizer)
        if cut is None:
            break
        yield start, cut
        start = cut
    yield start, len(text)


def _cut_before(text: str, place: int, least: int, tokenizer: Tokenizer) -> int | None:
    """A place between two words, at which what stands around it has the same tokens parted and whole; None: there is none
    nearby, for this tokenizer puts something before whatever it reads."""
    for _ in range(TRIES):
        place = text.rfind(" ", least, place)
        if place < 0:
            return None
        sides = text[max(0, place - AROUND) : place], text[place : place + AROUND]
        left, right, whole = (tokenizer.encode(some, special=False) for some in (*sides, "".join(sides)))
        if text[place - 1].isalnum() and left + right == whole:
            return place
    return None


def _plain(number: int, text: str, ids: tuple[int, ...], spans: Sequence[Span], tokenizer: Tokenizer) -> Unit:
    """A unit of plain text. It holds the part of the text it covers, and nothing of what is around."""
    covered = [span for span in spans if span[1] > span[0]]
    low, high = (covered[0][0], covered[-1][1]) if covered else (0, 0)
    inside = np.array([(a - low, b - low) if b > a else (0, 0) for a, b in spans], dtype=np.int32).reshape(-1, 2)
    text = text[low:high]
    return Unit(number, bucket_of(text), ids, None, partial(_align, tokenizer, text, ids, inside), text=text)


def _of_document(number: int, document: Document, tokenizer: Tokenizer) -> Unit:
    made = tokenizer.backend.encode(document.text, add_special_tokens=True)
    ids, spans = tuple(made.ids), np.array(made.offsets, dtype=np.int32).reshape(-1, 2)
    align = partial(_align, tokenizer, document.text, ids, spans, document.words)
    return Unit(number, bucket_of(document.text), ids, document, align, text=document.text)


def _of_pair(number: int, pair: Pair, tokenizer: Tokenizer, start: int) -> Unit:
    source, text = (tokenizer.backend.encode(given, add_special_tokens=False) for given in pair)
    sources, ids = tokenizer.pair(source.ids, text.ids, start)
    first = 1 + len(tokenizer.around[0])
    spans = [(0, 0)] * first + text.offsets
    spans += [(0, 0)] * (len(ids) - len(spans))
    made = _plain(number, pair.text, tuple(ids), spans, tokenizer)
    return replace(
        made, bucket=bucket_of("\n".join(pair)), source=tuple(sources), text=pair.text, source_text=pair.source
    )


def _recut(reading: Reading, longest: int) -> Iterator[Unit]:
    """The units of a reading, those of plain text cut further."""
    before, behind = (len(some) for some in reading.tokenizer.around)
    number, step = 0, longest - before - behind
    for unit in reading:
        if unit.document is not None or unit.source or len(unit.ids) <= longest:
            yield replace(unit, number=number)
            number += 1
            continue
        end, spans = len(unit.ids) - behind, unit.alignment.spans
        for start in range(before, end, step):
            inner = slice(start, min(start + step, end))
            ids = (*unit.ids[:before], *unit.ids[inner], *unit.ids[end:])
            places = [(0, 0)] * before + list(spans[inner]) + [(0, 0)] * behind
            yield _plain(number, unit.text, ids, places, reading.tokenizer)
            number += 1


def _align(
    tokenizer: Tokenizer, text: str, ids: tuple[int, ...], spans: np.ndarray, words: Sequence[str] | None = None
) -> Alignment:
    """The tokens and words of a unit."""
    tokens = [tokenizer.token(i) for i in ids]
    return Alignment.of(text, ids, tokens, [trim(text, (a, b)) for a, b in spans.tolist()], words)
