"""Relation metrics of models that read characters, and heads with a fixed offset."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.directed_relations import DirectedRelation
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.recording.batching import TextSample, forward_batch, make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.roles import score
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import causal
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import word_tokenizer
from tests.analysis.dense_reference import call_from_scores
from tests.analysis.models import character_model, documents_of
from tests.contract.layers import MODELS

ARCS = (
    (Relation("det", 0, 1), Relation("nsubj", 1, 2), Relation("advmod", 3, 2)),
    (Relation("det", 2, 3), Relation("nsubj", 0, 3), Relation("nsubj", 4, 5), Relation("acl", 5, 3)),
    (Relation("det", 0, 1),),
)
DOCUMENTS = [
    Document.of(text.split(), arcs)
    for text, arcs in zip(("the cat sat there", "it was a cat that sat", "a mat"), ARCS, strict=True)
]
KINDS = ("hits", "mass", "value-weighted mass")


def word_map(p: np.ndarray, document: Document) -> np.ndarray:
    """Convert a map of characters to words, (W, W): sum over the characters of the key word, mean over those of the query
    word."""
    starts = np.cumsum([0, *(len(word) + 1 for word in document.words)])
    word_tokens = [range(start, start + len(word)) for start, word in zip(starts, document.words, strict=False)]
    return np.array([[np.mean([sum(p[i, j] for j in to) for i in of]) for to in word_tokens] for of in word_tokens])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["decoder", "decoder, rotary", "encoder"])
def test_relation_metric_multi_token_words_equal_dense_loop(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if side == "left":
        monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 5)
        monkeypatch.setattr(row_blocks, "BLOCK_CELLS", 300)
    model = character_model(MODELS[kind]).float()
    is_causal = model.spec.kind == "decoder"
    samples = list(TokenizedCorpus.of(model, DOCUMENTS))
    assert [len(sample.ids) for sample in samples] == [len(d.text) for d in DOCUMENTS], "a token is a letter"
    batch, accumulator = make_batch(samples, side), Accumulator(4)
    relations = RelationMetric.of(accumulator, documents_of(samples), is_causal)
    want = {f"{relation} {metric_kind}": np.zeros(4) for relation in relations.relations for metric_kind in KINDS}
    arcs = dict.fromkeys(relations.relations, 0)

    def accumulate_both(call: AttentionCall) -> None:
        MetricRunner(relations.accumulator, [relations]).on_call(call, batch, 0)
        p = call.maps().double()
        lengths = torch.einsum("bhse,hed->bhsd", call.v[:, list(call.params.kv_of_head)], call.hook_point.W_O).norm(
            dim=-1
        )
        weighted_map = p * lengths[:, :, None]
        weighted_map = weighted_map / weighted_map.sum(-1, keepdim=True).clamp(min=1e-30)
        for row, document in enumerate(DOCUMENTS):
            text_slice = slice(int(batch.first_token_positions[row]), None)
            for h in range(4):
                plain, value_weighted = (
                    word_map(x[row, h, text_slice, text_slice].numpy(), document) for x in (p, weighted_map)
                )
                best = np.where(np.eye(len(plain)), -1, plain).argmax(-1)
                for arc in document.relations:
                    for direction, s, t in ((">", arc.source, arc.target), ("<", arc.target, arc.source)):
                        # the first word is an attention sink; later words are not visible
                        if t == 0 or (is_causal and t > s):
                            continue
                        relation = DirectedRelation(arc.name, direction)
                        arcs[relation] += h == 0
                        for metric_kind, value in zip(
                            KINDS, (best[s] == t, plain[s, t], value_weighted[s, t]), strict=True
                        ):
                            want[f"{relation} {metric_kind}"][h] += value

    with torch.no_grad(), model.hook_points()[1].listen(accumulate_both):
        forward_batch(model, batch)
    for name, sums in want.items():
        np.testing.assert_allclose(accumulator.bucket_sums_and_counts(name)[0].sum(0), sums, atol=1e-5, err_msg=name)
    for relation, count in arcs.items():
        assert accumulator.bucket_sums_and_counts(f"{relation} hits")[1].sum(0).tolist() == [count] * 4, relation
    assert relations.arcs.sum(0).tolist() == list(arcs.values())


def random_documents(seed: int, count: int, words: int = 11) -> list[Document]:
    """Make documents with arcs from words to one of the two previous words, and a phrase."""
    rng = np.random.default_rng(seed)
    docs = []
    for _ in range(count):
        arcs = [Relation("arc", i, i - int(rng.integers(1, 3))) for i in range(2, words) if rng.random() < 0.7]
        start = int(rng.integers(1, words - 3))
        text = tuple(f"w{rng.integers(0, 50)}" for _ in range(words))
        kinds = tuple("NV"[k] for k in rng.integers(0, 2, words))
        docs.append(Document(" ".join(text), text, tuple(arcs), kinds, ((start, start + 3),)))
    return docs


def run_relations(documents: list[Document], scores: Tensor, is_causal: bool = True) -> RelationMetric:
    """Run one head with scores (n, n) on documents of n words with one token each."""
    tokenizer = word_tokenizer([f"w{i}" for i in range(50)])
    samples = [
        TextSample(index, index, tuple(tokenizer.encode(d.text)), d, partial(tokenizer.align, d.text, d.words))
        for index, d in enumerate(documents)
    ]
    relations = RelationMetric.of(Accumulator(1), documents_of(samples), is_causal)
    for sample in samples:
        batch = make_batch([sample])
        MetricRunner(relations.accumulator, [relations]).on_call(
            call_from_scores(scores[None, None], causal() if is_causal else None), batch, 0
        )
    return relations


def scores_to_offset(n: int, offset: int) -> Tensor:
    """Return scores for one offset back. A row without such a key attends to itself."""
    scores = 90.0 * torch.eye(n).roll(-offset, 1).tril()
    scores[:offset, :offset] += 90.0 * torch.eye(offset)
    return scores


@pytest.mark.parametrize("is_causal", [True, False])
def test_relation_metric_previous_word_head_hits_adjacent_arcs(is_causal: bool) -> None:
    documents = random_documents(0, 30)
    relations = run_relations(documents, scores_to_offset(11, 1), is_causal)
    fraction = np.mean([arc.source - arc.target == 1 for d in documents for arc in d.relations if arc.target != 0])
    assert float(relations.accumulator.mean("arc > hits")[0]) == pytest.approx(fraction)
    assert float(relations.accumulator.mean("arc > mass")[0]) == pytest.approx(fraction, abs=1e-6)
    if is_causal:
        assert relations.accumulator.bucket_sums_and_counts("arc < hits")[1].sum() == 0, "what comes later is not seen"
    for relation in relations.relations:
        matched, others = (
            relations.accumulator.bucket_sums_and_counts(f"{relation} {kind}")[0].sum()
            for kind in ("matched", "others")
        )
        assert matched == pytest.approx(others, abs=1e-4), f"excess of {relation}"


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_role_scores_offset_head_has_no_relation(offset: int) -> None:
    relations = run_relations(random_documents(1, 60), scores_to_offset(11, offset))
    for case in score(relations.accumulator, relations):
        gains = np.nan_to_num([case.gain(half)[0] for half in (0, 1)])
        assert min(gains) < case.role.threshold, f"{case.role.name} {case.role.detail}"


@pytest.mark.parametrize("offset", [1, 2])
def test_role_scores_without_comparison_pairs_have_no_gain(offset: int) -> None:
    """If all pairs at a distance are in one phrase, the baseline and the excess are undefined."""
    words = tuple(f"w{i}" for i in range(7))
    relations = run_relations(
        [Document(" ".join(words), words, (), ("N",) * 7, ((0, 7),))] * 20, scores_to_offset(7, offset)
    )
    for case in score(relations.accumulator, relations):
        gain = float(case.gain(1)[0])
        assert np.isnan(gain) or gain == pytest.approx(0, abs=1e-6), case.role.name


def test_relation_metric_float64_equals_float32() -> None:
    model = character_model(MODELS["decoder"]).float()
    samples = list(TokenizedCorpus.of(model, DOCUMENTS))
    batch, masses = make_batch(samples), []
    for precision in (torch.float32, torch.float64):
        relations = RelationMetric.of(Accumulator(4), documents_of(samples), True)
        with (
            torch.no_grad(),
            model.to(precision)
            .hook_points()[0]
            .listen(lambda call, r=relations: MetricRunner(r.accumulator, [r]).on_call(call, batch, 0)),
        ):
            forward_batch(model, batch)
        masses.append(relations.accumulator.mean("nsubj < mass"))
    assert masses[0] == pytest.approx(masses[1], abs=1e-5)
