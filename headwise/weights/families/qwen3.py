"""Qwen3 (dense): like Llama, with an RMS norm of each head's queries and keys."""

from typing import Any

from headwise.spec import ModelSpec, QKNorm
from headwise.weights.families.decoder_config import (
    QK_NORM_NAMES,
    DecoderDefaults,
    decoder_config,
    decoder_mappings,
    decoder_spec,
    layer_types_of,
    layer_windows_and_rotaries,
    read_rotary,
    require_same_spec,
    rope_settings,
    varied_fields,
    windows_of,
)
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    positive_int_or_none,
    required_setting,
    setting_or_default,
)
from headwise.weights.families.llama import adjust_to_tensors

DEFAULTS = DecoderDefaults(context=32768, kv_heads=32, head_dim=128)


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    layers, window = required_setting(config, "num_hidden_layers"), None
    if bool_setting(config, "use_sliding_window", default=False):
        window = positive_int_or_none(config, "sliding_window", default=4096)
    first = setting_or_default(config, "max_window_layers", default=28)
    kinds = layer_types_of(
        config,
        lambda layer: "sliding_attention" if window is not None and layer >= first else "full_attention",
        ("full_attention", "sliding_attention"),
    )
    rotary = read_rotary(config, rope_settings(config), DEFAULTS)
    windows = windows_of(kinds, window)
    attention, model_fields = varied_fields(windows, [rotary] * layers)
    biased = bool_setting(config, "attention_bias", default=False)
    eps = setting_or_default(config, "rms_norm_eps", default=DEFAULTS.norm_eps)
    attention |= {"qk_norm": QKNorm(eps=eps), "bias": biased, "out_bias": biased}
    return decoder_spec(config, DEFAULTS, attention=attention, **model_fields)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    windows, _ = layer_windows_and_rotaries(spec)
    window = next((value for value in windows if value is not None), None)
    config = decoder_config(spec, "qwen3", "Qwen3") | {
        "attention_bias": spec.attention.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if value is None else "sliding_attention" for value in windows],
    }
    return require_same_spec(spec, config, spec_from_config, "Qwen3")


FAMILY = ModelFamilySpec(
    name="qwen3",
    model_types=("qwen3",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=decoder_mappings(QK_NORM_NAMES),
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
)
