"""Heads beside each other: closed forms, scipy and dense recomputation, and heads that are built to be alike."""

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

from headwise.analysis.similarity.attention_similarity import look, rows_of, sample
from headwise.analysis.similarity.compare_heads import Comparison, compare
from headwise.analysis.similarity.weight_similarity import (
    fold,
    folded_heads,
)
from headwise.errors import HeadwiseError
from headwise.heads import Site
from headwise.heads.hook_point import Seen
from headwise.kernels import Terms, causal, maps
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


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=dice(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(TEXTS).lower())))
    return Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Transformer]:
    def made(
        attention: AttentionSpec | None = None,
        layers: int = 2,
        kept: dict[str, Sequence[int]] | None = None,
        **fields: Any,
    ) -> Transformer:
        torch.manual_seed(3)
        attention = attention or AttentionSpec(width=30, heads=5, bias=True)
        spec = ModelSpec(
            vocab=len(tokenizer), context=128, layers=layers, attention=attention, kept=kept or {}, **fields
        )
        model = Transformer(spec).double()
        with torch.no_grad():
            for number, (name, parameter) in enumerate(model.named_parameters()):
                parameter.normal_(0, 1.0 if "norm" not in name else 0.3, generator=dice(number))
                if parameter.ndim > 1:
                    parameter.div_(parameter.shape[-1] ** 0.5)
                elif name.endswith("weight"):
                    parameter.add_(1.0)
        model.tokenizer = tokenizer
        return model.eval()

    return made


# Weights.


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_folding_moves_the_norm_into_the_weight(make: Callable[..., Transformer], norm: str) -> None:
    model = make(norm=norm, positions="none")
    block, x = model.blocks[1], randn(6, 30, seed=5)
    assert isinstance(block, Block)
    head = model.heads[Address.parse("1.3")]
    bias = getattr(block.norm_attention, "bias", None)
    size = (x - x.mean(1, keepdim=True) if norm == "layer" else x).square().mean(1, keepdim=True).add(1e-5).sqrt()
    shift = 0 if bias is None else bias @ head.W_Q
    expected = block.norm_attention(x) @ head.W_Q - shift
    torch.testing.assert_close(x / size @ fold(head.W_Q, block.norm_attention), expected)


@pytest.mark.parametrize("form", ["pre", "post", "parallel"])
def test_streams_and_norms_of_every_form(make: Callable[..., Transformer], form: str) -> None:
    model = make(kind="encoder-decoder", encoder_layers=1, form=form)
    weighed = folded_heads(model, model.heads.addresses)
    made = compare(model, TEXTS, rows=32)
    at = {str(head.address): i for i, head in enumerate(weighed)}
    v, q = made["v_composition"], made["q_composition"]
    assert np.isfinite(v[at["enc.0.1"], at["cross.1.2"]])  # the source is read across
    assert np.isnan(q[at["enc.0.1"], at["cross.1.2"]])  # but asked about from the target's stream
    assert np.isfinite(q[at["cross.0.0"], at["dec.1.4"]])
    assert np.isnan(v[at["cross.0.0"], at["cross.1.4"]])
    assert np.isnan(q[at["dec.1.4"], at["cross.0.0"]])  # nobody reads what is not yet written
    assert np.isnan(q[at["dec.1.4"], at["dec.1.3"]])
    assert np.isnan(q[at["dec.1.4"], at["cross.1.3"]]) == (form == "parallel")
    assert np.isnan(made["write"][at["enc.0.1"], at["dec.0.1"]])
    head, folded = model.heads[Address.parse("cross.0.2")], weighed[at["cross.0.2"]]
    assert torch.equal(folded.weights["v"], head.W_V) == (form == "post")
    if form != "post":
        torch.testing.assert_close(folded.weights["v"], fold(head.W_V, model.encoder_norm))
    assert ("q_composition" in made.notes) == (form == "post")


