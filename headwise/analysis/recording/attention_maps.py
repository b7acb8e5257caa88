"""One sentence, now: which word looks at which, in any head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.recording.batching import make_batch, read_sites, run, tokenizer_of
from headwise.analysis.recording.image import InputPicture, picture_unit, read_picture
from headwise.analysis.recording.recording import HeadCall, Recording, pick, record
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.model import AnyModel, quiet
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.align import Alignment

Word = str | int
SHOWN = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


class Look(NamedTuple):
    """One word looking at another in one head."""

    head: str
    word: str
    attended: str
    weight: float


@dataclass(frozen=True, eq=False)
class Parts:
    """What maps of a text have as rows and columns: its words and what belongs to no word, or its tokens one by one."""

    labels: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # for each part, the places of its tokens
    special: tuple[bool, ...]  # whether it is a token that stands for nothing in the text

    @staticmethod
    def of(alignment: Alignment, words: bool) -> "Parts":
        """The parts of one text, in the order of their first tokens. Words that share a token are one part: `,"`."""
        groups: list[tuple[list[int], list[int]]] = []  # words and tokens of each part
        for place, touched in enumerate(alignment.words_of_token):
            if words and touched and groups and touched[0] in groups[-1][0]:
                groups[-1][0].extend(touched)
                groups[-1][1].append(place)
            else:
                groups.append(([*touched] if words else [], [place]))
        labels = [_together(alignment, some) if some else _label(alignment, places[0]) for some, places in groups]
        special = [alignment.spans[places[0]][0] == alignment.spans[places[0]][1] for _, places in groups]
        return Parts(tuple(labels), tuple(tuple(places) for _, places in groups), tuple(special))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The labels, with a number where one stands more than once: the#1, the#2."""
        met: dict[str, int] = {}
        names = []
        for label in self.labels:
            met[label] = met.get(label, 0) + 1
            names.append(f"{label}#{met[label]}" if self.labels.count(label) > 1 else label)
        return tuple(names)

    def find(self, word: Word) -> int:
        """The place of a word: by its number, its text, or its text and which of several it is."""
        if isinstance(word, int):
            if -len(self.labels) <= word < len(self.labels):
                return word % len(self.labels)
            raise HeadwiseError(f"there is no word {word}; there are {len(self.labels)}: {', '.join(self.names)}.")
        if word in self.names:
            return self.names.index(word)
        found = [i for i, label in enumerate(self.labels) if label == word]
        found = found or [i for i, label in enumerate(self.labels) if label.casefold() == word.casefold()]
        if len(found) == 1:
            return found[0]
        if found:
            several = " or ".join(self.names[i] for i in found)
            raise HeadwiseError(f"{word!r} stands there {len(found)} times; say which: {several}.")
        raise HeadwiseError(f"the word {word!r} is not there; there are {', '.join(self.names)}.")

    def sums(self, like: Tensor) -> Tensor:
        """A matrix that adds up the columns of each part: (tokens, parts)."""
        made = like.new_zeros(sum(map(len, self.tokens)), len(self.tokens))
        for part, places in enumerate(self.tokens):
            made[list(places), part] = 1.0
        return made

    def means(self, like: Tensor) -> Tensor:
        """A matrix that takes the mean over the rows of each part: (parts, tokens)."""
        made = self.sums(like).mT
        return made / made.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Attended:
    """A text as every head saw it. Maps are made when asked for; attention to a split word is the sum over its tokens, from
    it the mean. Special tokens are words of their own, so rows sum to 1 (to less where a head has a sink)."""

    text: str
    source: str | None
    _parts: Parts
    _source_parts: Parts | None
    _recording: Recording
    _call: int | None = None  # which one, where a layer is called several times in a pass
    picture: InputPicture | None = (
        None  # what was looked at, where that is no text: its words are patches, `row,column`
    )

    @property
    def words(self) -> tuple[str, ...]:
        """The words, or the tokens, of the text."""
        return self._parts.labels

    @property
    def names(self) -> tuple[str, ...]:
        """The same, each with a number where it stands more than once."""
        return self._parts.names

    @property
    def source_words(self) -> tuple[str, ...]:
        """The words of the source of an encoder-decoder; none in other models."""
        return () if self._source_parts is None else self._source_parts.labels

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that were looked at."""
        return tuple(map(str, self._recording.addresses))

    def choose(self, heads: Pattern | Sequence[str]) -> tuple[str, ...]:
        """Some of these heads, by pattern."""
        return tuple(map(str, pick(heads, self._recording.addresses)))

    def sides(self, head: str | Address | None = None) -> tuple[Parts, Parts]:
        """What looks and what is looked at in a head: the rows and the columns of its map."""
        stack = self._head(head).stack
        text, source = self._parts, self._source_parts
        if source is None or stack == "dec":
            return text, text
        return (text, source) if stack == "cross" else (source, source)

    def map(self, head: str | Address | None = None) -> Tensor:
        """Who looks at whom, (words, words): row i says where word i looks."""
        looking, seen = self.sides(head)
        weights = self._seen(self._head(head)).map()[0].float()  # (T, S)
        return looking.means(weights) @ (weights @ seen.sums(weights))

    def over(self, head: str | Address | None = None, at: Word | tuple[int, int] | None = None) -> Tensor:
        """A head's attention over the picture, (rows, columns): from a patch, (2, 3) or "2,3", from "[CLS]", or the mean
        from all patches. What is on tokens that are no patches is left out."""
        if self.picture is None:
            raise HeadwiseError("what was looked at is a text; seen.map(head) is its map.")
        grid, address = self.picture.grid, self._head(head)
        rows = grid.places if at is None else (grid.find(at),)
        weights = self._seen(address).map(rows=rows)[0].float().mean(0)  # (S,)
        return weights[list(grid.places)].unflatten(0, (grid.rows, grid.columns))

    def row(self, word: Word, head: str | Address | None = None) -> list[tuple[str, float]]:
        """Where one word looks: (word, weight), the strongest first. A word is its text, "the#2", or its place."""
        looking, seen = self.sides(head)
        weights = self._row(looking.find(word), self._head(head)).tolist()
        return sorted(zip(seen.names, weights, strict=True), key=lambda pair: -pair[1])

    def heads_for(self, word: Word, attended: Word, k: int = 10) -> list[tuple[str, float]]:
        """The heads in which one word looks hardest at another: (head, weight)."""
        found, refusal = [], None
        for address in self._recording.addresses:
            looking, seen = self.sides(address)
            try:
                row, column = looking.find(word), seen.find(attended)
            except HeadwiseError as error:  # in an encoder-decoder a word may be in one of the texts alone
                refusal = error
                continue
            found.append((str(address), self._row(row, address)[column].item()))
        if not found and refusal is not None:
            raise refusal
        return sorted(found, key=lambda pair: -pair[1])[:k]

    def strongest(self, k: int = 10, word: Word | None = None) -> list[Look]:
        """The hardest looks of all heads, or of one word: at other words, not at the first one or at special tokens, where
        heads rest."""
        looks = []
        for address in self._recording.addresses:
            looking, seen = self.sides(address)
            chosen = range(len(looking.labels)) if word is None else [looking.find(word)]
            weights = self.map(address) if word is None else self._row(chosen[0], address)[None]
            weights = weights.masked_fill(self._resting(address, chosen), 0.0)
            best, where = weights.max(1)
            looks += [
                Look(str(address), looking.names[row], seen.names[int(column)], float(weight))
                for row, weight, column in zip(chosen, best, where, strict=True)
                if weight > 0
            ]
        return sorted(looks, key=lambda look: -look.weight)[:k]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        source = {} if self.source is None else {"source": self.source, "source_words": list(self.source_words)}
        maps = {head: self.map(head).tolist() for head in self.heads}
        return {"text": self.text, "words": list(self.words), **source, "maps": maps}

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import attended_html

        return attended_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_bundle

        return widget_bundle(self)

    def _seen(self, head: Address) -> HeadCall:
        """The call of a head that was asked for, or the only one."""
        there = self._recording[head]
        if self._call is None and len(there.calls) > 1:
            raise HeadwiseError(
                f"{head} is called {len(there.calls)} times in one pass of this model; say which: attend(…, call=0), "
                f"call=-1 for the last."
            )
        return there.only if self._call is None else there.call(self._call)

    def _row(self, part: int, head: Address) -> Tensor:
        """Where one part looks, (words,): no other row of the map is made."""
        looking, seen = self.sides(head)
        weights = self._seen(head).map(rows=looking.tokens[part])[0].float()  # (its tokens, S)
        return weights.mean(0) @ seen.sums(weights)

    def _resting(self, head: Address, rows: Sequence[int]) -> Tensor:
        """Looks that say little: at the first word, at special tokens, at oneself. (rows, words)"""
        looking, seen = self.sides(head)
        rests = torch.tensor([place == 0 or special for place, special in enumerate(seen.special)])
        itself = torch.tensor(rows)[:, None] == torch.arange(len(seen.labels))
        device = self._seen(head).q.device
        return (rests | itself if looking is seen else rests.expand_as(itself)).to(device)

    def _head(self, head: str | Address | None) -> Address:
        if head is None:
            if len(self._recording) > 1:
                raise HeadwiseError(f"there are {len(self._recording)} heads; say which, e.g. head={self.heads[0]!r}.")
            return self._recording.addresses[0]
        return Address.parse(head) if isinstance(head, str) else head


def attend(
    model: AnyModel,
    text: Any,
    heads: Pattern = "*",
    *,
    words: bool = True,
    source: str | None = None,
    call: int | None = None,
) -> Attended:
    """Run a model once on a text and keep where its heads looked; words=False keeps tokens apart.

    An encoder-decoder reads `source` and writes `text`; its maps have the words of one or both. Where a layer is called
    several times in a pass, as ALBERT's one layer is, `call` says which is meant, from 0.

    A model that reads pixels looks at a picture: a path, a Pillow image, or a tensor (C, height, width) that is ready for it.
    Its words are patches, `row,column`; `over` gives a head's attention over the picture.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    >>> seen = attend(model, "The cats sat", "5.1")
    >>> seen.words
    ('[CLS]', 'The', 'cats', 'sat', '[SEP]')
    >>> seen.map("5.1").shape, round(sum(weight for _, weight in seen.row("cats")), 4)
    (torch.Size([5, 5]), 1.0)
    """
    if model.pictures is not None:
        return _attend_picture(model, read_picture(model, text), heads, call)
    tokenizer = tokenizer_of(model)
    aligned = _aligned(tokenizer, text, "the text")
    aligned_source = None if source is None else _aligned(tokenizer, source, "the source")
    ids = torch.tensor([aligned.ids], device=model.device)  # (1, T)
    source_ids = None if aligned_source is None else torch.tensor([aligned_source.ids], device=model.device)
    heads = pick(heads, [address for site in read_sites(model, heads) for address in site.addresses])
    with quiet(model), torch.no_grad(), record(model, heads, what="map") as recording:
        model(ids, source=source_ids, hidden=True)
    parts = None if aligned_source is None else Parts.of(aligned_source, words)
    return Attended(text, source, Parts.of(aligned, words), parts, recording, call)


def _attend_picture(model: AnyModel, picture: InputPicture, heads: Pattern, call: int | None) -> Attended:
    grid = picture.grid
    special = tuple(cell < 0 for cell in grid.cells)
    parts = Parts(grid.names, tuple((token,) for token in range(len(grid))), special)
    with quiet(model), torch.no_grad(), record(model, heads, what="map") as recording:
        run(model, make_batch([picture_unit(0, picture)], device=model.device))
    return Attended(picture.name, None, parts, None, recording, call, picture)


def _aligned(tokenizer: Tokenizer, text: str, what: str) -> Alignment:
    if not isinstance(text, str):
        raise HeadwiseError(f"{what} must be a string, got {type(text).__name__}; attend looks at one text at a time.")
    aligned = tokenizer.align(text)
    if not aligned.ids or not text.strip():  # special tokens alone look at nothing worth seeing
        raise HeadwiseError(f"{what} is empty; give at least one word.")
    return aligned


def _together(alignment: Alignment, words: Sequence[int]) -> str:
    """Words as they stand in the text."""
    return alignment.text[alignment.word_spans[min(words)][0] : alignment.word_spans[max(words)][1]]


def _label(alignment: Alignment, token: int) -> str:
    """A token as a person reads it: its characters, or its name if it stands for none."""
    start, end = alignment.spans[token]
    text = alignment.text[start:end]
    if not text:
        return alignment.tokens[token]
    return text.translate(SHOWN) if text.isspace() else text
