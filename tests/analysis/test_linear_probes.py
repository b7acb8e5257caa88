"""What can be read out of a head: heads built to carry one thing and nothing else."""

import hashlib

import numpy as np
import pytest
import torch

from headwise.analysis.attribution.linear_probes import BINS, DRAWS, RIDGE, Decoded, Fit, decodable
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.documents import Document

NOUNS, VERBS = ("cat", "mat", "dog"), ("sat", "ran")
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOUNS, *VERBS]
LENGTH = 16


def documents(count: int = 40, seed: int = 0) -> list[Document]:
    """Random words, so that position and class have nothing to do with each other."""
    dice = np.random.default_rng(seed)
    drawn = [[(NOUNS + VERBS)[i] for i in dice.integers(5, size=LENGTH)] for _ in range(count)]
    return [Document.of(words, classes=["noun" if w in NOUNS else "verb" for w in words]) for words in drawn]


def built() -> Transformer:
    """A stream of 10 word channels and 20 position channels, one-hot. q reads positions two by two, which is enough for
    eight ranges of sixteen; k reads words."""
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
            q, k, v = (model.heads[f"0.{head}"].__getattribute__(f"W_{letter}") for letter in "QKV")
            for place in range(1, 17):  # [CLS] is at 0
                q[10 + place, (place - 1) // 2] = 1.0  # two places a channel
            for word in range(9):
                k[1 + word, word] = 1.0
            v.copy_(k)
    model.tokenizer = Tokenizer.from_wordpiece(PIECES)
    return model


def by_key(rows: list[Decoded]) -> dict[tuple[str, str, str], Decoded]:
    return {(row.head, row.side, row.what): row for row in rows}


def test_heads_give_away_what_they_were_built_to_read_and_nothing_else() -> None:
    found = by_key(decodable(built(), documents(), what=("position", "word", "class")))
    assert len(found) == 2 * 3 * 3
    for head in ("0.0", "0.1"):
        assert found[head, "q", "position"].accuracy == 1
        assert found[head, "k", "word"].accuracy == 1
        assert found[head, "k", "class"].accuracy == 1
        for side, what in (("q", "class"), ("q", "word"), ("k", "position")):
            row = found[head, side, what]
            assert abs(row.accuracy - row.majority) < 4 * np.sqrt(0.25 / row.rows) + 0.06, (side, what)
    row = found["0.0", "q", "position"]
    assert row.rows == 20 * LENGTH
    assert row.majority == pytest.approx(1 / BINS)
    assert row.majority < row.null < 1, "nine random channels of thirty show some of it"
    ids = {tuple(built().tokenizer.encode(d.text)): d for d in documents()}  # pyright: ignore[reportOptionalMemberAccess]
    order = sorted(ids, key=lambda one: hashlib.sha256(repr(one).encode()).digest())
    nouns = [word in NOUNS for one in order[1::2] for word in ids[one].words]
    assert found["0.0", "k", "class"].majority == pytest.approx(np.mean(nouns))


def test_the_null_is_of_the_layer_and_the_same_for_all_its_heads() -> None:
    rows = decodable(built(), documents(), sides="q", what="position")
    assert len({(row.null, row.null_sd) for row in rows}) == 1
    assert DRAWS > 1
    assert rows[0].null_sd > 0
    assert decodable(built(), documents(), sides="q", what="position") == rows
    assert decodable(built(), documents(), sides="q", what="position", seed=1)[0].null != rows[0].null


def test_batches_and_padding_make_no_difference() -> None:
    texts = [
        Document.of(d.words[: 3 + 2 * (i % 6)], classes=d.classes[: 3 + 2 * (i % 6)]) for i, d in enumerate(documents())
    ]
    one, other = (decodable(built(), texts, tokens=tokens) for tokens in (4096, 20))
    assert [row.accuracy for row in one] == pytest.approx([row.accuracy for row in other])


def test_the_closed_form_is_ridge_regression_with_a_free_intercept() -> None:
    dice = np.random.default_rng(3)
    x, labels = dice.normal(size=(50, 7)) + 2, dice.integers(3, size=50)
    fit = Fit()
    fit.add(x[:20], labels[:20], 3)
    fit.add(x[20:], labels[20:], 3)
    weight, bias = fit.solution()
    shrink = np.sqrt(RIDGE * x.var(0).mean() * len(x))  # as rows of data that pull towards zero
    a = np.vstack((np.hstack((x, np.ones((50, 1)))), np.hstack((shrink * np.eye(7), np.zeros((7, 1))))))
    b = np.vstack((np.eye(3)[labels], np.zeros((7, 3))))
    want = np.linalg.lstsq(a, b, rcond=None)[0]
    assert weight == pytest.approx(want[:7], abs=1e-9)
    assert bias == pytest.approx(want[7], abs=1e-9)


def test_looking_leaves_the_model_as_it_was() -> None:
    model = built().train()
    before = [p.clone() for p in model.parameters()]
    decodable(model, documents(6), "0.1")
    assert model.training
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not any(site.is_open for site in model.sites())
    assert not any(layer._forward_pre_hooks for layer in model.attention_layers())


def test_what_cannot_be_decoded_is_refused() -> None:
    model = built()
    with pytest.raises(HeadwiseError, match="'place' cannot be decoded"):
        decodable(model, documents(4), what="place")
    with pytest.raises(HeadwiseError, match="'v' cannot be decoded from"):
        decodable(model, documents(4), sides=("q", "v"))
    with pytest.raises(HeadwiseError, match="these texts have no word classes"):
        decodable(model, ["cat sat", "dog ran"])
    with pytest.raises(HeadwiseError, match="got 1, need 2 or more"):
        decodable(model, ["cat sat"], what="position")