def test_compositions_are_those_of_dense_circuits(make: Callable[..., Transformer]) -> None:
    model = make(AttentionSpec(width=30, heads=4, head_dim=6, value_dim=7, kv_heads=2), kept={"1": (0, 3)})
    made, heads = compare(model, TEXTS, rows=16), folded_heads(model, model.heads.addresses)
    a, b = 2, 5  # 0.2 and 1.3
    assert [str(heads[i].address) for i in (a, b)] == ["0.2", "1.3"]
    OV, QK = heads[a].OV.dense(), heads[b].QK.dense()
    for name, other in (("q", QK), ("k", QK.T), ("v", heads[b].OV.dense())):
        expected = (OV @ other).norm() / OV.norm() / other.norm()
        assert made[f"{name}_composition"][a, b] == pytest.approx(float(expected))
    angles = scipy.linalg.subspace_angles(heads[a].weights["o"].T.numpy(), heads[b].weights["o"].T.numpy())
    assert made["write"][a, b] == pytest.approx((np.cos(angles) ** 2).mean())
    assert np.isnan(made["read_k"][0, 1])  # they share W_K
    assert np.isfinite(made["read_k"][0, 2])
    assert np.isfinite(made["read_q"][0, 1])


def test_scores_have_a_low_rank(make: Callable[..., Transformer]) -> None:
    model = make(AttentionSpec(width=30, heads=5, head_dim=4), kind="encoder", output="none")
    seen: list[Seen] = []
    with model.sites()[1].listen(seen.append):
        model(torch.arange(23)[None])
    scores = (seen[0].terms.scale * seen[0].q @ seen[0].k.mT)[0]  # (H, T, T)
    assert (torch.linalg.matrix_rank(scores, rtol=1e-9) <= 4).all()
    logs = scores - scores.logsumexp(-1, keepdim=True)
    assert (torch.linalg.matrix_rank(logs, rtol=1e-9) <= 5).all()
    assert torch.linalg.matrix_rank(seen[0].maps()[0, 0], rtol=1e-9) > 5


# Rows.

KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"kind": "encoder", "output": "none", "form": "post"},
    "grouped": {
        "attention": AttentionSpec(width=30, heads=6, head_dim=4, kv_heads=2, rotary=Rotary()),
        "positions": "none",
        "kept": {"0": (0, 1, 5)},
    },
    "window, sink": {"attention": AttentionSpec(width=30, heads=5, window=3, softmax="sink")},
    "alibi, cap": {"attention": AttentionSpec(width=30, heads=5, alibi=True, softcap=2.0), "positions": "none"},
    "encoder-decoder": {"kind": "encoder-decoder"},
}


def dense(model: Transformer, ids: Tensor) -> dict[Site, Seen]:
    """One text alone, without padding, every call kept."""
    kept: dict[Site, Seen] = {}
    stack = [site.listen(lambda seen: kept.__setitem__(seen.site, seen)) for site in model.sites()]
    for one in stack:
        one.__enter__()
    source = {"source": ids} if model.spec.kind == "encoder-decoder" else {}
    with torch.no_grad():
        model(ids, hidden=True, **source)
    for one in stack:
        one.__exit__(None, None, None)
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_those_of_dense_maps(make: Callable[..., Transformer], kind: str) -> None:
    model = make(**KINDS[kind])
    made = compare(model, TEXTS, rows=40, seed=2)
    P, V, written, next_P = [], [], [], []  # per row: (H, S + 1), (H, e), (H, D), and the map row of the next text
    for units, places in sample(model, TEXTS, 40, 256, len(made.addresses), 2):
        rows = []
        for unit in units:
            calls = dense(model, torch.tensor([unit.ids]))
            seen = list(calls.values())
            maps = torch.cat([s.maps()[0] for s in seen])[:, places]  # (H, r, S)
            maps = torch.nn.functional.pad(maps, (0, 128 - maps.shape[-1]))
            rest = 1 - maps.sum(-1, keepdim=True) if model.spec.attention.softmax == "sink" else 0 * maps[..., :1]
            rows.append(torch.cat((maps, rest), -1))
            V.append(torch.cat([s.v[0, list(s.terms.groups)] for s in seen])[:, places].transpose(0, 1))
            written.append(torch.cat([s.z[0] @ s.site.W_O for s in seen])[:, places].transpose(0, 1))
        P += [row.transpose(0, 1) for row in rows]
        next_P += [rows[i - 1].transpose(0, 1) for i in range(len(rows))]
    maps, others, v, out = (torch.cat(x).detach().numpy() for x in (P, next_P, V, written))
    assert made.rows == len(maps) == 40
    H = len(made.addresses)
    assert maps.shape[1] == H == len(model.heads)

    def cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, y))
        return np.einsum("nac,nbc->ab", x, y) / len(x)

    keys, other_keys = maps[..., :-1], others[..., :-1]
    both = np.einsum("nac,nbc->ab", keys, keys)
    expected = {
        "js": np.mean([[[jensenshannon(p, q) ** 2 for q in row] for p in row] for row in np.nan_to_num(maps)], axis=0),
        "map_cosine": both / np.sqrt(np.outer(np.diag(both), np.diag(both))),
        "position": cosines(keys, keys),
        "output": cosines(out, out),
    }
    for name, matrix in expected.items():
        np.testing.assert_allclose(made[name], matrix, atol=1e-9, err_msg=name)
    there = np.isfinite(made["subspace"])
    np.testing.assert_allclose(made["subspace"][there], cosines(v, v)[there], atol=1e-9)
    assert (~there).any() == (kind == "grouped")
    own = [np.mean([jensenshannon(p, q) ** 2 for p, q in zip(maps[:, h], others[:, h], strict=True)]) for h in range(H)]
    np.testing.assert_allclose(made.nulls["js"][:, 0], own, atol=1e-9)
    shifted = cosines(keys, other_keys)
    np.testing.assert_allclose(made.nulls["position"], (shifted + shifted.T) / 2, atol=1e-9)


