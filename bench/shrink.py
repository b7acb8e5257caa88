"""Tiny configurations of any architecture of transformers, by reducing the known sizes of its configuration.

No rule is specific to an architecture. Fields are recognized by name and replaced in the configuration and its nested
configurations. A configuration that transformers cannot build or run counts as not built, with the error message.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_DIM, VOCAB = 2, 4, 2, 32, 8, 99

# Fields that are reduced to one small number if they are larger.
LAYER_COUNT_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
HEAD_COUNT_FIELDS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
SIZES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (LAYERS, (
        *LAYER_COUNT_FIELDS, "depth", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "vision_layers", "text_layers", "num_hidden_layers_per_stage",
        "resampler_depth", "num_global_layers", "decoder_num_hidden_layers", "encoder_num_hidden_layers", "attention_layers",
        "num_local_layers", "num_blocks", "perceiver_depth", "resampler_n_layers", "num_mem_blocks", "d_layers",
        "num_prediction_layers", "num_adapter_layers", "mtp_num_hidden_layers", "num_experts_per_tok", "moe_topk", "moe_k",
        "top_k_experts", "topk_group", "num_selected_experts", "num_shared_experts", "n_shared_experts",
        "num_blocks_per_group",
    )),
    (HEADS, (
        *HEAD_COUNT_FIELDS, "attention_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "resampler_n_heads",
        "decoder_num_attention_heads", "vision_attention_heads", "cross_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_group", "linear_num_value_heads",
        "index_n_heads", "text_attention_heads", "num_attention_heads_per_stage", "num_routed_experts",
    )),
    (KV_HEADS, (
        "num_key_value_heads", "num_kv_heads", "n_kv_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads",
        "multi_query_group_num", "linear_num_key_heads", "num_query_groups",
    )),
    (WIDTH, (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "encoder_hidden_size",
        "decoder_hidden_size", "out_hidden_size", "projection_dim", "word_embed_proj_dim", "text_hidden_size",
        "vision_hidden_size", "encoder_embed_dim", "text_embed_dim", "vision_embed_dim", "proj_dim", "emb_dim",
        "output_hidden_size", "hidden_dim", "output_dim", "pooler_output_size", "text_embed_size", "backbone_hidden_size",
        "llm_hidden_size", "kv_lora_rank", "q_lora_rank", "audio_hidden_size", "hidden_size_per_layer_input",
    )),
    (64, (
        "intermediate_size", "ffn_dim", "d_ff", "mlp_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "inner_dim",
        "moe_intermediate_size", "shared_expert_intermediate_size", "encoder_intermediate_size", "ff_dim", "ffn_hidden_size",
        "decoder_intermediate_size", "feed_forward_proj_dim", "intermediate_size_mlp", "expert_intermediate_size",
        "moe_shared_expert_intermediate_size", "shared_intermediate_size", "block_ff_dim", "feedforward_dim",
        "encoder_feedforward_dim", "dim_feedforward", "qformer_intermediate_size",
        "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "max_seq_len",
        "image_size", "pretrain_image_size", "input_size", "n_ctx",
    )),
    (HEAD_DIM, (
        "head_dim", "attention_head_size", "d_kv", "kv_channels", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
        "dim_head", "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "index_head_dim", "global_head_dim",
        "attention_dim_head", "patch_size", "mamba_d_state", "head_size", "attention_key_size", "linear_head_dim", "d_head",
        "mamba_n_heads", "mamba_num_heads", "rotary_dim",
    )),
    (VOCAB, ("vocab_size", "text_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")),
    (16, ("num_mel_bins", "num_conv_pos_embeddings", "num_queries", "context_size", "codebook_size", "chunk_size")),
    (5, ("sliding_window", "local_attention")),
)  # fmt: skip
SMALL_SIZES = {name: size for size, names in SIZES for name in names}
# Fields with one entry per layer: reduced to the new number of layers, new kinds of layers first.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attn_type_list", "no_rope_layers", "indexer_types",
             "hybrid_override_pattern")  # fmt: skip
# Layer indices: those of removed layers are left out.
LAYER_NUMBERS = ("cross_attention_layers", "mlp_only_layers", "global_attn_indexes", "fullatt_block_indexes",
                 "deepstack_visual_indexes", "attn_layer_indices", "global_attention_layers", "hybrid_layer_ids",
                 "full_attn_idxs", "intermediate_layers_indices")  # fmt: skip
DERIVED_FIELDS = (
    "out_indices",
    "out_features",
    "stage_names",
    "mamba_headdim",
    "attention_head_dim",
)  # derived from other sizes
ROTARY = ("rope_parameters", "rope_scaling")
WIDTHS = re.compile(
    r"size|dim|width|channels|d_model|embd|rank|inner|d_ff|d_kv|d_head|headdim|features|axial_pos_embds"
)
NOT_WIDTHS = re.compile(
    r"vocab|patch|image|kernel|window|group|batch|input|crop|grid|chunk|_id|in_channels|num_channels"
)
# Values for missing fields, and values that must be consistent.
DEFAULT_VALUES: dict[str, Any] = {
    "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "num_experts": 8, "num_experts_per_tok": 2,
    "top_k_experts": 2, "n_routed_experts": 8, "moe_intermediate_size": 64, "prediction_length": 4, "sliding_window": 5,
    "layer_types": ["full_attention"] * LAYERS, "mlp_layer_types": ["dense", "sparse"], "intermediate_size": 64,
    "vocabulary_map": {"<image>": 7}, "deepstack_layer_map": {0: 0}, "expert_intermediate_size": 64,
}  # fmt: skip
CONSISTENT_VALUES: dict[str, Any] = {
    "n_group": 2, "num_group": 2, "num_expert_group": 2, "topk_group": 1, "n_routed_experts": 8, "num_experts": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_ssm": 64, "moe_topk": 2, "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
}  # fmt: skip
EXPERTS = {name: size for name, size in CONSISTENT_VALUES.items() if "mamba" not in name} | {"num_local_experts": 8}
NOT_LAYER_COUNTS = tuple(name for name in SIZES[0][1] if "expert" in name or "top" in name or name == "moe_k")


def tiny_configs(config_class: type[Any], model: type[Any]) -> Iterator[Any]:
    """Yield configurations with small sizes for a model class, smallest first.

    The rules in order: all sizes small; missing sizes filled in as well; all widths divided by one number, so that their
    ratios remain; only few layers and a small vocabulary; unchanged.
    """
    own_class: Any = getattr(model, "config_class", None)
    config_class = (
        own_class if own_class in getattr(config_class, "sub_configs", {}).values() else config_class
    )  # the model uses a nested configuration
    defaults = config_class().to_dict()
    module = sys.modules.get(model.__module__)
    source = "" if module is None else inspect.getsource(module)
    for rule in (shrink, shrink_and_fill, divide_widths, shrink_depth, dict):
        try:
            fields = rule(defaults)
            if rule is shrink_and_fill or (rule is shrink and "mrope_section" in source):
                _split_rotary_sections(fields)
            yield config_class.from_dict(fields)
        except Exception as error:
            yield error


def shrink_and_fill(fields: dict[str, Any]) -> dict[str, Any]:
    """Reduce all sizes, fill in missing sizes, and use expert groups of two."""
    small = shrink(fields)
    for name, value in small.items():
        if isinstance(value, dict) and name not in (*ROTARY, "id2label", "label2id"):
            small[name] = shrink_and_fill(fields[name])
        elif value is None or name in CONSISTENT_VALUES:
            small[name] = (DEFAULT_VALUES | CONSISTENT_VALUES).get(name)
    return small


def divide_widths(fields: dict[str, Any]) -> dict[str, Any]:
    """Reduce the layers, and divide every width by eight."""
    small = shrink_depth(fields)
    small |= {name: EXPERTS[name] for name, value in fields.items() if name in EXPERTS and type(value) is int}
    for name, value in small.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            small[name] = divide_widths(value)
        elif (WIDTHS.search(name) and not NOT_WIDTHS.search(name)) or name == "mrope_section":
            small[name] = _eighth(value)
    return small


def _eighth(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_eighth, value))
    return value // 8 if type(value) is int and value % 8 == 0 and value >= 16 else value


def shrink_depth(fields: dict[str, Any]) -> dict[str, Any]:
    """Reduce the layers and the vocabulary, but not the widths."""
    small = shrink(fields)
    result = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and name not in (*ROTARY, "id2label", "label2id"):
            result[name] = shrink_depth(value)
        elif (SMALL_SIZES.get(name) in (LAYERS, VOCAB) and name not in NOT_LAYER_COUNTS) or (
            (name in (*LAYER_COUNT_FIELDS, *PER_LAYER, *LAYER_NUMBERS) or "token_i" in str(name)) and name in small
        ):
            result[name] = small[name]
    return result


def _split_rotary_sections(fields: dict[str, Any]) -> None:
    """Set the channel sections of three-axis positions, even if the configuration does not have them."""
    for name, value in fields.items():
        if isinstance(value, dict):
            if name == "rope_parameters" and "rope_theta" in value:
                half = int(HEAD_DIM * value.get("partial_rotary_factor", 1.0)) // 2
                value["mrope_section"] = [half - half // 2, half // 4, half // 2 - half // 4]
            else:
                _split_rotary_sections(value)


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration and its nested configurations with small sizes."""
    kinds = next((fields[name] for name in PER_LAYER if isinstance(fields.get(name), list | tuple)), ())
    kept_layers = _representative_layers(kinds)
    field_counts = {len(kinds)} | {
        fields[name] for name in LAYER_COUNT_FIELDS if isinstance(fields.get(name), int)
    }  # original numbers of layers
    kept_layers = kept_layers or list(range(LAYERS))
    small = {name: _shrink_field(name, value) for name, value in fields.items() if name not in DERIVED_FIELDS}
    small |= {name: len(kept_layers) for name in LAYER_COUNT_FIELDS if isinstance(fields.get(name), int)}
    for name, value in fields.items():
        if isinstance(value, list | tuple) and (name in PER_LAYER or (len(value) in field_counts and len(value) > 6)):
            small[name] = [small[name][i] for i in kept_layers if i < len(value)]
    if isinstance(fields.get("per_layer_config"), dict):
        per_layer = fields["per_layer_config"]
        small["per_layer_config"] = {i: shrink(per_layer[n]) for i, n in enumerate(kept_layers) if n in per_layer}
    for name in ("num_key_value_heads", "num_kv_heads"):  # models without shared keys stay without
        heads = next(
            (fields[field_counts] for field_counts in HEAD_COUNT_FIELDS if isinstance(fields.get(field_counts), int)),
            None,
        )
        if heads is not None and fields.get(name) == heads:
            small[name] = HEADS
    return small


