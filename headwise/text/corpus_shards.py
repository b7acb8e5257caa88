"""Split a corpus into shards of consecutive texts that can be processed separately.

A shard is a range of items of a corpus, so the samples of all shards are those of the corpus. It has a digest of its texts,
by which another machine can check that it reads the same texts.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from headwise.errors import ArgumentError, FileFormatError
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus, TextPair
from headwise.text.file_formats import TextChunk, read_corpus_file

Item = TextChunk | Document | TextPair
ItemSource = Callable[[], Iterator[Item]]


@dataclass(frozen=True)
class CorpusRange:
    """A range of items of a corpus.

    Attributes:
        file_index: Index of the file in which the shard starts.
        first_item: Index of its first item in that file.
        num_items: Number of items.
        characters: Number of characters.
        has_relations: Whether some items are documents with relations.
        digest: Digest of the texts.
    """

    file_index: int
    first_item: int
    num_items: int
    characters: int
    has_relations: bool
    digest: str

    def to_corpus(self, sources: Sequence[ItemSource], name: str) -> Corpus:
        """Return the texts as a corpus. Iterating it raises if the texts have changed."""

        def items() -> Iterator[Item]:
            hasher, count = hashlib.sha256(), 0
            for item in islice(_items_from(sources, self.file_index, self.first_item), self.num_items):
                hasher.update(_encode_item(item))
                count += 1
                yield item
            if count < self.num_items or hasher.hexdigest() != self.digest:
                raise FileFormatError(
                    f"{name}: its texts are not the ones that the shards were made from. Give every machine the same files, "
                    f"or use another output folder."
                )

        return Corpus(name, self.digest, items)


def file_sources(files: Sequence[str | Path]) -> list[ItemSource]:
    """Return one source of items per file, so that files before a shard need not be read."""
    return [partial(read_corpus_file, Path(file)) for file in files]


def split_shards(corpus: Corpus, characters: int) -> list[CorpusRange]:
    """Split a corpus into shards of about `characters` characters, at least one item each. The corpus is read once.

    Blank items, such as the end of a file, belong to the shard before them, because a blank shard has nothing to process.

    >>> [(shard.first_item, shard.num_items) for shard in split_shards(Corpus.of(["one", "two", "three"]), 6)]
    [(0, 2), (2, 1)]
    """
    if characters < 1:
        raise ArgumentError(f"characters: must be at least 1. Got {characters}. Use a larger number.")
    shards: list[CorpusRange] = []
    start: tuple[int, int] | None = None
    num_items, size, has_relations, hasher, has_text = 0, 0, False, hashlib.sha256(), False
    sources = file_sources(corpus.files) or [corpus.items]
    for file_index, source in enumerate(sources):
        for index, item in enumerate(source()):
            blank = not item.text.strip()
            if start is not None and has_text and not blank and size + len(item.text) > characters:
                shards.append(CorpusRange(*start, num_items, size, has_relations, hasher.hexdigest()))
                start, num_items, size, has_relations, hasher, has_text = None, 0, 0, False, hashlib.sha256(), False
            has_text, start = has_text or not blank, start or (file_index, index)
            hasher.update(_encode_item(item))
            num_items, size, has_relations = (
                num_items + 1,
                size + len(item.text),
                has_relations or isinstance(item, Document),
            )
    if start is not None:
        shards.append(CorpusRange(*start, num_items, size, has_relations, hasher.hexdigest()))
    if not any(shard.characters for shard in shards):
        raise ArgumentError(f"corpus: {corpus.name} is empty. Give some text.")
    return shards


def _items_from(sources: Sequence[ItemSource], file_index: int, first_item: int) -> Iterator[Item]:
    for index, source in enumerate(sources[file_index:], file_index):
        yield from islice(source(), first_item if index == file_index else 0, None)


def _encode_item(item: Item) -> bytes:
    text = repr(item) if isinstance(item, Document | TextPair) else item.text
    return f"{len(text)}:{text}".encode("utf-8", "surrogatepass")
