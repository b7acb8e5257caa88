"""Which head is which: a model and itself, its heads in another order, its cut child; and models that share nothing."""

import pytest
import torch

import headwise as hw
from headwise.analysis.recording.recording import record
from headwise.analysis.similarity.match_heads import _words, match
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer, word_tokenizer
from tests.distillation.tiny import make

ANIMALS, DEEDS, OTHERS = ("cat", "dog", "hen", "pig"), ("saw", "met"), ("man", "cow", "fox")
TEXTS = [f"the {a} {b} the {c} near a {a}" for a in ANIMALS for b in DEEDS for c in OTHERS]


def sharp(seed: int, **more) -> Transformer:
    model = make(seed, layers=2, heads=4, **more)
    with torch.no_grad():
        for head in model.heads:
            head.W_Q.mul_(6.0)
    return model


def test_a_model_is_itself() -> None:
    model = sharp(0)
    found = match(model, model, TEXTS)
    for one in found:
        assert one.like == one.head
        assert one.distance == pytest.approx(0, abs=1e-12)
        assert one.write == pytest.approx(1, abs=1e-5)
        assert one.matches
    assert found.texts == (12, 12)
    assert len(found.to_dict()["heads"]) == len(found) == 8


def test_heads_that_changed_places_and_basis_are_found() -> None:
    model, other = sharp(0), sharp(0)
    order = [2, 0, 3, 1]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))[0]
    with torch.no_grad():
        for place, head in enumerate(order):
            to, of = other.heads[Address("", 1, place)], model.heads[Address("", 1, head)]
            for letter in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(to, letter).copy_(getattr(of, letter))
            to.W_V.copy_(of.W_V @ turn)  # the same head in another basis
            to.W_O.copy_(turn.mT @ of.W_O)
    found = match(model, other, TEXTS)
    assert [str(found[f"1.{place}"].like) for place in range(4)] == [f"1.{head}" for head in order]
    assert found["1.0"].write == pytest.approx(1, abs=1e-4)


def test_a_cut_child_keeps_its_heads_names() -> None:
    model = sharp(1)
    child = hw.prune(model, heads="0.1,1.0,1.2", fold=False)
    assert [(one.head, one.like) for one in match(model, child, TEXTS)][:3] == [
        (h, h) for h in child.spec.addresses[:3]
    ]


def test_models_that_know_nothing_have_nothing_in_common() -> None:
    """Six pairs of random models of 8 heads, dull ones and sharp ones."""
    alarms = [
        one
        for seed in range(3)
        for kind in (make, sharp)
        for one in match(kind(2 * seed + 50), kind(2 * seed + 51), TEXTS, seed=seed + 900).matched
    ]
    assert not alarms


def test_other_tokenizers_meet_at_words() -> None:
    model, other = sharp(0), sharp(0)
    other.tokenizer = character_tokenizer("".join(TEXTS))
    found = match(model, other, TEXTS[:8])
    assert len(found) == 8
    aligned = byte_tokenizer().align("ab c")
    mean, total = _words(aligned, torch.zeros(1))
    assert mean.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]] or mean.sum(1).tolist() == [1, 1]
    assert torch.equal(total.sum(1), torch.tensor([1.0 if w else 0.0 for w in aligned.words_of_token]).double())


def counting(offsets: tuple[int, ...], words: list[str], width: int) -> Transformer:
    """A model each of whose heads looks so many words back: places are unit vectors, and nothing else is read."""
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


def test_heads_of_two_families_that_do_the_same_are_found() -> None:
    """Other ids for other tokens, another width, heads elsewhere: what is alike is where they look."""
    words = sorted({word for text in TEXTS for word in text.split()})
    one, other = counting((1, 2, 3), words, 20), counting((3, 4, 1, 2), words[::-1], 36)
    found = match(one, other, TEXTS)
    assert {str(pair.head): str(pair.like) for pair in found.matched} == {"0.0": "0.2", "0.2": "0.0", "0.3": "0.1"}
    assert not found["0.1"].matches, "nobody else looks four words back"


@pytest.mark.slow
def test_the_heads_that_look_one_back_in_two_real_models() -> None:
    """MiniLM's 0.2 looks one token back; its partner in SmolLM2, a decoder with another tokenizer, does so, too."""
    smollm2, minilm = hw.load("smollm2"), hw.load("minilm")
    found = match(smollm2, minilm, texts=8)["0.2"]
    assert found.distance < found.untrained
    assert smollm2.tokenizer is not None
    ids = torch.tensor([smollm2.tokenizer.encode("Heads differ: some look one word back, others follow the grammar.")])
    with record(smollm2) as recording, torch.no_grad():
        smollm2(ids)
    assert recording[found.like].map()[0].diagonal(-1).mean() > 0.5


@pytest.mark.usefixtures("few_documents")
def test_roles_are_told_where_profiles_are_given() -> None:
    model = sharp(0)
    seen = hw.profile(model, TEXTS, causal=False)
    assert match(model, model, TEXTS, profiles=(seen, seen))["0.1"].roles == (seen["0.1"].role, seen["0.1"].role)


def test_what_cannot_be_matched_is_refused() -> None:
    model = sharp(0)
    with pytest.raises(hw.HeadwiseError, match="at least 4 different texts"):
        match(model, model, ["one two three four"] * 9)
    with pytest.raises(hw.HeadwiseError, match="there is no head"):
        match(model, model, TEXTS)["7.7"]
    blind = sharp(0)
    blind.tokenizer = None
    with pytest.raises(hw.HeadwiseError, match="no tokenizer"):
        match(model, blind, TEXTS)
