"""Shared helpers of layer and model tests: variants with random weights, and pruning of state dicts by slicing."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.heads import MultiHeadAttention
from headwise.kernels import BACKENDS, Mask, causal
from headwise.model import ModelProtocol, Transformer
from headwise.spec import AttentionSpec, Latent, LayerAddress, ModelSpec, QKNorm, QueryScaling, Rotary, RotaryScaling

# All sizes are different. head_dim is even, for rotary positions.
B, T, S, WIDTH, HEADS, HEAD_DIM = 2, 5, 7, 20, 4, 6
PLAIN = AttentionSpec(width=WIDTH, heads=HEADS, head_dim=HEAD_DIM)
LATENT_ROTARY = Rotary(layout="interleaved", dims=2)

LAYERS: dict[str, AttentionSpec] = {
    "plain": PLAIN,
    "biases": replace(PLAIN, bias=True, out_bias=True),
    "grouped-query": replace(PLAIN, kv_heads=2, bias=True),
    "multi-query": replace(PLAIN, kv_heads=1),
    "wide values": replace(PLAIN, value_dim=11),
    "narrow values": replace(PLAIN, value_dim=3),
    "latent": replace(PLAIN, value_dim=5, latent=Latent(7, rotary_dims=2), rotary=LATENT_ROTARY, out_bias=True),
    "cut, latent": replace(
        PLAIN, kept_heads=(0, 3), bias=True, value_dim=5, latent=Latent(7, 2, query_rank=3), rotary=LATENT_ROTARY
    ),
    "sink": replace(PLAIN, softmax="sink"),
    "off by one": replace(PLAIN, softmax="off_by_one"),
    "softcap": replace(PLAIN, softcap=0.8),
    "own scale": replace(PLAIN, scale=1.0),
    "alibi": replace(PLAIN, alibi=True),
    "buckets": replace(PLAIN, t5_buckets=8),
    "rotary, half": replace(PLAIN, rotary=Rotary()),
    "rotary, interleaved": replace(PLAIN, rotary=Rotary(layout="interleaved")),
    "rotary, partial": replace(PLAIN, rotary=Rotary(dims=4)),
    "window": replace(PLAIN, window=2),
    "gated": replace(PLAIN, gated=True),
    "QK norm": replace(PLAIN, qk_norm=QKNorm(), rotary=Rotary(), kv_heads=2),
    "QK norm, layer, per head": replace(
        PLAIN, qk_norm=QKNorm("layer", weights="per_head", bias=True), rotary=Rotary(dims=4), kv_heads=2, bias=True
    ),
    "QK norm, after rotary": replace(PLAIN, qk_norm=QKNorm("rms_plus_one", after_rotary=True), rotary=Rotary()),
    "QK norm, no weights": replace(PLAIN, qk_norm=QKNorm(weights="none", eps=0.1)),
    "QK norm, width": replace(PLAIN, qk_norm=QKNorm(over="width"), rotary=Rotary(), kv_heads=2, bias=True),
    "gate per head": replace(PLAIN, output_gate="head"),
    "gate per channel": replace(PLAIN, output_gate="channel", bias=True, value_dim=3, kv_heads=2),
    "query scaling": replace(PLAIN, query_scaling=QueryScaling(0.5, 2, 1)),
    "yarn, query scaling": replace(
        PLAIN, rotary=Rotary(scaling=RotaryScaling("yarn", 4.0, original_context=3)), query_scaling=QueryScaling(0.5, 2)
    ),
    "slice": replace(PLAIN, head_input="slice", bias=True),
    "cross": replace(PLAIN, kv_width=13, bias=True, out_bias=True),
    "cut": replace(PLAIN, kept_heads=(0, 3), bias=True, out_bias=True),
    "cut, alibi": replace(PLAIN, kept_heads=(0, 3), alibi=True),
    "cut, buckets": replace(PLAIN, kept_heads=(0, 3), t5_buckets=8),
    "cut, slice": replace(PLAIN, kept_heads=(0, 3), head_input="slice"),
    "cut, uneven groups": replace(PLAIN, kept_heads=(0, 2, 3), kv_heads=2, bias=True),
    "cut, QK norm per head": replace(PLAIN, kept_heads=(0, 3), kv_heads=2, qk_norm=QKNorm(weights="per_head")),
    "cut, QK norm width": replace(
        PLAIN, kept_heads=(0, 1), kv_heads=2, bias=True, qk_norm=QKNorm("layer", "width"), output_gate="channel"
    ),
    "cut, QK norm over all KV heads": replace(
        PLAIN, kv_heads=2, qk_norm=QKNorm(over="width"), kept_heads=(0, 3), output_gate="head"
    ),
    "cut, no head left": replace(PLAIN, kept_heads=(), bias=True, out_bias=True, softmax="sink", gated=True),
}

SMALL = AttentionSpec(width=12, heads=4, head_dim=6, bias=True, out_bias=True)
GROUPED = AttentionSpec(width=12, heads=4, kv_heads=2, head_dim=6, rotary=Rotary())
SIZES: dict[str, Any] = {"vocab": 17, "context": 19, "layers": 2, "mlp_width": 23}

MODELS: dict[str, ModelSpec] = {
    "decoder": ModelSpec(**SIZES, attention=SMALL),
    "decoder, rotary": ModelSpec(
        **SIZES, attention=GROUPED, norm="rms", activation="swiglu", mlp_bias=False, positions="none", tied=False
    ),
    "decoder, parallel": ModelSpec(
        **SIZES, attention=replace(SMALL, alibi=True), norm_placement="parallel", positions="none"
    ),
    "decoder, buckets": ModelSpec(**SIZES, attention=replace(SMALL, t5_buckets=8), positions="none"),
    "decoder, windows": ModelSpec(**SIZES, attention=GROUPED, positions="none", windows=(None, 3)),
    "decoder, QK norm": ModelSpec(
        **SIZES,
        attention=replace(GROUPED, qk_norm=QKNorm("rms_plus_one"), query_scaling=QueryScaling(0.5, 3), softcap=None),
        norm="rms_plus_one",
        norm_placement="sandwich",
        activation="geglu_tanh",
        mlp_bias=False,
        positions="none",
        windows=(3, None),
        rotaries=(Rotary(), Rotary(theta=500.0, scaling=RotaryScaling("yarn", 4.0, original_context=3))),
        logit_softcap=3.0,
    ),
    "decoder, gates": ModelSpec(
        **SIZES,
        attention=replace(GROUPED, qk_norm=QKNorm(over="width"), output_gate="channel", bias=True),
        norm="rms",
        norm_placement="output",
        activation="swiglu",
        mlp_bias=False,
        positions="none",
        rotaries=(Rotary(), None),
        tied=False,
    ),
    "decoder, cut": ModelSpec(**SIZES, attention=GROUPED, positions="none", kept_heads={"0": (0, 3), "1": ()}),
    "encoder": ModelSpec(
        **SIZES,
        attention=SMALL,
        kind="encoder",
        norm_placement="post",
        embed_norm=True,
        token_types=2,
        pooler=True,
        output="mlm",
    ),
    "encoder-decoder": ModelSpec(**SIZES, attention=SMALL, kind="encoder-decoder", positions="sinusoidal"),
}


def assert_equal(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def backends_for(spec: AttentionSpec) -> list[str]:
    """Return every backend that supports the layer. The fused kernel does not support a softcap."""
    return [name for name in ("auto", *BACKENDS) if name != "fused" or spec.softcap is None]


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Set random values in all parameters, including biases, norms, gates and sinks, whose defaults would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def make_layer(spec: AttentionSpec, seed: int = 0, **options: Any) -> MultiHeadAttention:
    layer = MultiHeadAttention(spec, **options).double().eval()
    randomize(layer, seed)
    return layer


def make_model(spec: ModelSpec, seed: int = 0, **options: Any) -> Transformer:
    model = Transformer(spec, **options).double().eval()
    randomize(model, seed)
    return model


def make_varied_model(spec: ModelSpec, seed: int = 0) -> Transformer:
    """Return an untied model with sharp attention, whose greedy text does not repeat itself early."""
    model = make_model(replace(spec, tied=False), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv" in name or "output_projection" in name or "tokens" in name:
                parameter.mul_(3)
            elif "norm" in name and name.endswith("bias"):
                parameter.zero_()
    return model


def random_tensor(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_inputs(spec: AttentionSpec) -> tuple[tuple[Tensor, ...], Mask | None]:
    """Return the inputs of a layer and its mask: causal, or a source and no mask for cross-attention."""
    x = random_tensor(B, T, spec.width)
    if spec.kv_width != spec.width:
        return (x, random_tensor(B, S, spec.kv_width, seed=2)), None
    return (x,), causal()


def call_layer(layer: MultiHeadAttention, **options: Any) -> Tensor:
    inputs, mask = layer_inputs(layer.spec)
    return layer(*inputs, mask=mask, **options)


def token_ids(batch: int, length: int, vocab: int = 17, seed: int = 3) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def model_inputs(spec: ModelSpec) -> dict[str, Tensor]:
    inputs = {"ids": token_ids(B, T)}
    if spec.kind == "encoder-decoder":
        inputs["source"] = token_ids(B, S, seed=4)
    return inputs


def run_model(model: ModelProtocol, **options: Any) -> Tensor:
    return model(**model_inputs(model.spec), **options)


# Pruning by slicing a saved state dict.


def prune_layer_state(state: dict[str, Tensor], before: AttentionSpec, after: AttentionSpec, prefix: str = "") -> None:
    """Remove heads that are not in `after` from the saved tensors of a layer."""
    heads = [before.head_ids.index(head) for head in after.head_ids]
    kv_heads = [before.kv_head_ids.index(head) for head in after.kv_head_ids]
    rows = {"q": heads, "k": kv_heads, "v": kv_heads, "kv": heads}  # "kv": only with latents
    for projection, indices in rows.items():
        for kind in ("weight", "bias"):
            key = f"{prefix}qkv.{projection}.{kind}"
            if key not in state:
                continue
            if before.qk_norm is not None and before.qk_norm.over == "width" and projection != "v":
                keep_rows(state, key, f"{prefix}{projection}_norm.pruned_{kind}", before, after)
            state[key] = state[key][indices]
    state[f"{prefix}output_projection.weight"] = state[f"{prefix}output_projection.weight"][:, heads]
    per_head = before.qk_norm is not None and before.qk_norm.weights == "per_head"
    for projection, indices in (("q", heads), ("k", kv_heads)) if per_head else ():
        for kind in ("weight", "bias"):
            key = f"{prefix}{projection}_norm.{kind}"
            if key in state:
                state[key] = state[key][indices]
    for name in ("sink", "gate", "position_bias", "output_gate.weight", "output_gate.bias"):
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = state[f"{prefix}{name}"][heads]


def keep_rows(state: dict[str, Tensor], key: str, pruned_key: str, before: AttentionSpec, after: AttentionSpec) -> None:
    """Keep the rows of pruned heads, in the order of the heads, which a norm over all heads reads."""
    total, present, remaining = (before.heads, before.head_ids, after.head_ids)
    if ".k." in key:
        total, present, remaining = (before.kv_heads, before.kv_head_ids, after.kv_head_ids)
    earlier = [number for number in range(total) if number not in present]
    rows = dict(zip(present, state[key], strict=True)) | dict(zip(earlier, state.get(pruned_key, ()), strict=True))
    if len(remaining) < total:
        state[pruned_key] = torch.stack([rows[number] for number in range(total) if number not in remaining])


def state_prefix(address: LayerAddress) -> str:
    """Return the prefix of an attention layer's tensors in the state dict of a model."""
    stack = "encoder_blocks" if address.stack == "enc" else "blocks"
    return f"{stack}.{address.layer}.{'cross' if address.stack == 'cross' else 'attention'}."


def prune_by_slicing(model: Transformer, pattern: str) -> Transformer:
    """Return the pruned model, built by slicing."""
    after = model.spec.without(pattern)
    state = dict(model.state_dict())
    for address in model.spec.layer_addresses:
        prune_layer_state(state, model.spec.attention_at(address), after.attention_at(address), state_prefix(address))
    smaller = Transformer(after).double().eval()
    smaller.load_state_dict(state)
    return smaller
