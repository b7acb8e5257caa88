"""Comparison of heads: closed forms, scipy, dense recomputation, and heads that are built to be equal."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from headwise.analysis.similarity.attention_similarity import (
    attention_rows,
    record_rows,
    sample_texts_and_query_positions,
)
from headwise.analysis.similarity.compare_heads import HeadSimilarityResult, compare_heads
from headwise.analysis.similarity.weight_similarity import (
    fold_norm,
    fold_norms_into_heads,
)
from headwise.errors import HeadwiseError
from headwise.heads import HookPoint
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import ScoreParams, attention_weights, causal
from headwise.model import Transformer
from headwise.model.block import Block
from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary
from headwise.text import Tokenizer

TEXTS = [
    "The keeper of the lions was asleep when the gate fell open.",
    "Nobody in the village had seen the river so low, and nobody spoke of it.",
    "A letter (the third that week) lay on the table beside his hat.",
    "She counted the coins twice, then once more, and gave him half of them.",
    "If the rain stops before noon, we shall walk to the mill.",
    "Two boats, one red and one green, drifted towards the bridge.",
    "His answer was short: no.",
    "When the bells rang, the children ran out of the school and into the square.",
    "It was the baker who had found the key, not the priest.",
]


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=make_generator(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(TEXTS).lower())))
    return Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Transformer]:
    def build(
        attention: AttentionSpec | None = None,
        layers: int = 2,
        kept_heads: dict[str, Sequence[int]] | None = None,
        **fields: Any,
    ) -> Transformer:
        torch.manual_seed(3)
        attention = attention or AttentionSpec(width=30, heads=5, bias=True)
        spec = ModelSpec(
            vocab=len(tokenizer), context=128, layers=layers, attention=attention, kept_heads=kept_heads or {}, **fields
        )
        model = Transformer(spec).double()
        with torch.no_grad():
            for index, (name, parameter) in enumerate(model.named_parameters()):
                parameter.normal_(0, 1.0 if "norm" not in name else 0.3, generator=make_generator(index))
                if parameter.ndim > 1:
                    parameter.div_(parameter.shape[-1] ** 0.5)
                elif name.endswith("weight"):
                    parameter.add_(1.0)
        model.tokenizer = tokenizer
        return model.eval()

    return build


# Weights.


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_fold_equals_norm_before_projection(make: Callable[..., Transformer], norm: str) -> None:
    model = make(norm=norm, positions="none")
    block, x = model.blocks[1], randn(6, 30, seed=5)
    assert isinstance(block, Block)
    head = model.heads[Address.parse("1.3")]
    bias = getattr(block.norm_attention, "bias", None)
    size = (x - x.mean(1, keepdim=True) if norm == "layer" else x).square().mean(1, keepdim=True).add(1e-5).sqrt()
    shift = 0 if bias is None else bias @ head.W_Q
    expected = block.norm_attention(x) @ head.W_Q - shift
    torch.testing.assert_close(x / size @ fold_norm(head.W_Q, block.norm_attention), expected)


@pytest.mark.parametrize("norm_placement", ["pre", "post", "parallel"])
def test_compare_heads_composition_follows_norm_placement(
    make: Callable[..., Transformer], norm_placement: str
) -> None:
    model = make(kind="encoder-decoder", encoder_layers=1, norm_placement=norm_placement)
    head_weights = fold_norms_into_heads(model, model.heads.addresses)
    comparison = compare_heads(model, TEXTS, rows=32)
    at = {str(head.address): i for i, head in enumerate(head_weights)}
    v, q = comparison["v_composition"], comparison["q_composition"]
    assert np.isfinite(v[at["enc.0.1"], at["cross.1.2"]])  # cross-attention reads values from the encoder
    assert np.isnan(q[at["enc.0.1"], at["cross.1.2"]])  # but queries come from the decoder stream
    assert np.isfinite(q[at["cross.0.0"], at["dec.1.4"]])
    assert np.isnan(v[at["cross.0.0"], at["cross.1.4"]])
    assert np.isnan(q[at["dec.1.4"], at["cross.0.0"]])  # a head cannot read the output of a later one
    assert np.isnan(q[at["dec.1.4"], at["dec.1.3"]])
    assert np.isnan(q[at["dec.1.4"], at["cross.1.3"]]) == (norm_placement == "parallel")
    assert np.isnan(comparison["write"][at["enc.0.1"], at["dec.0.1"]])
    head, folded = model.heads[Address.parse("cross.0.2")], head_weights[at["cross.0.2"]]
    assert torch.equal(folded.weights["v"], head.W_V) == (norm_placement == "post")
    if norm_placement != "post":
        torch.testing.assert_close(folded.weights["v"], fold_norm(head.W_V, model.encoder_norm))
    assert ("q_composition" in comparison.notes) == (norm_placement == "post")


def test_compare_heads_composition_equals_dense_circuits(make: Callable[..., Transformer]) -> None:
    model = make(AttentionSpec(width=30, heads=4, head_dim=6, value_dim=7, kv_heads=2), kept_heads={"1": (0, 3)})
    comparison, heads = compare_heads(model, TEXTS, rows=16), fold_norms_into_heads(model, model.heads.addresses)
    a, b = 2, 5  # 0.2 and 1.3
    assert [str(heads[i].address) for i in (a, b)] == ["0.2", "1.3"]
    OV, QK = heads[a].OV.dense(), heads[b].QK.dense()
    for name, other in (("q", QK), ("k", QK.T), ("v", heads[b].OV.dense())):
        expected = (OV @ other).norm() / OV.norm() / other.norm()
        assert comparison[f"{name}_composition"][a, b] == pytest.approx(float(expected))
    angles = scipy.linalg.subspace_angles(heads[a].weights["o"].T.numpy(), heads[b].weights["o"].T.numpy())
    assert comparison["write"][a, b] == pytest.approx((np.cos(angles) ** 2).mean())
    assert np.isnan(comparison["read_k"][0, 1])  # they share W_K
    assert np.isfinite(comparison["read_k"][0, 2])
    assert np.isfinite(comparison["read_q"][0, 1])


def test_attention_scores_rank_is_at_most_head_dim(make: Callable[..., Transformer]) -> None:
    model = make(AttentionSpec(width=30, heads=5, head_dim=4), kind="encoder", output="none")
    calls: list[AttentionCall] = []
    with model.hook_points()[1].listen(calls.append):
        model(torch.arange(23)[None])
    scores = (calls[0].params.scale * calls[0].q @ calls[0].k.mT)[0]  # (H, T, T)
    assert (torch.linalg.matrix_rank(scores, rtol=1e-9) <= 4).all()
    logs = scores - scores.logsumexp(-1, keepdim=True)
    assert (torch.linalg.matrix_rank(logs, rtol=1e-9) <= 5).all()
    assert torch.linalg.matrix_rank(calls[0].maps()[0, 0], rtol=1e-9) > 5


# Rows.

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"kind": "encoder", "output": "none", "norm_placement": "post"},
    "grouped": {
        "attention": AttentionSpec(width=30, heads=6, head_dim=4, kv_heads=2, rotary=Rotary()),
        "positions": "none",
        "kept_heads": {"0": (0, 1, 5)},
    },
    "window, sink": {"attention": AttentionSpec(width=30, heads=5, window=3, softmax="sink")},
    "alibi, cap": {"attention": AttentionSpec(width=30, heads=5, alibi=True, softcap=2.0), "positions": "none"},
    "encoder-decoder": {"kind": "encoder-decoder"},
}


def record_calls(model: Transformer, ids: Tensor) -> dict[HookPoint, AttentionCall]:
    """Record every call of one text, without padding."""
    calls: dict[HookPoint, AttentionCall] = {}
    stack = [
        hook_point.listen(lambda call: calls.__setitem__(call.hook_point, call)) for hook_point in model.hook_points()
    ]
    for context in stack:
        context.__enter__()
    source = {"source": ids} if model.spec.kind == "encoder-decoder" else {}
    with torch.no_grad():
        model(ids, hidden=True, **source)
    for context in stack:
        context.__exit__(None, None, None)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_compare_heads_metrics_equal_dense_maps(make: Callable[..., Transformer], kind: str) -> None:
    model = make(**KINDS[kind])
    comparison = compare_heads(model, TEXTS, rows=40, seed=2)
    P, V, outputs, next_P = [], [], [], []  # per row: (H, S + 1), (H, e), (H, D), and the map row of the next text
    for text_samples, positions in sample_texts_and_query_positions(
        model, TEXTS, 40, 256, len(comparison.addresses), 2
    ):
        rows = []
        for text_sample in text_samples:
            calls = record_calls(model, torch.tensor([text_sample.ids]))
            layer_calls = list(calls.values())
            maps = torch.cat([s.maps()[0] for s in layer_calls])[:, positions]  # (H, r, S)
            maps = torch.nn.functional.pad(maps, (0, 128 - maps.shape[-1]))
            remainder = 1 - maps.sum(-1, keepdim=True) if model.spec.attention.softmax == "sink" else 0 * maps[..., :1]
            rows.append(torch.cat((maps, remainder), -1))
            V.append(torch.cat([s.v[0, list(s.params.kv_of_head)] for s in layer_calls])[:, positions].transpose(0, 1))
            outputs.append(torch.cat([s.z[0] @ s.hook_point.W_O for s in layer_calls])[:, positions].transpose(0, 1))
        P += [row.transpose(0, 1) for row in rows]
        next_P += [rows[i - 1].transpose(0, 1) for i in range(len(rows))]
    maps, others, v, out = (torch.cat(x).detach().numpy() for x in (P, next_P, V, outputs))
    assert comparison.rows == len(maps) == 40
    H = len(comparison.addresses)
    assert maps.shape[1] == H == len(model.heads)

    def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, y))
        return np.einsum("nac,nbc->ab", x, y) / len(x)

    keys, other_keys = maps[..., :-1], others[..., :-1]
    products = np.einsum("nac,nbc->ab", keys, keys)
    expected = {
        "js": np.mean([[[jensenshannon(p, q) ** 2 for q in row] for p in row] for row in np.nan_to_num(maps)], axis=0),
        "map_cosine": products / np.sqrt(np.outer(np.diag(products), np.diag(products))),
        "position": cosines(keys, keys),
        "output": cosines(out, out),
    }
    for name, matrix in expected.items():
        np.testing.assert_allclose(comparison[name], matrix, atol=1e-9, err_msg=name)
    finite = np.isfinite(comparison["subspace"])
    np.testing.assert_allclose(comparison["subspace"][finite], cosines(v, v)[finite], atol=1e-9)
    assert (~finite).any() == (kind == "grouped")
    own = [np.mean([jensenshannon(p, q) ** 2 for p, q in zip(maps[:, h], others[:, h], strict=True)]) for h in range(H)]
    np.testing.assert_allclose(comparison.baselines["js"][:, 0], np.array(own), atol=1e-9)
    shifted = cosines(keys, other_keys)
    np.testing.assert_allclose(comparison.baselines["position"], (shifted + shifted.T) / 2, atol=1e-9)


def test_sample_rows_is_reproducible_and_skips_padding(make: Callable[..., Transformer]) -> None:
    model = make()
    sampled = list(sample_texts_and_query_positions(model, TEXTS * 9, 100, 256, 10, 0))
    assert sum(len(text_samples) * len(positions) for text_samples, positions in sampled) == 100
    for text_samples, positions in sampled:
        assert positions[0] >= 1
        assert positions[-1] < min(len(text_sample.ids) for text_sample in text_samples)  # padding is never selected
        assert len(set(positions)) == len(positions)
    again = list(sample_texts_and_query_positions(model, TEXTS * 9, 100, 256, 10, 0))
    assert (
        [p for _, p in sampled]
        == [p for _, p in again]
        != [p for _, p in sample_texts_and_query_positions(model, TEXTS * 9, 100, 256, 10, 1)]
    )
    assert sum(len(u) * len(p) for u, p in sample_texts_and_query_positions(model, TEXTS * 9, 5, 256, 10, 0)) == 5
    few = list(sample_texts_and_query_positions(model, TEXTS[0], 500, 256, 10, 0))
    assert len(few) == 1
    assert len(few[0][1]) == len(few[0][0][0].ids) - 1  # all available rows
    long = list(sample_texts_and_query_positions(model, " ".join(TEXTS * 4), 64, 16, 10, 0))
    assert all(len(text_sample.ids) <= 16 for text_samples, _ in long for text_sample in text_samples)
    rows = record_rows(model, sampled[0][0], sampled[0][1], set(model.heads.addresses))
    assert rows.maps.shape[:2] == (10, len(sampled[0][0]) * len(sampled[0][1]))


def test_compare_heads_leaves_model_unchanged(make: Callable[..., Transformer]) -> None:
    model = make(dropout=0.2)
    model.train()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    first, second = compare_heads(model, TEXTS, rows=24), compare_heads(model, TEXTS, rows=24)
    assert [module.training for module in model.modules()] == modes
    assert not any(hook_point.is_active for hook_point in model.hook_points())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name in first.matrices:
        np.testing.assert_array_equal(first[name], second[name])


# Results.


def duplicate_head(model: Transformer) -> Transformer:
    """Set head 0.3 to head 0.1 in another basis."""
    original, duplicate = model.heads[Address.parse("0.1")], model.heads[Address.parse("0.3")]
    rotation, _ = torch.linalg.qr(randn(6, 6, seed=9))
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V"):
            getattr(duplicate, name).copy_(getattr(original, name) @ rotation)
        for name in ("b_Q", "b_K", "b_V"):
            getattr(duplicate, name).copy_(getattr(original, name) @ rotation)
        duplicate.W_O.copy_(rotation.T @ original.W_O)
    return model


def test_compare_heads_finds_duplicated_head(make: Callable[..., Transformer]) -> None:
    comparison = compare_heads(duplicate_head(make()), TEXTS, rows=80)
    a, b = Address("", 0, 1), Address("", 0, 3)
    for metric in ("js", "map_cosine", "position", "output", "cka", "read_q", "read_k", "read_v", "write"):
        (pair,) = comparison.most_similar_pairs(1, metric)
        assert (pair.a, pair.b) == (a, b)
        assert pair.value == pytest.approx(0 if metric == "js" else 1, abs=1e-9)
        assert np.isfinite(pair.baseline)
    assert comparison.nearest_heads("0.3", 1)[0].b == a
    assert comparison.nearest_heads(a, 3)[0].b == b
    assert (a, b) in [tuple(cluster) for cluster in comparison.clusters(9)]
    assert comparison.scores["ov_copying"][1] == pytest.approx(comparison.scores["ov_copying"][3])
    assert comparison.scores["ov_rank"][1] == pytest.approx(comparison.scores["ov_rank"][3])


def make_comparison(js: np.ndarray, baseline: float) -> HeadSimilarityResult:
    heads = tuple(Address("", i // 2, i % 2) for i in range(len(js)))
    return HeadSimilarityResult(heads, {"js": js}, {}, {"js": np.full((len(js), 1), baseline)}, 512, 8)


def test_comparison_clusters_and_embedding_match_distances() -> None:
    points = np.array([[0.0, 0], [0.1, 0], [5, 5], [5, 5.1], [5.1, 5], [9, 0]])
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    comparison = make_comparison(distances**2, baseline=1.0)
    names = [[str(a) for a in cluster] for cluster in comparison.clusters()]
    assert names == [["1.0", "1.1", "2.0"], ["0.0", "0.1"], ["2.1"]]
    assert [len(cluster) for cluster in comparison.clusters(2)] in ([4, 2], [3, 3])
    positions = comparison.head_coordinates()
    np.testing.assert_allclose(np.linalg.norm(positions[:, None] - positions, axis=-1), distances, atol=1e-7)
    assert comparison.head_coordinates(8).shape == (6, 8)
    with pytest.raises(HeadwiseError, match="a single text"):
        make_comparison(distances, baseline=np.nan).clusters()


def test_comparison_js_embeds_exactly(make: Callable[..., Transformer]) -> None:
    comparison = compare_heads(make(), TEXTS, rows=40)
    positions = comparison.head_coordinates(10)
    squared = ((positions[:, None] - positions) ** 2).sum(-1)
    # a metric that can be embedded: no eigenvalue is negative
    np.testing.assert_allclose(squared, comparison["js"], atol=1e-9)


def test_comparison_by_layer_averages_pairs_within_layer(make: Callable[..., Transformer]) -> None:
    comparison = compare_heads(make(kept_heads={"1": (2,)}), TEXTS, rows=24)
    layers = comparison.mean_by_layer()
    assert [str(hook_point) for hook_point in layers] == ["0", "1"]
    inside = comparison["js"][:5, :5]
    first, second = layers.values()
    assert first["js"] == pytest.approx(inside.sum() / 20)
    assert np.isnan(second["js"])
    assert np.isnan(first["v_composition"])


def test_compare_heads_subset_equals_full_comparison(make: Callable[..., Transformer]) -> None:
    model = make()
    full, subset = compare_heads(model, TEXTS, rows=24), compare_heads(model, TEXTS, rows=24, heads="0.1,1.*")
    where = [full.addresses.index(a) for a in subset.addresses]
    assert where == [1, 5, 6, 7, 8, 9]
    for name in full.matrices:
        np.testing.assert_allclose(subset[name], full[name][np.ix_(where, where)], atol=1e-9)


def test_comparison_missing_values_have_notes(make: Callable[..., Transformer]) -> None:
    comparison = compare_heads(make(**KINDS["grouped"]), TEXTS, rows=24)
    assert np.isnan(comparison["q_composition"]).all()
    assert np.isfinite(comparison["v_composition"]).any()
    assert "offset" in comparison.notes["q_composition"]
    assert "share" in comparison.notes["read_k"]
    alone = compare_heads(make(), TEXTS[0], rows=8)
    assert np.isnan(alone.baselines["js"]).all()  # a single text has no other text to compare with
    assert alone.texts == 1


def test_compare_heads_invalid_request_raises(make: Callable[..., Transformer]) -> None:
    model = make()
    comparison = compare_heads(model, TEXTS, rows=16)
    with pytest.raises(HeadwiseError, match="two heads"):
        compare_heads(model, TEXTS, heads="0.1")
    with pytest.raises(HeadwiseError, match="must be at least 2"):
        compare_heads(model, TEXTS, rows=1)
    with pytest.raises(HeadwiseError, match="did you mean js"):
        comparison.most_similar_pairs(metric="jss")
    with pytest.raises(HeadwiseError, match="unknown metric"):
        comparison["entropy"]
    with pytest.raises(HeadwiseError, match="does not have head"):
        comparison.nearest_heads("7.1")


def test_compare_heads_long_documents_are_split(make: Callable[..., Transformer], tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS))
    assert compare_heads(make(), path, rows=16, max_length=20).rows == 16


def test_rows_of_half_precision_computes_in_float32(make: Callable[..., Transformer]) -> None:
    q, k, v = (randn(2, 5, 11, 6, seed=s).bfloat16() for s in range(3))
    params = ScoreParams(scale=0.4, kv_of_head=tuple(range(5)), mask=causal())
    weights = attention_rows(AttentionCall(make().hook_points()[0], q, k, v, params, v), [3, 8])
    exact = attention_weights(q.double(), k.double(), params)[:, :, [3, 8]]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[..., :-1].double(), exact, atol=1e-6, rtol=0)
