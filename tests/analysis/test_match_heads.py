"""Matching of heads: a model with itself, with reordered heads, with a pruned copy, and with an unrelated model."""

import pytest
import torch

import headwise as hw
from headwise.analysis.recording.recording import record
from headwise.analysis.similarity.match_heads import _word_pooling_matrices, match_heads
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer, word_tokenizer
from tests.distillation.tiny import make_model

ANIMALS, VERBS, OTHERS = ("cat", "dog", "hen", "pig"), ("saw", "met"), ("man", "cow", "fox")
TEXTS = [f"the {a} {b} the {c} near a {a}" for a in ANIMALS for b in VERBS for c in OTHERS]


def sharp_model(seed: int, **kwargs) -> Transformer:
    model = make_model(seed, layers=2, heads=4, **kwargs)
    with torch.no_grad():
        for head in model.heads:
            head.W_Q.mul_(6.0)
    return model


def test_match_heads_model_matches_itself() -> None:
    model = sharp_model(0)
    matching = match_heads(model, model, TEXTS)
    for pair in matching:
        assert pair.partner == pair.head
        assert pair.distance == pytest.approx(0, abs=1e-12)
        assert pair.output_similarity == pytest.approx(1, abs=1e-5)
        assert pair.is_match
    assert matching.texts == (12, 12)
    assert len(matching.to_dict()["heads"]) == len(matching) == 8


def test_match_heads_finds_permuted_and_rotated_heads() -> None:
    model, other = sharp_model(0), sharp_model(0)
    order = [2, 0, 3, 1]
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))[0]
    with torch.no_grad():
        for position, head in enumerate(order):
            to, of = other.heads[Address("", 1, position)], model.heads[Address("", 1, head)]
            for weight_name in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(to, weight_name).copy_(getattr(of, weight_name))
            to.W_V.copy_(of.W_V @ rotation)  # the same head in another basis
            to.W_O.copy_(rotation.mT @ of.W_O)
    matching = match_heads(model, other, TEXTS)
    assert [str(matching[f"1.{position}"].partner) for position in range(4)] == [f"1.{head}" for head in order]
    assert matching["1.0"].output_similarity == pytest.approx(1, abs=1e-4)


def test_match_heads_pruned_model_keeps_addresses() -> None:
    model = sharp_model(1)
    child = hw.prune(model, heads="0.1,1.0,1.2", fold_mean=False)
    assert [(pair.head, pair.partner) for pair in match_heads(model, child, TEXTS)][:3] == [
        (h, h) for h in child.spec.head_addresses[:3]
    ]


def test_match_heads_random_models_have_no_matches() -> None:
    """Six pairs of random models of 8 heads, with nearly uniform and with sharp attention."""
    alarms = [
        pair
        for seed in range(3)
        for make_random in (make_model, sharp_model)
        for pair in match_heads(make_random(2 * seed + 50), make_random(2 * seed + 51), TEXTS, seed=seed + 900).matched
    ]
    assert not alarms


def test_match_heads_different_tokenizers_align_by_words() -> None:
    model, other = sharp_model(0), sharp_model(0)
    other.tokenizer = character_tokenizer("".join(TEXTS))
    matching = match_heads(model, other, TEXTS[:8])
    assert len(matching) == 8
    aligned = byte_tokenizer().align("ab c")
    mean, total = _word_pooling_matrices(aligned, torch.zeros(1))
    assert mean.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]] or mean.sum(1).tolist() == [1, 1]
    assert torch.equal(total.sum(1), torch.tensor([1.0 if w else 0.0 for w in aligned.words_of_token]).double())


def offset_model(offsets: tuple[int, ...], words: list[str], width: int) -> Transformer:
    """Make a model whose heads attend to fixed word offsets. Positions are unit vectors; tokens are not read."""
    tokenizer = word_tokenizer(words)
    attention = hw.AttentionSpec(width=width, heads=len(offsets), head_dim=16)
    model = Transformer(hw.ModelSpec(vocab=len(tokenizer), context=16, layers=1, attention=attention)).eval()
    model.tokenizer = tokenizer
    assert model.embed.positions is not None
    with torch.no_grad():
        model.embed.tokens.weight.zero_()
        model.embed.positions.weight.copy_(torch.eye(16, width))
        for head, offset in zip(model.heads, offsets, strict=True):
            head.W_K.copy_(torch.eye(width, 16))
            head.W_Q.copy_(30 * torch.eye(width, 16).roll(-offset, 1) * (torch.arange(width) >= offset)[:, None])
    return model


def test_match_heads_finds_same_offsets_across_families() -> None:
    """The models differ in token ids, width and order of heads. Only the attended positions are equal."""
    words = sorted({word for text in TEXTS for word in text.split()})
    first, second = offset_model((1, 2, 3), words, 20), offset_model((3, 4, 1, 2), words[::-1], 36)
    matching = match_heads(first, second, TEXTS)
    assert {str(pair.head): str(pair.partner) for pair in matching.matched} == {
        "0.0": "0.2",
        "0.2": "0.0",
        "0.3": "0.1",
    }
    assert not matching["0.1"].is_match, "nobody else looks four words back"


@pytest.mark.slow
def test_match_heads_finds_previous_token_heads_of_real_models() -> None:
    """Head 0.2 of MiniLM is a previous-token head, and so is its match in SmolLM2, a decoder with another tokenizer."""
    smollm2, minilm = hw.load("smollm2"), hw.load("minilm")
    pair = match_heads(smollm2, minilm, max_texts=8)["0.2"]
    assert pair.distance < pair.untrained_distance
    assert smollm2.tokenizer is not None
    ids = torch.tensor([smollm2.tokenizer.encode("Heads differ: some look one word back, others follow the grammar.")])
    with record(smollm2) as recording, torch.no_grad():
        smollm2(ids)
    assert recording[pair.partner].map()[0].diagonal(-1).mean() > 0.5


@pytest.mark.usefixtures("few_documents")
def test_match_heads_profiles_add_roles() -> None:
    model = sharp_model(0)
    profiled = hw.profile(model, TEXTS, causal=False)
    assert match_heads(model, model, TEXTS, profiles=(profiled, profiled))["0.1"].roles == (
        profiled["0.1"].role,
        profiled["0.1"].role,
    )


def test_match_heads_invalid_input_raises() -> None:
    model = sharp_model(0)
    with pytest.raises(hw.HeadwiseError, match="at least 4 different texts"):
        match_heads(model, model, ["one two three four"] * 9)
    with pytest.raises(hw.HeadwiseError, match=r"unknown head 7\.7"):
        match_heads(model, model, TEXTS)["7.7"]
    blind = sharp_model(0)
    blind.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="no tokenizer"):
        match_heads(model, blind, TEXTS)
