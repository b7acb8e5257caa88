"""A corpus in shards: some neighbouring texts each, found by one quick reading, so that each can be worked on by itself.

A shard is a range of what a corpus reads one after the other, so the units a model makes of all shards are those of the
whole. It has a digest of its texts: whoever reads it elsewhere can tell whether it is the same.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.text.corpus import Corpus, Pair
from headwise.text.documents import Document
from headwise.text.file_formats import Piece, read_stored

Item = Piece | Document | Pair
Source = Callable[[], Iterator[Item]]


@dataclass(frozen=True)
class TextShard:
    """So many items from one on: where it begins is told by file, and by item in it."""

    file: int
    first: int
    items: int
    characters: int
    related: bool  # whether documents with relations are among them
    digest: str

    def read(self, sources: Sequence[Source], name: str) -> Corpus:
        """Its texts as a corpus; what is read must be what it was."""

        def items() -> Iterator[Item]:
            made, count = hashlib.sha256(), 0
            for item in islice(_from(sources, self.file, self.first), self.items):
                made.update(_bytes(item))
                count += 1
                yield item
            if count < self.items or made.hexdigest() != self.digest:
                raise HeadwiseError(
                    f"{name} is not the same here as where its shards were made, or was changed since; give every machine "
                    f"the same files, or another folder for what is made of them."
                )

        return Corpus(name, self.digest, items)


def sources_of(files: Sequence[str | Path]) -> list[Source]:
    """What is in files, each by itself, so that those before a shard need not be read."""
    return [partial(read_stored, Path(file)) for file in files]


def cut_shards(corpus: Corpus, characters: int) -> list[TextShard]:
    """Shards of about so many characters, an item at least; read once, and nothing of it is held.

    Blanks, such as the end of a file's last line, go with what is before them: alone there would be nothing to look at.

    >>> [(shard.first, shard.items) for shard in cut_shards(Corpus.of(["one", "two", "three"]), 6)]
    [(0, 2), (2, 1)]
    """
    if characters < 1:
        raise HeadwiseError(f"a shard has at least one character, got {characters}.")
    shards: list[TextShard] = []
    begun: tuple[int, int] | None = None
    items, size, related, made, filled = 0, 0, False, hashlib.sha256(), False
    sources = sources_of(corpus.files) or [corpus.items]
    for file, source in enumerate(sources):
        for place, item in enumerate(source()):
            blank = not item.text.strip()
            if begun is not None and filled and not blank and size + len(item.text) > characters:
                shards.append(TextShard(*begun, items, size, related, made.hexdigest()))
                begun, items, size, related, made, filled = None, 0, 0, False, hashlib.sha256(), False
            filled, begun = filled or not blank, begun or (file, place)
            made.update(_bytes(item))
            items, size, related = items + 1, size + len(item.text), related or isinstance(item, Document)
    if begun is not None:
        shards.append(TextShard(*begun, items, size, related, made.hexdigest()))
    if not any(shard.characters for shard in shards):
        raise HeadwiseError(f"{corpus.name} is empty; give some text.")
    return shards


def _from(sources: Sequence[Source], file: int, first: int) -> Iterator[Item]:
    for number, source in enumerate(sources[file:], file):
        yield from islice(source(), first if number == file else 0, None)


def _bytes(item: Item) -> bytes:
    told = repr(item) if isinstance(item, Document | Pair) else item.text
    return f"{len(told)}:{told}".encode("utf-8", "surrogatepass")
