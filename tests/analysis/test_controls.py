"""Controls of paired words: hand-built heads that follow the words instead of the pair get no role."""

from functools import partial

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.recording.text_hash_split import bucket_of_text
from headwise.analysis.roles.roles import assess, score
from headwise.kernels import causal
from headwise.text import Alignment
from headwise.text.annotated_document import Document, Relation
from headwise.text.token_alignment import find_word_spans
from tests.analysis.dense_reference import call_from_scores
from tests.analysis.models import documents_of


def bracket_document(index: int) -> Document:
    """Two pairs of brackets of random lengths with commas between them. Words are numbered, so that all texts differ."""
    rng = np.random.default_rng(index)
    words, arcs = [f"x{index}"], []
    for _ in range(2):
        words += [f"w{i}" for i in range(int(rng.integers(1, 4)))] + ["("]
        opener_index = len(words) - 1
        words += [f"v{i}" for i in range(int(rng.integers(1, 9)))] + [")"]
        arcs.append(Relation("bracket", len(words) - 1, opener_index))
        words += [f"u{i}" for i in range(int(rng.integers(1, 9)))] + [","]
    return Document.of(words, arcs)


def conditional_document(index: int) -> Document:
    """Sentences with if and then, which are alternately a pair and not a pair."""
    rng = np.random.default_rng(index)
    words = [f"x{index}", "if", *(f"w{i}" for i in range(int(rng.integers(1, 12)))), "then", "y"]
    return Document.of(words, [Relation("if-then" if index % 2 else "unconditional", 1, len(words) - 2)])


def scores_to_arcs(document: Document, *kinds: str) -> torch.Tensor:
    """Scores of a head that attends from the later to the earlier word of arcs of some kinds, otherwise to the first token:
    (T, T)."""
    words = document.words
    target = [0] * len(words)
    for name, s, t in document.relations:
        if name in kinds:
            target[max(s, t)] = min(s, t)
    for position, word in enumerate(words):
        earlier = [i for i in range(position) if words[i] == {",": ",", ")": "("}.get(word)]
        if word == "," and "comma" in kinds and earlier:
            target[position] = earlier[-1]
        if word == ")" and "first opener" in kinds:
            target[position] = earlier[0]
    return torch.eye(len(words))[target] * 200.0


def roles_of_heads(documents: list[Document], heads: list[tuple[str, ...]]) -> list[dict[str, tuple[float, float]]]:
    """Return the confirmed roles of each head with score and baseline."""
    samples = []
    for index, document in enumerate(documents):
        spans = find_word_spans(document.text, document.words)
        aligned = Alignment.of(document.text, range(len(spans)), document.words, spans, document.words)
        samples.append(
            TextSample(index, bucket_of_text(document.text), aligned.ids, document, partial(lambda a: a, aligned))
        )
    relations = RelationMetric.of(Accumulator(len(heads)), documents_of(samples), causal=True)
    for sample in samples:
        assert sample.document is not None
        batch = make_batch([sample])
        scores = torch.stack([scores_to_arcs(sample.document, *kinds) for kinds in heads])[None].double()
        MetricRunner(relations.accumulator, [relations]).on_call(call_from_scores(scores, causal()), batch, 0)
    evidence, _ = assess(score(relations.accumulator, relations), len(heads))
    return [
        {
            role_evidence.role: (role_evidence.score, role_evidence.baseline)
            for role_evidence in head_evidence
            if role_evidence.is_supported
        }
        for head_evidence in evidence
    ]


def test_roles_bracket_head_following_marks_has_no_role() -> None:
    """A head that also attends from comma to comma follows punctuation. A head that takes the first opening bracket is right
    for the first pair only."""
    head_roles = roles_of_heads(
        [bracket_document(i) for i in range(120)], [("bracket",), ("bracket", "comma"), ("first opener",), ("comma",)]
    )
    assert head_roles[0]["bracket"][0] == 1
    assert head_roles[0]["bracket"][1] < 0.3, "no offset finds many, and it never looks at a wrong one"
    assert head_roles[1] == head_roles[2] == head_roles[3] == {}


def test_roles_if_then_head_following_any_pair_has_no_role() -> None:
    head_roles = roles_of_heads(
        [conditional_document(i) for i in range(160)], [("if-then",), ("if-then", "unconditional"), ("unconditional",)]
    )
    assert head_roles[0]["if-then"][0] == pytest.approx(1)
    assert head_roles[1] == head_roles[2] == {}


def test_roles_without_control_texts_cannot_separate_heads() -> None:
    """Without sentences in which if and then are not a pair, the two heads cannot be distinguished."""
    head_roles = roles_of_heads(
        [conditional_document(i) for i in range(1, 160, 2)], [("if-then",), ("if-then", "unconditional")]
    )
    assert head_roles[0] == head_roles[1]
    assert "if-then" in head_roles[0]


def test_relation_metric_counts_control_pairs() -> None:
    """`)` with opening brackets of other pairs, commas with earlier commas. Annotated pairs are excluded."""
    document = Document.of(
        ["a", "(", "b", ")", ",", "(", "c", ")", ","], [Relation("bracket", 3, 1), Relation("bracket", 7, 5)]
    )
    aligned = Alignment.of(
        document.text, range(9), document.words, find_word_spans(document.text, document.words), document.words
    )
    sample = TextSample(0, 0, aligned.ids, document, partial(lambda: aligned))
    relations = RelationMetric.of(Accumulator(1), documents_of([sample]), causal=True)
    relations.begin_batch(make_batch([sample]))
    counted = dict(zip(relations.relations, relations.arcs.sum(0).tolist(), strict=True))
    assert counted == {
        "bracket >": 2, "bracket <": 0, "another's bracket >": 1, "another's bracket <": 0,
        "comma to comma >": 1, "comma to comma <": 0,
    }  # fmt: skip
