"""GPT-2 and BERT in GGUF. Both have one number of heads for all layers, so cut heads are zeros there, in the full shape."""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, suggest_names
from headwise.exporters.gguf_llama import query_scale
from headwise.exporters.gguf_writer import GgufFile
from headwise.kernels import sinusoidal
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.weights.export import full_shape_state

POOLING = ("mean", "cls", "none")
State = dict[str, Tensor]


def write_gpt2(model: Transformer, store: GgufFile) -> list[str]:
    """Sizes and tensors; what was done about the rest."""
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
    return _prune_notes(spec)


def write_bert(model: Transformer, store: GgufFile, pooling: str) -> list[str]:
    """The same for an encoder; `pooling` is how a server makes one vector of a text."""
    if pooling not in POOLING:
        raise HeadwiseError(
            f"a text becomes one vector by {', '.join(POOLING)}, got {pooling!r}; {suggest_names(pooling, POOLING)}"
        )
    spec, state = model.spec, full_shape_state(model)
    _write_sizes(store, spec)
    store.writer.add_causal_attention(False)
    store.writer.add_pooling_type(store.package.PoolingType[pooling.upper()])
    store.add_tensor("token_embd.weight", state["embed.tokens.weight"], is_vocab_table=True)
    token_types = state["embed.types.weight"] if spec.token_types else torch.zeros(1, spec.width)
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
    notes = [f"a text becomes one vector by {pooling}"] if pooling != "none" else []
    notes += ["the pooler is left out: llama.cpp has none"] if spec.pooler else []
    notes += ["more than one token type: llama.cpp takes the first for all tokens"] if spec.token_types > 1 else []
    return [
        *_prune_notes(spec),
        *notes,
        "llama.cpp bends by tanh, not erf, and in 16 bits: states differ in the third digit",
    ]


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
    """What heads write, and the MLP."""
    prefix, gguf_prefix = f"blocks.{i}.", f"blk.{i}."
    store.add_tensor(
        f"{gguf_prefix}attn_output.weight", state[f"{prefix}attention.output_projection.weight"].flatten(1)
    )
    zero_bias = torch.zeros(spec.width)
    store.add_tensor(
        f"{gguf_prefix}attn_output.bias",
        state.get(f"{prefix}attention.output_projection.bias", zero_bias),
        keep_float32=True,
    )
    for part, size in (("up", spec.mlp_width), ("down", spec.width)):
        store.add_tensor(f"{gguf_prefix}ffn_{part}.weight", state[f"{prefix}mlp.{part}.weight"])
        store.add_tensor(
            f"{gguf_prefix}ffn_{part}.bias", state.get(f"{prefix}mlp.{part}.bias", torch.zeros(size)), keep_float32=True
        )


def _projection_rows(spec: ModelSpec, state: State, prefix: str, projection: str) -> tuple[Tensor, Tensor]:
    """Rows of q, k or v and their bias, zeros where there is none."""
    weight = state[f"{prefix}qkv.{projection}.weight"].flatten(0, 1)  # (heads · d, D)
    bias = state.get(f"{prefix}qkv.{projection}.bias")
    rows = weight.new_zeros(len(weight)) if bias is None else bias.flatten()
    factor = query_scale(spec) if projection == "q" else 1.0
    return weight * factor, rows * factor


def _position_table(spec: ModelSpec, state: State) -> Tensor:
    """A row for every position, whatever they are made of."""
    if spec.positions == "learned":
        return state["embed.positions.weight"]
    if spec.positions == "sinusoidal":
        return sinusoidal(torch.arange(spec.context)[None], spec.width)[0]
    return torch.zeros(spec.context, spec.width)


def _write_norm(store: GgufFile, gguf_name: str, state: State, name: str) -> None:
    store.add_tensor(f"{gguf_name}.weight", state[f"{name}.weight"], keep_float32=True)
    store.add_tensor(f"{gguf_name}.bias", state[f"{name}.bias"], keep_float32=True)


def _prune_notes(spec: ModelSpec) -> list[str]:
    pruned_count = spec.attention.heads * spec.layers - len(spec.head_addresses)
    return (
        [f"{pruned_count} cut heads are zeros: the numbers are those of the cut model, the size is not"]
        if pruned_count
        else []
    )
