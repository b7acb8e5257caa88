"""OV analysis: closed forms of hand-set weights, and decompositions that sum to the total."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.head_output_scores import (
    logit_attribution,
    output_shares,
    ov_eigenvalue_scores,
    token_effects,
    value_weighted_map,
)
from headwise.analysis.recording.recording import record
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from tests.contract.layers import MODELS, make_model, randomize, token_ids
from tests.parity.real import smollm2_folder

WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "mat", ".", "it"]
TEXTS = ["the cats sat on the mat .", "it sat", "the cat . it sat on it . the mat", "mat"]


def get_head(model: Transformer, address: str) -> Head:
    head = model.heads[address]
    assert isinstance(head, Head)
    return head


def set_ov(model: Transformer, address: str, core: torch.Tensor) -> None:
    """Set the OV circuit of a head to `core` on the first channels of the residual stream, and to zero elsewhere."""
    head, d = get_head(model, address), len(core)
    with torch.no_grad():
        head.W_V.zero_()
        head.W_O.zero_()
        head.W_V[:d] = core
        head.W_O[:, :d] = torch.eye(d)


def word_model(name: str, **changes: Any) -> Transformer:
    model = Transformer(replace(MODELS[name], **changes)).double().eval()
    randomize(model)
    model.tokenizer = Tokenizer.from_wordpiece(WORDPIECES)
    return model


# Copying.


def test_copying_of_known_ov_circuits_matches_closed_form() -> None:
    model = Transformer(ModelSpec(vocab=7, context=5, layers=2, attention=AttentionSpec(width=20, heads=3, head_dim=6)))
    angle = 0.7
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    set_ov(model, "0.0", 2.5 * torch.eye(6))
    set_ov(model, "0.1", -torch.eye(6))
    set_ov(model, "0.2", torch.block_diag(rotation, rotation, rotation))
    set_ov(model, "1.0", torch.zeros(6, 6))
    scores = ov_eigenvalue_scores(model, "0.*,1.0")
    assert [scores[f"0.{i}"] for i in range(3)] == pytest.approx([1, -1, math.cos(angle)], abs=1e-6)
    assert math.isnan(scores["1.0"])
    assert list(ov_eigenvalue_scores(model)) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def test_copying_equals_eigenvalues_of_full_matrix() -> None:
    for name in ("decoder, rotary", "decoder, cut", "encoder-decoder"):
        model = make_model(MODELS[name])
        for address, score in ov_eigenvalue_scores(model).items():
            head = get_head(model, address)
            values = np.linalg.eigvals((head.W_V @ head.W_O).detach().numpy())
            assert score == pytest.approx(values.sum().real / np.abs(values).sum(), abs=1e-6)


def test_copying_random_weights_is_near_zero() -> None:
    d = 24
    spec = ModelSpec(vocab=3, context=3, layers=1, attention=AttentionSpec(width=96, heads=200, head_dim=d))
    torch.manual_seed(0)
    scores = np.array(list(ov_eigenvalue_scores(Transformer(spec)).values()))
    assert abs(scores.mean()) < 4 * 1.5 / d / math.sqrt(200)
    assert 0.7 < scores.std() / (1.5 / d) < 1.4


# Attribution.

DECODERS = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut"]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_logit_attribution_parts_sum_to_logit(name: str, norm: str) -> None:
    model, ids = make_model(replace(MODELS[name], norm=norm)), token_ids(1, 7)
    with torch.no_grad():
        logits = model(ids)[0]
    for wrong, position in ((None, -1), (3, -1), (3, 2)):
        attribution = logit_attribution(model, ids, 11, wrong, position=position)
        want = float(logits[position, 11] - (0 if wrong is None else logits[position, wrong]))
        assert attribution.logit == pytest.approx(want, rel=1e-12)
        assert attribution.total == pytest.approx(want, rel=1e-9)
        assert attribution.is_complete
        assert attribution.relative_error < 1e-9
        assert list(attribution.heads) == list(map(str, model.spec.head_addresses))
        assert list(attribution.mlps) == ["0", "1"]
        assert attribution.top_parts(1)[0][1] == max(attribution.parts.values(), key=abs)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_logit_attribution_head_equals_write_at_frozen_scale(norm: str) -> None:
    """Remove the output of the head from the residual stream by hand, with fixed mean and scale, and compare the logits."""
    model, ids = make_model(replace(MODELS["decoder"], norm=norm)), token_ids(1, 6)
    last: list[torch.Tensor] = []
    assert model.norm is not None
    hook = model.norm.register_forward_pre_hook(lambda m, inputs: last.append(inputs[0][0, -1]))
    with torch.no_grad(), record(model, "0.2") as recording:
        model(ids)
        hook.remove()
        x, write = last[0].numpy(), recording["0.2"].output[0, -1].numpy()
        scale = np.sqrt(((x - x.mean()) ** 2 if norm == "layer" else x**2).mean() + 1e-5)
        write = write - write.mean() if norm == "layer" else write
        words = model.embed.tokens.weight.numpy()
        logit_change = (write / scale * model.norm.weight.numpy()) @ (words[5] - words[9])  # pyright: ignore
    assert logit_attribution(model, ids, 5, 9).heads["0.2"] == pytest.approx(float(logit_change), rel=1e-9)


def test_logit_attribution_real_model_is_complete() -> None:
    model = hw.load(smollm2_folder())
    assert isinstance(model.tokenizer, Tokenizer)
    text = "The capital of France is"
    ids = torch.tensor([model.tokenizer.encode(text)])
    with torch.no_grad():
        before = model(ids)
        attribution = logit_attribution(model, text, " Paris", " London")
        assert torch.equal(before, model(ids))
    paris, london = (model.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" Paris", " London"))
    difference = float(before[0, -1, paris] - before[0, -1, london])
    assert attribution.logit == pytest.approx(difference, rel=1e-6)
    assert attribution.total == pytest.approx(difference, rel=1e-5)
    assert attribution.is_complete
    assert len(attribution.heads) == 270


def test_logit_attribution_invalid_input_raises() -> None:
    with pytest.raises(HeadwiseError, match="not supported for post-norm models"):
        logit_attribution(make_model(MODELS["encoder"]), [1, 2], 3)
    with pytest.raises(HeadwiseError, match="Got kind 'encoder-decoder'"):
        logit_attribution(make_model(MODELS["encoder-decoder"]), [1, 2], 3)
    model = word_model("decoder")
    with pytest.raises(HeadwiseError, match=r"answer: .* Got 'cats', which is tokenized as 'cat' '##s'"):
        logit_attribution(model, "the", "cats")
    with pytest.raises(HeadwiseError, match=r"wrong: .* from 0 to 16\. Got 17"):
        logit_attribution(model, "the", "cat", 17)
    with pytest.raises(HeadwiseError, match=r"3 tokens\. Got 3"):
        logit_attribution(model, "the", "cat", position=3)
    with pytest.raises(HeadwiseError, match=r"one text .* Got token ids of shape \(2, 3\)"):
        logit_attribution(model, token_ids(2, 3), 1)


# Vocabulary.


def copying_model(norm: str) -> Transformer:
    """A head that writes the attended token, with orthogonal embeddings: it promotes the attended word."""
    spec = ModelSpec(
        vocab=13,
        context=9,
        layers=1,
        norm="rms" if norm == "rms" else "layer",
        attention=AttentionSpec(width=16, heads=1),
        positions="none",
    )
    model = Transformer(spec).eval()
    model.tokenizer = Tokenizer.from_wordpiece(WORDPIECES)
    set_ov(model, "0.0", torch.eye(16))
    with torch.no_grad():
        model.embed.tokens.weight.copy_(3 * torch.eye(13, 16))
    return model


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("typical", [False, True])
def test_token_effects_copying_head_promotes_attended_word(norm: str, typical: bool) -> None:
    model = copying_model(norm)
    effects = token_effects(model, "0.0", "the cats", k=2, typical=typical, corpus=TEXTS)
    assert [effect.token for effect in effects] == ["the", "cat", "##s"]
    assert [effect.promotes[0][0] for effect in effects] == ["the", "cat", "##s"]
    # RMS norm maps 3·e_i to 4·e_i; the output layer multiplies by 3. LayerNorm subtracts the mean 3/16 first, twice.
    if norm == "rms":
        assert effects[0].promotes[0][1] == pytest.approx(12, rel=1e-4)
    else:
        assert effects[0].promotes[0][1] == pytest.approx(3 * (1 - 1 / 16) / math.sqrt(1 / 16 - 1 / 256), rel=1e-4)
    with torch.no_grad():
        get_head(model, "0.0").W_O.neg_()
    effects = token_effects(model, "0.0", [5], k=2, typical=typical, corpus=TEXTS)
    assert effects[0].suppresses[0][0] == "the"


def test_token_effects_invalid_input_raises() -> None:
    with pytest.raises(HeadwiseError, match="does not contain the token 'it'"):
        token_effects(copying_model("rms"), "0.0", "it", typical=True, corpus=["the mat"])
    with pytest.raises(HeadwiseError, match="no tokens"):
        token_effects(copying_model("rms"), "0.0", "")
    for name, head in (("encoder", "0.1"), ("encoder-decoder", "cross.0.1")):
        with pytest.raises(HeadwiseError, match="pre-norm decoder"):
            token_effects(word_model(name), head, "the")


# Value-weighted attention.


@pytest.mark.parametrize("name", ["encoder", "decoder, rotary", "decoder, windows"])
def test_value_weighted_equals_softmax_of_scores_plus_log_norms(name: str) -> None:
    model, text = word_model(name), TEXTS[2]
    with torch.no_grad(), record(model, "1.3") as recording:
        assert isinstance(model.tokenizer, Tokenizer)
        model(torch.tensor([model.tokenizer.encode(text)]))
        head_recording = recording["1.3"]
        lengths = np.linalg.norm(head_recording.v[0].numpy() @ get_head(model, "1.3").W_O.numpy(), axis=1)
        scores = head_recording.map()[0].log().numpy() + np.log(lengths)
    want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    weighted = value_weighted_map(model, text, "1.3", words=False)
    assert weighted.weighted.numpy() == pytest.approx(want, abs=1e-6)
    assert weighted.attention.numpy() == pytest.approx(head_recording.map()[0].numpy(), abs=1e-6)
    by_words = value_weighted_map(model, "the cats sat", "1.3")
    assert by_words.query_words == ("[CLS]", "the", "cats", "sat", "[SEP]")
    assert by_words.weighted.sum(1).numpy() == pytest.approx(np.ones(5), abs=1e-5)


# Output shares.


@pytest.mark.parametrize("name", ["encoder", "decoder, rotary", "decoder, windows", "decoder, cut"])
def test_write_share_equals_dense_outputs_for_any_batching(name: str) -> None:
    model = word_model(name)
    assert isinstance(model.tokenizer, Tokenizer)
    dense: dict[str, list[tuple[float, float]]] = {str(a): [] for a in model.spec.head_addresses}
    with torch.no_grad():
        for text in TEXTS:
            with record(model, tensors="output") as recording:
                model(torch.tensor([model.tokenizer.encode(text)]))
            for hook_point in model.hook_points():
                if not hook_point.head_ids:
                    continue
                writes = np.stack([recording[a].output[0].numpy() for a in hook_point.head_addresses])  # (H, T, D)
                total = writes.sum(0)
                along = (writes * total).sum(-1) / (total**2).sum(-1)
                lengths = np.linalg.norm(writes, axis=-1)
                lengths = lengths / lengths.sum(0)
                for i, address in enumerate(hook_point.head_addresses):
                    dense[str(address)] += list(zip(along[i], lengths[i], strict=True))
    for tokens in (4096, 12):
        shares = output_shares(model, TEXTS, batch_tokens=tokens)
        assert list(shares) == list(dense)
        for address, rows in dense.items():
            assert shares[address].rows == len(rows)
            assert shares[address][:2] == pytest.approx(np.mean(rows, axis=0), rel=1e-6)
        for hook_point in model.hook_points():
            if hook_point.head_ids:
                layer_shares = [shares[str(a)] for a in hook_point.head_addresses]
                assert sum(output_share.fraction for output_share in layer_shares) == pytest.approx(1)
                assert sum(output_share.norm_fraction for output_share in layer_shares) == pytest.approx(1)


def test_write_share_twin_heads_are_equal_and_silent_head_zero() -> None:
    model = word_model("decoder")
    first, twin, silent = (get_head(model, f"0.{i}") for i in (0, 1, 3))
    qkv: Any = next(iter(model.attention_layers())).qkv
    with torch.no_grad():
        for projection in "qkv":
            for tensor in (qkv.weight_by_head(projection), qkv.bias_by_head(projection)):
                tensor[1] = tensor[0]
        twin.W_O.copy_(first.W_O)
        silent.W_O.zero_()
        get_head(model, "0.2").W_O.zero_()
    shares = output_shares(model, TEXTS)
    assert [shares[f"0.{i}"].fraction for i in range(4)] == pytest.approx([0.5, 0.5, 0, 0])
    assert [shares[f"0.{i}"].norm_fraction for i in range(4)] == pytest.approx([0.5, 0.5, 0, 0])
