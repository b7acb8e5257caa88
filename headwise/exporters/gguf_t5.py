"""Write T5, Flan-T5, mT5 (`t5`) and their encoders (`t5encoder`) to GGUF.

llama.cpp counts heads once for all layers of both stacks, so a file has as many heads per layer as the largest layer, and
zero heads in the others. It does not scale hidden states before the output, so a scaled output is stored as weights of its
own.
"""

from typing import Any

import torch
from torch import Tensor

from headwise.exporters.gguf_tensors import GgufFile, State, prune_notes, write_pooling
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.weights.export import compact_state
from headwise.weights.families.gguf_t5 import MAX_DISTANCE, position_table_names, t5_tensor_names

NOTE_GELU = "llama.cpp computes GELU in 16 bits: hidden states differ in the third digit"
NOTE_TABLES = "layers have different position biases, which are stored per layer: transformers reads only the first"


def t5_problems(spec: ModelSpec) -> dict[str, bool]:
    """Return the reasons why llama.cpp cannot compute a T5, and whether they apply."""
    attention = spec.attention
    return {
        f"its activation is {spec.activation}, but must be relu or geglu_tanh": spec.activation
        not in ("relu", "geglu_tanh"),
        f"T5 buckets end at distance {attention.t5_max_distance}, but must end at {MAX_DISTANCE}": (
            attention.t5_max_distance != MAX_DISTANCE
        ),
        f"it has {attention.kv_heads} KV heads, but must have {attention.heads}": attention.kv_heads != attention.heads,
        "it has no T5 position biases": attention.t5_buckets == 0,
        "its decoder keeps T5 buckets for later keys": spec.kind != "encoder" and not spec.causal_t5_buckets,
        "its position biases are not those of both directions": not attention.t5_bidirectional,
        "value_dim differs from head_dim": attention.value_dim != attention.head_dim,
    }


def write_t5(model: Transformer, store: GgufFile, pooling: str) -> list[str]:
    """Write sizes and tensors of a T5; llama.cpp pools the hidden states of an encoder by `pooling`. Returns notes."""
    spec, (state, heads) = model.spec, compact_state(model)
    is_encoder, is_gated = spec.kind == "encoder", spec.activation == "geglu_tanh"
    _write_sizes(store, spec, heads)
    notes = write_pooling(store, pooling) if is_encoder else []
    for native, external in t5_tensor_names(is_encoder=is_encoder, is_gated=is_gated).items():
        layers = spec.encoder_layers if native.startswith("encoder_blocks.") else spec.layers
        for i in range(layers) if "{i}" in native else (0,):
            weight = _weight(spec, state, native.format(i=i))
            store.add_tensor(
                external.format(i=i), weight, keep_float32="norm" in native, is_vocab_table=native.startswith("embed.")
            )
    notes += _write_position_tables(model, store, heads, is_encoder=is_encoder)
    if not is_encoder:
        notes += _write_output(store, spec, state)
    return [*prune_notes(spec, heads), *notes, *([NOTE_GELU] if is_gated else [])]


def _weight(spec: ModelSpec, state: State, name: str) -> Tensor:
    """Return a weight as llama.cpp stores it: (rows, columns), queries with the scale of the scores."""
    if ".qkv." in name:
        weight = state[name.replace("_weight", ".weight")].flatten(0, 1)  # (heads · d, D)
        scale = spec.attention.head_dim**-0.5 if spec.attention.scale is None else spec.attention.scale
        return weight * scale if name.endswith("q_weight") else weight
    return state[name].flatten(1) if name.endswith("output_projection.weight") else state[name]


def _write_position_tables(model: Transformer, store: GgufFile, heads: int, *, is_encoder: bool) -> list[str]:
    """Write the position biases of each stack: one table if its layers agree on all heads, else one per layer."""
    notes: list[str] = []
    layers = dict(model.named_modules())
    for native, external in position_table_names(is_encoder=is_encoder).items():
        count = model.spec.encoder_layers if native.startswith("encoder_blocks.") else model.spec.layers
        tables = [_table(layers[native.format(i=i).removesuffix(".position_bias")], heads) for i in range(count)]
        shared = _shared_table(tables)
        notes = [NOTE_TABLES] if shared is None else notes
        for i, table in enumerate(tables if shared is None else [shared]):
            store.add_tensor(external.format(i=i), table.nan_to_num().mT, keep_float32=True)  # (buckets, heads)
    return notes


def _table(layer: Any, heads: int) -> Tensor:
    """Return the position biases of a layer with a row for every stored head, NaN for zero heads: (heads, buckets)."""
    own, ids = layer.position_bias.detach().float(), list(layer.spec.head_ids)
    table = own.new_full((heads, own.shape[1]), torch.nan)
    table[ids if heads == layer.spec.heads else range(len(ids))] = own
    return table


def _shared_table(tables: list[Tensor]) -> Tensor | None:
    """Return the table that has the rows of all layers, NaN for heads that no layer has. None if layers differ."""
    shared = tables[0].clone()
    for table in tables:
        shared = torch.where(shared.isnan(), table, shared)
        if not torch.where(table.isnan(), shared, table).nan_to_num().equal(shared.nan_to_num()):
            return None
    return shared


def _write_output(store: GgufFile, spec: ModelSpec, state: State) -> list[str]:
    """Write the output, also if it is tied to the embedding, because llama.cpp and transformers scale it differently."""
    table = state["embed.tokens.weight" if spec.tied else "output.vocabulary.weight"]
    store.add_tensor("output.weight", table * spec.logit_scale, is_vocab_table=True)
    return ["the tied output is stored as weights of its own"] if spec.tied else []


def _write_sizes(store: GgufFile, spec: ModelSpec, heads: int) -> None:
    attention, writer = spec.attention, store.writer
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.mlp_width)
    writer.add_block_count(spec.encoder_layers or spec.layers)
    if spec.kind != "encoder":
        writer.add_decoder_block_count(spec.layers)
        if spec.decoder_start_id is not None:
            writer.add_decoder_start_token_id(spec.decoder_start_id)
    writer.add_head_count(heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.value_dim)
    writer.add_layer_norm_eps(spec.norm_eps)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_relative_attn_buckets_count(attention.t5_buckets)
    writer.add_vocab_size(spec.vocab)
