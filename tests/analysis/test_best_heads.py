"""The best head for coreference: hand-built heads with known results, and the numbers in the docs."""

import os
from pathlib import Path

import pytest

import headwise as hw
from headwise.analysis.roles.best_relation_heads import best_coreference_head, best_relation_heads
from headwise.analysis.roles.profile import profile
from headwise.text.annotated_document import Document
from headwise.text.annotated_documents import GAPExample, read_gap
from headwise.text.corpus import Corpus
from tests.analysis.constructed_heads import FILLERS, HeadBuilder, blank_model
from tests.analysis.test_profile_invariance import synthetic_model

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))


def make_pronouns(right: int, wrong: int, count: int = 24, answers: str = "AB") -> list[GAPExample]:
    """Make sentences with a pronoun at word 6, the correct name at one position and the wrong one at another. Names
    alternate."""
    pronouns = []
    for index in range(count):
        words = [FILLERS[(index + 5 * position) % len(FILLERS)] for position in range(9)]
        answer = answers[index % len(answers)]
        a, b = (right, wrong) if answer == "A" else (wrong, right)
        pronouns.append(GAPExample(Document.of(words), 6, (a,), (b,), answer))
    return pronouns


def test_coreference_head_that_finds_name_is_best() -> None:
    """The correct name is two words back and the wrong one is one word ahead: the second head is always right."""
    model = blank_model(heads=3, layers=1, kind="encoder")
    for index, offset in enumerate((3, 2, -1)):
        HeadBuilder(next(model.attention_layers()), index).attend_offsets(offset).write()
    result = best_coreference_head(model, make_pronouns(right=4, wrong=7))
    assert result == ("0.1", result.num_cases, 1.0, 1.0, 1.0, 0.0, (1.0, 1.0))
    assert 6 <= result.num_cases <= 18, "about half of 24"


@pytest.mark.parametrize("answers", ["A", "B", "AB"])
def test_coreference_uniform_head_scores_half(answers: str) -> None:
    """Heads with uniform attention score 0.5 for either name."""
    result = best_coreference_head(
        blank_model(heads=2, layers=1, kind="encoder"), make_pronouns(right=3, wrong=5, answers=answers)
    )
    assert (result.accuracy, result.low, result.high) == (0.5, 0.5, 0.5)
    assert result.nearer_accuracy == 0.0


def test_coreference_decoder_skips_later_names() -> None:
    model = blank_model(heads=1, layers=1)
    HeadBuilder(next(model.attention_layers()), 0).attend_offsets(2).write()
    visible, hidden = make_pronouns(right=4, wrong=2, count=10), make_pronouns(right=4, wrong=7, count=30)
    unanswered = [GAPExample(Document.of(FILLERS[:9]), 6, (2,), (4,), None)]
    result = best_coreference_head(model, [*hidden, *visible, *unanswered])
    assert result.num_cases < 10, "some of the ten that can be seen"
    assert result.accuracy == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it")
def test_coreference_minilm_matches_docs() -> None:
    result = best_coreference_head(hw.load("minilm"), read_gap(DATA / "gap-coreference" / "gap-development.tsv"))
    assert result.head == "3.1"
    assert result.accuracy == pytest.approx(0.738, abs=0.01)
    assert result.nearer_accuracy == pytest.approx(0.513, abs=0.01)
    assert result.difference_interval[0] > 0.1


def test_best_heads_relations_of_different_texts_are_one_family() -> None:
    """Each relation has its own halves, given by its texts, but all relations are one family of tests."""
    profiled = profile(
        synthetic_model(layers=1), list(Corpus.synthetic("held-out", documents=60, seed=3).items()), causal=False
    )
    best = best_relation_heads(profiled, min_arcs=5)
    assert len(best) > 3
    assert all(0 < row.p <= 1 for row in best)
