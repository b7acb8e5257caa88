"""GPT-Neo: like GPT-2, but scores are not scaled, layers alternate between global and local, and q, k, v are separate."""

from typing import Any

from headwise.errors import FileFormatError
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
)
from headwise.weights.families.gpt2 import ACTIVATIONS, COMMON_MAPPINGS, gpt_unrepresentable
from headwise.weights.keymap import TensorMapping


def spec_from_config(config: Config) -> ModelSpec:
    """Convert config.json to a spec."""
    reject_unsupported(decoder_unsupported(config))
    width, window = required_setting(config, "hidden_size"), positive_int_setting(config, "window_size", default=256)
    types = setting_or_default(config, "attention_types", default=None, allow_null=True) or [[["global", "local"], 12]]
    kinds = setting_or_default(config, "attention_layers", default=_expand_types(types))
    layers = required_setting(config, "num_layers", "num_hidden_layers")
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        raise FileFormatError(f"attention_layers must list global or local for each of {layers} layers. Got {kinds}.")
    windows = tuple(window if kind == "local" else None for kind in kinds)
    return ModelSpec(
        vocab=required_setting(config, "vocab_size"),
        context=positive_int_setting(config, "max_position_embeddings", default=2048),
        layers=layers,
        attention=AttentionSpec(
            width,
            positive_int_setting(config, "num_heads", "num_attention_heads", default=16),
            out_bias=True,
            scale=1.0,
        ),
        mlp_width=positive_int_or_none(config, "intermediate_size") or 4 * width,
        activation=translate_setting(
            setting_or_default(config, "activation_function", default="gelu_new"), ACTIVATIONS, "activation"
        ),
        norm_eps=setting_or_default(config, "layer_norm_epsilon", default=1e-5),
        windows=_shortest_period(windows),
        tied=bool_setting(config, "tie_word_embeddings", default=True),
    )


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Convert a spec to config.json."""
    attention = spec.attention
    windows = [spec.attention_at(layer_address).window for layer_address in spec.layer_addresses]
    sizes = {window for window in windows if window is not None}
    reject_unrepresentable(
        {
            **gpt_unrepresentable(spec),
            "windows of several sizes": len(sizes) > 1,
            "biases on q, k, v, or outputs without biases": attention.bias
            or not (attention.out_bias and spec.mlp_bias),
            "scaled scores": attention.scale != 1.0,
        },
        "GPT-Neo",
    )
    return {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_layers": spec.layers,
        "num_heads": attention.heads,
        "intermediate_size": spec.mlp_width,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "attention_types": [[["local" if window else "global"], 1] for window in windows],
        "window_size": next(iter(sizes), 256),
        "tie_word_embeddings": spec.tied,
        "attention_dropout": attention.dropout,
        "resid_dropout": spec.dropout,
        "embed_dropout": spec.dropout,
    }


def _expand_types(types: list) -> list[str]:
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]


def _shortest_period(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the shortest pattern whose repetition gives these windows; empty if no layer has a window."""
    if not any(windows):
        return ()
    n = len(windows)
    return next(windows[:p] for p in range(1, n + 1) if all(windows[i] == windows[i % p] for i in range(n)))


MAPPINGS = (
    *COMMON_MAPPINGS,
    TensorMapping("h.{i}.attn.attention.q_proj.weight", "blocks.{i}.attention.qkv.q_weight"),
    TensorMapping("h.{i}.attn.attention.k_proj.weight", "blocks.{i}.attention.qkv.k_weight"),
    TensorMapping("h.{i}.attn.attention.v_proj.weight", "blocks.{i}.attention.qkv.v_weight"),
    TensorMapping("h.{i}.attn.attention.out_proj.weight", "blocks.{i}.attention.output_projection.weight"),
    TensorMapping("h.{i}.attn.attention.out_proj.bias", "blocks.{i}.attention.output_projection.bias"),
    TensorMapping("h.{i}.mlp.c_fc.weight", "blocks.{i}.mlp.up.weight"),
    TensorMapping("h.{i}.mlp.c_proj.weight", "blocks.{i}.mlp.down.weight"),
)

FAMILY = ModelFamilySpec(
    name="gpt-neo",
    model_types=("gpt_neo",),
    spec_from_config=spec_from_config,
    config_from_spec=config_from_spec,
    mappings=MAPPINGS,
    storage="q,k,v",
    prefixes=("transformer.", ""),
    export_prefix=lambda spec: "transformer.",
    ignored_suffixes=(".attn.attention.bias", ".attn.attention.masked_bias", "lm_head.weight"),
)
