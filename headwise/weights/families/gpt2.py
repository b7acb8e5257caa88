"""GPT-2: learned positions, pre-norm, linear layers stored as (in, out), one weight for q, k and v."""

from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
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
from headwise.weights.families.gguf_gpt2_bert import GPT2_MAPPINGS
from headwise.weights.keymap import TensorMapping

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec. `reorder_and_upcast_attn` affects only training in half precision and is ignored."""
    has_layer_scaling = bool_setting(config, "scale_attn_by_inverse_layer_idx", default=False)
    reject_unsupported(
        decoder_unsupported(config) | {"scores scaled by layer (scale_attn_by_inverse_layer_idx)": has_layer_scaling}
    )
    width, heads = (
        required_setting(config, "n_embd", "hidden_size"),
        positive_int_setting(config, "n_head", "num_attention_heads", default=12),
    )
    scaled = bool_setting(config, "scale_attn_weights", default=True)
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=positive_int_setting(config, "n_positions", "max_position_embeddings", default=1024),
        layers=required_setting(config, "n_layer", "num_hidden_layers"),
        attention=AttentionSpec(width, heads, bias=True, out_bias=True, scale=None if scaled else 1.0),
        mlp_width=positive_int_or_none(config, "n_inner") or 4 * width,
        activation=translate_setting(
            setting_or_default(config, "activation_function", default="gelu_new"), ACTIVATIONS, "activation"
        ),
        norm_eps=setting_or_default(config, "layer_norm_epsilon", default=1e-5),
        tied=bool_setting(config, "tie_word_embeddings", default=True),
    )


def gpt_unrepresentable(spec: ModelSpec) -> dict[str, bool]:
    """Return the features that neither GPT-2 nor GPT-Neo can represent, and whether the spec uses them."""
    attention = spec.attention
    return {
        **unrepresentable_feature_flags(spec),
        "a model that is not a decoder with an LM head": spec.kind != "decoder" or spec.output != "lm",
        "rotary positions": attention.rotary is not None or spec.positions != "learned",
        "grouped-query attention": attention.kv_heads != attention.heads,
        "head_dim other than width / heads": attention.head_dim * attention.heads != attention.width,
        "post-norm or RMS norms": spec.norm_placement != "pre" or spec.norm != "layer" or spec.embed_norm,
        "a gated MLP": spec.has_gated_mlp,
        "token types": spec.token_types > 0,
    }


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention = spec.attention
    reject_unrepresentable(
        {
            **gpt_unrepresentable(spec),
            "windows": bool(spec.windows) or attention.window is not None,
            "layers without biases": not (attention.bias and attention.out_bias and spec.mlp_bias),
            "a custom attention scale": attention.scale not in (None, 1.0),
        },
        "GPT-2",
    )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": spec.vocab,
        "n_positions": spec.context,
        "n_embd": spec.width,
        "n_layer": spec.layers,
        "n_head": attention.heads,
        "n_inner": spec.mlp_width,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "scale_attn_weights": attention.scale is None,
        "tie_word_embeddings": spec.tied,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
    }


# Mappings shared with GPT-Neo: embeddings, norms and biases.
COMMON_MAPPINGS = (
    TensorMapping("wte.weight", "embed.tokens.weight"),
    TensorMapping("wpe.weight", "embed.positions.weight"),
    TensorMapping("h.{i}.ln_1.weight", "blocks.{i}.norm_attention.weight"),
    TensorMapping("h.{i}.ln_1.bias", "blocks.{i}.norm_attention.bias"),
    TensorMapping("h.{i}.ln_2.weight", "blocks.{i}.norm_mlp.weight"),
    TensorMapping("h.{i}.ln_2.bias", "blocks.{i}.norm_mlp.bias"),
    TensorMapping("h.{i}.mlp.c_fc.bias", "blocks.{i}.mlp.up.bias"),
    TensorMapping("h.{i}.mlp.c_proj.bias", "blocks.{i}.mlp.down.bias"),
    TensorMapping("ln_f.weight", "norm.weight"),
    TensorMapping("ln_f.bias", "norm.bias"),
    TensorMapping("/lm_head.weight", "output.vocabulary.weight", when=lambda spec: not spec.tied),
)
MAPPINGS = (
    *COMMON_MAPPINGS,
    TensorMapping("h.{i}.attn.c_attn.weight", "blocks.{i}.attention.qkv.qkv_weight", transposed=True),
    TensorMapping("h.{i}.attn.c_attn.bias", "blocks.{i}.attention.qkv.qkv_bias"),
    TensorMapping("h.{i}.attn.c_proj.weight", "blocks.{i}.attention.output_projection.weight", transposed=True),
    TensorMapping("h.{i}.attn.c_proj.bias", "blocks.{i}.attention.output_projection.bias"),
    TensorMapping("h.{i}.mlp.c_fc.weight", "blocks.{i}.mlp.up.weight", transposed=True),
    TensorMapping("h.{i}.mlp.c_proj.weight", "blocks.{i}.mlp.down.weight", transposed=True),
)

FAMILY = ModelFamilySpec(
    name="gpt2",
    model_types=("gpt2",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    other_mappings={"gguf": GPT2_MAPPINGS},
    storage="qkv",
    prefixes=("transformer.", ""),
    export_prefix=lambda spec: "transformer.",
    ignored_suffixes=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
)
