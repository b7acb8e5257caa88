"""The page of gold sets has the counts of the files, and every role is described by the words of its arcs."""

from collections import Counter
from pathlib import Path

import pytest

from bench.gold_sets import count_gold_sets, filled
from headwise.analysis.metrics.directed_relations import CONTROL_RELATIONS
from headwise.analysis.recording.tokenized_corpus import DEFAULT_DOCUMENTS
from headwise.analysis.roles.roles import ROLE_OF_RELATION
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from headwise.text.probe import probe_set
from headwise.ui.role_descriptions import RELATION_ROLES

PAGE = Path(__file__).parents[2] / "docs" / "gold-sets.md"
SYNTHETIC = [
    item
    for item in Corpus.synthetic("held-out", documents=DEFAULT_DOCUMENTS, seed=1).items()
    if isinstance(item, Document)
]
SETS = {"probe": probe_set(), "synthetic": SYNTHETIC}
POSSESSIVES = {"his", "her", "its", "their", "whose"}
PERSONAL = {"he", "she", "it", "they", "him", "her", "them"}
ASKING = {"who", "whom", "whose", "what", "which", "where", "when", "why", "how", "?", "do", "does"}
# relation: possible words at the source and at the target of its arcs; None: an open class
WORDS_AT_ENDS = {
    "possessive": (POSSESSIVES, None), "pronoun-antecedent": (PERSONAL, None), "question-answer": (ASKING, None),
    "if-then": ({"if"}, {"then"}), "unconditional": ({"if"}, {"then"}), "bracket": (set(")]}"), set("([{")),
    "quote": (set("\"'”’»"), set("\"'“‘«")), "delimiter": ({".", "?"}, {".", "?"}),
}  # fmt: skip


def ends(documents, relation):
    """Return the words at both ends of the arcs of a relation, in lower case."""
    arcs = [(document.words, arc) for document in documents for arc in document.relations if arc.name == relation]
    return [tuple(words[index].lower() for index in (arc.source, arc.target)) for words, arc in arcs]


def test_gold_sets_page_counted_again_is_unchanged():
    assert filled(PAGE.read_text()) == PAGE.read_text(), "run python -m bench.gold_sets --write docs/gold-sets.md"


def test_possessive_arcs_of_the_probe_set_never_lead_to_the_owned_word():
    counted = count_gold_sets(probe_set())["possessive"]
    assert (counted.texts, counted.arcs, counted.second_earlier, counted.second_later) == (46, 46, 41, 5)
    assert counted.first_end == Counter(their=14, its=12, his=8, her=8, whose=4)
    later = {
        document.words[arc.target]
        for document in probe_set("possessive")
        for arc in document.relations
        if arc.target > arc.source
    }
    assert later == {"painter", "players", "island", "pilot", "geese"}, "the owned words are youth, injuries, shape …"


@pytest.mark.parametrize("relation", WORDS_AT_ENDS)
@pytest.mark.parametrize("name", SETS)
def test_arcs_of_either_set_join_the_words_their_description_names(name, relation):
    for pair in ends(SETS[name], relation):
        for word, allowed in zip(pair, WORDS_AT_ENDS[relation], strict=True):
            assert allowed is None or word in allowed, pair


@pytest.mark.parametrize("name", SETS)
def test_every_gold_set_has_a_role_description_for_both_directions(name):
    relations = set(count_gold_sets(SETS[name])) - CONTROL_RELATIONS
    roles = {ROLE_OF_RELATION.get(relation, relation) for relation in relations}
    assert roles <= set(RELATION_ROLES)


def test_every_relation_role_has_a_gold_set():
    counted = {relation for documents in SETS.values() for relation in count_gold_sets(documents)}
    assert set(RELATION_ROLES) == {ROLE_OF_RELATION.get(relation, relation) for relation in counted - CONTROL_RELATIONS}
