"""Relation metrics between words, compared with plain loops over dense maps: split words, both directions, any padding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.row_blocks import iter_row_blocks
from headwise.analysis.recording.batching import TextSample, TokenBatch, make_batch
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.analysis.roles.roles import score
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import Mask, causal, padding_mask
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document, Relation
from tests.analysis.dense_reference import call_from_scores
from tests.analysis.models import documents_of

WORDPIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "head",
    "##s",
    "##ing",
    "attend",
    "look",
    "back",
    "a",
    "b",
    "c",
    "d",
]
WORDS = ("heads", "attending", "look", "back", "looks", "a", "b", "c", "d", "headsing")
TOKENIZER = Tokenizer.from_wordpiece(WORDPIECES)  # [CLS] … [SEP]


def encode_plain(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_samples(framed: bool, count: int = 9, seed: int = 0, max_words: int = 12) -> list[TextSample]:
    """Make texts of random words, split and unsplit, with random arcs, classes and phrases."""
    rng, samples = np.random.default_rng(seed), []
    for index in range(count):
        n = int(rng.integers(4, max_words))
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), n)]
        pairs = {(int(s), int(t)) for s, t in rng.integers(0, n, (n, 2)) if s != t}
        arcs = [Relation(("det", "subject of")[(s + t) % 2], s, t) for s, t in sorted(pairs)]
        document = Document(
            " ".join(words), tuple(words), tuple(arcs), tuple("NV"[i % 2] for i in range(n)), ((0, 3), (1, n))
        )
        samples.append(make_sample(3 * index + 1, document, framed))
    return samples


def make_sample(index: int, document: Document, framed: bool = False) -> TextSample:
    ids = TOKENIZER.encode(document.text, add_special_tokens=framed)
    return TextSample(
        index, index, tuple(ids), document, partial(TOKENIZER.align, document.text, document.words, framed)
    )


def make_call(batch: TokenBatch, is_causal: bool, heads: int = 3, scores: Tensor | None = None) -> AttentionCall:
    """Make a call with random scores for a batch, with the mask of a model."""
    B, T = batch.ids.shape
    generator = torch.Generator().manual_seed(T)
    logits = 2 * torch.randn(B, heads, T, T, generator=generator).double() if scores is None else scores
    mask: Mask = padding_mask(batch.real_tokens)
    norms = torch.rand(T, generator=generator) + 0.5
    return call_from_scores(logits, causal() & mask if is_causal else mask, norms=norms)


def run_relations(
    batches: list[TokenBatch], is_causal: bool, heads: int = 3
) -> tuple[RelationMetric, list[AttentionCall]]:
    samples = [sample for batch in batches for sample in batch.samples]
    relations = RelationMetric.of(Accumulator(heads), documents_of(samples), is_causal)
    calls = [make_call(batch, is_causal, heads) for batch in batches]
    for batch, attention_call in zip(batches, calls, strict=True):
        MetricRunner(relations.accumulator, [relations]).on_call(attention_call, batch, 0)
    return relations, calls


def word_map(sample: TextSample, p: np.ndarray) -> np.ndarray:
    """Convert a token map to a word map, (H, T, T) → (H, W, W): sum over the columns of a word, mean over its rows."""
    word_tokens = sample.alignment.tokens_of_word
    weights = np.zeros((len(p), len(word_tokens), len(word_tokens)))
    for i, sources in enumerate(word_tokens):
        for j, targets in enumerate(word_tokens):
            weights[:, i, j] = np.mean([[sum(p[h, s, t] for t in targets) for s in sources] for h in range(len(p))], 1)
    return weights


def relation_pairs(sample: TextSample, relation: str, is_causal: bool) -> Iterator[tuple[int, int]]:
    """Return the visible word pairs of a relation, without pairs that end at the first word."""
    name, direction = relation.rsplit(" ", 1)
    document = sample.document
    assert document is not None
    W, first = len(document.words), sample.alignment.words_of_token[0]
    if name == "same class":
        pairs = {(i, j) for i in range(W) for j in range(i + 1, W) if document.classes[i] == document.classes[j]}
    elif name == "same phrase":
        pairs = {(i, j) for a, b in document.phrases if b - a <= 8 for i in range(a, b) for j in range(i + 1, b)}
    else:
        pairs = {(arc.source, arc.target) for arc in document.relations if arc.name == name}
    for s, t in pairs:
        s, t = (s, t) if direction == ">" else (t, s)
        if t not in first and s != t and (t < s or not is_causal):
            yield s, t


def sample_word_maps(
    batches: list[TokenBatch], calls: list[AttentionCall], value_weighted: bool = False
) -> Iterator[tuple[TextSample, np.ndarray]]:
    for batch, attention_call in zip(batches, calls, strict=True):
        p = attention_call.maps().numpy()
        if value_weighted:
            p = p * attention_call.v[..., 0].numpy()[:, :, None]
            p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
        for row, sample in enumerate(batch.samples):
            start = int(batch.first_token_positions[row])
            text_slice = slice(start, start + len(sample.ids))
            yield sample, word_map(sample, p[row][:, text_slice, text_slice])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("framed", [True, False])
def test_relation_metric_hits_and_mass_equal_dense_loop(
    side: str, is_causal: bool, framed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if side == "left":
        monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 5)
        monkeypatch.setattr(row_blocks, "BLOCK_CELLS", 300)
    samples = make_samples(framed)
    batches = [make_batch(samples[:4], side), make_batch(samples[4:], side)]
    relations, calls = run_relations(batches, is_causal)
    assert set(relations.relations) == {
        f"{n} {w}" for n in ("det", "subject of", "same phrase", "same class") for w in "><"
    }
    for relation in relations.relations:
        for kind, value_weighted in (("", False), ("value-weighted ", True)):
            hits, mass, rows_of = np.zeros(3), np.zeros(3), 0
            for sample, words in sample_word_maps(batches, calls, value_weighted):
                rows_of += len({s for s, _ in relation_pairs(sample, relation, is_causal)})
                for s, t in relation_pairs(sample, relation, is_causal):
                    others = np.delete(words[:, s], s, 1)
                    hits += np.delete(np.arange(words.shape[1]), s)[others.argmax(1)] == t
                    mass += words[:, s, t]
            got_hits, counts = relations.accumulator.bucket_sums_and_counts(f"{relation} {kind}hits")
            got_mass, _ = relations.accumulator.bucket_sums_and_counts(f"{relation} {kind}mass")
            np.testing.assert_array_equal(counts.sum(0), rows_of, err_msg=relation)
            np.testing.assert_array_equal(got_hits.sum(0), hits, err_msg=relation)
            np.testing.assert_allclose(got_mass.sum(0), mass, rtol=1e-5, atol=1e-5, err_msg=relation)


def test_word_map_uniform_encoder_weights_words_by_tokens() -> None:
    """The weight on a word of k tokens is k/n, and a row sums to the share of all words."""
    sample = make_samples(framed=False, count=1, seed=4, max_words=13)[0]
    batch = make_batch([sample])
    relations = RelationMetric.of(Accumulator(1), documents_of([sample]), causal=False)
    n, runner = len(sample.ids), MetricRunner(relations.accumulator, [relations])
    context = AttentionCallContext(
        call_from_scores(torch.zeros(1, 1, n, n).double()), runner.batch_context(batch), 0, runner._gram
    )
    block_accumulator = relations.make_accumulator(context)
    for block in iter_row_blocks(context.attention_call, context.key_features):
        block_accumulator.add_block(block)
    plain = block_accumulator.maps[0]
    sizes = np.array([len(word_tokens) for word_tokens in sample.alignment.tokens_of_word])
    np.testing.assert_allclose(plain[0][0], np.tile(sizes / n, (len(sizes), 1)), atol=1e-6)
    assert max(sizes) > 1


def visibility_bin(source: int, words: int, is_causal: bool) -> int:
    """Bin rows by the number of visible words, by powers of two."""
    return int(np.log2(max(1, source if is_causal else words - 1)))


def other_pairs(
    sample: TextSample, words: np.ndarray, relation: str, is_causal: bool
) -> dict[tuple[int, int], list[np.ndarray]]:
    """Return the weight on pairs of a text that are not arcs, by offset and number of visible words."""
    W, first, arcs = (
        words.shape[1],
        sample.alignment.words_of_token[0],
        set(relation_pairs(sample, relation, is_causal)),
    )
    weights: dict[tuple[int, int], list[np.ndarray]] = {}
    for s in range(W):
        for t in range(s if is_causal else W):
            if s != t and t not in first and (s, t) not in arcs:
                weights.setdefault((t - s, visibility_bin(s, W, is_causal)), []).append(words[:, s, t])
    return weights


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("framed", [True, False])
def test_relation_metric_matched_pairs_equal_dense_loop(is_causal: bool, framed: bool) -> None:
    """Each arc is compared with the pairs of its text at the same offset and with about as many visible words. Rows with an
    arc without such pairs are left out of the weight, of the comparison and of the count."""
    samples = make_samples(framed, count=14, seed=2)
    batches = [make_batch(samples[:5], "left"), make_batch(samples[5:])]
    relations, calls = run_relations(batches, is_causal)
    maps = list(sample_word_maps(batches, calls))
    dropped = 0
    for index, relation in enumerate(relations.relations):
        others, matched, fit, rows = np.zeros((BUCKETS, 3)), np.zeros((BUCKETS, 3)), np.zeros(BUCKETS), 0
        for sample, words in maps:
            comparisons = other_pairs(sample, words, relation, is_causal)
            arcs = list(relation_pairs(sample, relation, is_causal))
            for source in {s for s, _ in arcs}:
                targets = [t for s, t in arcs if s == source]
                matches = [
                    comparisons.get((t - source, visibility_bin(source, words.shape[1], is_causal))) for t in targets
                ]
                rows += 1
                if None in matches:
                    dropped += 1
                    continue
                fit[sample.bucket] += 1
                others[sample.bucket] += sum(np.mean(weights, 0) for weights in matches if weights is not None)
                matched[sample.bucket] += sum(words[:, source, t] for t in targets)
        for kind, want in (("others", others), ("matched", matched)):
            got, counts = relations.accumulator.bucket_sums_and_counts(f"{relation} {kind}")
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{relation} {kind}")
            np.testing.assert_array_equal(counts, np.tile(fit[:, None], 3), err_msg=relation)
        if rows:
            assert relations.comparable_row_fraction()[index] == pytest.approx(fit.sum() / rows), relation
    assert dropped > 20


def previous_word_relations(samples: list[TextSample], is_causal: bool) -> RelationMetric:
    """A head with hard attention from each word to the previous one. Words are single tokens."""
    relations = RelationMetric.of(Accumulator(1), documents_of(samples), is_causal)
    for sample in samples:
        batch, n = make_batch([sample]), len(sample.ids)
        scores = 200.0 * torch.eye(n).roll(-1, 1).tril().double()
        scores[0, 0] = 200.0  # the first word has no previous word
        MetricRunner(relations.accumulator, [relations]).on_call(
            make_call(batch, is_causal, 1, scores[None, None]), batch, 0
        )
    return relations


def single_token_samples(arcs: list[list[tuple[int, int]]], n: int = 9) -> list[TextSample]:
    words = ("a", "b", "c", "d", "look", "back", "head", "attend", "a")[:n]
    return [
        make_sample(i, Document.of(words, [Relation("det", s, t) for s, t in pairs])) for i, pairs in enumerate(arcs)
    ]


@pytest.mark.parametrize("is_causal", [True, False])
def test_relation_metric_previous_word_head_has_no_excess(is_causal: bool) -> None:
    arcs = [[(2, 1), (5, 4), (7, 2), (3, 6)], [(8, 7), (6, 2), (4, 3)], [(3, 1), (5, 4)], [(2, 5)]]
    relations = previous_word_relations(single_token_samples(arcs), is_causal)
    flat = [(s, t) for pairs in arcs for s, t in pairs if t < s or not is_causal]
    fraction = np.mean([t == s - 1 for s, t in flat])
    assert relations.accumulator.mean("det > hits") == pytest.approx([fraction])
    # only word 8 sees 8 words; 2 → 0 ends at the first word, so 3 → 1 has no comparison either
    coverage = 6 / 8 if is_causal else 1
    assert relations.comparable_row_fraction()[relations.relations.index("det >")] == coverage
    (mass, counts), (others, _) = (
        relations.accumulator.bucket_sums_and_counts(f"det > {kind}") for kind in ("matched", "others")
    )
    assert mass.sum() == pytest.approx(others.sum(), abs=1e-9), "no excess at all"
    assert counts.sum() == coverage * len(flat)


def test_relation_metric_rows_without_comparison_are_left_out() -> None:
    """Every pair of neighbors is an arc, so a previous-word head has no pairs to compare with and no excess."""
    everywhere = [[(i, i - 1) for i in range(1, 9)] + [(6, 2)], [(i, i - 1) for i in range(1, 9)] + [(8, 3)]] * 6
    relations = previous_word_relations(single_token_samples(everywhere), is_causal=True)
    coverage = relations.comparable_row_fraction()[relations.relations.index("det >")]
    assert coverage == 0, "words 6 and 8 look at a neighbour too, so that no row can be compared"
    for case in score(relations.accumulator, relations, only_role="det"):
        if case.role.detail == ">":
            assert case.mean(0) == pytest.approx([0]), "without excess weight a head follows nothing"


def test_relation_metric_left_out_rows_do_not_dilute_excess() -> None:
    """Seven of eight rows have no comparison. The excess of the eighth is reported in full, not divided by eight."""
    # all neighbors except the first word, which is an attention sink
    arcs = [(i, i - 1) for i in range(2, 9)] + [(1, 5)]
    relations = RelationMetric.of(
        Accumulator(1), documents_of(samples := single_token_samples([arcs] * 12)), causal=False
    )
    for sample in samples:
        batch, n = make_batch([sample]), len(sample.ids)
        scores = torch.zeros(n, n).double()
        scores[1, 5] = 200.0
        MetricRunner(relations.accumulator, [relations]).on_call(
            make_call(batch, False, 1, scores[None, None]), batch, 0
        )
    matched, others = (relations.accumulator.mean(f"det > {kind}")[0] for kind in ("matched", "others"))
    assert matched == pytest.approx(1)
    assert others == pytest.approx(1 / 9), "0 → 4, 2 → 6, 3 → 7 and 4 → 8 look everywhere alike"
    assert relations.comparable_row_fraction()[relations.relations.index("det >")] == pytest.approx(1 / 8)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_relation_metric_perfect_head_scores_one(targets: int) -> None:
    """The head divides its weight over all targets, or attends to one of them."""
    arcs = [(8, t) for t in (2, 4, 5)[:targets]]
    for spread_out in (True, False):
        relations = RelationMetric.of(
            Accumulator(1), documents_of(samples := single_token_samples([arcs] * 12)), causal=True
        )
        for sample in samples:
            batch, n = make_batch([sample]), len(sample.ids)
            scores = torch.zeros(n, n).double()
            scores[8, [t for _, t in arcs][: None if spread_out else 1]] = 200.0
            MetricRunner(relations.accumulator, [relations]).on_call(
                make_call(batch, True, 1, scores[None, None]), batch, 0
            )
        for kind in ("hits", "mass", "value-weighted hits", "value-weighted mass"):
            assert relations.accumulator.mean(f"det > {kind}") == pytest.approx([1]), kind


def test_relation_metric_single_word_class_has_no_gain() -> None:
    """All words are in one class, so pairs of different classes do not exist for comparison."""
    words = ("a", "b", "c", "d", "look", "back")
    samples = [make_sample(i, Document.of(words, classes=["N"] * 6)) for i in range(12)]
    relations = previous_word_relations(samples, is_causal=True)
    case = next(c for c in score(relations.accumulator, relations) if c.role.name == "part of speech")
    assert not np.nan_to_num(case.gain(1)) > 0


def test_role_scores_baseline_offset_is_fitted_on_first_half() -> None:
    """The first half selects offset −1. The second half reports it, although −3 would be better there."""
    arcs = [[(4, 3), (5, 4), (8, 5)] if i % 2 == 0 else [(4, 1), (5, 2), (8, 7)] for i in range(20)]
    relations = previous_word_relations(single_token_samples(arcs), is_causal=True)
    case = next(c for c in score(relations.accumulator, relations, only_role="det") if c.role.detail == ">")
    assert case.baseline(0) == pytest.approx([2 / 3])
    assert case.baseline(1) == pytest.approx([1 / 3]), "the share of −1, not of −3"


def test_relation_metric_counts_arcs_by_offset() -> None:
    samples = make_samples(framed=True, count=20, seed=7)
    relations, _ = run_relations([make_batch(samples)], is_causal=False)
    index = relations.relations.index("det >")
    want = Counter(t - s for sample in samples for s, t in relation_pairs(sample, "det >", False))
    got = relations.offsets[:, index].sum(0)
    assert got.tolist() == [want[offset] for offset in range(-5, 6)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_relation_metric_head_on_special_token_hits_nothing(is_causal: bool) -> None:
    """All weight is on [CLS]. Words have zero weight, and zero weight is never a hit, not even on the first word."""
    samples = [
        make_sample(i, Document.of("abcd", [Relation("det", 2, 0), Relation("det", 3, 0)]), True) for i in range(3)
    ]
    batch = make_batch(samples)
    relations = RelationMetric.of(Accumulator(1), documents_of(samples), is_causal)
    scores = torch.zeros(3, 1, 6, 6).double()
    scores[..., 0] = 2000.0
    MetricRunner(relations.accumulator, [relations]).on_call(make_call(batch, is_causal, 1, scores), batch, 0)
    assert relations.accumulator.mean("det > mass") == pytest.approx([0])
    assert relations.accumulator.mean("det > hits") == pytest.approx([0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_relation_metric_batch_equals_single_texts(side: str, is_causal: bool) -> None:
    """Some texts have no relations, and padded rows may contain any value, including NaN."""
    samples = [replace(sample, document=None) if i % 3 == 1 else sample for i, sample in enumerate(make_samples(True))]
    batch = make_batch(samples, side)
    B, T = batch.ids.shape
    scores = torch.randn(B, 3, T, T, generator=torch.Generator().manual_seed(5)).double()
    torn = scores.masked_fill(~batch.real_tokens[:, None, :, None], torch.nan)
    batched, separate = (RelationMetric.of(Accumulator(3), documents_of(samples), is_causal) for _ in range(2))
    MetricRunner(batched.accumulator, [batched]).on_call(make_call(batch, is_causal, scores=torn), batch, 0)
    for row, sample in enumerate(samples):
        text_slice = slice(
            int(batch.first_token_positions[row]), int(batch.first_token_positions[row]) + len(sample.ids)
        )
        alone, full_call = make_batch([sample]), make_call(batch, is_causal, scores=scores)
        mask = causal() if is_causal else None
        attention_call = call_from_scores(
            scores[row : row + 1, :, text_slice, text_slice], mask, norms=full_call.v[row, 0, text_slice, 0]
        )
        MetricRunner(separate.accumulator, [separate]).on_call(attention_call, alone, 0)
    assert batched.arcs.sum() > 0
    # a batch without relations
    bare = make_batch([sample for sample in samples if sample.document is None], side)
    MetricRunner(batched.accumulator, [batched]).on_call(make_call(bare, is_causal), bare, 0)
    for name, array in batched.arc_count_arrays().items():
        np.testing.assert_array_equal(array, separate.arc_count_arrays()[name])
    for metric_spec in batched.metric_specs:
        for actual, expected in zip(
            batched.accumulator.bucket_sums_and_counts(metric_spec.name),
            separate.accumulator.bucket_sums_and_counts(metric_spec.name),
            strict=True,
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
