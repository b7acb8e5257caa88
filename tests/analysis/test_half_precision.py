"""Metrics of models in float16 and bfloat16, compared with the same rounded weights in float32. The bound of a metric is a
number of rounding errors of the dtype (`UNITS` times eps) times its size: 1 for shares, its value for norms and counts.
Argmax metrics change abruptly if two weights are nearly equal, so only the pattern of finite values is compared."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.head_output_scores import output_shares, token_effects, value_weighted_map
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.attribution.qk_norm_rotary import infer_qk_transform
from headwise.errors import HeadwiseError
from headwise.text.build_tokenizers import byte_tokenizer
from tests.attached.models import BY_NAME
from tests.contract.layers import MODELS, randomize

TEXTS = ["The old man saw a dog. The old man saw a cat.", "To be or not to be, that is the question.", "a b c d e f g"]
IDS = list(range(40, 60))
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
UNITS = 16
JUMPS = ("hits", "argmax")


def native() -> Any:
    model = hw.Transformer(replace(MODELS["decoder, rotary"], vocab=257, context=128)).eval()
    randomize(model)
    return model


def attached() -> Any:
    case = BY_NAME["llama"]
    return replace(case, sizes=case.sizes | {"vocab_size": 257, "max_position_embeddings": 128}).build()


@pytest.fixture(scope="module", params=[f"{kind} {dtype}" for kind in ("native", "attached") for dtype in HALVES])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, float]:
    """A model in half precision, a model with the same weights in float32, and eps of the half precision."""
    kind, name = request.param.split()
    half = (native() if kind == "native" else attached()).to(HALVES[name])
    models = [half, copy.deepcopy(half).float()]
    if kind == "attached":
        models = [hw.attach(model) for model in models]
    for model in models:
        model.tokenizer = byte_tokenizer()
    return models[0], models[1], torch.finfo(HALVES[name]).eps


def test_profile_in_half_precision_equals_float32(pair: tuple[Any, Any, float]) -> None:
    half, full, eps = pair
    half_result, full_result = hw.profile(half, TEXTS), hw.profile(full, TEXTS)
    for name in full_result.accumulator.fields:
        got, want = half_result.accumulator.mean(name), full_result.accumulator.mean(name)
        assert (np.isfinite(got) == np.isfinite(want)).all(), name
        if not any(jump in name for jump in JUMPS):
            bound = UNITS * eps * np.maximum(1, np.abs(np.nan_to_num(want)))
            assert (np.abs(np.nan_to_num(got) - np.nan_to_num(want)) <= bound).all(), name


@pytest.mark.parametrize("ranking", ["ablation", "gradient", "attribution"])
def test_importance_in_half_precision_equals_float32(pair: tuple[Any, Any, float], ranking: Any) -> None:
    half, full, eps = pair
    half_result, full_result = (hw.importance(model, TEXTS, ranking=ranking, check_heads=0) for model in (half, full))
    # nats per token, of a loss of about 6
    np.testing.assert_allclose(half_result.mean, full_result.mean, rtol=0, atol=UNITS * eps)
    if ranking == "ablation":
        assert half_result.clean_loss == pytest.approx(full_result.clean_loss, abs=UNITS * eps)


def test_loss_in_half_precision_is_that_of_the_logits_in_float64(pair: tuple[Any, Any, float]) -> None:
    """Rounded to bfloat16, a loss of 6 nats is off by up to 0.016."""
    half, text = pair[0], TEXTS[0]
    ids = torch.tensor([half.tokenizer.encode(text)])
    with torch.no_grad():
        logits, hidden = half(ids)[0, :-1].double(), half(ids, hidden=True)[0, :-1]
        summed = half.output.cross_entropy(hidden, ids[0, 1:], total=1)
    want = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert hw.importance(half, [text]).clean_loss == pytest.approx(float(want), abs=1e-5)
    assert float(summed) == pytest.approx(float(want) * len(logits), rel=1e-5)


@pytest.mark.parametrize("relative_to_mean", [False, True])
def test_explain_in_half_precision_equals_float32(pair: tuple[Any, Any, float], relative_to_mean: bool) -> None:
    half, full, eps = pair
    for head in half.spec.head_addresses:
        half_result, full_result = (
            hw.explain(model, IDS, head, query=18, key=5, relative_to_mean=relative_to_mean) for model in (half, full)
        )
        assert half_result.is_complete, (head, half_result.relative_error, half_result.rounding)
        with hw.record(full, head) as recording, torch.no_grad():
            full(torch.tensor([IDS]))
        call = recording[head].only_call
        size = float(call.q[0, 18].norm() * call.k[0].norm(dim=1).max())  # a score of this size is rounded
        largest = max(size, float(full_result.pair_scores.abs().max()))
        assert (half_result.pair_scores - full_result.pair_scores).abs().max() <= UNITS * eps * largest, head
        assert half_result.score == pytest.approx(full_result.score, abs=UNITS * eps * largest), head


def test_attribution_in_half_precision_adds_up(pair: tuple[Any, Any, float]) -> None:
    half, full, eps = pair
    half_result, full_result = logit_attribution(half, IDS, 33), logit_attribution(full, IDS, 33)
    assert half_result.is_complete
    assert full_result.tolerance < half_result.tolerance
    sizes = max(map(abs, full_result.parts.values()))
    for name, part in full_result.parts.items():
        assert half_result.parts[name] == pytest.approx(part, abs=UNITS * eps * sizes), name


def test_output_shares_in_half_precision_equal_float32(pair: tuple[Any, Any, float]) -> None:
    half, full, eps = pair
    half_result, full_result = output_shares(half, TEXTS), output_shares(full, TEXTS)
    for head, want in full_result.items():
        assert half_result[head].norm_fraction == pytest.approx(want.norm_fraction, abs=UNITS * eps)
    head = str(half.spec.head_addresses[-1])
    weighted = [value_weighted_map(model, TEXTS[2], head).weighted for model in (half, full)]
    assert (weighted[0] - weighted[1]).abs().max() <= UNITS * eps
    assert token_effects(half, head, [40], k=2)[0].promotes
    assert half.heads[head].OV.singular_values().dtype == torch.float32
    a, b = (model.heads[head].OV.singular_values() for model in (half, full))
    assert torch.equal(a, b)  # the same values, computed in the same way


def projections(bias: float) -> dict[str, torch.Tensor]:
    """Queries of 3 heads and keys of 2, (heads, T=2, d=4), with a bias on channels 1 and 3: the pair that rotates slowest."""
    generator = torch.Generator().manual_seed(0)
    values = {
        projection: torch.randn(heads, 2, 4, generator=generator, dtype=torch.double)
        for projection, heads in (("q", 3), ("k", 2))
    }
    return {projection: x + bias * torch.tensor([0.0, 1.0, 0.0, 1.0]) for projection, x in values.items()}


@pytest.mark.parametrize("name", HALVES)
def test_infer_qk_transform_under_large_biases_finds_the_rotation(name: str) -> None:
    """The rotation of the small channels is below the tolerance of the largest, so a plain factor would pass for it."""
    before, dtype = projections(100.0), HALVES[name]
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01]], dtype=torch.double)  # (T, pairs)
    score_inputs = {}
    for projection, x in before.items():
        first, second = x[..., :2], x[..., 2:]
        rotated = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        score_inputs[projection] = torch.cat(rotated, -1).to(dtype).double()
    transform = infer_qk_transform(
        SimpleNamespace(hook_point=SimpleNamespace(address="0")), before, score_inputs, dtype
    )
    assert transform.layout == "half"
    assert transform.cos is not None
    # computed from values of 1 next to 100
    assert float((transform.cos[1] - angles[1].cos()).abs().max()) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", HALVES)
def test_infer_qk_transform_of_something_else_raises(name: str) -> None:
    before = projections(0.0)
    score_inputs = {projection: x.tanh().to(HALVES[name]).double() for projection, x in before.items()}
    with pytest.raises(HeadwiseError, match="not a combination of QK norm"):
        infer_qk_transform(SimpleNamespace(hook_point=SimpleNamespace(address="0")), before, score_inputs, HALVES[name])


@pytest.mark.parametrize("kind", ["native", "attached"])
def test_profile_of_large_float16_activations_is_finite(kind: str) -> None:
    """Values of some hundreds: their squares and the norms of head outputs exceed the float16 maximum of 65,504."""
    model: Any = native() if kind == "native" else attached()
    with torch.no_grad():
        if kind == "native":
            for layer in model.attention_layers():
                layer.qkv.weight_by_head("v").mul_(300)
        else:
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(300)
    model = model.half()
    model = model if kind == "native" else hw.attach(model)
    model.tokenizer = byte_tokenizer()
    with hw.record(model, "*", tensors="v") as recording, torch.no_grad():
        model(torch.tensor([IDS]))
    largest = max(float(head.v.abs().max()) for head in recording)
    assert 256 < largest < 65504  # squares overflow, the values themselves do not
    profile = hw.profile(model, TEXTS)
    for name in ("output norm", "output share", "local value-weighted", "entropy"):
        assert np.isfinite(profile.accumulator.mean(name)).all(), name
    assert (profile.accumulator.mean("output norm") > 256).any()
    assert np.isfinite(hw.importance(model, TEXTS).mean).all()
