"""What heads write: closed forms for hand-set weights, and sums that must add up."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.ov_analysis import (
    copying,
    logit_attribution,
    value_weighted,
    vocabulary,
    write_share,
)
from headwise.analysis.recording.recording import record
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from tests.contract.layers import MODELS, fill, make_model, token_ids
from tests.parity.real import smollm2_folder

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "mat", ".", "it"]
TEXTS = ["the cats sat on the mat .", "it sat", "the cat . it sat on it . the mat", "mat"]


def head_of(model: Transformer, address: str) -> Head:
    head = model.heads[address]
    assert isinstance(head, Head)
    return head


def set_ov(model: Transformer, address: str, core: torch.Tensor) -> None:
    """Give a head the OV circuit `core` on the first channels of the stream, and none elsewhere."""
    head, d = head_of(model, address), len(core)
    with torch.no_grad():
        head.W_V.zero_()
        head.W_O.zero_()
        head.W_V[:d] = core
        head.W_O[:, :d] = torch.eye(d)


def reader(name: str, **changes: Any) -> Transformer:
    model = Transformer(replace(MODELS[name], **changes)).double().eval()
    fill(model)
    model.tokenizer = Tokenizer.from_wordpiece(PIECES)
    return model


# Copying.


def test_copying_of_the_identity_its_negative_and_a_rotation() -> None:
    model = Transformer(ModelSpec(vocab=7, context=5, layers=2, attention=AttentionSpec(width=20, heads=3, head_dim=6)))
    angle = 0.7
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    set_ov(model, "0.0", 2.5 * torch.eye(6))
    set_ov(model, "0.1", -torch.eye(6))
    set_ov(model, "0.2", torch.block_diag(turn, turn, turn))
    set_ov(model, "1.0", torch.zeros(6, 6))
    scores = copying(model, "0.*,1.0")
    assert [scores[f"0.{i}"] for i in range(3)] == pytest.approx([1, -1, math.cos(angle)], abs=1e-6)
    assert math.isnan(scores["1.0"])
    assert list(copying(model)) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def test_copying_equals_the_eigenvalues_of_the_whole_matrix_also_in_groups_and_cut_layers() -> None:
    for name in ("decoder, rotary", "decoder, cut", "encoder-decoder"):
        model = make_model(MODELS[name])
        for address, score in copying(model).items():
            head = head_of(model, address)
            values = np.linalg.eigvals((head.W_V @ head.W_O).detach().numpy())
            assert score == pytest.approx(values.sum().real / np.abs(values).sum(), abs=1e-6)


def test_random_weights_copy_nothing_within_the_known_spread() -> None:
    d = 24
    spec = ModelSpec(vocab=3, context=3, layers=1, attention=AttentionSpec(width=96, heads=200, head_dim=d))
    torch.manual_seed(0)
    scores = np.array(list(copying(Transformer(spec)).values()))
    assert abs(scores.mean()) < 4 * 1.5 / d / math.sqrt(200)
    assert 0.7 < scores.std() / (1.5 / d) < 1.4


# Attribution.

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_parts_add_up_to_the_logit_and_to_the_difference(name: str, norm: str) -> None:
    model, ids = make_model(replace(MODELS[name], norm=norm)), token_ids(1, 7)
    with torch.no_grad():
        logits = model(ids)[0]
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        made = logit_attribution(model, ids, 11, wrong, position=position)
        want = float(logits[position, 11] - (0 if wrong is None else logits[position, wrong]))
        assert made.logit == pytest.approx(want, rel=1e-12)
        assert made.total == pytest.approx(want, rel=1e-9)
        assert made.complete
        assert made.error < 1e-9
        assert list(made.heads) == list(map(str, model.spec.addresses))
        assert list(made.mlps) == ["0", "1"]
        assert made.strongest(1)[0][1] == max(made.parts.values(), key=abs)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_heads_share_is_what_its_write_does_at_the_frozen_scale(norm: str) -> None:
    """By hand: take the head's write out of the stream, keep mean and scale as they were, and see the logit move."""
    model, ids = make_model(replace(MODELS["decoder"], norm=norm)), token_ids(1, 6)
    last: list[torch.Tensor] = []
    assert model.norm is not None
    hook = model.norm.register_forward_pre_hook(lambda m, given: last.append(given[0][0, -1]))
    with torch.no_grad(), record(model, "0.2") as recording:
        model(ids)
        hook.remove()
        x, write = last[0].numpy(), recording["0.2"].write[0, -1].numpy()
        scale = np.sqrt(((x - x.mean()) ** 2 if norm == "layer" else x**2).mean() + 1e-5)
        write = write - write.mean() if norm == "layer" else write
        words = model.embed.tokens.weight.numpy()
        moved = (write / scale * model.norm.weight.numpy()) @ (words[5] - words[9])  # pyright: ignore
    assert logit_attribution(model, ids, 5, 9).heads["0.2"] == pytest.approx(float(moved), rel=1e-9)


