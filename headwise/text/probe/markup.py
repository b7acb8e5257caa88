"""The probe files' markup: a plain sentence with each relation written in braces behind the word it starts from."""

import re
from collections.abc import Iterator

from headwise.errors import HeadwiseError, close_names
from headwise.text.align import split_words
from headwise.text.documents import Document, Relation

MARKS = {
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

_PIECE = re.compile(r"[{}]|[^{}]+")
_ARC = re.compile(r"(?P<mark>[a-z]+)>(?P<word>\S+?)(?:#(?P<number>\d+))?")


def parse_file(text: str, file: str) -> Iterator[Document]:
    """The documents of one file: one sentence a line; empty lines and those that begin with # are skipped."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield parse_line(line.strip(), f"{file}, line {number}")


def parse_line(line: str, where: str = "this line") -> Document:
    """One marked sentence as a document.

    `word{mark>target}` is an arc from that word to the target, a word of the same sentence written as it stands there.
    One that occurs more than once is told apart by its number: `the#2`. Several arcs are parted by a comma and a space.

    >>> d = parse_line("The{det>cats} old{adj>cats} cats{subj>sleep} that we feed sleep.")
    >>> d.text
    'The old cats that we feed sleep.'
    >>> d.relations[2]
    Relation(name='subject-verb', source=2, target=6)
    """
    text, marks = _strip(line, where)
    spans = split_words(text)
    words = [text[start:end] for start, end in spans]
    word_before = {end: number for number, (_, end) in enumerate(spans)}
    relations: list[Relation] = []
    for place, mark in marks:
        if place not in word_before:
            raise HeadwiseError(f"{where}: the mark {{{mark}}} stands behind no word; write it as in old{{adj>dog}}.")
        source = word_before[place]
        for arc in mark.split(", "):
            name, target = _arc(arc, words, where)
            relation = Relation(name, source, target)
            if source == target:
                raise HeadwiseError(f"{where}: {words[source]}{{{arc}}} points at itself; name another word.")
            if relation in relations:
                raise HeadwiseError(f"{where}: {words[source]}{{{arc}}} is marked twice; leave one.")
            relations.append(relation)
    if not relations:
        raise HeadwiseError(f"{where}: {line!r} has no mark; mark a relation, or begin the line with # to skip it.")
    return Document(text, tuple(words), tuple(relations))


def _strip(line: str, where: str) -> tuple[str, list[tuple[int, str]]]:
    """The text without its marks, and each mark with the place in that text behind which it stood."""
    text, marks, mark = "", [], None
    for piece in _PIECE.findall(line):
        if piece == "{" and mark is None:
            mark = ""
        elif piece == "}" and mark is not None:
            marks.append((len(text), mark))
            mark = None
        elif piece in "{}":
            fault = "opens a mark within a mark" if piece == "{" else "closes a mark that was never opened"
            raise HeadwiseError(f"{where}: a brace {fault} in {line!r}; write marks as in old{{adj>dog}}.")
        elif mark is None:
            text += piece
        else:
            mark = piece
    if mark is not None:
        raise HeadwiseError(f"{where}: the mark {{{mark} is not closed; end it with a brace.")
    return text, marks


def _arc(arc: str, words: list[str], where: str) -> tuple[str, int]:
    """The relation's name and the target's place."""
    found = _ARC.fullmatch(arc)
    if not found:
        raise HeadwiseError(f"{where}: {{{arc}}} is not a mark; write relation>word, as in old{{adj>dog}}.")
    mark, word, number = found["mark"], found["word"], found["number"]
    if mark not in MARKS:
        raise HeadwiseError(f"{where}: unknown relation {mark!r} in {{{arc}}}; {close_names(mark, MARKS)}")
    places = [place for place, other in enumerate(words) if other == word]
    if not places:
        raise HeadwiseError(
            f"{where}: {{{arc}}} points at {word!r}, which the sentence does not hold; copy it exactly."
        )
    if number is None and len(places) > 1:
        raise HeadwiseError(f"{where}: {{{arc}}} may be any of {len(places)}; say which, as in {word}#1.")
    if not 1 <= int(number or 1) <= len(places):
        raise HeadwiseError(
            f"{where}: {{{arc}}} wants {word!r} number {number}, but there are {len(places)}, counted from 1."
        )
    return MARKS[mark], places[int(number or 1) - 1]
