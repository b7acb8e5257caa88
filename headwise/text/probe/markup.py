"""Markup of the probe files: a plain sentence with each relation in braces after its source word."""

import re
from collections.abc import Iterator

from headwise.errors import FileFormatError, suggest_names
from headwise.text.annotated_document import Document, Relation
from headwise.text.token_alignment import split_word_spans

RELATION_BY_TAG = {
    "subj": "subject-verb",
    "obj": "verb-object",
    "adj": "adjective-noun",
    "det": "determiner-noun",
    "ref": "pronoun-antecedent",
    "poss": "possessive",
    "cause": "cause-effect",
    "rel": "related",
    "unrel": "unrelated",
    "bracket": "bracket",
    "quote": "quote",
    "cond": "if-then",
    "uncond": "unconditional",
    "answer": "question-answer",
}

_SEGMENT = re.compile(r"[{}]|[^{}]+")
_ARC = re.compile(r"(?P<mark>[a-z]+)>(?P<word>\S+?)(?:#(?P<number>\d+))?")


def parse_file(text: str, file_name: str) -> Iterator[Document]:
    """Yield the documents of one file: one sentence per line. Empty lines and lines that start with # are skipped."""
    for line_number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield parse_line(line.strip(), f"{file_name}, line {line_number}")


def parse_line(line: str, location: str = "this line") -> Document:
    """Parse one marked sentence.

    `word{tag>target}` is an arc from that word to the target, a word of the same sentence with the same spelling. A word that
    occurs more than once has a number: `the#2`. Several arcs are separated by a comma and a space.

    >>> d = parse_line("The{det>cats} old{adj>cats} cats{subj>sleep} that we feed sleep.")
    >>> d.text
    'The old cats that we feed sleep.'
    >>> d.relations[2]
    Relation(name='subject-verb', source=2, target=6)
    """
    text, tags = _strip_tags(line, location)
    spans = split_word_spans(text)
    words = [text[start:end] for start, end in spans]
    word_before = {end: index for index, (_, end) in enumerate(spans)}
    relations: list[Relation] = []
    for position, tag in tags:
        if position not in word_before:
            raise FileFormatError(
                f"{location}: the mark {{{tag}}} does not follow a word. Write it directly after a word: old{{adj>dog}}."
            )
        source = word_before[position]
        for arc in tag.split(", "):
            name, target = _parse_arc(arc, words, location)
            relation = Relation(name, source, target)
            if source == target:
                raise FileFormatError(f"{location}: {words[source]}{{{arc}}} points at itself. Name another word.")
            if relation in relations:
                raise FileFormatError(f"{location}: {words[source]}{{{arc}}} is marked twice. Remove one mark.")
            relations.append(relation)
    if not relations:
        raise FileFormatError(
            f"{location}: no relation is marked in {line!r}. Mark one, as in old{{adj>dog}}, or start the line with # to "
            f"skip it."
        )
    return Document(text, tuple(words), tuple(relations))


def _strip_tags(line: str, location: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the text without marks, and each mark with its position in that text."""
    text, tags, tag = "", [], None
    for segment in _SEGMENT.findall(line):
        if segment == "{" and tag is None:
            tag = ""
        elif segment == "}" and tag is not None:
            tags.append((len(text), tag))
            tag = None
        elif segment in "{}":
            problem = "opens a mark within a mark" if segment == "{" else "closes a mark that was never opened"
            raise FileFormatError(f"{location}: a brace {problem} in {line!r}. Write marks as in old{{adj>dog}}.")
        elif tag is None:
            text += segment
        else:
            tag = segment
    if tag is not None:
        raise FileFormatError(f"{location}: the mark {{{tag} is not closed. End it with a brace.")
    return text, tags


def _parse_arc(arc: str, words: list[str], location: str) -> tuple[str, int]:
    """Return the name of the relation and the index of the target."""
    match = _ARC.fullmatch(arc)
    if not match:
        raise FileFormatError(
            f"{location}: {{{arc}}} does not mark a relation. Write {{relation>word}} directly after a word, as in "
            f"old{{adj>dog}}."
        )
    tag, word, occurrence = match["mark"], match["word"], match["number"]
    if tag not in RELATION_BY_TAG:
        raise FileFormatError(
            f"{location}: unknown relation {tag!r} in {{{arc}}}; {suggest_names(tag, RELATION_BY_TAG)}"
        )
    positions = [position for position, other in enumerate(words) if other == word]
    if not positions:
        raise FileFormatError(
            f"{location}: {{{arc}}} points at {word!r}, which is not in the sentence. Copy the word exactly."
        )
    if occurrence is None and len(positions) > 1:
        raise FileFormatError(
            f"{location}: {{{arc}}} is ambiguous, because {word!r} occurs {len(positions)} times. Add a number: {word}#1."
        )
    if not 1 <= int(occurrence or 1) <= len(positions):
        raise FileFormatError(
            f"{location}: {{{arc}}} points at {word!r} number {occurrence}, but there are {len(positions)}. "
            f"Use a number from 1 to {len(positions)}."
        )
    return RELATION_BY_TAG[tag], positions[int(occurrence or 1) - 1]
