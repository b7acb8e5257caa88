"""Read texts with relations: CoNLL-U treebanks, GAP pronouns and JSON Lines. Errors name file and line."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import FileFormatError, HeadwiseError, MissingDependencyError
from headwise.text.annotated_document import Document, Relation
from headwise.text.token_alignment import find_word_spans, split_word_spans


def read_documents(path: Path | str) -> Iterator[Document]:
    """Yield the documents of a .conllu file, or of a GAP .tsv file (relation `coref`)."""
    path = Path(path)
    readers = {".conllu": read_conllu, ".tsv": _read_gap_documents}
    if path.suffix not in readers:
        raise FileFormatError(
            f"{path}: this type of file has no relations between words. Use a file that ends in {' or '.join(readers)}."
        )
    return readers[path.suffix](path)


# CoNLL-U (https://universaldependencies.org/format.html).


def read_conllu(path: Path | str) -> Iterator[Document]:
    """Yield the sentences of a treebank: arcs from each word to its head, UPOS classes, and the span of each subtree."""
    try:
        import conllu
        from conllu.exceptions import ParseException
    except ImportError:
        raise MissingDependencyError(
            f"{path}: reading a treebank needs the conllu package: pip install 'headwise[treebank]'."
        ) from None
    for first_line, lines in _sentence_blocks(Path(path)):
        for line_number, line in enumerate(lines, first_line):
            if not line.startswith("#") and line.count("\t") != 9:
                raise FileFormatError(
                    f"{path}, line {line_number}: a CoNLL-U line has 10 columns. Got {line.count(chr(9)) + 1}. "
                    "Separate the columns with tabs."
                )
        try:
            sentence = conllu.parse("\n".join(lines) + "\n\n")[0]
            yield _parse_sentence(sentence)
        except (ParseException, HeadwiseError, KeyError, TypeError, IndexError) as error:
            raise FileFormatError(f"{path}, sentence at line {first_line}: {error}") from None


def _parse_sentence(sentence: Any) -> Document:
    # Skip multiword tokens (1-2) and empty nodes (8.1).
    tokens = [token for token in sentence if isinstance(token["id"], int)]
    index_of = {token["id"]: i for i, token in enumerate(tokens)}
    words = [token["form"] for token in tokens]
    relations, children = [], {i: [] for i in range(len(tokens))}
    for i, token in enumerate(tokens):
        head = token["head"]
        if head is None or (head != 0 and head not in index_of):
            raise FileFormatError(
                f"word {token['id']} ({token['form']}): its syntactic head (column HEAD) is {head}, but the sentence has no "
                f"such word. Correct the file."
            )
        if head != 0:
            relations.append(Relation(token["deprel"], i, index_of[head]))
            children[index_of[head]].append(i)
    text = sentence.metadata.get("text") or " ".join(words)
    try:
        find_word_spans(text, words)
    except HeadwiseError:  # a word is written differently than analyzed: du, from de and le
        text = " ".join(words)
    classes = tuple(token["upos"] or "_" for token in tokens)
    return Document(text, tuple(words), tuple(relations), classes, _phrase_spans(children))


def _phrase_spans(children: dict[int, list[int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans of subtrees with more than one word and without gaps."""
    spans = set()
    for word in children:
        subtree, pending = {word}, list(children[word])
        while pending:
            child = pending.pop()
            if child not in subtree:  # stops at a cycle in a malformed tree
                subtree.add(child)
                pending += children[child]
        first, end = min(subtree), max(subtree) + 1
        if end - first == len(subtree) > 1:
            spans.add((first, end))
    return tuple(sorted(spans))


def _sentence_blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each sentence, with the number of the first line."""
    block: list[str] = []
    line_number = 0
    for line_number, line in _numbered_lines(path):
        if line.strip():
            block.append(line)
        elif block:
            yield line_number - len(block), block
            block = []
    if block:
        yield line_number - len(block) + 1, block
    if line_number == 0:
        raise FileFormatError(f"{path}: the file is empty. It needs at least one sentence.")


# JSON Lines: {"words": […], "relations": [["coref", 7, 1], …], "classes": […], "text": "…"}; the last two are optional.


def parse_json_document(row: Any, location: str) -> Document:
    """Return the document of a JSON line."""
    try:
        words = tuple(row["words"])
        relations = tuple(Relation(str(name), int(source), int(target)) for name, source, target in row["relations"])
        return Document(row.get("text") or " ".join(words), words, relations, tuple(row.get("classes", ())))
    except HeadwiseError as error:
        raise FileFormatError(f"{location}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FileFormatError(
            f"{location}: not a document with relations. Got {json.dumps(row)[:60]}. "
            'Use {"words": […], "relations": [["name", from, to], …]}.'
        ) from None


# GAP (https://arxiv.org/abs/1810.05201): a pronoun and two names. The pronoun refers to one of them, or to neither.


@dataclass(frozen=True)
class GAPExample:
    """An example of GAP.

    Attributes:
        document: The text with its words.
        pronoun: Index of the pronoun.
        a: Indices of the words of name A.
        b: Indices of the words of name B.
        answer: "A", "B" or None.
    """

    document: Document
    pronoun: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    answer: str | None

    @property
    def nearest_name_answer(self) -> str:
        """Answer of the baseline: the name that is nearer to the pronoun."""
        distance = {
            name: min(abs(self.pronoun - index) for index in indices)
            for name, indices in (("A", self.a), ("B", self.b))
        }
        return min(distance, key=lambda name: distance[name])


def read_gap(path: Path | str) -> Iterator[GAPExample]:
    """Yield the examples of a GAP file."""
    columns = ("Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref")
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        missing = [name for name in columns if name not in (rows.fieldnames or ())]
        if missing:
            raise FileFormatError(
                f"{path}, line 1: the columns {', '.join(missing)} are missing. Use a GAP file with a header."
            )
        for line_number, row in enumerate(rows, 2):
            try:
                yield _parse_gap_coreference_row(row)
            except (ValueError, TypeError) as error:
                raise FileFormatError(f"{path}, line {line_number}: {error}") from None


def _parse_gap_coreference_row(row: dict[str, str]) -> GAPExample:
    text = row["Text"]
    spans = split_word_spans(text)

    def word_indices(name: str) -> tuple[int, ...]:
        start = int(row[f"{name}-offset"])
        end = start + len(row[name])
        if text[start:end] != row[name]:
            raise FileFormatError(
                f"{name}-offset: {row[name]!r} does not begin at character {start} of the text. Set {name}-offset to the "
                f"index of its first character, counted from 0."
            )
        return tuple(i for i, (first, last) in enumerate(spans) if first < end and last > start)

    pronoun, a, b = word_indices("Pronoun")[0], word_indices("A"), word_indices("B")
    answer = "A" if row["A-coref"].upper() == "TRUE" else "B" if row["B-coref"].upper() == "TRUE" else None
    antecedent = {"A": a, "B": b}.get(answer or "", ())
    relations = (Relation("coref", pronoun, antecedent[-1]),) if antecedent else ()  # the last word represents a name
    return GAPExample(Document(text, tuple(text[i:j] for i, j in spans), relations), pronoun, a, b, answer)


def _read_gap_documents(path: Path) -> Iterator[Document]:
    return (example.document for example in read_gap(path))


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers. Raise if a line is not UTF-8."""
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            try:
                yield line_number, line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise FileFormatError(f"{path}, line {line_number}: not UTF-8. Convert the file to UTF-8.") from None