def test_the_sample(make: Callable[..., Transformer]) -> None:
    model = make()
    taken = list(sample(model, TEXTS * 9, 100, 256, 10, 0))
    assert sum(len(units) * len(places) for units, places in taken) == 100
    for units, places in taken:
        assert places[0] >= 1
        assert places[-1] < min(len(unit.ids) for unit in units)  # padding is never a row
        assert len(set(places)) == len(places)
    again = list(sample(model, TEXTS * 9, 100, 256, 10, 0))
    assert [p for _, p in taken] == [p for _, p in again] != [p for _, p in sample(model, TEXTS * 9, 100, 256, 10, 1)]
    assert sum(len(u) * len(p) for u, p in sample(model, TEXTS * 9, 5, 256, 10, 0)) == 5
    few = list(sample(model, TEXTS[0], 500, 256, 10, 0))
    assert len(few) == 1
    assert len(few[0][1]) == len(few[0][0][0].ids) - 1  # all there is
    long = list(sample(model, " ".join(TEXTS * 4), 64, 16, 10, 0))
    assert all(len(unit.ids) <= 16 for units, _ in long for unit in units)
    rows = look(model, taken[0][0], taken[0][1], set(model.heads.addresses))
    assert rows.maps.shape[:2] == (10, len(taken[0][0]) * len(taken[0][1]))


