"""GPT-2 and BERT in GGUF. Both have one number of heads for all layers, so cut heads are zeros there, in the full shape."""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, close_names
from headwise.exporters.gguf_llama import q_factor
from headwise.exporters.gguf_writer import GgufFile
from headwise.kernels import sinusoidal
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.weights.export import whole_state

POOLING = ("mean", "cls", "none")
State = dict[str, Tensor]


def write_gpt2(model: Transformer, store: GgufFile) -> list[str]:
    """Sizes and tensors; what was done about the rest."""
    spec, state = model.spec, whole_state(model)
    _write_sizes(store, spec)
    store.add("token_embd.weight", state["embed.tokens.weight"], table=True)
    store.add("position_embd.weight", _positions(spec, state), plain=True)
    for i in range(spec.layers):
        ours, blk = f"blocks.{i}.", f"blk.{i}."
        _pair(store, f"{blk}attn_norm", state, f"{ours}norm_attention")
        parts = [_projection(spec, state, f"{ours}attention.", letter) for letter in "qkv"]
        store.add(f"{blk}attn_qkv.weight", torch.cat([weight for weight, _ in parts]))
        store.add(f"{blk}attn_qkv.bias", torch.cat([bias for _, bias in parts]), plain=True)
        _write_rest(store, spec, state, i)
        _pair(store, f"{blk}ffn_norm", state, f"{ours}norm_mlp")
    _pair(store, "output_norm", state, "norm")
    if not spec.tied:
        store.add("output.weight", state["output.vocabulary.weight"], table=True)
    return _notes(spec)


def write_bert(model: Transformer, store: GgufFile, pooling: str) -> list[str]:
    """The same for an encoder; `pooling` is how a server makes one vector of a text."""
    if pooling not in POOLING:
        raise HeadwiseError(
            f"a text becomes one vector by {', '.join(POOLING)}, got {pooling!r}; {close_names(pooling, POOLING)}"
        )
    spec, state = model.spec, whole_state(model)
    _write_sizes(store, spec)
    store.writer.add_causal_attention(False)
    store.writer.add_pooling_type(store.package.PoolingType[pooling.upper()])
    store.add("token_embd.weight", state["embed.tokens.weight"], table=True)
    types = state["embed.types.weight"] if spec.token_types else torch.zeros(1, spec.width)
    store.writer.add_token_type_count(len(types))
    store.add("token_types.weight", types, plain=True)
    store.add("position_embd.weight", _positions(spec, state), plain=True)
    _pair(store, "token_embd_norm", state, "embed.norm")
    for i in range(spec.layers):
        ours, blk = f"blocks.{i}.", f"blk.{i}."
        for letter in "qkv":
            weight, bias = _projection(spec, state, f"{ours}attention.", letter)
            store.add(f"{blk}attn_{letter}.weight", weight)
            store.add(f"{blk}attn_{letter}.bias", bias, plain=True)
        _write_rest(store, spec, state, i)
        _pair(store, f"{blk}attn_output_norm", state, f"{ours}norm_attention")
        _pair(store, f"{blk}layer_output_norm", state, f"{ours}norm_mlp")
    notes = [f"a text becomes one vector by {pooling}"] if pooling != "none" else []
    notes += ["the pooler is left out: llama.cpp has none"] if spec.pooler else []
    notes += ["more than one token type: llama.cpp takes the first for all tokens"] if spec.token_types > 1 else []
    return [*_notes(spec), *notes, "llama.cpp bends by tanh, not erf, and in 16 bits: states differ in the third digit"]


def _write_sizes(store: GgufFile, spec: ModelSpec) -> None:
    attention, writer = spec.attention, store.writer
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.hidden)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_layer_norm_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab)


def _write_rest(store: GgufFile, spec: ModelSpec, state: State, i: int) -> None:
    """What heads write, and the MLP."""
    ours, blk = f"blocks.{i}.", f"blk.{i}."
    store.add(f"{blk}attn_output.weight", state[f"{ours}attention.write.weight"].flatten(1))
    none = torch.zeros(spec.width)
    store.add(f"{blk}attn_output.bias", state.get(f"{ours}attention.write.bias", none), plain=True)
    for part, size in (("up", spec.hidden), ("down", spec.width)):
        store.add(f"{blk}ffn_{part}.weight", state[f"{ours}mlp.{part}.weight"])
        store.add(f"{blk}ffn_{part}.bias", state.get(f"{ours}mlp.{part}.bias", torch.zeros(size)), plain=True)


def _projection(spec: ModelSpec, state: State, prefix: str, letter: str) -> tuple[Tensor, Tensor]:
    """Rows of q, k or v and their bias, zeros where there is none."""
    weight = state[f"{prefix}read.{letter}.weight"].flatten(0, 1)  # (heads · d, D)
    bias = state.get(f"{prefix}read.{letter}.bias")
    rows = weight.new_zeros(len(weight)) if bias is None else bias.flatten()
    factor = q_factor(spec) if letter == "q" else 1.0
    return weight * factor, rows * factor


def _positions(spec: ModelSpec, state: State) -> Tensor:
    """A row for every position, whatever they are made of."""
    if spec.positions == "learned":
        return state["embed.positions.weight"]
    if spec.positions == "sinusoidal":
        return sinusoidal(torch.arange(spec.context)[None], spec.width)[0]
    return torch.zeros(spec.context, spec.width)


def _pair(store: GgufFile, theirs: str, state: State, ours: str) -> None:
    store.add(f"{theirs}.weight", state[f"{ours}.weight"], plain=True)
    store.add(f"{theirs}.bias", state[f"{ours}.bias"], plain=True)


def _notes(spec: ModelSpec) -> list[str]:
    gone = spec.attention.heads * spec.layers - len(spec.addresses)
    return [f"{gone} cut heads are zeros: the numbers are those of the cut model, the size is not"] if gone else []
