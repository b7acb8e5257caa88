"""Phi-3 and Phi-4: like Llama, with one tensor for q, k and v, one for both up projections, and LongRoPE."""

from typing import Any

from headwise.spec import ModelSpec
from headwise.weights.families.decoder_config import (
    DecoderDefaults,
    decoder_config,
    decoder_mappings,
    decoder_spec,
    layer_windows_and_rotaries,
    read_rotary,
    require_same_spec,
    rope_settings,
)
from headwise.weights.families.family import Config, ModelFamilySpec, positive_int_or_none, positive_int_setting
from headwise.weights.families.llama import adjust_to_tensors
from headwise.weights.keymap import TensorMapping

DEFAULTS = DecoderDefaults(context=4096, norm_eps=1e-5, partial_rotary=True)


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    settings = rope_settings(config)
    kind = settings.get("rope_type", settings.get("type"))
    if kind in ("su", "yarn"):  # older names of LongRoPE in this family
        settings = {**settings, "rope_type": "longrope"}
    original = positive_int_setting(config, "original_max_position_embeddings", default=4096)
    config = {**config, "original_max_position_embeddings": original}
    rotary = read_rotary(config, settings, DEFAULTS)
    attention = {"rotary": rotary, "window": positive_int_or_none(config, "sliding_window")}
    return decoder_spec(config, DEFAULTS, attention=attention)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    (windows, _), rotary = layer_windows_and_rotaries(spec), spec.attention.rotary
    config: dict[str, Any] = decoder_config(spec, "phi3", "Phi3") | {"sliding_window": windows[0] if windows else None}
    if rotary is not None and rotary.scaling is not None:
        config["original_max_position_embeddings"] = rotary.scaling.original_context
    config["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return require_same_spec(spec, config, spec_from_config, "Phi-3")


MAPPINGS = (
    *(
        mapping
        for mapping in decoder_mappings()
        if ".qkv." not in mapping.native_name
        and ".mlp.gate" not in mapping.native_name
        and ".mlp.up" not in mapping.native_name
    ),
    TensorMapping("layers.{i}.self_attn.qkv_proj.weight", "blocks.{i}.attention.qkv.qkv_weight"),
    TensorMapping("layers.{i}.mlp.gate_up_proj.weight", "blocks.{i}.mlp.gate.weight", part=(0, 2)),
    TensorMapping("layers.{i}.mlp.gate_up_proj.weight", "blocks.{i}.mlp.up.weight", part=(1, 2)),
)

FAMILY = ModelFamilySpec(
    name="phi3",
    model_types=("phi3",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="qkv",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
)
