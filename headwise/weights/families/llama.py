"""Llama and models with its architecture (SmolLM2, TinyLlama, Mistral, Qwen2): rotary, RMS norm, SwiGLU, grouped queries."""

from dataclasses import replace
from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.weights.families.decoder_config import DecoderDefaults, read_rotary, rope_parameters, rope_settings
from headwise.weights.families.family import (
    Config,
    ModelFamilySpec,
    bool_setting,
    decoder_unsupported,
    positive_int_or_none,
    positive_int_setting,
    reject_unrepresentable,
    reject_unsupported,
    required_setting,
    setting_or_default,
    translate_setting,
    unrepresentable_feature_flags,
)
from headwise.weights.families.llama_meta_and_gguf import GGUF_NAMES, META_NAMES
from headwise.weights.keymap import TensorMapping

# Defaults of transformers that differ between the three model types.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": None, "context": 2048},
    "mistral": {"kv_heads": 8, "context": 131072},
    "qwen2": {"kv_heads": 32, "context": 32768},
}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert Hugging Face's config.json to a spec.

    Settings that the model class does not use, such as a Llama's sliding_window, are ignored, as in transformers.
    """
    reject_unsupported(decoder_unsupported(config))
    model_type = config.get("model_type", "llama")
    translate_setting(
        setting_or_default(config, "hidden_act", default="silu"), {"silu": "swiglu", "swish": "swiglu"}, "activation"
    )
    heads = positive_int_setting(config, "num_attention_heads", default=32)
    layers = required_setting(config, "num_hidden_layers")
    context = positive_int_setting(config, "max_position_embeddings", default=DEFAULTS[model_type]["context"])
    windows = _windows(config, model_type, layers)
    is_uniform = len(set(windows)) == 1
    biased = model_type == "qwen2" or (model_type == "llama" and bool_setting(config, "attention_bias", default=False))
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=context,
        layers=layers,
        attention=AttentionSpec(
            required_setting(config, "hidden_size"),
            heads,
            head_dim=positive_int_or_none(config, "head_dim") or 0,
            kv_heads=positive_int_or_none(config, "num_key_value_heads", default=DEFAULTS[model_type]["kv_heads"])
            or heads,
            bias=biased,
            out_bias=biased and model_type != "qwen2",
            rotary=_rotary(config, DecoderDefaults(DEFAULTS[model_type]["context"])),
            window=windows[0] if is_uniform else None,
        ),
        mlp_width=required_setting(config, "intermediate_size"),
        norm="rms",
        norm_eps=setting_or_default(config, "rms_norm_eps", default=1e-6),
        activation="swiglu",
        mlp_bias=model_type == "llama" and bool_setting(config, "mlp_bias", default=False),
        positions="none",
        windows=() if is_uniform else windows,
        tied=bool_setting(config, "tie_word_embeddings", default=False),
    )


def _windows(config: Config, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: no window in Llama, one for all layers in Mistral, optional in Qwen2."""
    window = None
    if model_type == "mistral" or (model_type == "qwen2" and bool_setting(config, "use_sliding_window", default=False)):
        window = positive_int_or_none(config, "sliding_window", default=4096)
    first_window_layer = setting_or_default(config, "max_window_layers", default=28) if model_type == "qwen2" else 0
    layer_types = setting_or_default(config, "layer_types", default=None, allow_null=True)
    if layer_types is None:
        return tuple(window if layer >= first_window_layer else None for layer in range(layers))
    window_of_type = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != layers
        or any(name not in window_of_type for name in layer_types)
    ):
        raise FileFormatError(
            f"layer_types must list one of {', '.join(window_of_type)} for each of {layers} layers. Got {layer_types}."
        )
    if model_type != "qwen2" and any(window_of_type[name] != window for name in layer_types):
        raise UnsupportedModelError(
            f"layer_types: some layers have no window, which is not supported for {model_type}. Remove layer_types."
        )
    return tuple(window_of_type[name] for name in layer_types)


def _rotary(config: Config, defaults: DecoderDefaults) -> Rotary:
    """Read rope_parameters (transformers 5), or rope_scaling and rope_theta (4). rope_scaling takes precedence."""
    settings = rope_settings(config)
    for section in (config, settings):
        if section.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedModelError(
                f"partial_rotary_factor {section['partial_rotary_factor']} is not supported: in this model family all "
                f"channels of a head are rotated. Remove it."
            )
    return read_rotary(config, settings, defaults)


