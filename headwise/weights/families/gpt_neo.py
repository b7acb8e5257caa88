"""GPT-Neo: as GPT-2, but scores are not scaled, layers alternate between global and local, q, k and v lie apart."""

from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families.family import (
    Config,
    Family,
    choose,
    decoder_unread,
    need,
    refuse,
    setting,
    switch,
    unread,
    whole,
    whole_or_null,
)
from headwise.weights.families.gpt2 import ACTIVATIONS, COMMON, gpt_refusals
from headwise.weights.keymap import Line


def spec(config: Config) -> ModelSpec:
    """From config.json."""
    unread(decoder_unread(config))
    width, window = need(config, "hidden_size"), whole(config, "window_size", default=256)
    types = setting(config, "attention_types", default=None, null=True) or [[["global", "local"], 12]]
    kinds = setting(config, "attention_layers", default=_written_out(types))
    layers = need(config, "num_layers", "num_hidden_layers")
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        raise HeadwiseError(f"attention_layers must give global or local for each of {layers} layers, got {kinds}.")
    windows = tuple(window if kind == "local" else None for kind in kinds)
    return ModelSpec(
        vocab=need(config, "vocab_size"),
        context=whole(config, "max_position_embeddings", default=2048),
        layers=layers,
        attention=AttentionSpec(
            width, whole(config, "num_heads", "num_attention_heads", default=16), out_bias=True, scale=1.0
        ),
        hidden=whole_or_null(config, "intermediate_size") or 4 * width,
        activation=choose(setting(config, "activation_function", default="gelu_new"), ACTIVATIONS, "activation"),
        norm_eps=setting(config, "layer_norm_epsilon", default=1e-5),
        windows=_shortest(windows),
        tied=switch(config, "tie_word_embeddings", default=True),
    )


def config(spec: ModelSpec) -> dict[str, Any]:
    """To config.json."""
    heads = spec.attention
    windows = [spec.attention_at(site).window for site in spec.sites]
    sizes = {window for window in windows if window is not None}
    refuse(
        {
            **gpt_refusals(spec),
            "windows of several sizes": len(sizes) > 1,
            "biases on q, k, v, or none on the outputs": heads.bias or not (heads.out_bias and spec.mlp_bias),
            "scaled scores": heads.scale != 1.0,
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
        "num_heads": heads.heads,
        "intermediate_size": spec.hidden,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(spec.activation, spec.activation),
        "layer_norm_epsilon": spec.norm_eps,
        "attention_types": [[["local" if window else "global"], 1] for window in windows],
        "window_size": next(iter(sizes), 256),
        "tie_word_embeddings": spec.tied,
        "attention_dropout": heads.dropout,
        "resid_dropout": spec.dropout,
        "embed_dropout": spec.dropout,
    }


def _written_out(types: list) -> list[str]:
    return [kind for kinds, times in types for _ in range(times) for kind in kinds]


def _shortest(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The shortest pattern that repeats to these windows; none at all where no layer has one."""
    if not any(windows):
        return ()
    n = len(windows)
    return next(windows[:p] for p in range(1, n + 1) if all(windows[i] == windows[i % p] for i in range(n)))


LINES = (
    *COMMON,
    Line("h.{i}.attn.attention.q_proj.weight", "blocks.{i}.attention.read.q_weight"),
    Line("h.{i}.attn.attention.k_proj.weight", "blocks.{i}.attention.read.k_weight"),
    Line("h.{i}.attn.attention.v_proj.weight", "blocks.{i}.attention.read.v_weight"),
    Line("h.{i}.attn.attention.out_proj.weight", "blocks.{i}.attention.write.weight"),
    Line("h.{i}.attn.attention.out_proj.bias", "blocks.{i}.attention.write.bias"),
    Line("h.{i}.mlp.c_fc.weight", "blocks.{i}.mlp.up.weight"),
    Line("h.{i}.mlp.c_proj.weight", "blocks.{i}.mlp.down.weight"),
)

FAMILY = Family(
    name="gpt-neo",
    model_types=("gpt_neo",),
    spec=spec,
    config=config,
    lines=LINES,
    storage="q,k,v",
    prefixes=("transformer.", ""),
    export_prefix=lambda spec: "transformer.",
    ignored=(".attn.attention.bias", ".attn.attention.masked_bias", "lm_head.weight"),
)
