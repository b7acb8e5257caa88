"""Linear probes: heads that carry one property and nothing else."""

import hashlib

import numpy as np
import pytest
import torch

from headwise.analysis.attribution.linear_probes import (
    NUM_PROJECTIONS,
    POSITION_BINS,
    RIDGE,
    ProbeAccuracy,
    RidgeAccumulator,
    linear_probe,
)
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.annotated_document import Document

NOUNS, VERBS = ("cat", "mat", "dog"), ("sat", "ran")
WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOUNS, *VERBS]
LENGTH = 16


def documents(count: int = 40, seed: int = 0) -> list[Document]:
    """Random words, so that position and class are independent."""
    rng = np.random.default_rng(seed)
    sentences = [[(NOUNS + VERBS)[i] for i in rng.integers(5, size=LENGTH)] for _ in range(count)]
    return [Document.of(words, classes=["noun" if w in NOUNS else "verb" for w in words]) for words in sentences]


def one_hot_model() -> Transformer:
    """A one-hot residual stream of 10 word channels and 20 position channels. q reads pairs of positions, which suffices for
    eight ranges of sixteen positions; k reads words."""
    spec = ModelSpec(
        vocab=10,
        context=20,
        layers=1,
        kind="encoder",
        output="none",
        attention=AttentionSpec(width=30, heads=2, head_dim=9),
    )
    model = Transformer(spec).eval()
    with torch.no_grad():
        model.embed.tokens.weight.copy_(torch.eye(10, 30))
        model.embed.positions.weight.copy_(torch.eye(20, 30).roll(10, 1))  # pyright: ignore[reportOptionalMemberAccess]
        for parameter in model.blocks.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        for head in (0, 1):
            q, k, v = (model.heads[f"0.{head}"].__getattribute__(f"W_{projection}") for projection in "QKV")
            for position in range(1, 17):  # [CLS] is at 0
                q[10 + position, (position - 1) // 2] = 1.0  # two positions per channel
            for word in range(9):
                k[1 + word, word] = 1.0
            v.copy_(k)
    model.tokenizer = Tokenizer.from_wordpiece(WORDPIECES)
    return model


def by_key(rows: list[ProbeAccuracy]) -> dict[tuple[str, str, str], ProbeAccuracy]:
    return {(row.head, row.tensor, row.target): row for row in rows}


def test_linear_probe_decodes_only_what_heads_read() -> None:
    probes = by_key(linear_probe(one_hot_model(), documents(), targets=("position", "word", "class")))
    assert len(probes) == 2 * 3 * 3
    for head in ("0.0", "0.1"):
        assert probes[head, "q", "position"].accuracy == 1
        assert probes[head, "k", "word"].accuracy == 1
        assert probes[head, "k", "class"].accuracy == 1
        for side, label in (("q", "class"), ("q", "word"), ("k", "position")):
            row = probes[head, side, label]
            assert abs(row.accuracy - row.majority) < 4 * np.sqrt(0.25 / row.rows) + 0.06, (side, label)
    row = probes["0.0", "q", "position"]
    assert row.rows == 20 * LENGTH
    assert row.majority == pytest.approx(1 / POSITION_BINS)
    assert row.majority < row.baseline < 1, "nine random channels of thirty show some of it"
    ids = {tuple(one_hot_model().tokenizer.encode(d.text)): d for d in documents()}  # pyright: ignore[reportOptionalMemberAccess]
    order = sorted(ids, key=lambda token_ids: hashlib.sha256(repr(token_ids).encode()).digest())
    nouns = [word in NOUNS for token_ids in order[1::2] for word in ids[token_ids].words]
    assert probes["0.0", "k", "class"].majority == pytest.approx(np.mean(nouns))


def test_linear_probe_baseline_is_shared_by_layer() -> None:
    rows = linear_probe(one_hot_model(), documents(), tensors="q", targets="position")
    assert len({(row.baseline, row.baseline_sd) for row in rows}) == 1
    assert NUM_PROJECTIONS > 1
    assert rows[0].baseline_sd > 0
    assert linear_probe(one_hot_model(), documents(), tensors="q", targets="position") == rows
    assert (
        linear_probe(one_hot_model(), documents(), tensors="q", targets="position", seed=1)[0].baseline
        != rows[0].baseline
    )


def test_linear_probe_does_not_depend_on_batching() -> None:
    texts = [
        Document.of(d.words[: 3 + 2 * (i % 6)], classes=d.classes[: 3 + 2 * (i % 6)]) for i, d in enumerate(documents())
    ]
    first, second = (linear_probe(one_hot_model(), texts, batch_tokens=tokens) for tokens in (4096, 20))
    assert [row.accuracy for row in first] == pytest.approx([row.accuracy for row in second])


def test_ridge_accumulator_equals_ridge_regression_with_intercept() -> None:
    rng = np.random.default_rng(3)
    x, labels = rng.normal(size=(50, 7)) + 2, rng.integers(3, size=50)
    fit = RidgeAccumulator()
    fit.add(x[:20], labels[:20], 3)
    fit.add(x[20:], labels[20:], 3)
    weight, bias = fit.solution()
    shrink = np.sqrt(RIDGE * x.var(0).mean() * len(x))  # ridge penalty as additional data rows with target zero
    a = np.vstack((np.hstack((x, np.ones((50, 1)))), np.hstack((shrink * np.eye(7), np.zeros((7, 1))))))
    b = np.vstack((np.eye(3)[labels], np.zeros((7, 3))))
    want = np.linalg.lstsq(a, b, rcond=None)[0]
    assert weight == pytest.approx(want[:7], abs=1e-9)
    assert bias == pytest.approx(want[7], abs=1e-9)


def test_linear_probe_leaves_model_unchanged() -> None:
    model = one_hot_model().train()
    before = [p.clone() for p in model.parameters()]
    linear_probe(model, documents(6), "0.1")
    assert model.training
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert not any(hook_point.is_active for hook_point in model.hook_points())
    assert not any(layer._forward_pre_hooks for layer in model.attention_layers())


def test_linear_probe_invalid_request_raises() -> None:
    model = one_hot_model()
    with pytest.raises(HeadwiseError, match="targets: unknown value 'place'"):
        linear_probe(model, documents(4), targets="place")
    with pytest.raises(HeadwiseError, match="tensors: unknown value 'v'"):
        linear_probe(model, documents(4), tensors=("q", "v"))
    with pytest.raises(HeadwiseError, match="needs texts with parts of speech"):
        linear_probe(model, ["cat sat", "dog ran"])
    with pytest.raises(HeadwiseError, match="at least 2 different texts"):
        linear_probe(model, ["cat sat"], targets="position")
