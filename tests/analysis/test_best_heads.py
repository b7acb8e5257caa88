"""The best head for coreference: heads built by hand, whose answers are known; and the figure of the docs."""

import os
from pathlib import Path

import pytest

import headwise as hw
from headwise.analysis.roles.best_heads import best_heads, coreference
from headwise.analysis.roles.profile import profile
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from headwise.text.treebank import Pronoun, read_gap
from tests.analysis.constructed_heads import FILLERS, Built, blank
from tests.analysis.test_profile_invariance import little

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))


def cases(right: int, wrong: int, count: int = 24, answers: str = "AB") -> list[Pronoun]:
    """Word 6 is the pronoun; the right name stands at one place, the wrong one at another; A and B by turns."""
    made = []
    for number in range(count):
        words = [FILLERS[(number + 5 * place) % len(FILLERS)] for place in range(9)]
        answer = answers[number % len(answers)]
        a, b = (right, wrong) if answer == "A" else (wrong, right)
        made.append(Pronoun(Document.of(words), 6, (a,), (b,), answer))
    return made


def test_a_head_that_finds_the_name() -> None:
    """Two words back is the name meant, one ahead the other: the nearer is always wrong, the second head always right."""
    model = blank(heads=3, layers=1, kind="encoder")
    for number, offset in enumerate((3, 2, -1)):
        Built(next(model.attention_layers()), number).places(offset).writes()
    found = coreference(model, cases(right=4, wrong=7))
    assert found == ("0.1", found.cases, 1.0, 1.0, 1.0, 0.0, (1.0, 1.0))
    assert 6 <= found.cases <= 18, "about half of 24"


@pytest.mark.parametrize("answers", ["A", "B", "AB"])
def test_a_tie_is_half_right(answers: str) -> None:
    """Heads that look everywhere alike know nothing, whichever name is meant."""
    found = coreference(blank(heads=2, layers=1, kind="encoder"), cases(right=3, wrong=5, answers=answers))
    assert (found.accuracy, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.nearer == 0.0


def test_what_a_decoder_cannot_see_is_not_asked() -> None:
    model = blank(heads=1, layers=1)
    Built(next(model.attention_layers()), 0).places(2).writes()
    seen, unseen = cases(right=4, wrong=2, count=10), cases(right=4, wrong=7, count=30)
    nobody = [Pronoun(Document.of(FILLERS[:9]), 6, (2,), (4,), None)]
    found = coreference(model, [*unseen, *seen, *nobody])
    assert found.cases < 10, "some of the ten that can be seen"
    assert found.accuracy == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it")
def test_the_figure_in_the_docs() -> None:
    found = coreference(hw.load("minilm"), read_gap(DATA / "gap-coreference" / "gap-development.tsv"))
    assert found.head == "3.1"
    assert found.accuracy == pytest.approx(0.738, abs=0.01)
    assert found.nearer == pytest.approx(0.513, abs=0.01)
    assert found.difference[0] > 0.1


def test_relations_that_fill_different_texts_are_one_family() -> None:
    """Halves follow the texts a relation has; together they are tested all the same, over all texts."""
    made = profile(little(layers=1), list(Corpus.little("held-out", documents=60, seed=3).items()), causal=False)
    found = best_heads(made, fewest=5)
    assert len(found) > 3
    assert all(0 < row.p <= 1 for row in found)
