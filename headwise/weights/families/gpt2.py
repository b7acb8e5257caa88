"""GPT-2: learned positions, pre-norm, linear layers stored (in, out), q, k and v in one weight."""

from typing import Any

from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import (
    Config,
    Family,
    choose,
    common_refusals,
    decoder_unread,
    need,
    refuse,
    setting,
    switch,
    unread,
    whole,
    whole_or_null,
)
from headwise.weights.keymap import Line

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def spec(config: Config) -> ModelSpec:
    """From config.json. `reorder_and_upcast_attn` is about half precision in training and changes no number here."""
    by_layer = switch(config, "scale_attn_by_inverse_layer_idx", default=False)
    unread(decoder_unread(config) | {"scores scaled by layer (scale_attn_by_inverse_layer_idx)": by_layer})
    width, heads = need(config, "n_embd", "hidden_size"), whole(config, "n_head", "num_attention_heads", default=12)
    scaled = switch(config, "scale_attn_weights", default=True)
    return ModelSpec(
        vocab=need(config, "vocab_size"),
        context=whole(config, "n_positions", "max_position_embeddings", default=1024),
        layers=need(config, "n_layer", "num_hidden_layers"),
        attention=AttentionSpec(width, heads, bias=True, out_bias=True, scale=None if scaled else 1.0),
        hidden=whole_or_null(config, "n_inner") or 4 * width,
        activation=choose(setting(config, "activation_function", default="gelu_new"), ACTIVATIONS, "activation"),
        norm_eps=setting(config, "layer_norm_epsilon", default=1e-5),
        tied=switch(config, "tie_word_embeddings", default=True),
    )


def gpt_refusals(spec: ModelSpec) -> dict[str, bool]:
    """What neither GPT-2's nor GPT-Neo's format can hold."""
    heads = spec.attention
    return {
        **common_refusals(spec),
        "anything but a decoder": spec.kind != "decoder" or spec.output != "lm",
        "rotary positions": heads.rotary is not None or spec.positions != "learned",
        "grouped keys": heads.kv_heads != heads.heads,
        "head_dim other than width / heads": heads.head_dim * heads.heads != heads.width,
        "post-norm or RMS norms": spec.form != "pre" or spec.norm != "layer" or spec.embed_norm,
        "swiglu": spec.activation == "swiglu",
        "token types": spec.token_types > 0,
    }


def config(spec: ModelSpec) -> dict[str, Any]:
    """To config.json."""
    heads = spec.attention
    refuse(
        {
            **gpt_refusals(spec),
            "windows": bool(spec.windows) or heads.window is not None,
            "layers without biases": not (heads.bias and heads.out_bias and spec.mlp_bias),
            "a scale of its own": heads.scale not in (None, 1.0),
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
        "n_head": heads.heads,
        "n_inner": spec.hidden,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "scale_attn_weights": heads.scale is None,
        "tie_word_embeddings": spec.tied,
        "attn_pdrop": heads.dropout,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
    }


# What GPT-Neo shares: embeddings, norms, and the biases around them.
COMMON = (
    Line("wte.weight", "embed.tokens.weight"),
    Line("wpe.weight", "embed.positions.weight"),
    Line("h.{i}.ln_1.weight", "blocks.{i}.norm_attention.weight"),
    Line("h.{i}.ln_1.bias", "blocks.{i}.norm_attention.bias"),
    Line("h.{i}.ln_2.weight", "blocks.{i}.norm_mlp.weight"),
    Line("h.{i}.ln_2.bias", "blocks.{i}.norm_mlp.bias"),
    Line("h.{i}.mlp.c_fc.bias", "blocks.{i}.mlp.up.bias"),
    Line("h.{i}.mlp.c_proj.bias", "blocks.{i}.mlp.down.bias"),
    Line("ln_f.weight", "norm.weight"),
    Line("ln_f.bias", "norm.bias"),
    Line("/lm_head.weight", "output.vocabulary.weight", when=lambda spec: not spec.tied),
)
LINES = (
    *COMMON,
    Line("h.{i}.attn.c_attn.weight", "blocks.{i}.attention.read.qkv_weight", transposed=True),
    Line("h.{i}.attn.c_attn.bias", "blocks.{i}.attention.read.qkv_bias"),
    Line("h.{i}.attn.c_proj.weight", "blocks.{i}.attention.write.weight", transposed=True),
    Line("h.{i}.attn.c_proj.bias", "blocks.{i}.attention.write.bias"),
    Line("h.{i}.mlp.c_fc.weight", "blocks.{i}.mlp.up.weight", transposed=True),
    Line("h.{i}.mlp.c_proj.weight", "blocks.{i}.mlp.down.weight", transposed=True),
)

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    spec=spec,
    config=config,
    lines=LINES,
    storage="qkv",
    prefixes=("transformer.", ""),
    export_prefix=lambda spec: "transformer.",
    ignored=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
)