def test_it_is_complete_on_a_real_model_and_leaves_its_outputs_bitwise_alone() -> None:
    model = hw.load(smollm2_folder())
    assert isinstance(model.tokenizer, Tokenizer)
    text = "The capital of France is"
    ids = torch.tensor([model.tokenizer.encode(text)])
    with torch.no_grad():
        before = model(ids)
        made = logit_attribution(model, text, " Paris", " London")
        assert torch.equal(before, model(ids))
    paris, london = (model.tokenizer.encode(word, special=False)[0] for word in (" Paris", " London"))
    difference = float(before[0, -1, paris] - before[0, -1, london])
    assert made.logit == pytest.approx(difference, rel=1e-6)
    assert made.total == pytest.approx(difference, rel=1e-5)
    assert made.complete
    assert len(made.heads) == 270


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="in a post-norm model every layer ends in a norm"):
        logit_attribution(make_model(MODELS["encoder"]), [1, 2], 3)
    with pytest.raises(HeadwiseError, match="this is kind encoder-decoder"):
        logit_attribution(make_model(MODELS["encoder-decoder"]), [1, 2], 3)
    model = reader("decoder")
    with pytest.raises(HeadwiseError, match="answer must be one token, but 'cats' is 'cat' '##s'"):
        logit_attribution(model, "the", "cats")
    with pytest.raises(HeadwiseError, match="wrong must be a token id in 0-16, got 17"):
        logit_attribution(model, "the", "cat", 17)
    with pytest.raises(HeadwiseError, match="there is no position 3; the text has 3 tokens"):
        logit_attribution(model, "the", "cat", position=3)
    with pytest.raises(HeadwiseError, match=r"one text .* got ids of shape \(2, 3\)"):
        logit_attribution(model, token_ids(2, 3), 1)


# Vocabulary.


def copier(norm: str) -> Transformer:
    """A head that writes what it reads, where words are orthogonal: it promotes the word it looks at."""
    spec = ModelSpec(
        vocab=13,
        context=9,
        layers=1,
        norm="rms" if norm == "rms" else "layer",
        attention=AttentionSpec(width=16, heads=1),
        positions="none",
    )
    model = Transformer(spec).eval()
    model.tokenizer = Tokenizer.from_wordpiece(PIECES)
    set_ov(model, "0.0", torch.eye(16))
    with torch.no_grad():
        model.embed.tokens.weight.copy_(3 * torch.eye(13, 16))
    return model


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("typical", [False, True])
def test_a_copying_head_promotes_the_word_it_looks_at(norm: str, typical: bool) -> None:
    model = copier(norm)
    found = vocabulary(model, "0.0", "the cats", k=2, typical=typical, corpus=TEXTS)
    assert [one.token for one in found] == ["the", "cat", "##s"]
    assert [one.promotes[0][0] for one in found] == ["the", "cat", "##s"]
    # RMS norm makes 3·e_i into 4·e_i; the output layer multiplies by 3. LayerNorm takes the mean 3/16 out first, twice.
    if norm == "rms":
        assert found[0].promotes[0][1] == pytest.approx(12, rel=1e-4)
    else:
        assert found[0].promotes[0][1] == pytest.approx(3 * (1 - 1 / 16) / math.sqrt(1 / 16 - 1 / 256), rel=1e-4)
    with torch.no_grad():
        head_of(model, "0.0").W_O.neg_()
    found = vocabulary(model, "0.0", [5], k=2, typical=typical, corpus=TEXTS)
    assert found[0].suppresses[0][0] == "the"


