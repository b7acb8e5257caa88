"""OLMo 2 and OLMo 3: norms on the outputs of sub-layers, and a norm of q and k over all heads. OLMo 3 mixes windows."""

from dataclasses import replace
from typing import Any

from headwise.spec import ModelSpec, QKNorm
from headwise.weights.families.decoder_config import (
    NAMES,
    QK_NORM_NAMES,
    DecoderDefaults,
    decoder_config,
    decoder_mappings,
    decoder_spec,
    layer_rope_settings,
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
    required_setting,
    setting_or_default,
)
from headwise.weights.families.llama import adjust_to_tensors

DEFAULTS = DecoderDefaults(context=2048, norm_eps=1e-5)
OLMO3_DEFAULTS = replace(DEFAULTS, theta=500000.0)
THETA_NAMES = {"full_attention": "rope_theta", "sliding_attention": ""}  # transformers reads the older setting once
KINDS = ("full_attention", "sliding_attention")


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    layers = required_setting(config, "num_hidden_layers")
    if config.get("model_type") == "olmo3":
        window = positive_int_or_none(config, "sliding_window", default=4096)
        kinds = layer_types_of(config, lambda layer: KINDS[(layer + 1) % 4 != 0], KINDS)
        windows = windows_of(kinds, window)
        rotary_of = {
            kind: read_rotary(
                {name: value for name, value in config.items() if name != "rope_theta"},
                layer_rope_settings(config, kind, THETA_NAMES[kind]),
                OLMO3_DEFAULTS,
            )
            for kind in set(kinds)
        }
        rotaries = [rotary_of[kind] for kind in kinds]
    else:
        windows, rotaries = [None] * layers, [read_rotary(config, rope_settings(config), DEFAULTS)] * layers
    attention, model_fields = varied_fields(windows, rotaries)
    biased = bool_setting(config, "attention_bias", default=False)
    eps = setting_or_default(config, "rms_norm_eps", default=DEFAULTS.norm_eps)
    attention |= {"qk_norm": QKNorm(over="width", eps=eps), "bias": biased, "out_bias": biased}
    return decoder_spec(config, DEFAULTS, attention=attention, norm_placement="output", **model_fields)


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json: OLMo 3 if some layers have a window, else OLMo 2."""
    windows, rotaries = layer_windows_and_rotaries(spec)
    window = next((value for value in windows if value is not None), None)
    if window is None:
        config = decoder_config(spec, "olmo2", "Olmo2")
    else:
        kinds = ["full_attention" if value is None else "sliding_attention" for value in windows]
        rotary_of = dict(zip(kinds, rotaries, strict=True))
        settings = {kind: rope_parameters(rotary_of.get(kind, rotaries[0]), spec.attention.head_dim) for kind in KINDS}
        config = decoder_config(spec, "olmo3", "Olmo3") | {
            "sliding_window": window,
            "layer_types": kinds,
            "rope_parameters": settings,
        }
    config["attention_bias"] = spec.attention.bias
    return require_same_spec(spec, config, spec_from_config, "OLMo 2")


BLOCK_NORMS = {
    "blocks.{i}.norm_attention.weight": "layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.norm_mlp.weight": "layers.{i}.post_feedforward_layernorm.weight",
}
assert BLOCK_NORMS.keys() <= NAMES.keys()

FAMILY = ModelFamilySpec(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=decoder_mappings(BLOCK_NORMS, QK_NORM_NAMES),
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
)
