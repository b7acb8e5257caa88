"""The probe set: valid markup, enough sentences, varied distances and matched controls."""

import re
from collections import Counter
from importlib.resources import files
from itertools import pairwise

import pytest

from headwise.errors import HeadwiseError
from headwise.text.annotated_document import Relation, best_offset, count_relation_offsets
from headwise.text.probe import RELATIONS, probe_set
from headwise.text.probe.markup import RELATION_BY_TAG, parse_file, parse_line


@pytest.mark.parametrize("relation", RELATIONS)
def test_probe_set_relation_is_not_solved_by_offset(relation: str) -> None:
    documents = probe_set(relation)
    counts = count_relation_offsets(documents)[relation]
    assert len(documents) >= 40
    assert best_offset(counts)[1] <= 0.5
    assert len(counts) >= 8  # different distances


def test_probe_set_contains_every_line_of_its_files() -> None:
    lines = [
        line
        for entry in files("headwise.text.probe").iterdir()
        if entry.name.endswith(".txt")
        for line in entry.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert len(probe_set()) == len(lines)
    assert set(count_relation_offsets(probe_set())) == set(RELATIONS)


def test_probe_set_has_no_duplicates() -> None:
    assert [text for text, times in Counter(d.text.lower() for d in probe_set()).items() if times > 1] == []


def test_probe_set_words_cover_text_and_length_is_readable() -> None:
    for document in probe_set():
        assert "".join(document.words) == re.sub(r"\s", "", document.text)
        assert 6 <= sum(word[0].isalnum() for word in document.words) <= 30, document.text
        assert document.text[0] == document.text[0].upper(), document.text
        assert re.search(r"[.!?][\"”’']?$", document.text), document.text
        assert not re.search(r"[{}>#]|\s\s|\s[.,;:!?]", document.text), document.text


def test_probe_set_arcs_avoid_first_word() -> None:
    """The first token is an attention sink of many heads, so an arc to it would credit them with a relation."""
    assert [d.text for d in probe_set() if any(0 in (arc.source, arc.target) for arc in d.relations)] == []


def test_probe_set_related_pairs_have_controls() -> None:
    pairs = probe_set("related", "unrelated")
    assert len(pairs) % 4 == 0
    by_turns = [(a, b) if n % 2 == 0 else (b, a) for n, (a, b) in enumerate(zip(pairs[::2], pairs[1::2], strict=True))]
    for related, control in by_turns:
        (arc,), (other,) = related.relations, control.relations
        assert (arc.name, other.name) == ("related", "unrelated")
        assert arc[1:] == other[1:], related.text
        changed = [n for n, (a, b) in enumerate(zip(related.words, control.words, strict=True)) if a != b]
        assert changed == [arc.target], related.text


def test_probe_set_pronoun_twins_have_different_antecedents() -> None:
    twins = 0
    for first, second in pairwise(probe_set("pronoun-antecedent")):
        (arc, *_), (other, *_) = first.relations, second.relations
        if first.words[: arc.source + 1] == second.words[: other.source + 1]:
            assert arc.target != other.target, first.text
            assert len(first.words) == len(second.words), first.text
            twins += 1
    assert twins >= 20


PAIRS = {")": "(", "]": "[", "”": "“", "’": "‘", '"': '"', "'": "'"}


@pytest.mark.parametrize("relation", ["bracket", "quote"])
def test_probe_set_brackets_and_quotes_nest(relation: str) -> None:
    marks = set("()[]") if relation == "bracket" else set("“”‘’\"'")
    for document in probe_set(relation):
        inside: list[int] = []  # indices of the open marks
        expected = []
        for position, word in enumerate(document.words):
            if word in PAIRS and inside and document.words[inside[-1]] == PAIRS[word] and word in marks:
                expected.append(Relation(relation, position, inside.pop()))
            elif word in marks:
                inside.append(position)
        assert not inside, document.text
        assert set(document.relations) == set(expected), document.text


def test_probe_set_arc_sources_match_relation() -> None:
    asking = {"who", "whom", "whose", "what", "which", "where", "when", "why", "how", "?"}
    sources = {
        "if-then": {"if"},
        "possessive": {"his", "her", "its", "their", "whose"},
        "pronoun-antecedent": {"he", "she", "it", "they", "him", "her", "them"},
        "question-answer": asking,
    }
    for name, source_words in sources.items():
        for document in probe_set(name):
            for arc in document.relations:
                assert document.words[arc.source].lower() in source_words, document.text
                assert name != "if-then" or document.words[arc.target] == "then", document.text


def test_probe_set_selection_keeps_only_its_arcs() -> None:
    assert {arc.name for d in probe_set("quote", "bracket") for arc in d.relations} == {"quote", "bracket"}
    assert probe_set() is probe_set()
    with pytest.raises(HeadwiseError, match=r"Got 'posessive'; did you mean possessive"):
        probe_set("posessive")


def test_parse_line_several_arcs_and_numbered_words() -> None:
    document = parse_line('The{det>dog} dog{subj>"#2, obj>saw} "saw"{quote>"#1} it.')
    assert document.text == 'The dog "saw" it.'
    assert document.relations == (
        Relation("determiner-noun", 0, 1),
        Relation("subject-verb", 1, 4),
        Relation("verb-object", 1, 3),
        Relation("quote", 4, 2),
    )
    assert set(RELATION_BY_TAG.values()) == set(RELATIONS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("The old{adj>dog dog sleeps.", r"mark \{adj>dog dog sleeps\. is not closed"),
        ("The old{adj>{dog} sleeps.", "opens a mark within a mark"),
        ("The old adj>dog} dog sleeps.", "closes a mark that was never opened"),
        ("The old{adjj>dog} dog sleeps.", "unknown relation 'adjj'.*did you mean adj"),
        ("The old{adj>cat} dog sleeps.", "points at 'cat', which is not in the sentence"),
        ("The old{adj>Dog} dog sleeps.", "points at 'Dog', which is not in the sentence"),
        ("The old{adj>dog} dog bit a dog.", r"'dog' occurs 2 times. Add a number: dog#1"),
        ("The old{adj>dog#3} dog bit a dog.", "number 3, but there are 2"),
        ("The old{adj>dog#0} dog bit a dog.", "Use a number from 1 to 2"),
        ("The old{adj} dog sleeps.", r"\{adj\} does not mark a relation"),
        ("The old{} dog sleeps.", r"\{\} does not mark a relation"),
        ("The old {adj>dog} dog sleeps.", "does not follow a word"),
        ("The old{adj>old} dog sleeps.", "points at itself"),
        ("The old{adj>dog, adj>dog} dog sleeps.", "marked twice"),
        ("The old dog sleeps.", "no relation is marked"),
    ],
)
def test_parse_file_malformed_line_raises_with_line(line: str, message: str) -> None:
    with pytest.raises(HeadwiseError, match=rf"^dogs\.txt, line 4: .*{message}"):
        list(parse_file(f"# dogs\n\nThe{{det>dog}} dog sleeps.\n{line}\n", "dogs.txt"))