def _has_other_dynamic_scaling(spec: ModelSpec) -> bool:
    """Return whether dynamic scaling begins at another length than the context, where transformers begins it."""
    scaling = None if spec.attention.rotary is None else spec.attention.rotary.scaling
    return scaling is not None and scaling.kind == "dynamic" and scaling.original_context != spec.context


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json: Mistral if there is a window, Qwen2 if only q, k and v have biases, else Llama."""
    attention = spec.attention
    reject_unrepresentable(
        {
            **unrepresentable_feature_flags(spec),
            "a model that is not a decoder": spec.kind != "decoder",
            "positions other than rotary": attention.rotary is None or spec.positions != "none",
            "rotary positions on part of the channels": attention.rotary is not None
            and attention.rotary.dims not in (None, attention.head_dim),
            "post-norm or LayerNorm": spec.norm_placement != "pre" or spec.norm != "rms" or spec.embed_norm,
            "an MLP other than swiglu": spec.activation != "swiglu",
            "windows given layer by layer": bool(spec.windows),
            "a custom attention scale": attention.scale is not None,
            f"dynamic rotary scaling from another length than the context {spec.context}": _has_other_dynamic_scaling(
                spec
            ),
            "an output bias without biases on q, k, v": attention.out_bias and not attention.bias,
            "a window together with biases": attention.window is not None and attention.bias,
            "token types": spec.token_types > 0,
        },
        "Llama",
    )
    # transformers' Llama does not accept such a width; a Mistral without a window computes the same
    uneven = bool(spec.width % attention.heads)
    model_type = "qwen2" if attention.bias and not attention.out_bias else "llama"
    model_type = "mistral" if attention.window is not None or (uneven and not attention.bias) else model_type
    if uneven and model_type == "llama":
        raise UnsupportedModelError(
            f"transformers' Llama, Mistral and Qwen2 cannot represent this model: Llama needs a width divisible by the "
            f"number of heads (got width {spec.width}, {attention.heads} heads), and Mistral and Qwen2 have no output bias. "
            f"Use model.save(folder)."
        )
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    hf_config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [names[model_type] + ("Model" if spec.output == "none" else "ForCausalLM")],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": spec.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope_parameters(attention.rotary, attention.head_dim),
        "rope_theta": attention.rotary.theta if attention.rotary else None,
        "tie_word_embeddings": spec.tied,
        "attention_dropout": attention.dropout,
    }
    if model_type == "llama":
        hf_config |= {"attention_bias": attention.bias, "mlp_bias": spec.mlp_bias}
    elif spec.mlp_bias:
        raise UnsupportedModelError(
            f"the {model_type} format cannot represent biases in the MLP. Use model.save(folder)."
        )
    if model_type == "mistral":
        hf_config["sliding_window"] = attention.window
    return hf_config


_NATIVE_NAMES = {
    "tokens": "embed.tokens.weight",
    "norm_attention": "blocks.{i}.norm_attention.weight",
    "q": "blocks.{i}.attention.qkv.q_weight",
    "k": "blocks.{i}.attention.qkv.k_weight",
    "v": "blocks.{i}.attention.qkv.v_weight",
    "o": "blocks.{i}.attention.output_projection.weight",
    "norm_mlp": "blocks.{i}.norm_mlp.weight",
    "gate": "blocks.{i}.mlp.gate.weight",
    "up": "blocks.{i}.mlp.up.weight",
    "down": "blocks.{i}.mlp.down.weight",
    "norm": "norm.weight",
    "output": "output.vocabulary.weight",
}
_HUGGING_FACE_NAMES = {
    "tokens": "embed_tokens.weight",
    "norm_attention": "layers.{i}.input_layernorm.weight",
    "q": "layers.{i}.self_attn.q_proj.weight",
    "k": "layers.{i}.self_attn.k_proj.weight",
    "v": "layers.{i}.self_attn.v_proj.weight",
    "o": "layers.{i}.self_attn.o_proj.weight",
    "norm_mlp": "layers.{i}.post_attention_layernorm.weight",
    "gate": "layers.{i}.mlp.gate_proj.weight",
    "up": "layers.{i}.mlp.up_proj.weight",
    "down": "layers.{i}.mlp.down_proj.weight",
    "norm": "norm.weight",
    "output": "/lm_head.weight",
}


def adjust_to_tensors(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Remove the output head if the file contains a LlamaModel, MistralModel or Qwen2Model.

    If config.json says ForCausalLM, the head must be tied to the embedding or in the file.
    """
    classes = config.get("architectures")
    is_causal_lm = isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)
    is_body = "embed_tokens.weight" in names and "lm_head.weight" not in names
    return replace(spec, output="none") if is_body and not is_causal_lm else spec


def _has_own_output(spec: ModelSpec) -> bool:
    return spec.output == "lm" and not spec.tied


def make_mappings(external_names: dict[str, str]) -> tuple[TensorMapping, ...]:
    """Return the name map of a layout. A bias is named after its weight."""
    mappings = []
    for part, external_name in external_names.items():
        native_name = _NATIVE_NAMES[part]
        is_rotary = part in ("q", "k")
        tied = part == "output"
        mappings.append(
            TensorMapping(
                external_name, native_name, is_rotary=is_rotary, when=_has_own_output if tied else lambda spec: True
            )
        )
        for parts, condition in _BIASES:
            if part in parts:
                external_bias, native_bias = (
                    external_name.replace(".weight", ".bias"),
                    native_name.replace("weight", "bias"),
                )
                mappings.append(TensorMapping(external_bias, native_bias, is_rotary=is_rotary, when=condition))
    return tuple(mappings)


_BIASES = (
    ("qkv", lambda spec: spec.attention.bias),
    ("o", lambda spec: spec.attention.out_bias),
    (("gate", "up", "down"), lambda spec: spec.mlp_bias),
)

FAMILY = ModelFamilySpec(
    name="llama",
    model_types=("llama", "mistral", "qwen2"),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=make_mappings(_HUGGING_FACE_NAMES),
    storage="q,k,v",
    adjust=adjust_to_tensors,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored_suffixes=("rotary_emb.inv_freq", "rope.freqs", "rope_freqs.weight", "lm_head.weight"),
    other_mappings={"meta": make_mappings(META_NAMES), "gguf": make_mappings(GGUF_NAMES)},
)
