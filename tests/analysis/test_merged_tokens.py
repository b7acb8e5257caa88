"""Tokens that belong to several words: hand-built heads, with results counted by hand."""

from functools import partial

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.gold_arc_data import BASELINE_OFFSETS
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.recording.attention_maps import TokenGroups
from headwise.analysis.recording.batching import TextSample, make_batch, make_batches
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.merge_profiles import merge_relations
from headwise.kernels import causal
from headwise.text import Alignment
from headwise.text.annotated_document import Document, Relation
from headwise.text.probe import probe_set
from tests.analysis.dense_reference import call_from_scores
from tests.analysis.models import documents_of
from tests.parity.real import smollm2_folder

# words: x " a , " y      tokens: x | " | a | ," | y
QUOTE = Document('x "a," y', ("x", '"', "a", ",", '"', "y"), (Relation("quote", 4, 1), Relation("beside", 4, 3)))
QUOTED = Alignment.of(QUOTE.text, range(5), ["x", '"', "a", ',"', "y"], [(0, 1), (2, 3), (3, 4), (4, 6), (7, 8)])
# words: x do n't y       tokens: x | don | 't | y
NEGATED = Document("x don't y", ("x", "do", "n't", "y"), (Relation("not", 1, 2),))
NEGATION = Alignment.of(
    NEGATED.text, range(4), ["x", "don", "'t", "y"], [(0, 1), (2, 5), (5, 7), (8, 9)], NEGATED.words
)


def run_head(document: Document, alignment: Alignment, p: list[list[float]], is_causal: bool = False) -> RelationMetric:
    """Run one head with weights p, row by row."""
    sample = TextSample(3, 3, alignment.ids, document, partial(lambda: alignment))
    relations = RelationMetric.of(Accumulator(1), documents_of([sample]), is_causal)
    batch = make_batch([sample])
    scores = torch.tensor(p).double().clamp(min=1e-30).log()[None, None]  # (1, 1, T, T)
    MetricRunner(relations.accumulator, [relations]).on_call(
        call_from_scores(scores, causal() if is_causal else None), batch, 0
    )
    return relations


def relation_counts(relations: RelationMetric, relation: str) -> tuple[float, float, float]:
    """Return hits, weight and number of arcs."""
    hits, arcs = relations.accumulator.bucket_sums_and_counts(f"{relation} hits")
    return (
        float(hits.sum()),
        float(relations.accumulator.bucket_sums_and_counts(f"{relation} mass")[0].sum()),
        float(arcs.sum()),
    )


def attention_rows(n: int, **rows: list[float]) -> list[list[float]]:
    """Make attention rows from given ones such as r3. The other rows attend to the first token."""
    return [rows.get(f"r{i}", [1.0] + [0.0] * (n - 1)) for i in range(n)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_relation_metric_second_word_of_token_as_query(is_causal: bool) -> None:
    metric = run_head(QUOTE, QUOTED, attention_rows(5, r3=[0, 1.0, 0, 0, 0]), is_causal)
    assert relation_counts(metric, "quote >") == pytest.approx((1, 1, 1))


def test_relation_metric_second_word_of_token_as_target() -> None:
    """The comma has the same weight, because it is the same token. It does not compete with the target."""
    metric = run_head(QUOTE, QUOTED, attention_rows(5, r1=[0, 0, 0.1, 0.9, 0]))
    assert relation_counts(metric, "quote <") == pytest.approx((1, 0.9, 1))
    hits_by_offset = dict(zip(BASELINE_OFFSETS, metric.offsets[3, metric.relations.index("quote <")], strict=True))
    # no offset distinguishes the two either
    assert {offset for offset, hits in hits_by_offset.items() if hits} == {2, 3}


def test_relation_metric_ignores_weight_on_own_token() -> None:
    """`,"` has weight 0.6 on itself. This is not weight on the comma, so the opening quote has the largest weight."""
    metric = run_head(QUOTE, QUOTED, attention_rows(5, r3=[0, 0.4, 0, 0.6, 0]))
    assert relation_counts(metric, "quote >") == pytest.approx((1, 0.4, 1))


def test_relation_metric_skips_pairs_within_one_token() -> None:
    metric = run_head(QUOTE, QUOTED, attention_rows(5, r3=[0, 0, 0, 1.0, 0]))
    assert relation_counts(metric, "beside >")[2] == relation_counts(metric, "beside <")[2] == 0
    index = metric.relations.index("beside >")
    assert (metric.arcs[:, index].sum(), metric.left_out[:, index].sum()) == (0, 1)
    assert metric.left_out[:, metric.relations.index("quote >")].sum() == 0
    merged = merge_relations(Accumulator(1), [(metric.accumulator, metric), (metric.accumulator, metric)])
    assert merged is not None
    assert merged.left_out[3, index] == 2


def test_relation_metric_counts_word_pairs_of_merged_tokens() -> None:
    """Six words, so thirty pairs. Five end at the first word, and two are in one token."""
    arcs = run_head(QUOTE, QUOTED, attention_rows(5))._batch_arcs
    assert arcs is not None
    assert len(arcs.pairs.text) == 30 - 5 - 2


def test_relation_metric_words_sharing_a_token_count_one_direction() -> None:
    """`do` consists of `don` only, which is also part of `n't`. So attention from one to the other is defined in one
    direction."""
    metric = run_head(NEGATED, NEGATION, attention_rows(4, r1=[0, 0.7, 0.1, 0.2]))
    assert relation_counts(metric, "not >") == pytest.approx((0, 0.1, 1))  # 0.7 is on itself, 0.2 on y
    assert metric.left_out[3].tolist() == [0, 1]
    metric = run_head(NEGATED, NEGATION, attention_rows(4, r1=[0, 0.7, 0.2, 0.1]))
    assert relation_counts(metric, "not >") == pytest.approx((1, 0.2, 1))


def test_relation_metric_word_without_token_is_left_out() -> None:
    bare = Alignment.of("x y", [0], ["x"], [(0, 1)])
    metric = run_head(Document.of(["x", "y"], [Relation("det", 0, 1)]), bare, [[1.0]])
    assert metric.arcs.sum() == 0
    assert metric.left_out.sum(0).tolist() == [1, 0]  # in the other direction the target is the first word


def test_token_groups_merge_words_of_one_token() -> None:
    groups = TokenGroups.of(QUOTED, words=True)
    assert (groups.labels, groups.tokens) == (("x", '"', "a", ',"', "y"), ((0,), (1,), (2,), (3,), (4,)))
    assert groups.sum_matrix(torch.zeros(1)).sum(1).tolist() == [1.0] * 5


def test_relation_metric_keeps_merged_quotes_of_probe_set() -> None:
    """SmolLM2 has one token for 36 of the 65 closing quotes and the preceding punctuation. Their arcs are not lost."""
    model = hw.load(smollm2_folder())
    samples = list(TokenizedCorpus.of(model, probe_set("quote")))
    aligned_arcs = [
        (sample.alignment, arc) for sample in samples if sample.document for arc in sample.document.relations
    ]
    assert (
        sum(
            alignment.words_of_token[alignment.tokens_of_word[arc.source][0]][0] != arc.source
            for alignment, arc in aligned_arcs
        )
        == 36
    )
    relations = RelationMetric.of(Accumulator(1), documents_of(samples), causal=True)
    for batch in make_batches(samples):
        relations.begin_batch(batch)
    index = relations.relations.index("quote >")
    assert (relations.arcs[:, index].sum(), relations.left_out.sum()) == (65, 0)
