"""Write DeepSeek-V2 with dense MLPs to GGUF (`deepseek2`).

llama.cpp counts heads once for all layers, so a file has as many heads per layer as the largest layer, and zero heads in the
others. It multiplies all scores by m² / √d, where m is 1 + 0.1 · mscale_all_dim · ln(factor) with YaRN and 1 without it, and
does not scale cosines and sines. Other factors are multiplied into the queries: one for their rotary channels, one for the
others.
"""

import torch
from torch import Tensor

from headwise.exporters.gguf_tensors import GgufFile, State, prune_notes
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.weights.export import compact_state
from headwise.weights.families.deepseek import mscale_from_scale, scale_from_mscale
from headwise.weights.families.gguf_deepseek import (
    DIRECT_QUERIES,
    LOG_MULTIPLIER_UNIT,
    NAMES,
    RANKED_QUERIES,
    SPLIT_KEYS,
    SPLIT_VALUES,
    split_latent_weight,
)

LITE_LAYERS = (26, 27)  # llama.cpp expects queries without a rank in models with this many layers


def deepseek_problems(spec: ModelSpec) -> dict[str, bool]:
    """Return the reasons why llama.cpp cannot compute a DeepSeek-V2, and whether they apply."""
    attention, latent, rotary = spec.attention, spec.attention.latent, spec.attention.rotary
    assert latent is not None
    scaling = None if rotary is None else rotary.scaling
    kind = "none" if scaling is None else scaling.kind
    return {
        "it has no interleaved rotary positions": rotary is None or rotary.layout != "interleaved",
        "rotary positions apply to other channels than those of the latent": rotary is not None
        and (rotary.dims or attention.head_dim) != latent.rotary_dims,
        f"its rotary scaling is {kind}, but must be none or yarn": kind not in ("none", "yarn"),
        "YaRN with truncate=False": scaling is not None and scaling.kind == "yarn" and not scaling.truncate,
        f"the norms of its latents have the epsilon {latent.norm_eps}, but must have {spec.norm_eps}": (
            latent.norm_eps != spec.norm_eps
        ),
        f"it has {spec.layers} layers and a latent of the queries, but llama.cpp reads such models without one": (
            latent.query_rank > 0 and spec.layers in LITE_LAYERS
        ),
        "every channel of its keys is rotary": attention.head_dim == latent.rotary_dims,
        "its attention window is shorter than its context": attention.window is not None
        and attention.window < spec.context,
    }


def write_deepseek(model: Transformer, store: GgufFile) -> list[str]:
    """Write sizes and tensors of a DeepSeek-V2. Returns notes."""
    spec, (state, heads) = model.spec, compact_state(model)
    latent = spec.attention.latent
    assert latent is not None
    _write_sizes(store, spec, heads)
    names = NAMES | (RANKED_QUERIES if latent.query_rank else DIRECT_QUERIES)
    for native, external in names.items():
        for i in range(spec.layers) if "{i}" in native else (0,):
            store.add_tensor(
                external.format(i=i),
                _weight(spec, state, native.format(i=i)),
                keep_float32="norm" in native,
                is_vocab_table=native.startswith("embed."),
            )
    for i in range(spec.layers):
        rows = state[f"blocks.{i}.attention.qkv.kv.weight"]  # (heads, d + e, rank)
        keys, values = split_latent_weight(rows, spec.attention.head_dim - latent.rotary_dims)
        store.add_tensor(SPLIT_KEYS.format(i=i), keys)
        store.add_tensor(SPLIT_VALUES.format(i=i), values)
    if not spec.tied:
        store.add_tensor("output.weight", state["output.vocabulary.weight"], is_vocab_table=True)
    return prune_notes(spec, heads)


def _weight(spec: ModelSpec, state: State, name: str) -> Tensor:
    if name.endswith("qkv.q_weight"):
        rows = state[name.replace("q_weight", "q.weight")]  # (heads, d, D or rank)
        return (rows * _query_factors(spec)[:, None]).flatten(0, 1)
    if ".qkv." in name:
        return state[name.replace("_weight", ".weight")]
    return state[name].flatten(1) if name.endswith("output_projection.weight") else state[name]


def _query_factors(spec: ModelSpec) -> Tensor:
    """Return the factor of each channel of the queries that llama.cpp does not apply, (d,)."""
    attention, latent, rotary = spec.attention, spec.attention.latent, spec.attention.rotary
    assert latent is not None
    assert rotary is not None
    default = attention.head_dim**-0.5
    scale, engine_scale = default if attention.scale is None else attention.scale, default
    cos_sin_factor = 1.0
    if rotary.scaling is not None:
        engine_scale = scale_from_mscale(attention.head_dim, rotary.scaling.factor, _stored_mscale(spec)) or default
        cos_sin_factor = rotary.scaling.cos_sin_factor
    factors = torch.full((attention.head_dim,), scale / engine_scale, dtype=torch.float32)
    factors[attention.head_dim - latent.rotary_dims :] *= cos_sin_factor**2  # of a query and of a key
    return factors


def _stored_mscale(spec: ModelSpec) -> float:
    """Return `mscale_all_dim`, which is also stored if the scores are not scaled: else llama.cpp scales cosines and sines."""
    mscale = mscale_from_scale(spec.attention)
    return 1.0 if not mscale else round(mscale, 6)


def _write_sizes(store: GgufFile, spec: ModelSpec, heads: int) -> None:
    attention, writer = spec.attention, store.writer
    latent, rotary = attention.latent, attention.rotary
    assert latent is not None
    assert rotary is not None
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.mlp_width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)  # llama.cpp attends to the latent, which all heads share
    writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.kv_rank)
    writer.add_key_length(latent.kv_rank + latent.rotary_dims)
    writer.add_value_length(latent.kv_rank)
    writer.add_key_length_mla(attention.head_dim)
    writer.add_value_length_mla(attention.value_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_leading_dense_block_count(spec.layers)  # the remaining layers would have experts
    writer.add_expert_feed_forward_length(spec.mlp_width)  # required, unused
    writer.add_expert_shared_count(0)
    writer.add_rope_dimension_count(latent.rotary_dims)
    writer.add_rope_freq_base(rotary.theta)
    writer.add_vocab_size(spec.vocab)
    scaling = rotary.scaling
    if scaling is not None:
        writer.add_rope_scaling_type(store.package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        writer.add_rope_scaling_yarn_log_mul(LOG_MULTIPLIER_UNIT * _stored_mscale(spec))
