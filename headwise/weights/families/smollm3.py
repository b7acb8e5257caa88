"""SmolLM3: like Llama, with layers without positions (NoPE)."""

from typing import Any

from headwise.errors import FileFormatError
from headwise.spec import ModelSpec
from headwise.weights.families.decoder_config import (
    DecoderDefaults,
    decoder_config,
    decoder_mappings,
    decoder_spec,
    layer_types_of,
    layer_windows_and_rotaries,
    read_rotary,
    require_same_spec,
    rope_parameters,
    rope_settings,
    varied_fields,
    windows_of,
)
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    positive_int_or_none,
    positive_int_setting,
    required_setting,
    setting_or_default,
)
from headwise.weights.families.llama import adjust_to_tensors

DEFAULTS = DecoderDefaults(context=32768, kv_heads=4, theta=2000000.0, tied=True)


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    layers = required_setting(config, "num_hidden_layers")
    interval = positive_int_setting(config, "no_rope_layer_interval", default=4)
    has_rotary = setting_or_default(
        config, "no_rope_layers", default=None, allow_null=True
    )  # 1 where rotary is applied
    has_rotary = [int((layer + 1) % interval != 0) for layer in range(layers)] if has_rotary is None else has_rotary
    if len(has_rotary) != layers or set(has_rotary) - {0, 1}:
        raise FileFormatError(f"no_rope_layers must list 0 or 1 for each of {layers} layers. Got {has_rotary}.")
    uses_window = bool_setting(config, "use_sliding_window", default=False)
    window = positive_int_or_none(config, "sliding_window")
    kinds = layer_types_of(
        config,
        lambda layer: "sliding_attention" if uses_window and window and not has_rotary[layer] else "full_attention",
        ("full_attention", "sliding_attention"),
    )
    rotary = read_rotary(config, rope_settings(config), DEFAULTS)
    attention, model_fields = varied_fields(
        windows_of(kinds, window),
        [rotary if rotated else None for rotated in has_rotary],
    )
    biased = bool_setting(config, "attention_bias", default=False)
    attention |= {"bias": biased, "out_bias": biased}
    mlp_bias = bool_setting(config, "mlp_bias", default=False)
    return decoder_spec(config, DEFAULTS, attention=attention, mlp_bias=mlp_bias, **model_fields)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    windows, rotaries = layer_windows_and_rotaries(spec)
    window = next((value for value in windows if value is not None), None)
    rotary = next((value for value in rotaries if value is not None), None)
    config = decoder_config(spec, "smollm3", "SmolLM3") | {
        "rope_parameters": rope_parameters(rotary, spec.attention.head_dim),
        "attention_bias": spec.attention.bias,
        "mlp_bias": spec.mlp_bias,
        "no_rope_layers": [int(value is not None) for value in rotaries],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if value is None else "sliding_attention" for value in windows],
    }
    return require_same_spec(spec, config, spec_from_config, "SmolLM3")


FAMILY = ModelFamilySpec(
    name="smollm3",
    model_types=("smollm3",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=decoder_mappings(),
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
)
