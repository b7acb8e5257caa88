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
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus, TextPair
from headwise.text.file_formats import TextChunk, read_corpus_file

Item = TextChunk | Document | TextPair
ItemSource = Callable[[], Iterator[Item]]


@dataclass(frozen=True)
class TextShard:
    """So many items from one on: where it begins is told by file, and by item in it."""

    file_index: int
    first_item: int
    num_items: int
    characters: int
    has_relations: bool  # whether documents with relations are among them
    digest: str

    def to_corpus(self, sources: Sequence[ItemSource], name: str) -> Corpus:
        """Its texts as a corpus; what is read must be what it was."""

        def items() -> Iterator[Item]:
            hasher, count = hashlib.sha256(), 0
            for item in islice(_items_from(sources, self.file_index, self.first_item), self.num_items):
                hasher.update(_item_bytes(item))
                count += 1
                yield item
            if count < self.num_items or hasher.hexdigest() != self.digest:
                raise HeadwiseError(
                    f"{name} is not the same here as where its shards were made, or was changed since; give every machine "
                    f"the same files, or another folder for what is made of them."
                )

        return Corpus(name, self.digest, items)


def file_sources(files: Sequence[str | Path]) -> list[ItemSource]:
    """What is in files, each by itself, so that those before a shard need not be read."""
    return [partial(read_corpus_file, Path(file)) for file in files]


def split_shards(corpus: Corpus, characters: int) -> list[TextShard]:
    """Shards of about so many characters, an item at least; read once, and nothing of it is held.

    Blanks, such as the end of a file's last line, go with what is before them: alone there would be nothing to look at.

    >>> [(shard.first_item, shard.num_items) for shard in split_shards(Corpus.of(["one", "two", "three"]), 6)]
    [(0, 2), (2, 1)]
    """
    if characters < 1:
        raise HeadwiseError(f"a shard has at least one character, got {characters}.")
    shards: list[TextShard] = []
    start: tuple[int, int] | None = None
    num_items, size, has_relations, hasher, has_text = 0, 0, False, hashlib.sha256(), False
    sources = file_sources(corpus.files) or [corpus.items]
    for file_index, source in enumerate(sources):
        for index, item in enumerate(source()):
            blank = not item.text.strip()
            if start is not None and has_text and not blank and size + len(item.text) > characters:
                shards.append(TextShard(*start, num_items, size, has_relations, hasher.hexdigest()))
                start, num_items, size, has_relations, hasher, has_text = None, 0, 0, False, hashlib.sha256(), False
            has_text, start = has_text or not blank, start or (file_index, index)
            hasher.update(_item_bytes(item))
            num_items, size, has_relations = (
                num_items + 1,
                size + len(item.text),
                has_relations or isinstance(item, Document),
            )
    if start is not None:
        shards.append(TextShard(*start, num_items, size, has_relations, hasher.hexdigest()))
    if not any(shard.characters for shard in shards):
        raise HeadwiseError(f"{corpus.name} is empty; give some text.")
    return shards


def _items_from(sources: Sequence[ItemSource], file_index: int, first_item: int) -> Iterator[Item]:
    for index, source in enumerate(sources[file_index:], file_index):
        yield from islice(source(), first_item if index == file_index else 0, None)


def _item_bytes(item: Item) -> bytes:
    text = repr(item) if isinstance(item, Document | TextPair) else item.text
    return f"{len(text)}:{text}".encode("utf-8", "surrogatepass")
