"""Words that come in pairs: heads that follow the words and not the pair have no role. Heads are made by hand."""

from functools import partial

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Unit, make_batch
from headwise.analysis.recording.text_buckets import bucket_of
from headwise.analysis.roles.roles import judge, make_cases
from headwise.kernels import causal
from headwise.text import Alignment
from headwise.text.align import find_words
from headwise.text.documents import Document, Relation
from tests.analysis.dense_reference import by_scores
from tests.analysis.models import documents_of


def bracketed(number: int) -> Document:
    """Two pairs of brackets of random lengths, and commas between; words are numbered, so that no text is another."""
    draw = np.random.default_rng(number)
    words, arcs = [f"x{number}"], []
    for _ in range(2):
        words += [f"w{i}" for i in range(int(draw.integers(1, 4)))] + ["("]
        opens = len(words) - 1
        words += [f"v{i}" for i in range(int(draw.integers(1, 9)))] + [")"]
        arcs.append(Relation("bracket", len(words) - 1, opens))
        words += [f"u{i}" for i in range(int(draw.integers(1, 9)))] + [","]
    return Document.of(words, arcs)


def conditional(number: int) -> Document:
    """An if and a then, by turns a pair and none."""
    draw = np.random.default_rng(number)
    words = [f"x{number}", "if", *(f"w{i}" for i in range(int(draw.integers(1, 12)))), "then", "y"]
    return Document.of(words, [Relation("if-then" if number % 2 else "unconditional", 1, len(words) - 2)])


def looks(document: Document, *kinds: str) -> torch.Tensor:
    """A head that looks from the later to the earlier word of arcs of these kinds, and else at the first: (T, T)."""
    words = document.words
    target = [0] * len(words)
    for name, s, t in document.relations:
        if name in kinds:
            target[max(s, t)] = min(s, t)
    for place, word in enumerate(words):
        before = [i for i in range(place) if words[i] == {",": ",", ")": "("}.get(word)]
        if word == "," and "comma" in kinds and before:
            target[place] = before[-1]
        if word == ")" and "first opener" in kinds:
            target[place] = before[0]
    return torch.eye(len(words))[target] * 200.0


def roles(documents: list[Document], heads: list[tuple[str, ...]]) -> list[dict[str, tuple[float, float]]]:
    """For each head its roles that stand, with score and null."""
    units = []
    for number, document in enumerate(documents):
        spans = find_words(document.text, document.words)
        aligned = Alignment.of(document.text, range(len(spans)), document.words, spans, document.words)
        units.append(Unit(number, bucket_of(document.text), aligned.ids, document, partial(lambda a: a, aligned)))
    relations = Relations.of(Tally(len(heads)), documents_of(units), causal=True)
    for unit in units:
        assert unit.document is not None
        batch = make_batch([unit])
        scores = torch.stack([looks(unit.document, *kinds) for kinds in heads])[None].double()
        Runner(relations.tally, [relations]).see(by_scores(scores, causal()), batch, 0)
    found, _ = judge(make_cases(relations.tally, relations), len(heads))
    return [{one.role: (one.score, one.null) for one in some if one.stands} for some in found]


def test_brackets() -> None:
    """Who also jumps from comma to comma follows marks; who takes the first opener is right for the first pair alone."""
    found = roles(
        [bracketed(i) for i in range(120)], [("bracket",), ("bracket", "comma"), ("first opener",), ("comma",)]
    )
    assert found[0]["bracket"][0] == 1
    assert found[0]["bracket"][1] < 0.3, "no offset finds many, and it never looks at a wrong one"
    assert found[1] == found[2] == found[3] == {}


def test_if_and_then() -> None:
    found = roles(
        [conditional(i) for i in range(160)], [("if-then",), ("if-then", "unconditional"), ("unconditional",)]
    )
    assert found[0]["if-then"][0] == pytest.approx(1)
    assert found[1] == found[2] == {}


def test_a_control_of_a_few_texts_says_nothing() -> None:
    """Without sentences in which if and then are no pair, nobody can tell the two heads apart."""
    found = roles([conditional(i) for i in range(1, 160, 2)], [("if-then",), ("if-then", "unconditional")])
    assert found[0] == found[1]
    assert "if-then" in found[0]


def test_what_is_asked() -> None:
    """`)` at openers that are not its own, commas at earlier commas; pairs of any relation are none."""
    document = Document.of(
        ["a", "(", "b", ")", ",", "(", "c", ")", ","], [Relation("bracket", 3, 1), Relation("bracket", 7, 5)]
    )
    aligned = Alignment.of(
        document.text, range(9), document.words, find_words(document.text, document.words), document.words
    )
    unit = Unit(0, 0, aligned.ids, document, partial(lambda: aligned))
    relations = Relations.of(Tally(1), documents_of([unit]), causal=True)
    relations.begin(make_batch([unit]))
    counted = dict(zip(relations.questions, relations.arcs.sum(0).tolist(), strict=True))
    assert counted == {
        "bracket >": 2, "bracket <": 0, "another's bracket >": 1, "another's bracket <": 0,
        "comma to comma >": 1, "comma to comma <": 0,
    }  # fmt: skip
