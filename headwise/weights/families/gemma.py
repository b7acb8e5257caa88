"""Gemma 2 and 3 (text): norms before and after each sub-layer, mixed windows, a query scale, and soft caps or QK norm."""

from typing import Any

from headwise.spec import ModelSpec, QKNorm
from headwise.weights.families.decoder_config import (
    OUTPUT_NORM_NAMES,
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
    positive_int_setting,
    reject_unsupported,
    required_setting,
    setting_or_default,
)
from headwise.weights.families.llama import adjust_to_tensors

GEMMA2 = DecoderDefaults(8192, kv_heads=4, head_dim=256, tied=True, activation="hidden_activation")
GEMMA3 = DecoderDefaults(131072, kv_heads=4, head_dim=256, theta=1e6, tied=True, activation="hidden_activation")
GEMMA3_LOCAL = DecoderDefaults(131072, kv_heads=4, head_dim=256, theta=10000.0)
ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
ACTIVATION_NAMES = {"geglu_tanh": "gelu_pytorch_tanh", "geglu": "gelu", "swiglu": "silu"}
KINDS = ("full_attention", "sliding_attention")


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    is_gemma3 = config.get("model_type") == "gemma3_text"
    defaults, layers = GEMMA3 if is_gemma3 else GEMMA2, required_setting(config, "num_hidden_layers")
    reject_unsupported(
        {"bidirectional attention (use_bidirectional_attention)": bool(config.get("use_bidirectional_attention"))}
    )
    config = {"num_attention_heads": 8, **config}
    window = positive_int_or_none(config, "sliding_window", default=4096)
    period = positive_int_setting(config, "sliding_window_pattern", default=6) if is_gemma3 else 2
    kinds = layer_types_of(config, lambda layer: KINDS[(layer + 1) % period != 0], KINDS)
    if is_gemma3:
        rotary_of = {
            "full_attention": read_rotary(config, layer_rope_settings(config, "full_attention", "rope_theta"), GEMMA3),
            "sliding_attention": read_rotary(
                {name: value for name, value in config.items() if name != "rope_theta"},
                layer_rope_settings(config, "sliding_attention", "rope_local_base_freq"),
                GEMMA3_LOCAL,
            ),
        }
        rotaries = [rotary_of[kind] for kind in kinds]
    else:
        rotaries = [read_rotary(config, rope_settings(config), defaults)] * layers
    attention, model_fields = varied_fields(windows_of(kinds, window), rotaries)
    caps = {
        name: setting_or_default(config, f"{name}_logit_softcapping", default=cap, allow_null=True)
        for name, cap in (("attn", None if is_gemma3 else 50.0), ("final", None if is_gemma3 else 30.0))
    }
    biased = bool_setting(config, "attention_bias", default=False)
    eps = setting_or_default(config, "rms_norm_eps", default=defaults.norm_eps)
    attention |= {
        "qk_norm": QKNorm("rms_plus_one", eps=eps) if is_gemma3 else None,
        "softcap": None if is_gemma3 else caps["attn"],  # Gemma 3 reads the setting but does not apply it
        "scale": setting_or_default(config, "query_pre_attn_scalar", default=256) ** -0.5,
        "bias": biased,
        "out_bias": biased,
    }
    return decoder_spec(
        config,
        defaults,
        attention=attention,
        activations=ACTIVATIONS,
        **model_fields | {"norm": "rms_plus_one", "norm_placement": "sandwich", "logit_softcap": caps["final"]},
        embed_scale=required_setting(config, "hidden_size") ** 0.5,
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json: Gemma 3 if queries and keys have a norm, else Gemma 2."""
    attention, (windows, rotaries) = spec.attention, layer_windows_and_rotaries(spec)
    is_gemma3 = attention.qk_norm is not None
    kinds = ["full_attention" if value is None else "sliding_attention" for value in windows]
    config = decoder_config(spec, *(("gemma3_text", "Gemma3") if is_gemma3 else ("gemma2", "Gemma2")))
    if is_gemma3:
        config["architectures"] = ["Gemma3TextModel" if spec.output == "none" else "Gemma3ForCausalLM"]
        rotary_of = dict(zip(kinds, rotaries, strict=True))
        config["rope_parameters"] = {
            kind: rope_parameters(rotary_of.get(kind, rotaries[0]), attention.head_dim) for kind in KINDS
        }
    config |= {
        "sliding_window": next((value for value in windows if value is not None), 4096),
        "layer_types": kinds,
        "query_pre_attn_scalar": attention.head_dim if attention.scale is None else round(attention.scale**-2),
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "attention_bias": attention.bias,
        "hidden_activation": ACTIVATION_NAMES.get(spec.activation, spec.activation),
    }
    config.pop("hidden_act")
    return require_same_spec(spec, config, spec_from_config, "Gemma 3" if is_gemma3 else "Gemma 2")


def _family(name: str, model_type: str, *changes: dict[str, str]) -> ModelFamilySpec:
    return ModelFamilySpec(
        name=name,
        model_types=(model_type,),
        spec_from_config=spec_from_config,
        config_from_spec=config_from_spec,
        mappings=decoder_mappings(OUTPUT_NORM_NAMES, *changes),
        storage="q,k,v",
        adjust=adjust_to_tensors,
        prefixes=("model.", ""),
        export_prefix=lambda spec: "" if spec.output == "none" else "model.",
        ignored_suffixes=("rotary_emb.inv_freq", "lm_head.weight"),
    )


GEMMA2_FAMILY = _family("gemma2", "gemma2")
GEMMA3_FAMILY = _family("gemma3", "gemma3_text", QK_NORM_NAMES)
