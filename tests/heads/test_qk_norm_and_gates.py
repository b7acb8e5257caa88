"""QK norm, output gates and query scaling: a loop over heads in plain torch is the oracle of every kernel."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.cache import DynamicCache
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.spec import AttentionSpec, QKNorm, QueryScaling, Rotary
from tests.contract.layers import HEADS, PLAIN, WIDTH, assert_equal, backends_for, make_layer, random_tensor

GROUPED = replace(PLAIN, kv_heads=2, bias=True)
T = 7


def normalize(x: Tensor, norm: QKNorm, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalize the last axis."""
    x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if gain is not None:
        x = x * (gain + (norm.kind == "rms_plus_one"))
    return x if bias is None else x + bias


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate (T, d) as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)
    rotated = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), -1)


def oracle_tensors(layer: MultiHeadAttention, x: Tensor, projection: str) -> list[Tensor]:
    """Return queries or keys of each head of one text (T, D) after norm, rotation and scaling."""
    spec = layer.spec
    weight, bias = layer.qkv.weight_by_head(projection), layer.qkv.bias_by_head(projection)
    heads = [x @ weight[i].T + (0 if bias is None else bias[i]) for i in range(len(weight))]
    module: Any = layer.q_norm if projection == "q" else layer.k_norm

    def norm(heads: list[Tensor]) -> list[Tensor]:
        if spec.qk_norm is None:
            return heads
        gain, offset = module.weight, module.bias
        if spec.qk_norm.over == "width":
            flat = [None if value is None else value.flatten() for value in (gain, offset)]
            return list(normalize(torch.cat(heads, -1), spec.qk_norm, *flat).split(spec.head_dim, -1))
        of_head = [
            [None if v is None else v[i] if v.ndim == 2 else v for v in (gain, offset)] for i in range(len(heads))
        ]
        return [normalize(head, spec.qk_norm, *of_head[i]) for i, head in enumerate(heads)]

    if spec.qk_norm is None or not spec.qk_norm.after_rotary:
        heads = norm(heads)
    if spec.rotary is not None:
        heads = [rotate(head, spec.rotary.theta) for head in heads]
    if spec.qk_norm is not None and spec.qk_norm.after_rotary:
        heads = norm(heads)
    scaling = spec.query_scaling
    if scaling is not None and projection == "q":
        steps = torch.tensor([(position + scaling.offset) // scaling.context for position in range(len(x))])
        heads = [head * (1 + scaling.beta * torch.log(1.0 + steps.double()))[:, None] for head in heads]
    return heads


def oracle(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    """Compute a causal layer head by head: (B, T, D) → (B, T, D)."""
    spec, out = layer.spec, []
    for text in x:
        q, k = oracle_tensors(layer, text, "q"), oracle_tensors(layer, text, "k")
        total = torch.zeros_like(text) if layer.b_O is None else layer.b_O.expand_as(text)
        for index, kv_index in enumerate(spec.kv_of_head):
            b_v = layer.qkv.bias_by_head("v")
            v = text @ layer.qkv.weight_by_head("v")[kv_index].T + (0 if b_v is None else b_v[kv_index])
            scores = q[index] @ k[kv_index].T / spec.head_dim**0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            z = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
            if layer.output_gate is not None:
                gate_bias = layer.output_gate.bias
                logits = text @ layer.output_gate.weight[index].T + (0 if gate_bias is None else gate_bias[index])
                z = z / (1 + torch.exp(-logits))
            total = total + z @ layer.hook_point.W_O[index]
        out.append(total)
    return torch.stack(out)


NORMS = [
    QKNorm(kind, over, weights, bias, after_rotary, eps=1e-2)
    for kind, over, weights, bias, after_rotary in product(
        ("rms", "rms_plus_one", "layer"),
        ("head", "width"),
        ("shared", "per_head", "none"),
        (False, True),
        (False, True),
    )
    if not (bias and weights == "none") and not (over == "width" and (weights == "shared" or after_rotary))
]
SPECS = {
    "norm, rotary": replace(GROUPED, qk_norm=QKNorm(eps=1e-2), rotary=Rotary(theta=50.0)),
    "layer norm over the width": replace(GROUPED, qk_norm=QKNorm("layer", "width", bias=True, eps=1e-2)),
    "gate per head": replace(GROUPED, output_gate="head"),
    "gate per channel, narrow values": replace(GROUPED, output_gate="channel", value_dim=3),
    "query scaling": replace(GROUPED, query_scaling=QueryScaling(0.7, 2, 1), rotary=Rotary(theta=50.0)),
    "all of them": replace(
        GROUPED,
        qk_norm=QKNorm("rms_plus_one", after_rotary=True),
        output_gate="channel",
        query_scaling=QueryScaling(0.7, 2),
        rotary=Rotary(theta=50.0),
    ),
}


@pytest.mark.parametrize("backend", backends_for(PLAIN))
@pytest.mark.parametrize("name", SPECS)
def test_layer_each_kernel_equals_loop_over_heads(name: str, backend: str) -> None:
    layer, x = make_layer(SPECS[name], backend=backend), random_tensor(2, T, WIDTH)
    expected = oracle(layer, x)
    out = layer(x, mask=hw.causal())
    # rotary angles are computed in float32, as in transformers
    assert_equal(out, expected, 1e-5 if SPECS[name].rotary else 1e-12)
    parameters = list(layer.parameters())
    grads = torch.autograd.grad(out.square().sum(), parameters)
    for grad, reference in zip(grads, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4 if SPECS[name].rotary else 1e-9)


@pytest.mark.parametrize("norm", [pytest.param(norm, marks=pytest.mark.slow) for norm in NORMS], ids=str)
def test_layer_each_norm_equals_loop_over_heads(norm: QKNorm) -> None:
    layer, x = make_layer(replace(GROUPED, qk_norm=norm, rotary=Rotary(theta=50.0))), random_tensor(2, T, WIDTH)
    assert_equal(layer(x, mask=hw.causal()), oracle(layer, x), 1e-5)


HALF_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
@pytest.mark.parametrize("name", ["layer norm over the width", "all of them"])
@torch.no_grad()
def test_layer_half_precision_equals_float64(name: str, dtype: torch.dtype) -> None:
    layer, x = make_layer(SPECS[name]), random_tensor(2, T, WIDTH)
    expected = layer(x, mask=hw.causal())
    out = layer.to(dtype)(x.to(dtype), mask=hw.causal())
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= HALF_TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_layer_step_by_step_with_cache_equals_one_call(name: str) -> None:
    layer, x = make_layer(SPECS[name]), random_tensor(2, T, WIDTH)
    cache = DynamicCache()
    steps = [layer(x[:, t : t + 1], mask=hw.causal(), cache=cache) for t in range(T)]
    assert_equal(torch.cat(steps, 1), layer(x, mask=hw.causal()), 1e-12)


@torch.no_grad()
def test_listener_sees_gated_z_and_its_gate() -> None:
    layer, x, calls = make_layer(SPECS["gate per channel, narrow values"]), random_tensor(2, T, WIDTH), []
    with layer.hook_point.listen(calls.append):
        out = layer(x)
    assert calls[0].token_gate.shape == (2, HEADS, T, 3)
    assert_equal(torch.einsum("bhte,hed->btd", calls[0].z, layer.hook_point.W_O), out)
    ungated = calls[0].maps() @ calls[0].v[:, list(layer.spec.kv_of_head)]
    assert_equal(calls[0].z, ungated * calls[0].token_gate)


@torch.no_grad()
def test_gate_per_head_scales_attention_weights() -> None:
    """The smallest gates: a bias of −40 in one head silences it, and +40 in the other heads leaves them as they are."""
    layer, x = make_layer(SPECS["gate per head"]), random_tensor(1, T, WIDTH)
    assert layer.output_gate is not None
    assert layer.output_gate.bias is not None
    layer.output_gate.weight.zero_()
    layer.output_gate.bias.fill_(40.0)
    layer.output_gate.bias[1] = -40.0
    gated = layer(x)
    plain = MultiHeadAttention(replace(layer.spec, output_gate=None)).double()
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("output_gate")})
    with plain.heads[1].silenced():
        assert_equal(gated, plain(x), 1e-12)


ERRORS = {
    "kind": (lambda: QKNorm(kind="batch"), "QKNorm kind='batch': unknown"),  # pyright: ignore[reportArgumentType]
    "bias": (lambda: QKNorm(weights="none", bias=True), "bias=True: needs gains"),
    "eps": (lambda: QKNorm(eps=-1.0), "eps=-1.0: must be at least 0"),
    "beta": (lambda: QueryScaling(-1.0, 8), "beta=-1.0: must be at least 0"),
    "context": (lambda: QueryScaling(1.0, 0), "context=0: must be at least 1"),
    "no object": (lambda: AttentionSpec(8, 2, qk_norm=True), "qk_norm=True: must be a QKNorm"),  # pyright: ignore
    "gate": (lambda: AttentionSpec(8, 2, output_gate="all"), "output_gate='all': unknown"),  # pyright: ignore
    "slice": (lambda: AttentionSpec(8, 2, head_input="slice", output_gate="head"), "a head reads only its own slice"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_spec_invalid_settings_raise(name: str) -> None:
    build, message = ERRORS[name]
    with pytest.raises(HeadwiseError, match=message):
        build()
