"""Ministral 3: like Mistral, with YaRN and queries that are scaled by their position."""

from dataclasses import replace
from typing import Any

from headwise.spec import ModelSpec, QueryScaling
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
from headwise.weights.families.family import Config, ModelFamilySpec, positive_int_or_none, required_setting
from headwise.weights.families.llama import adjust_to_tensors

DEFAULTS = DecoderDefaults(context=262144, kv_heads=8, head_dim=128, norm_eps=1e-5)
DEFAULT_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    settings = rope_settings(config) or DEFAULT_ROPE
    scaling = QueryScaling(
        required_setting(settings, "llama_4_scaling_beta"),
        required_setting(settings, "original_max_position_embeddings"),
    )
    attention = {
        "rotary": read_rotary(config, settings, DEFAULTS),
        "window": positive_int_or_none(config, "sliding_window"),
        "query_scaling": scaling,
    }
    return decoder_spec(config, DEFAULTS, attention=attention)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    (windows, _), scaling = layer_windows_and_rotaries(spec), spec.attention.query_scaling
    config: dict[str, Any] = decoder_config(spec, "ministral3", "Ministral3") | {
        "sliding_window": windows[0] if windows else None
    }
    scaling = QueryScaling(0.0, spec.context) if scaling is None else scaling
    config["rope_parameters"] |= {
        "llama_4_scaling_beta": scaling.beta,
        "original_max_position_embeddings": scaling.context,
    }
    if spec.attention.query_scaling is None:  # a factor of 1
        spec = replace(spec, attention=replace(spec.attention, query_scaling=scaling))
    return require_same_spec(spec, config, spec_from_config, "Ministral 3")


FAMILY = ModelFamilySpec(
    name="ministral3",
    model_types=("ministral3",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=decoder_mappings(),
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
)
