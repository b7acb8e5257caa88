"""The probe files' markup: a plain sentence with each relation written in braces behind the word it starts from."""

import re
from collections.abc import Iterator

from headwise.errors import HeadwiseError, suggest_names
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
    """The documents of one file: one sentence a line; empty lines and those that begin with # are skipped."""
    for line_number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield parse_line(line.strip(), f"{file_name}, line {line_number}")


def parse_line(line: str, location: str = "this line") -> Document:
    """One marked sentence as a document.

    `word{tag>target}` is an arc from that word to the target, a word of the same sentence written as it stands there.
    One that occurs more than once is told apart by its number: `the#2`. Several arcs are parted by a comma and a space.

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
            raise HeadwiseError(f"{location}: the mark {{{tag}}} stands behind no word; write it as in old{{adj>dog}}.")
        source = word_before[position]
        for arc in tag.split(", "):
            name, target = _parse_arc(arc, words, location)
            relation = Relation(name, source, target)
            if source == target:
                raise HeadwiseError(f"{location}: {words[source]}{{{arc}}} points at itself; name another word.")
            if relation in relations:
                raise HeadwiseError(f"{location}: {words[source]}{{{arc}}} is marked twice; leave one.")
            relations.append(relation)
    if not relations:
        raise HeadwiseError(f"{location}: {line!r} has no mark; mark a relation, or begin the line with # to skip it.")
    return Document(text, tuple(words), tuple(relations))


def _strip_tags(line: str, location: str) -> tuple[str, list[tuple[int, str]]]:
    """The text without its marks, and each mark with the place in that text behind which it stood."""
    text, tags, tag = "", [], None
    for segment in _SEGMENT.findall(line):
        if segment == "{" and tag is None:
            tag = ""
        elif segment == "}" and tag is not None:
            tags.append((len(text), tag))
            tag = None
        elif segment in "{}":
            problem = "opens a mark within a mark" if segment == "{" else "closes a mark that was never opened"
            raise HeadwiseError(f"{location}: a brace {problem} in {line!r}; write marks as in old{{adj>dog}}.")
        elif tag is None:
            text += segment
        else:
            tag = segment
    if tag is not None:
        raise HeadwiseError(f"{location}: the mark {{{tag} is not closed; end it with a brace.")
    return text, tags


def _parse_arc(arc: str, words: list[str], location: str) -> tuple[str, int]:
    """The relation's name and the target's place."""
    match = _ARC.fullmatch(arc)
    if not match:
        raise HeadwiseError(f"{location}: {{{arc}}} is not a mark; write relation>word, as in old{{adj>dog}}.")
    tag, word, occurrence = match["mark"], match["word"], match["number"]
    if tag not in RELATION_BY_TAG:
        raise HeadwiseError(f"{location}: unknown relation {tag!r} in {{{arc}}}; {suggest_names(tag, RELATION_BY_TAG)}")
    positions = [position for position, other in enumerate(words) if other == word]
    if not positions:
        raise HeadwiseError(
            f"{location}: {{{arc}}} points at {word!r}, which the sentence does not hold; copy it exactly."
        )
    if occurrence is None and len(positions) > 1:
        raise HeadwiseError(f"{location}: {{{arc}}} may be any of {len(positions)}; say which, as in {word}#1.")
    if not 1 <= int(occurrence or 1) <= len(positions):
        raise HeadwiseError(
            f"{location}: {{{arc}}} wants {word!r} number {occurrence}, but there are {len(positions)}, counted from 1."
        )
    return RELATION_BY_TAG[tag], positions[int(occurrence or 1) - 1]