def test_vocabulary_refuses_what_it_cannot_know() -> None:
    with pytest.raises(HeadwiseError, match=r"'it' does not stand in the corpus"):
        vocabulary(copier("rms"), "0.0", "it", typical=True, corpus=["the mat"])
    with pytest.raises(HeadwiseError, match="there is no token to look at"):
        vocabulary(copier("rms"), "0.0", "")
    for name, head in (("encoder", "0.1"), ("encoder-decoder", "cross.0.1")):
        with pytest.raises(HeadwiseError, match="takes a pre-norm decoder"):
            vocabulary(reader(name), head, "the")


# Value-weighted attention.


@pytest.mark.parametrize("name", ["encoder", "decoder, rotary", "decoder, windows"])
def test_value_weighted_attention_is_the_softmax_of_scores_plus_log_lengths(name: str) -> None:
    model, text = reader(name), TEXTS[2]
    with torch.no_grad(), record(model, "1.3") as recording:
        assert isinstance(model.tokenizer, Tokenizer)
        model(torch.tensor([model.tokenizer.encode(text)]))
        seen = recording["1.3"]
        lengths = np.linalg.norm(seen.v[0].numpy() @ head_of(model, "1.3").W_O.numpy(), axis=1)
        scores = seen.map()[0].log().numpy() + np.log(lengths)
    want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    made = value_weighted(model, text, "1.3", words=False)
    assert made.weighted.numpy() == pytest.approx(want, abs=1e-6)
    assert made.attention.numpy() == pytest.approx(seen.map()[0].numpy(), abs=1e-6)
    by_words = value_weighted(model, "the cats sat", "1.3")
    assert by_words.words == ("[CLS]", "the", "cats", "sat", "[SEP]")
    assert by_words.weighted.sum(1).numpy() == pytest.approx(np.ones(5), abs=1e-5)


# Shares of the layer's output.


@pytest.mark.parametrize("name", ["encoder", "decoder, rotary", "decoder, windows", "decoder, cut"])
def test_shares_equal_dense_writes_whatever_the_batches(name: str) -> None:
    model = reader(name)
    assert isinstance(model.tokenizer, Tokenizer)
    dense: dict[str, list[tuple[float, float]]] = {str(a): [] for a in model.spec.addresses}
    with torch.no_grad():
        for text in TEXTS:
            with record(model, what="write") as recording:
                model(torch.tensor([model.tokenizer.encode(text)]))
            for site in model.sites():
                if not site.head_ids:
                    continue
                writes = np.stack([recording[a].write[0].numpy() for a in site.addresses])  # (H, T, D)
                whole = writes.sum(0)
                along = (writes * whole).sum(-1) / (whole**2).sum(-1)
                lengths = np.linalg.norm(writes, axis=-1)
                lengths = lengths / lengths.sum(0)
                for i, address in enumerate(site.addresses):
                    dense[str(address)] += list(zip(along[i], lengths[i], strict=True))
    for tokens in (4096, 12):
        made = write_share(model, TEXTS, tokens=tokens)
        assert list(made) == list(dense)
        for address, rows in dense.items():
            assert made[address].rows == len(rows)
            assert made[address][:2] == pytest.approx(np.mean(rows, axis=0), rel=1e-6)
        for site in model.sites():
            if site.head_ids:
                mine = [made[str(a)] for a in site.addresses]
                assert sum(one.share for one in mine) == pytest.approx(1)
                assert sum(one.norm_share for one in mine) == pytest.approx(1)


def test_twin_heads_share_evenly_and_a_silent_one_has_nothing() -> None:
    model = reader("decoder")
    one, other, silent = (head_of(model, f"0.{i}") for i in (0, 1, 3))
    with torch.no_grad():
        for letter in "qkv":
            model.blocks[0].attention.read.weight(letter)[1] = model.blocks[0].attention.read.weight(letter)[0]  # pyright: ignore
            model.blocks[0].attention.read.bias(letter)[1] = model.blocks[0].attention.read.bias(letter)[0]  # pyright: ignore
        other.W_O.copy_(one.W_O)
        silent.W_O.zero_()
        head_of(model, "0.2").W_O.zero_()
    made = write_share(model, TEXTS)
    assert [made[f"0.{i}"].share for i in range(4)] == pytest.approx([0.5, 0.5, 0, 0])
    assert [made[f"0.{i}"].norm_share for i in range(4)] == pytest.approx([0.5, 0.5, 0, 0])
