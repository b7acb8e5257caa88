"""Llamas in GGUF: whole ones as `llama`, cut ones as `deci`, which counts heads and key heads by layer."""

from typing import Any

import torch
from torch import Tensor

from headwise.exporters.gguf_writer import GgufFile
from headwise.exporters.pad_head_groups import PaddedLayer, pad_head_groups
from headwise.model import Transformer
from headwise.spec import ModelSpec


def gguf_architecture(model: Transformer) -> str:
    """`llama`, or `deci` where heads are gone or means folded in."""
    is_pruned = bool(model.spec.kept_heads) or any(layer.b_O is not None for layer in model.attention_layers())
    return "deci" if is_pruned else "llama"


def write_llama(model: Transformer, store: GgufFile, name: str) -> list[str]:
    """Sizes and tensors; what was done about the rest."""
    spec = model.spec
    layers, constant_biases = pad_head_groups(model)
    _write_sizes(store, spec, name, layers)
    store.add_tensor("token_embd.weight", model.embed.tokens.weight, is_vocab_table=True)
    blocks: list[Any] = list(model.blocks)
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        gguf_prefix = f"blk.{i}."
        if layer.heads:
            store.add_tensor(f"{gguf_prefix}attn_norm.weight", block.norm_attention.weight, keep_float32=True)
            _write_heads(store, spec, gguf_prefix, layer)
        store.add_tensor(f"{gguf_prefix}ffn_norm.weight", block.norm_mlp.weight, keep_float32=True)
        biases: dict[str, Tensor] = {"down": constant_biases[i]} if i in constant_biases else {}
        for part in ("gate", "up", "down"):
            linear = getattr(block.mlp, part)
            store.add_tensor(f"{gguf_prefix}ffn_{part}.weight", linear.weight)
            if linear.bias is not None:
                biases[part] = linear.bias + biases[part] if part in biases else linear.bias
        for part, bias in biases.items():
            store.add_tensor(f"{gguf_prefix}ffn_{part}.bias", bias, keep_float32=True)
    norm: Any = model.norm
    store.add_tensor("output_norm.weight", norm.weight, keep_float32=True)
    if not spec.tied:
        assert model.output is not None
        store.add_tensor("output.weight", model.output.vocabulary.weight, is_vocab_table=True)
    if (factors := _rope_factors(spec)) is not None:
        store.add_tensor("rope_freqs.weight", factors, keep_float32=True)
    zero_heads, headless_layers = (
        sum(layer.zero_heads for layer in layers),
        [i for i, layer in enumerate(layers) if not layer.heads],
    )
    notes = [f"{zero_heads} heads of zeros make groups even"] if zero_heads else []
    notes += [f"layers {', '.join(map(str, headless_layers))} have no attention"] if headless_layers else []
    notes += (
        [f"what {len(constant_biases)} emptied layers wrote is in the bias of the MLP before"]
        if constant_biases
        else []
    )
    return notes


def _write_heads(store: GgufFile, spec: ModelSpec, gguf_prefix: str, layer: PaddedLayer) -> None:
    assert layer.q is not None
    assert layer.k is not None
    assert layer.v is not None
    assert layer.o is not None
    factor = query_scale(spec)
    store.add_tensor(f"{gguf_prefix}attn_q.weight", _permute_rotary(layer.q * factor, spec))
    store.add_tensor(f"{gguf_prefix}attn_k.weight", _permute_rotary(layer.k, spec))
    store.add_tensor(f"{gguf_prefix}attn_v.weight", layer.v)
    store.add_tensor(f"{gguf_prefix}attn_output.weight", layer.o)
    for projection, bias in layer.biases.items():
        rows = _permute_rotary(bias * factor if projection == "q" else bias, spec) if projection in "qk" else bias
        store.add_tensor(
            f"{gguf_prefix}attn_{'output' if projection == 'o' else projection}.bias", rows, keep_float32=True
        )


def query_scale(spec: ModelSpec) -> float:
    """llama.cpp divides scores by √d; another scale is a factor of q."""
    attention = spec.attention
    return 1.0 if attention.scale is None else attention.scale * attention.head_dim**0.5


def _write_sizes(store: GgufFile, spec: ModelSpec, name: str, layers: list[PaddedLayer]) -> None:
    attention, writer = spec.attention, store.writer
    rotary = attention.rotary
    assert rotary is not None
    by_layer = name == "deci"
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length([spec.mlp_width] * spec.layers if by_layer else spec.mlp_width)
    writer.add_head_count([layer.heads for layer in layers] if by_layer else attention.heads)
    writer.add_head_count_kv([layer.kv_heads for layer in layers] if by_layer else attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.value_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(rotary.theta)
    writer.add_vocab_size(spec.vocab)
    if rotary.scaling is not None and rotary.scaling.kind == "linear":
        writer.add_rope_scaling_type(store.package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary.scaling.factor)


def _permute_rotary(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Rows of q or k in the order in which llama.cpp turns them: channels that turn together stand together."""
    rotary = spec.attention.rotary
    assert rotary is not None
    if rotary.layout == "interleaved":
        return rows
    return rows.unflatten(0, (-1, 2, spec.attention.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _rope_factors(spec: ModelSpec) -> Tensor | None:
    """Llama 3's stretching, a factor for each frequency."""
    rotary = spec.attention.rotary
    assert rotary is not None
    scaling = rotary.scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    pairs = torch.arange(spec.attention.head_dim // 2, dtype=torch.double)
    rotations = scaling.original_context * rotary.theta ** (-pairs / len(pairs)) / (2 * torch.pi)
    blend = ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return 1 / ((1 - blend) / scaling.factor + blend)