def test_looking_leaves_no_trace(make: Callable[..., Transformer]) -> None:
    model = make(dropout=0.2)
    model.train()
    model.blocks[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    first, second = compare(model, TEXTS, rows=24), compare(model, TEXTS, rows=24)
    assert [part.training for part in model.modules()] == modes
    assert not any(site.is_open for site in model.sites())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name in first.matrices:
        np.testing.assert_array_equal(first[name], second[name])


# Results.


def duplicated(model: Transformer) -> Transformer:
    """Head 0.3 becomes head 0.1, in coordinates of its own."""
    one, three = model.heads[Address.parse("0.1")], model.heads[Address.parse("0.3")]
    turn, _ = torch.linalg.qr(randn(6, 6, seed=9))
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V"):
            getattr(three, name).copy_(getattr(one, name) @ turn)
        for name in ("b_Q", "b_K", "b_V"):
            getattr(three, name).copy_(getattr(one, name) @ turn)
        three.W_O.copy_(turn.T @ one.W_O)
    return model


def test_a_duplicated_head_is_found(make: Callable[..., Transformer]) -> None:
    made = compare(duplicated(make()), TEXTS, rows=80)
    a, b = Address("", 0, 1), Address("", 0, 3)
    for by in ("js", "map_cosine", "position", "output", "cka", "read_q", "read_k", "read_v", "write"):
        (pair,) = made.redundant(1, by)
        assert (pair.a, pair.b) == (a, b)
        assert pair.value == pytest.approx(0 if by == "js" else 1, abs=1e-9)
        assert np.isfinite(pair.null)
    assert made.nearest("0.3", 1)[0].b == a
    assert made.nearest(a, 3)[0].b == b
    assert (a, b) in [tuple(cluster) for cluster in made.clusters(9)]
    assert made.scores["ov_copying"][1] == pytest.approx(made.scores["ov_copying"][3])
    assert made.scores["ov_rank"][1] == pytest.approx(made.scores["ov_rank"][3])


def hand_made(js: np.ndarray, null: float) -> Comparison:
    heads = tuple(Address("", i // 2, i % 2) for i in range(len(js)))
    return Comparison(heads, {"js": js}, {}, {"js": np.full((len(js), 1), null)}, 512, 8)


def test_clusters_and_the_map_of_heads() -> None:
    points = np.array([[0.0, 0], [0.1, 0], [5, 5], [5, 5.1], [5.1, 5], [9, 0]])
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    made = hand_made(distances**2, null=1.0)
    names = [[str(a) for a in cluster] for cluster in made.clusters()]
    assert names == [["1.0", "1.1", "2.0"], ["0.0", "0.1"], ["2.1"]]
    assert [len(cluster) for cluster in made.clusters(2)] in ([4, 2], [3, 3])
    places = made.embedding()
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places, axis=-1), distances, atol=1e-7)
    assert made.embedding(8).shape == (6, 8)
    with pytest.raises(HeadwiseError, match="null"):
        hand_made(distances, null=np.nan).clusters()


def test_root_divergence_is_a_distance(make: Callable[..., Transformer]) -> None:
    made = compare(make(), TEXTS, rows=40)
    places = made.embedding(10)
    squared = ((places[:, None] - places) ** 2).sum(-1)
    np.testing.assert_allclose(squared, made["js"], atol=1e-9)  # embeds exactly: no eigenvalue is below 0


def test_by_layer(make: Callable[..., Transformer]) -> None:
    made = compare(make(kept={"1": (2,)}), TEXTS, rows=24)
    layers = made.by_layer()
    assert [str(site) for site in layers] == ["0", "1"]
    inside = made["js"][:5, :5]
    first, second = layers.values()
    assert first["js"] == pytest.approx(inside.sum() / 20)
    assert np.isnan(second["js"])
    assert np.isnan(first["v_composition"])


def test_some_heads_alone(make: Callable[..., Transformer]) -> None:
    model = make()
    whole, some = compare(model, TEXTS, rows=24), compare(model, TEXTS, rows=24, heads="0.1,1.*")
    where = [whole.addresses.index(a) for a in some.addresses]
    assert where == [1, 5, 6, 7, 8, 9]
    for name in whole.matrices:
        np.testing.assert_allclose(some[name], whole[name][np.ix_(where, where)], atol=1e-9)


def test_what_is_missing_is_explained(make: Callable[..., Transformer]) -> None:
    made = compare(make(**KINDS["grouped"]), TEXTS, rows=24)
    assert np.isnan(made["q_composition"]).all()
    assert np.isfinite(made["v_composition"]).any()
    assert "offset" in made.notes["q_composition"]
    assert "share" in made.notes["read_k"]
    alone = compare(make(), TEXTS[0], rows=8)
    assert np.isnan(alone.nulls["js"]).all()  # one text has no other
    assert alone.texts == 1


def test_bad_requests_are_refused(make: Callable[..., Transformer]) -> None:
    model = make()
    made = compare(model, TEXTS, rows=16)
    with pytest.raises(HeadwiseError, match="two heads"):
        compare(model, TEXTS, heads="0.1")
    with pytest.raises(HeadwiseError, match="at least 2 rows"):
        compare(model, TEXTS, rows=1)
    with pytest.raises(HeadwiseError, match="did you mean js"):
        made.redundant(by="jss")
    with pytest.raises(HeadwiseError, match="not measured"):
        made["entropy"]
    with pytest.raises(HeadwiseError, match="no head"):
        made.nearest("7.1")


def test_a_file_of_documents_too_long(make: Callable[..., Transformer], tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS))
    assert compare(make(), path, rows=16, longest=20).rows == 16


def test_half_precision_is_measured_in_single(make: Callable[..., Transformer]) -> None:
    q, k, v = (randn(2, 5, 11, 6, seed=s).bfloat16() for s in range(3))
    terms = Terms(scale=0.4, groups=tuple(range(5)), mask=causal())
    made = rows_of(Seen(make().sites()[0], q, k, v, terms, v), [3, 8])
    exact = maps(q.double(), k.double(), terms)[:, :, [3, 8]]
    assert made.dtype == torch.float32
    torch.testing.assert_close(made[..., :-1].double(), exact, atol=1e-6, rtol=0)
