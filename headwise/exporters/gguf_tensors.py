"""Tensors of a model in a GGUF file: names, layout and data types for the architectures of llama.cpp.

Llama: a pruned model is written as `deci`, which has a head count per layer. llama.cpp requires groups of equal size (the
same number of heads per KV head), so smaller groups are padded with heads whose W_O is zero and whose output is therefore
zero. A layer without heads is written without attention; its output bias is added to the bias of the preceding MLP, because
both are added to the same residual stream. The first layer always has at least one (zero) head, because llama.cpp infers
the head size from it.

GPT-2, BERT and ModernBERT: all layers have the same number of heads, so pruned heads are stored as zeros in the full shape.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ArgumentError, MissingDependencyError, suggest_names
from headwise.heads import MultiHeadAttention
from headwise.kernels import sinusoidal
from headwise.model import Transformer
from headwise.spec import ModelSpec, Rotary, RotaryScaling
from headwise.weights.export import full_shape_state
from headwise.weights.families.gguf_gpt2_bert import MODERN_BERT_NAMES

GGUF_TYPES = ("f32", "f16", "q8_0", "q4_0")
QUANT_BLOCK = 32  # consecutive weights of a row that share a quantization scale
POOLING = ("mean", "cls", "none")
State = dict[str, Tensor]


class GgufFile:
    """A GGUF file being written. Sizes are set through `writer`, tensors through `add_tensor`."""

    def __init__(self, path: Path, architecture: str, dtype: str) -> None:
        try:
            import gguf
        except ImportError:
            raise MissingDependencyError(
                "the gguf package is required to write GGUF files. Run: pip install 'headwise[deploy]'"
            ) from None
        self.package: Any = gguf
        self.writer: Any = gguf.GGUFWriter(path, architecture)
        self.dtype, self.unquantized_tensors = dtype, 0

    def add_tensor(
        self, name: str, tensor: Tensor, *, keep_float32: bool = False, is_vocab_table: bool = False
    ) -> None:
        """Add a tensor. Norms and biases set `keep_float32`; an `is_vocab_table` has at least 8 bits per weight."""
        data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
        dtype = "f32" if keep_float32 else "q8_0" if is_vocab_table and self.dtype == "q4_0" else self.dtype
        if dtype.startswith("q") and data.shape[-1] % QUANT_BLOCK:
            self.unquantized_tensors += 1
            dtype = "f16"
        if dtype == "f32":
            self.writer.add_tensor(name, data)
        elif dtype == "f16":
            self.writer.add_tensor(name, data.astype(np.float16))
        else:
            quant_type = self.package.GGMLQuantizationType[dtype.upper()]
            self.writer.add_tensor(name, self.package.quants.quantize(data, quant_type), raw_dtype=quant_type)

    def close(self) -> None:
        """Write the file to disk and close it, even if writing fails."""
        try:
            self.writer.write_header_to_file()
            self.writer.write_kv_data_to_file()
            self.writer.write_tensors_to_file()
            self.writer.close()
        except BaseException:
            for file in self.writer.fout or ():
                with suppress(OSError):  # flushing the remaining data fails, too
                    file.close()
            raise


@dataclass(frozen=True)
class GQAPaddedLayer:
    """Weights of one attention layer, padded with zero heads. Rows of q and k are in the original order.

    Attributes:
        heads: Number of heads, with padding.
        kv_heads: Number of KV heads.
        q, k, v: Weights, (heads · d, D); None if the layer has no heads.
        o: Output weights, (D, heads · e); None if the layer has no heads.
        biases: Biases of q, k, v and o.
        zero_heads: Number of padding heads.
    """

    heads: int
    kv_heads: int
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    o: Tensor | None
    biases: dict[str, Tensor]
    zero_heads: int


def padded_layers_and_biases(model: Transformer) -> tuple[list[GQAPaddedLayer], dict[int, Tensor]]:
    """Return all padded layers, and the biases to add to the MLP of a layer because the next layer has no heads."""
    padded, constant_biases = [], {}
    for index, layer in enumerate(model.attention_layers()):
        bias = layer.b_O
        if layer.spec.head_ids:
            padded.append(_pad_kv_groups(layer))
        elif index == 0:
            padded.append(_zero_head_layer(layer, bias))
        else:
            padded.append(GQAPaddedLayer(0, 0, None, None, None, None, {}, 0))
            if bias is not None:
                constant_biases[index - 1] = bias.detach()
    return padded, constant_biases


def _pad_kv_groups(layer: MultiHeadAttention) -> GQAPaddedLayer:
    spec, qkv = layer.spec, layer.qkv
    groups: list[list[int]] = [[] for _ in spec.kv_head_ids]
    for index, group in enumerate(spec.kv_of_head):
        groups[group].append(index)
    group_size = max(map(len, groups))
    indices = [
        index for members in groups for index in (*members, *[-1] * (group_size - len(members)))
    ]  # −1: a zero head
    q, o = (
        qkv.weight_by_head("q").detach(),
        layer.output_projection.head_output_weights.detach(),
    )  # (H, d, D), (H, e, D)
    biases = {}
    if spec.bias:
        biases = {
            projection: bias.detach().flatten()
            for projection in "kv"
            if (bias := qkv.bias_by_head(projection)) is not None
        }
        q_bias = qkv.bias_by_head("q")
        assert q_bias is not None
        biases["q"] = _gather_heads(q_bias.detach(), indices).flatten()
    if layer.b_O is not None:
        biases["o"] = layer.b_O.detach()
    return GQAPaddedLayer(
        len(indices),
        len(groups),
        _gather_heads(q, indices).flatten(0, 1),
        qkv.weight_by_head("k").detach().flatten(0, 1),
        qkv.weight_by_head("v").detach().flatten(0, 1),
        _gather_heads(o, indices).flatten(0, 1).mT,
        biases,
        indices.count(-1),
    )


def _zero_head_layer(layer: MultiHeadAttention, out_bias: Tensor | None) -> GQAPaddedLayer:
    spec = layer.spec
    rows, width = torch.zeros(spec.head_dim, spec.width, dtype=torch.float32), spec.width
    biases = {} if out_bias is None else {"o": out_bias.detach()}
    if spec.bias:
        biases |= {projection: torch.zeros(spec.head_dim, dtype=torch.float32) for projection in "qkv"}
    return GQAPaddedLayer(1, 1, rows, rows, rows, torch.zeros(width, spec.value_dim, dtype=torch.float32), biases, 1)


def _gather_heads(x: Tensor, indices: list[int]) -> Tensor:
    """Reorder heads; index −1 gives a zero head: (H, …) → (len(indices), …)."""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[[index if index >= 0 else len(x) for index in indices]]


def llama_architecture_name(model: Transformer) -> str:
    """Return `deci` if the model is pruned or has output biases, else `llama`."""
    is_pruned = bool(model.spec.kept_heads) or any(layer.b_O is not None for layer in model.attention_layers())
    return "deci" if is_pruned else "llama"


def write_llama(model: Transformer, store: GgufFile, name: str) -> list[str]:
    """Write sizes and tensors of a Llama model. Returns notes."""
    spec = model.spec
    layers, constant_biases = padded_layers_and_biases(model)
    _write_llama_sizes(store, spec, name, layers)
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
    notes = [f"{zero_heads} zero heads pad KV groups to equal size"] if zero_heads else []
    notes += [f"layers {', '.join(map(str, headless_layers))} have no attention"] if headless_layers else []
    notes += (
        [f"the output biases of {len(constant_biases)} layers without heads are added to the bias of the preceding MLP"]
        if constant_biases
        else []
    )
    return notes


def _write_heads(store: GgufFile, spec: ModelSpec, gguf_prefix: str, layer: GQAPaddedLayer) -> None:
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
    """Return the factor to apply to q: llama.cpp divides scores by √d, so any other scale is folded into q."""
    attention = spec.attention
    return 1.0 if attention.scale is None else attention.scale * attention.head_dim**0.5


def _write_llama_sizes(store: GgufFile, spec: ModelSpec, name: str, layers: list[GQAPaddedLayer]) -> None:
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
    write_rotary_scaling(store, rotary)


def write_rotary_scaling(store: GgufFile, rotary: Rotary) -> None:
    """Write a rotary scaling that llama.cpp computes from metadata: linear, YaRN, and LongRoPE's factor of cosines."""
    scaling, writer = rotary.scaling, store.writer
    if scaling is None or scaling.kind == "llama3":  # llama3 is stored as a tensor
        return
    if scaling.kind == "linear":
        writer.add_rope_scaling_type(store.package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
        return
    writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
    if scaling.kind == "longrope":
        writer.add_rope_scaling_type(store.package.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(scaling.cos_sin_factor)
        return
    writer.add_rope_scaling_type(store.package.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling.factor)
    writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    default = RotaryScaling("yarn", scaling.factor).cos_sin_factor
    if scaling.cos_sin_factor == 1.0:
        writer.add_rope_scaling_yarn_log_mul(1.0)  # llama.cpp then divides its own factor out
    elif scaling.cos_sin_factor != default:
        writer.add_rope_scaling_attn_factors(scaling.cos_sin_factor / default)


def _permute_rotary(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Reorder rows of q or k for llama.cpp: channels that rotate together become adjacent."""
    rotary = spec.attention.rotary
    assert rotary is not None
    return rows if rotary.layout == "interleaved" else rotary_rows_for_engine(rows, spec.attention.head_dim)


def rotary_rows_for_engine(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of q or k from the half-split to the interleaved rotary layout: channels 0, d/2, 1, d/2 + 1 …"""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _rope_factors(spec: ModelSpec) -> Tensor | None:
    """Return Llama 3's rotary scaling as one factor per frequency."""
    rotary = spec.attention.rotary
    assert rotary is not None
    scaling = rotary.scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    pairs = torch.arange(spec.attention.head_dim // 2, dtype=torch.double)
    rotations = scaling.original_context * rotary.theta ** (-pairs / len(pairs)) / (2 * torch.pi)
    blend = ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return 1 / ((1 - blend) / scaling.factor + blend)


def write_gpt2(model: Transformer, store: GgufFile) -> list[str]:
    """Write sizes and tensors of a GPT-2 model. Returns notes."""
    spec, state = model.spec, full_shape_state(model)
    _write_sizes(store, spec)
    store.add_tensor("token_embd.weight", state["embed.tokens.weight"], is_vocab_table=True)
    store.add_tensor("position_embd.weight", _position_table(spec, state), keep_float32=True)
    for i in range(spec.layers):
        prefix, gguf_prefix = f"blocks.{i}.", f"blk.{i}."
        _write_norm(store, f"{gguf_prefix}attn_norm", state, f"{prefix}norm_attention")
        qkv = [_projection_rows(spec, state, f"{prefix}attention.", projection) for projection in "qkv"]
        store.add_tensor(f"{gguf_prefix}attn_qkv.weight", torch.cat([weight for weight, _ in qkv]))
        store.add_tensor(f"{gguf_prefix}attn_qkv.bias", torch.cat([bias for _, bias in qkv]), keep_float32=True)
        _write_output_and_mlp(store, spec, state, i)
        _write_norm(store, f"{gguf_prefix}ffn_norm", state, f"{prefix}norm_mlp")
    _write_norm(store, "output_norm", state, "norm")
    if not spec.tied:
        store.add_tensor("output.weight", state["output.vocabulary.weight"], is_vocab_table=True)
    return prune_notes(spec)


def write_bert(model: Transformer, store: GgufFile, pooling: str) -> list[str]:
    """Write sizes and tensors of an encoder; llama.cpp pools its hidden states by `pooling`. Returns notes."""
    spec, state = model.spec, full_shape_state(model)
    _write_sizes(store, spec)
    pooling_notes = write_pooling(store, pooling)
    store.add_tensor("token_embd.weight", state["embed.tokens.weight"], is_vocab_table=True)
    token_types = state["embed.types.weight"] if spec.token_types else torch.zeros(1, spec.width, dtype=torch.float32)
    store.writer.add_token_type_count(len(token_types))
    store.add_tensor("token_types.weight", token_types, keep_float32=True)
    store.add_tensor("position_embd.weight", _position_table(spec, state), keep_float32=True)
    _write_norm(store, "token_embd_norm", state, "embed.norm")
    for i in range(spec.layers):
        prefix, gguf_prefix = f"blocks.{i}.", f"blk.{i}."
        for projection in "qkv":
            weight, bias = _projection_rows(spec, state, f"{prefix}attention.", projection)
            store.add_tensor(f"{gguf_prefix}attn_{projection}.weight", weight)
            store.add_tensor(f"{gguf_prefix}attn_{projection}.bias", bias, keep_float32=True)
        _write_output_and_mlp(store, spec, state, i)
        _write_norm(store, f"{gguf_prefix}attn_output_norm", state, f"{prefix}norm_attention")
        _write_norm(store, f"{gguf_prefix}layer_output_norm", state, f"{prefix}norm_mlp")
    notes = ["the pooler is omitted: llama.cpp does not support it"] if spec.pooler else []
    notes += ["llama.cpp uses the first token type for all tokens"] if spec.token_types > 1 else []
    return [
        *prune_notes(spec),
        *pooling_notes,
        *notes,
        "llama.cpp computes GELU with tanh instead of erf, in 16 bits: hidden states differ in the third digit",
    ]


def write_pooling(store: GgufFile, pooling: str) -> list[str]:
    """Write how llama.cpp pools the hidden states of an encoder. Returns notes."""
    if pooling not in POOLING:
        raise ArgumentError(
            f"pooling={pooling!r}: must be one of {', '.join(POOLING)}; {suggest_names(pooling, POOLING)}"
        )
    store.writer.add_causal_attention(False)
    store.writer.add_pooling_type(store.package.PoolingType[pooling.upper()])
    return [f"pooling of hidden states into one vector: {pooling}"] if pooling != "none" else []


def encoder_windows_and_rotaries(spec: ModelSpec) -> list[tuple[int | None, Rotary | None]]:
    """Return the window and the rotary embedding of each layer."""
    attentions = [spec.attention_at(address) for address in spec.layer_addresses]
    return [(attention.window, attention.rotary) for attention in attentions]


def write_modern_bert(model: Transformer, store: GgufFile, pooling: str) -> list[str]:
    """Write sizes and tensors of a ModernBERT model. Returns notes."""
    spec, state = model.spec, full_shape_state(model)
    _write_sizes(store, spec)
    _write_windows(store, encoder_windows_and_rotaries(spec))
    if spec.activation == "swiglu":
        store.writer.add_string("modern-bert.hidden_activation", "silu")
    pooling_notes = write_pooling(store, pooling)
    for native, external in MODERN_BERT_NAMES.items():
        for i in range(spec.layers) if "{i}" in native else (0,):
            key = native.format(i=i)
            if key in state:  # the first layer has no norm before its attention
                weight = state[key].flatten(1) if "output_projection" in key else state[key]
                store.add_tensor(
                    external.format(i=i),
                    weight,
                    keep_float32="norm" in key,
                    is_vocab_table=key == "embed.tokens.weight",
                )
    for i in range(spec.layers):
        prefix = f"blocks.{i}."
        rows = [_projection_rows(spec, state, f"{prefix}attention.", projection)[0] for projection in "qkv"]
        store.add_tensor(f"blk.{i}.attn_qkv.weight", torch.cat(rows))
        up = [state[f"{prefix}mlp.{part}.weight"] for part in ("gate", "up")]
        store.add_tensor(f"blk.{i}.ffn_up.weight", torch.cat(up))
    note = "older releases of llama.cpp compute GELU with tanh, in 16 bits: hidden states differ in the third digit"
    return [*prune_notes(spec), *pooling_notes, *([note] if spec.activation == "geglu" else [])]


def _write_windows(store: GgufFile, layers: list[tuple[int | None, Rotary | None]]) -> None:
    """Write the window of ModernBERT, the layers that have it, and the theta of both kinds of layers."""
    has_window = [window is not None for window, _ in layers]
    theta = {window is not None: rotary.theta for window, rotary in layers if rotary is not None}
    store.writer.add_rope_scaling_type(store.package.RopeScalingType.NONE)
    store.writer.add_rope_freq_base(theta.get(False, theta.get(True)))
    window = next((window for window, _ in layers if window is not None), None)
    if window is None:
        return
    store.writer.add_rope_freq_base_swa(theta[True])
    store.writer.add_sliding_window(2 * (window - 1))  # keys on both sides
    periods = range(1, len(layers) + 1)
    patterns = [period for period in periods if has_window == [layer % period != 0 for layer in range(len(layers))]]
    store.writer.add_sliding_window_pattern(patterns[0] if patterns else has_window)


def _write_sizes(store: GgufFile, spec: ModelSpec) -> None:
    attention, writer = spec.attention, store.writer
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.mlp_width)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_layer_norm_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab)


def _write_output_and_mlp(store: GgufFile, spec: ModelSpec, state: State, i: int) -> None:
    """Write the output projection and the MLP of a layer."""
    prefix, gguf_prefix = f"blocks.{i}.", f"blk.{i}."
    store.add_tensor(
        f"{gguf_prefix}attn_output.weight", state[f"{prefix}attention.output_projection.weight"].flatten(1)
    )
    zero_bias = torch.zeros(spec.width, dtype=torch.float32)
    store.add_tensor(
        f"{gguf_prefix}attn_output.bias",
        state.get(f"{prefix}attention.output_projection.bias", zero_bias),
        keep_float32=True,
    )
    for part, size in (("up", spec.mlp_width), ("down", spec.width)):
        store.add_tensor(f"{gguf_prefix}ffn_{part}.weight", state[f"{prefix}mlp.{part}.weight"])
        store.add_tensor(
            f"{gguf_prefix}ffn_{part}.bias",
            state.get(f"{prefix}mlp.{part}.bias", torch.zeros(size, dtype=torch.float32)),
            keep_float32=True,
        )


def _projection_rows(spec: ModelSpec, state: State, prefix: str, projection: str) -> tuple[Tensor, Tensor]:
    """Return the rows of q, k or v and their bias; a missing bias is zero."""
    weight = state[f"{prefix}qkv.{projection}.weight"].flatten(0, 1)  # (heads · d, D)
    bias = state.get(f"{prefix}qkv.{projection}.bias")
    rows = weight.new_zeros(len(weight)) if bias is None else bias.flatten()
    factor = query_scale(spec) if projection == "q" else 1.0
    return weight * factor, rows * factor


def _position_table(spec: ModelSpec, state: State) -> Tensor:
    """Return one row per position for learned, sinusoidal or no positions."""
    if spec.positions == "learned":
        return state["embed.positions.weight"][spec.position_offset :]
    if spec.positions == "sinusoidal":
        return sinusoidal(torch.arange(spec.context)[None], spec.width)[0]
    return torch.zeros(spec.context, spec.width, dtype=torch.float32)


def _write_norm(store: GgufFile, gguf_name: str, state: State, name: str) -> None:
    store.add_tensor(f"{gguf_name}.weight", state[f"{name}.weight"], keep_float32=True)
    store.add_tensor(f"{gguf_name}.bias", state[f"{name}.bias"], keep_float32=True)


def prune_notes(spec: ModelSpec, heads: int | None = None) -> list[str]:
    """Return a note on pruned heads that are stored as zeros, if every layer is stored with this many heads."""
    heads = spec.attention.heads if heads is None else heads
    pruned_count = heads * len(spec.layer_addresses) - len(spec.head_addresses)
    if heads < spec.attention.heads:
        zeros = f"; {pruned_count} zero heads pad smaller layers" if pruned_count else ""
        return [f"{heads} of {spec.attention.heads} heads per layer are stored and renumbered{zeros}"]
    return (
        [
            f"{pruned_count} pruned heads are stored as zeros: outputs equal those of the pruned model, but the size is "
            f"not reduced"
        ]
        if pruned_count
        else []
    )
