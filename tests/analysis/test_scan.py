"""Scan of one text: contributions, logit lens and losses without heads, compared with direct computations."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.analysis.attribution.scan import scan_steps
from headwise.model import Transformer
from headwise.text.build_tokenizers import byte_tokenizer
from tests.analysis.models import character_model
from tests.contract.attached_models import cached_model
from tests.contract.layers import MODELS

TEXT = "a cat sat"
DECODERS = ("decoder", "decoder, rotary", "decoder, cut")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def double(name: str) -> Transformer:
    return character_model(MODELS[name]).double()


def text_ids(model: Any, text: str = TEXT) -> Tensor:
    return torch.tensor([model.tokenizer.encode(text)])


@pytest.mark.parametrize("name", DECODERS)
def test_scan_contributions_sum_to_logit_above_mean(name: str) -> None:
    model = double(name)
    result = hw.scan(model, TEXT)
    logits = model(text_ids(model))[0, -1]
    assert result.answer is not None
    assert result.attribution is not None
    assert result.answer.id == int(logits.argmax())
    assert result.attribution.logit == pytest.approx(float(logits.max() - logits.mean()), rel=1e-9)
    assert result.attribution.total == pytest.approx(result.attribution.logit, abs=1e-9)
    assert result.loss == pytest.approx(float(-logits.log_softmax(-1).max()), rel=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_scan_head_contribution_equals_output_through_frozen_norm(name: str) -> None:
    """z W_O of a head, times gain and scale of the final norm at the last token, times the centered unembedding."""
    model = double(name)
    final: list[Tensor] = []
    assert model.norm is not None
    assert model.output is not None
    hook = model.norm.register_forward_pre_hook(lambda module, args: final.append(args[0][0, -1]))
    with hw.record(model, "*") as recording:
        model(text_ids(model))
    hook.remove()
    result, norm = hw.scan(model, TEXT), cast(Any, model.norm)
    assert result.answer is not None
    assert result.attribution is not None
    x, W = final[0], model.output.vocabulary.weight.detach()
    for address in recording.addresses:
        written = recording[address].output[0, -1]
        if isinstance(norm, torch.nn.LayerNorm):
            scale, written = 1 / (x.var(correction=0) + norm.eps).sqrt(), written - written.mean()
        else:
            scale = 1 / (x.square().mean() + (norm.eps or torch.finfo(x.dtype).eps)).sqrt()
        expected = (written * scale * norm.weight) @ (W[result.answer.id] - W.mean(0))
        assert result.attribution.heads[str(address)] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_scan_logit_lens_equals_prediction_of_truncated_model(name: str) -> None:
    """The model without its later blocks predicts like the logit lens after a block."""
    model = double(name)
    result = hw.scan(model, TEXT)
    assert result.answer is not None
    assert [item.layer for item in result.layers] == list(range(-1, model.spec.layers))
    blocks = model.blocks
    for item in result.layers:
        model.blocks = blocks[: item.layer + 1]
        probabilities = model(text_ids(model))[0, -1].softmax(-1)
        assert item.probability == pytest.approx(float(probabilities[result.answer.id]), rel=1e-9)
        assert item.top_probability == pytest.approx(float(probabilities.max()), rel=1e-9)
        assert item.rank == 1 + int((probabilities > probabilities[result.answer.id]).sum())


@pytest.mark.parametrize("name", [*DECODERS, "encoder"])
def test_scan_loss_equals_loss_of_silenced_model(name: str) -> None:
    model = double(name)
    result = hw.scan(model, TEXT, max_heads=4)
    assert result.answer is not None
    assert 0 < len(result.heads) <= 4
    for head in result.heads:
        with model.heads[head.head].silenced():
            log_probs = model(text_ids(model))[0, -1].log_softmax(-1)
        assert head.loss == pytest.approx(-float(log_probs[result.answer.id]), rel=1e-9)
        assert head.loss_increase == pytest.approx(head.loss - result.loss, abs=1e-9)


def test_scan_weights_equal_recorded_map() -> None:
    model = double("decoder, rotary")
    with hw.record(model, "*") as recording:
        model(text_ids(model))
    for head in hw.scan(model, TEXT).heads:
        row = recording[head.head].map(rows=-1)[0, 0]
        assert head.weights == pytest.approx(row.tolist(), abs=1e-6)
        assert head.first_token_weight == head.weights[0]
        assert [item.weight for item in head.attended] == sorted(head.weights[1:], reverse=True)[: len(head.attended)]
        assert all(head.weights[item.position] == item.weight for item in head.attended)


@pytest.mark.parametrize("position", [0, 3, -2])
def test_scan_position_and_answer_select_the_logit(position: int) -> None:
    model = double("decoder")
    result = hw.scan(model, TEXT, answer=5, position=position)
    log_probs = model(text_ids(model))[0, position].log_softmax(-1)
    assert result.loss == pytest.approx(-float(log_probs[5]), rel=1e-9)
    assert all(len(head.weights) == len(result.tokens) for head in result.heads)
    with model.heads[result.heads[0].head].silenced():
        expected = model(text_ids(model))[0, position].log_softmax(-1)[5]
    assert result.heads[0].loss == pytest.approx(-float(expected), rel=1e-9)


def test_scan_changes_neither_outputs_nor_mode() -> None:
    model = character_model(MODELS["decoder"]).train()
    before = model.eval()(text_ids(model))
    model.train()
    hw.scan(model, TEXT)
    assert model.training
    assert torch.equal(model.eval()(text_ids(model)), before)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "mistral"])
def test_scan_attached_model_is_complete(name: str) -> None:
    model = cached_model(name)
    result = hw.scan(model, "the cat sat")
    assert result.attribution is not None
    assert result.attribution.is_complete
    assert result.layers[-1].probability == pytest.approx(math.exp(-result.loss), rel=1e-4)
    assert not result.notes
    for head in result.heads[:2]:
        ids = torch.tensor([model.tokenizer.encode("the cat sat")])
        with model.heads[head.head].silenced():
            loss = F.cross_entropy(model(ids)[:, -1], torch.tensor([result.answer.id if result.answer else -1]))
        assert head.loss == pytest.approx(float(loss), rel=1e-4)


def test_scan_encoder_decoder_reads_source() -> None:
    model = cached_model("bart")
    result = hw.scan(model, "", source="the cat sat", max_heads=100)
    assert result.tokens
    assert result.layers == ()
    assert {head.keys for head in result.heads if head.head.startswith("cross")} == {"source"}
    assert all(not head.weights for head in result.heads if head.head.startswith("enc"))
    with pytest.raises(hw.HeadwiseError, match="needs a source text"):
        hw.scan(model, "the cat")


def test_scan_masked_model_predicts_at_mask() -> None:
    model = character_model(replace(MODELS["encoder"], output="mlm"))
    assert model.tokenizer is not None
    mask = cast(Any, model.tokenizer).mask
    ids = model.tokenizer.encode(TEXT)
    position = len(ids) // 2
    ids[position] = mask
    assert hw.scan(model, ids).position == position


def test_scan_model_without_output_ranks_by_hidden_state() -> None:
    model = character_model(replace(MODELS["decoder"], output="none", tied=False)).double()
    result = hw.scan(model, TEXT)
    clean = model(text_ids(model))[0, -1]
    head = result.heads[0]
    with model.heads[head.head].silenced():
        other = model(text_ids(model))[0, -1]
    assert result.answer is None
    assert head.loss == pytest.approx(1 - float(F.cosine_similarity(clean, other, dim=0)), abs=1e-9)
    assert head.loss == max(item.loss for item in result.heads)
    with pytest.raises(hw.HeadwiseError, match="predicts no tokens"):
        hw.scan(model, TEXT, answer=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_half_precision_is_complete_within_rounding(dtype: torch.dtype) -> None:
    model = character_model(MODELS["decoder, rotary"]).to(dtype)
    result = hw.scan(model, TEXT)
    assert result.attribution is not None
    assert result.attribution.is_complete
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["heads"]


def test_scan_pruned_layer_without_heads() -> None:
    model = double("decoder")
    small = model.prune("0.*")
    result = hw.scan(small, TEXT)
    assert result.attribution is not None
    assert result.attribution.relative_error < 1e-9
    assert not [head for head in result.heads if head.head.startswith("0.")]
    assert result.layers[-1].probability == pytest.approx(math.exp(-result.loss), rel=1e-9)


def test_scan_post_norm_model_says_what_is_missing() -> None:
    model = character_model(replace(MODELS["decoder"], norm_placement="post"))
    result = hw.scan(model, TEXT)
    assert result.attribution is None
    assert result.layers == ()
    assert result.heads
    assert "post-norm" in " ".join(result.notes)


def test_scan_steps_complete_the_result_in_order() -> None:
    steps = list(scan_steps(double("decoder"), TEXT))
    assert [bool(step.predictions) for step in steps] == [True] * 3
    assert [bool(step.layers) for step in steps] == [False, True, True]
    assert [bool(step.heads) for step in steps] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"text": "  "}, "at least one word"),
        ({"text": []}, "at least one token"),
        ({"text": [TEXT, TEXT]}, "Pass one text at a time"),
        ({"text": [[1, 2], [3]]}, "Pass one text at a time"),
        ({"text": [1.5, 2.0]}, "as token ids"),
        ({"text": None}, "as token ids. Got None"),
        ({"text": [1, 10**6]}, "token ids must be from 0 to"),
        ({"text": [1, -1]}, "token ids must be from 0 to"),
        ({"text": TEXT, "position": 99}, "position: out of range"),
        ({"text": TEXT, "answer": 10**6}, "answer: must be a token id"),
        ({"text": TEXT, "max_heads": -1}, "max_heads"),
        ({"text": TEXT, "source": "x"}, "Remove source"),
    ],
)
def test_scan_wrong_argument_raises(arguments: dict[str, Any], fragment: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=fragment):
        hw.scan(character_model(MODELS["decoder"]), **arguments)


def test_scan_roles_come_from_profile() -> None:
    model = character_model(MODELS["decoder"])
    profile = hw.profile(model, ["a cat sat there", "the mat", "it was a cat"], relations=False, causal=False)
    result = hw.scan(model, TEXT, profile=profile)
    assert result.profile_name == profile.metadata["corpus"]
    for head in result.heads:
        row = profile[head.head]
        assert head.role == (f"{row.role_label} ({row.evidence_label})" if row.roles else "")


def test_scan_page_is_self_contained_and_escapes_text(tmp_path: Path) -> None:
    model = Transformer(replace(hw.preset("nano"), vocab=257))
    model.tokenizer = byte_tokenizer()
    page = hw.scan(model, '</style><script>alert(1)</script> "&').report(tmp_path / "scan.html").read_text()
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http" not in page.replace("http-equiv", "")
    for heading in ("Layers", "Contributions", "Heads"):
        assert f"<h2>{heading}</h2>" in page
