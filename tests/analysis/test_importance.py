"""Importance of heads: gradients compared with autograd, closed forms, inactive and duplicate heads, intervals."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.ablation.ablate import (
    MeanActivations,
    ablated,
    make_replacement_fn,
    mean_activations,
    mean_of_outputs,
    record_z,
)
from headwise.analysis.ablation.ablation_sweep import ablation_gradients, ablation_sweep
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.ablation.importance import importance
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec
from headwise.text.build_tokenizers import character_tokenizer
from tests.analysis.models import TEXTS, character_model, encode_texts, text_loss
from tests.contract.layers import MODELS, assert_equal

HEADLESS = replace(MODELS["encoder"], output="none", norm_placement="pre")


def test_importance_does_not_depend_on_batching_or_merge() -> None:
    model = character_model(MODELS["decoder, rotary"])
    for ranking, method in (("ablation", "resample"), ("gradient", "mean"), ("attribution", "mean")):
        full = importance(model, TEXTS, ranking=ranking, ablation=method, check_heads=0)  # pyright: ignore
        for batch_tokens in (1, 37, 90):
            options: dict[str, Any] = {"ranking": ranking, "ablation": method, "batch_tokens": batch_tokens}
            batched = importance(model, TEXTS, **options, check_heads=0)
            np.testing.assert_allclose(batched.mean, full.mean, atol=1e-10)
    means = mean_activations(model, TEXTS)
    parts = [importance(model, texts, means=means) for texts in (TEXTS[:2], TEXTS[2:])]
    merged = parts[0].merge(parts[1])
    np.testing.assert_allclose(merged.mean, importance(model, TEXTS, means=means).mean, atol=1e-10)
    assert merged.texts == 4


def test_importance_subset_equals_full_run() -> None:
    model = character_model(MODELS["decoder"])
    subset, full = importance(model, TEXTS, heads="0.1,1.*"), importance(model, TEXTS)
    assert list(map(str, subset.addresses)) == ["0.1", "1.0", "1.1", "1.2", "1.3"]
    for head_importance in subset:
        assert head_importance.importance == pytest.approx(full[head_importance.head].importance, abs=1e-12)


# Meaning of the values.


def test_importance_constant_or_dead_head_is_zero_and_twins_equal() -> None:
    model = character_model(MODELS["decoder"])
    with torch.no_grad():
        model.heads["0.1"].W_V.zero_()  # constant output: b_V only  # pyright: ignore
        model.heads["1.2"].W_O.zero_()  # inactive  # pyright: ignore
        twin, of = model.heads["0.3"], model.heads["0.2"]
        for weight_name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V"):
            getattr(twin, weight_name).copy_(getattr(of, weight_name))
    by_method = {method: importance(model, TEXTS, ablation=method) for method in ("zero", "mean", "resample")}  # pyright: ignore
    for method, result in by_method.items():
        assert result["1.2"].importance == pytest.approx(0, abs=1e-12)
        assert result["0.3"].importance == pytest.approx(result["0.2"].importance, abs=1e-12)
        assert (abs(result["0.1"].importance) < 1e-12) == (method != "zero")
        assert abs(result["0.0"].importance) > 1e-4


def test_importance_canceling_heads_matter_alone_but_not_jointly() -> None:
    model = character_model(MODELS["decoder"])
    with torch.no_grad():
        twin, of = model.heads["1.3"], model.heads["1.2"]
        for weight_name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
            getattr(twin, weight_name).copy_(getattr(of, weight_name))
        twin.W_O.copy_(-of.W_O)  # pyright: ignore
    result = importance(model, TEXTS, ablation="zero")
    assert abs(result["1.2"].importance) > 1e-4
    ids = encode_texts(model)[0]
    before = model(ids)
    with ablated(model, "1.2,1.3", "zero"):
        assert_equal(model(ids), before)


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut"])
def test_importance_gradient_equals_autograd_per_text(name: str) -> None:
    model = character_model(MODELS[name])
    result = importance(model, TEXTS, ranking="gradient")
    total = np.zeros(len(result))
    for ids in encode_texts(model):
        gates = {
            hook_point.address: torch.ones(len(hook_point.head_ids), requires_grad=True)
            for hook_point in model.hook_points()
        }
        (loss_with_gates(model, ids, gates) / (ids.shape[1] - 1)).backward()
        total += torch.cat([gate.grad.abs() for gate in gates.values() if gate.grad is not None]).numpy()
    np.testing.assert_allclose(result.mean, total / len(TEXTS), atol=1e-6)  # the gates are in single precision
    again = importance(model, TEXTS, ranking="gradient")
    np.testing.assert_array_equal(again.mean, result.mean)  # gradients are not accumulated between calls
    assert result["0.0"].importance > 1e-6


def loss_with_gates(model: Transformer, ids: Tensor, gates: dict[LayerAddress, Tensor]) -> Tensor:
    return F.cross_entropy(model(ids, gates=gates)[0, :-1], ids[0, 1:], reduction="sum")


def test_importance_leaves_model_unchanged() -> None:
    model = character_model(MODELS["decoder"], dropout=0.1).train()
    model.blocks[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for ranking in ("ablation", "gradient", "attribution"):
        importance(model, TEXTS, ranking=ranking)  # pyright: ignore
    assert model.training
    assert not model.blocks[0].training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(hook_point.is_active for hook_point in model.hook_points())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_importance_respects_silenced_heads() -> None:
    model, without = character_model(MODELS["decoder"]), character_model(MODELS["decoder"])
    with torch.no_grad():
        without.heads["0.1"].W_O.zero_()  # pyright: ignore
    with model.heads["0.1"].silenced():
        got = importance(model, TEXTS, ablation="zero")
    np.testing.assert_allclose(got.mean, importance(without, TEXTS, ablation="zero").mean, atol=1e-12)


# Closed forms on hand-built models with four channels: message of a head, answer, token, and a large constant.

MESSAGE, ANSWER, TOKEN, BIG = range(4)
LARGE = 1e5  # so large that it determines the norm


def blank_two_token_model(layers: int) -> Transformer:
    """All weights are zero except the embeddings of tokens 0 (+1) and 1 (−1) and an output with the logits +answer and
    −answer."""
    attention = AttentionSpec(width=4, heads=1, head_dim=2, bias=True, out_bias=True, scale=1.0)
    spec = ModelSpec(2, 8, layers, attention, norm="rms", positions="none", tied=False, mlp_bias=False)
    model = Transformer(spec).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(LARGE / 2 if "norm" in name else 0.0)  # the norm leaves the stream unchanged
        model.embed.tokens.weight[:, TOKEN] = torch.tensor([1.0, -1.0])
        model.embed.tokens.weight[:, BIG] = LARGE
        model.output.vocabulary.weight[:, ANSWER] = torch.tensor([1.0, -1.0])  # pyright: ignore
    return model


def test_importance_alternating_gradients_do_not_cancel() -> None:
    model = blank_two_token_model(layers=1)
    head = model.heads["0.0"]
    with torch.no_grad():
        head.b_V[0] = 1.0  # pyright: ignore
        head.W_O[0, ANSWER] = 1.0  # pyright: ignore
        # the answer is 0, and its gradient is −1 or +1 depending on the target token
        head.layer.b_O[ANSWER] = -1.0  # pyright: ignore
    model.tokenizer = character_tokenizer("ab")
    result = importance(model, ["aa", "ab"], ranking="gradient")
    assert result.mean == pytest.approx(1.0, abs=1e-6)
    signed = importance(model, ["aa", "ab"], ranking="attribution", ablation="zero")
    assert signed.mean == pytest.approx(0.0, abs=1e-9)  # an absolute value per batch would be nonzero
    exact = np.log((1 + np.exp(2)) * (1 + np.exp(-2)) / 4) / 2  # softplus(±2) − ln 2, half of the texts each
    assert importance(model, ["aa", "ab"], ablation="zero").mean == pytest.approx(exact, abs=1e-6)


def test_importance_attribution_can_miss_saturated_effect() -> None:
    """Head 0.0 changes a later score difference of two keys from +10 to −10: p falls by 0.9999, but the gradient predicts
    0.0009."""
    model = blank_two_token_model(layers=2)
    first, second = model.heads["0.0"], model.heads["1.0"]
    with torch.no_grad():
        first.b_V[0] = 1.0  # pyright: ignore
        first.W_O[0, MESSAGE] = 1.0  # pyright: ignore
        second.W_Q[MESSAGE, 0], second.W_K[TOKEN, 0] = 1.0, 5.0  # scores ±5  # pyright: ignore
        second.W_V[TOKEN, 0], second.b_V[0] = 0.5, 0.5  # values 1 and 0  # pyright: ignore
        second.W_O[0, ANSWER] = 1.0  # pyright: ignore
    layer_address = LayerAddress("", 0)
    means = MeanActivations(
        "global",
        {layer_address: (0,)},
        {layer_address: torch.tensor([[[-1.0, 0.0]]]).double()},
        {layer_address: torch.ones(1).double()},
    )
    batch = TargetBatch(torch.tensor([[0, 1]]), torch.ones(1, 2).bool(), torch.tensor([[IGNORE_INDEX, 0]]), None)
    heads = (first.address,)  # pyright: ignore

    def replacement(hook_point: Any, chosen: Any) -> Any:
        return make_replacement_fn(hook_point, chosen, "mean", means)

    high, low = 1 / (1 + np.exp(-10.0)), 1 / (1 + np.exp(10.0))
    assert (low - high, -20 * high * low) == pytest.approx((-0.9999, -0.0009), abs=1e-4)
    exact = np.log1p(np.exp(-2 * low)) - np.log1p(np.exp(-2 * high))
    estimate = -2 / (1 + np.exp(2 * high)) * (-20 * high * low)  # ∂loss/∂p · ∂p/∂gap · change of the gap
    assert float(ablation_sweep(model, batch, heads, replacement)[0]) == pytest.approx(exact, abs=1e-6)
    assert float(ablation_gradients(model, batch, heads, replacement)) == pytest.approx(estimate, abs=1e-6)
    model.tokenizer = character_tokenizer("ab")
    result = importance(model, ["aba"] * 3, ranking="attribution", metric="last", means=means, heads="0.0")
    assert result.check is not None
    assert result.check.worst_estimate == ("0.0", pytest.approx(estimate - exact, abs=1e-6))


def test_importance_attribution_equals_slope_and_is_checked() -> None:
    model = character_model(MODELS["decoder, rotary"])
    means = mean_of_outputs(record_z(model, ids[:, :-1]) for ids in encode_texts(model))
    result = importance(model, TEXTS, ranking="attribution", check_heads=5)
    exact = importance(model, TEXTS)
    tokens = sum(ids.shape[1] - 1 for ids in encode_texts(model))
    for head in model.heads:  # the gradient, from a small step of the head towards its mean
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad(), head.layer.hook_point.replaced(_step(head.index, means[head.address], step)):
                ends.append(sum(float(text_loss(model, ids)) for ids in encode_texts(model)))
        assert result[head.address].importance == pytest.approx((ends[0] - ends[1]) / 2e-5 / tokens, abs=1e-6)
    assert result.check is not None
    assert len(result.check.heads) == 5
    for head, estimate, expected in zip(result.check.heads, result.check.estimate, result.check.exact, strict=True):
        assert (estimate, expected) == pytest.approx((result[head].importance, exact[head].importance), abs=1e-9)
    assert result.check.correlation == pytest.approx(np.corrcoef(result.check.estimate, result.check.exact)[0, 1])


def _step(index: int, mean: Tensor, step: float) -> Any:
    def edit(z: Tensor) -> Tensor:
        moved = z.clone()
        moved[:, index] += step * (mean - z[:, index])
        return moved

    return edit


# The result.


def test_importance_intervals_and_layer_differences_are_consistent() -> None:
    model = character_model(MODELS["decoder"])
    result = importance(model, TEXTS * 5)
    sums, _ = result.accumulator.bucket_sums_and_counts("importance")
    low, high = result.interval
    assert ((low <= result.mean) & (result.mean <= high)).all()
    for index, address in enumerate(result.addresses):
        peers = [i for i, other in enumerate(result.addresses) if other.layer == address.layer and i != index]
        assert result[address].above_layer == pytest.approx(result.mean[index] - result.mean[peers].mean(), abs=1e-12)
        assert result[address].above_low <= result[address].above_layer <= result[address].above_high
    assert result.ranked[0] == result.addresses[int(result.mean.argmax())]
    assert [row[0] for row in result.table_rows()] == list(map(str, result.ranked))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["heads"][3] == {**data["heads"][3], "head": "0.3", "importance": pytest.approx(result.mean[3])}
    assert (data["ranking"], data["ablation"], data["texts"], sums.shape) == ("ablation", "mean", 20, (256, 8))
    alone = importance(model, TEXTS, heads="1.1").to_dict()["heads"][0]
    assert alone["above_layer"] is None


def test_importance_reports_progress() -> None:
    updates: list[tuple[str, int, int | None]] = []
    importance(character_model(MODELS["decoder"]), TEXTS, batch_tokens=90, progress=lambda *now: updates.append(now))
    assert updates[-1] == ("head importance", 4, 4)
    assert len(updates) > 1


def test_importance_invalid_arguments_raise() -> None:
    decoder, encoder = character_model(MODELS["decoder"]), character_model(HEADLESS)
    for model, options, message in (
        (decoder, {"ranking": "magic"}, "ranking='magic': unknown"),
        (decoder, {"ablation": "magic"}, "mean, resample, zero"),
        (decoder, {"metric": "first"}, "last token of each text"),
        (decoder, {"heads": "7.1"}, "no such head"),
        (decoder, {"batch_tokens": 0}, "must be at least 1"),
        (decoder, {"ablation": "resample", "corpus": "the cat"}, "only one"),
        (decoder, {"corpus": "t"}, "at least 2 tokens"),
        (encoder, {"metric": "last"}, "needs a decoder"),
        (encoder, {"ranking": "gradient"}, "has gradient 0"),
        (character_model(MODELS["encoder-decoder"]), {}, "needs pairs"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            importance(model, **({"corpus": TEXTS} | options))  # pyright: ignore
    with pytest.raises(HeadwiseError, match=r"head: 0\.9 was not measured"):
        importance(decoder, TEXTS)["0.9"]
    with pytest.raises(HeadwiseError, match="different measurements"):
        importance(decoder, TEXTS).merge(importance(decoder, TEXTS, ablation="zero"))