def _representative_layers(kinds: Any) -> list[int]:
    """Return two layers, or one of each kind."""
    firsts = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values()) if kinds else []
    if len(firsts) == 1 and len(kinds) > 1:
        firsts.append(1)
    return firsts


def _shrink_field(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if name in ROTARY:
            return _shrink_rotary(value)
        return value if name in ("id2label", "label2id") else shrink(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if "token_id" in str(name) or str(name).endswith("token_index"):
            return value if value < VOCAB else VOCAB - 1 - sum(map(ord, name)) % 40
        return min(value, SMALL_SIZES.get(name, value))
    if isinstance(value, list | tuple):
        if name in LAYER_NUMBERS:
            return [layer for layer in value if isinstance(layer, int) and layer < LAYERS]
        if "token_id" in name and all(isinstance(item, int) for item in value):
            return [item if item < VOCAB else 2 for item in value]
        if name in SMALL_SIZES and all(isinstance(item, int) for item in value):
            return type(value)(min(item, SMALL_SIZES[name]) for item in value)
    return value


def _shrink_rotary(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the position settings with smaller channel sections."""
    small = {name: _shrink_rotary(value) if isinstance(value, dict) else value for name, value in parameters.items()}
    if "mrope_section" in small:
        small["mrope_section"] = [2, 1, 1]
    return small
