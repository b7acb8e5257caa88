"""Llama and those built like it (SmolLM2, TinyLlama, Mistral, Qwen2): rotary, RMS norms, swiglu, grouped keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
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
from headwise.weights.families.llama_files import GGUF, META
from headwise.weights.keymap import Line

# What transformers takes where a configuration leaves it out; these three differ in it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": None, "context": 2048},
    "mistral": {"kv_heads": 8, "context": 131072},
    "qwen2": {"kv_heads": 32, "context": 32768},
}


def spec(config: Config) -> ModelSpec:
    """From Hugging Face's config.json. What a model's class does not know, such as a Llama's sliding_window, is no
    part of it, here as in transformers."""
    unread(decoder_unread(config))
    kind = config.get("model_type", "llama")
    choose(setting(config, "hidden_act", default="silu"), {"silu": "swiglu", "swish": "swiglu"}, "activation")
    heads = whole(config, "num_attention_heads", default=32)
    layers = need(config, "num_hidden_layers")
    context = whole(config, "max_position_embeddings", default=DEFAULTS[kind]["context"])
    windows = _windows(config, kind, layers)
    one = len(set(windows)) == 1
    biased = kind == "qwen2" or (kind == "llama" and switch(config, "attention_bias", default=False))
    return ModelSpec(
        vocab=need(config, "vocab_size"),
        context=context,
        layers=layers,
        attention=AttentionSpec(
            need(config, "hidden_size"),
            heads,
            head_dim=whole_or_null(config, "head_dim") or 0,
            kv_heads=whole_or_null(config, "num_key_value_heads", default=DEFAULTS[kind]["kv_heads"]) or heads,
            bias=biased,
            out_bias=biased and kind != "qwen2",
            rotary=_rotary(config, context),
            window=windows[0] if one else None,
        ),
        hidden=need(config, "intermediate_size"),
        norm="rms",
        norm_eps=setting(config, "rms_norm_eps", default=1e-6),
        activation="swiglu",
        mlp_bias=kind == "llama" and switch(config, "mlp_bias", default=False),
        positions="none",
        windows=() if one else windows,
        tied=switch(config, "tie_word_embeddings", default=False),
    )


def _windows(config: Config, kind: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: a Llama has none, a Mistral one for all, a Qwen2 one for some if it says so."""
    window = None
    if kind == "mistral" or (kind == "qwen2" and switch(config, "use_sliding_window", default=False)):
        window = whole_or_null(config, "sliding_window", default=4096)
    first = setting(config, "max_window_layers", default=28) if kind == "qwen2" else 0
    kinds = setting(config, "layer_types", default=None, null=True)
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None} | ({} if window is None else {"sliding_attention": window})
    if not isinstance(kinds, list) or len(kinds) != layers or any(name not in known for name in kinds):
        raise HeadwiseError(
            f"layer_types must give one of {', '.join(known)} for each of {layers} layers, got {kinds}."
        )
    if kind != "qwen2" and any(known[name] != window for name in kinds):
        raise HeadwiseError(f"layer_types gives some layers no window, which a {kind} cannot do; leave it out.")
    return tuple(known[name] for name in kinds)


def _rotary(config: Config, context: int) -> Rotary:
    """transformers 5 writes rope_parameters, 4 wrote rope_scaling and rope_theta; it goes by rope_scaling where both are."""
    told = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(told, Mapping) or any(isinstance(value, Mapping) for value in told.values()):
        raise HeadwiseError(f"rotary positions that differ from layer to layer are not supported, got {told}.")
    for where in (config, told):
        if where.get("partial_rotary_factor") not in (None, 1):
            raise HeadwiseError(
                f"partial_rotary_factor {where['partial_rotary_factor']} is not supported: in these families every "
                f"channel of a head turns; leave it out."
            )
    theta = setting(told, "rope_theta", default=setting(config, "rope_theta", default=10000.0))
    kind = setting(told, "rope_type", default=told.get("type", "default"))
    if kind == "default":
        return Rotary(theta=theta)
    if kind == "linear":
        return Rotary(theta=theta, scaling=RotaryScaling("linear", need(told, "factor")))
    if kind == "llama3":
        scaling = RotaryScaling(
            "llama3",
            need(told, "factor"),
            need(told, "low_freq_factor"),
            need(told, "high_freq_factor"),
            config.get("original_max_position_embeddings")  # as transformers has it: outside before inside
            or whole(told, "original_max_position_embeddings", default=context),
        )
        return Rotary(theta=theta, scaling=scaling)
    raise HeadwiseError(f"rotary scaling {kind!r} is not supported; known: default, linear, llama3.")


def config(spec: ModelSpec) -> dict[str, Any]:
    """To config.json: as a Llama, a Mistral where there is a window, a Qwen2 where only q, k and v have biases."""
    heads = spec.attention
    refuse(
        {
            **common_refusals(spec),
            "anything but a decoder": spec.kind != "decoder",
            "positions other than rotary": heads.rotary is None or spec.positions != "none",
            "rotary positions on part of the channels": heads.rotary is not None
            and heads.rotary.dims not in (None, heads.head_dim),
            "post-norm or LayerNorm": spec.form != "pre" or spec.norm != "rms" or spec.embed_norm,
            "an MLP other than swiglu": spec.activation != "swiglu",
            "windows given layer by layer": bool(spec.windows),
            "a scale of its own": heads.scale is not None,
            "an output bias without biases on q, k, v": heads.out_bias and not heads.bias,
            "a window beside biases": heads.window is not None and heads.bias,
            "token types": spec.token_types > 0,
        },
        "Llama",
    )
    uneven = bool(spec.width % heads.heads)  # which transformers' Llama refuses; a Mistral without a window is the same
    kind = "qwen2" if heads.bias and not heads.out_bias else "llama"
    kind = "mistral" if heads.window is not None or (uneven and not heads.bias) else kind
    if uneven and kind == "llama":
        raise HeadwiseError(
            f"transformers' Llama refuses a width of {spec.width} with {heads.heads} heads, and its Mistral and Qwen2 a "
            f"bias on what heads write; use model.save(folder)."
        )
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    made: dict[str, Any] = {
        "model_type": kind,
        "architectures": [names[kind] + ("Model" if spec.output == "none" else "ForCausalLM")],
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "intermediate_size": spec.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": _rope_parameters(heads.rotary),
        "rope_theta": heads.rotary.theta if heads.rotary else None,
        "tie_word_embeddings": spec.tied,
        "attention_dropout": heads.dropout,
    }
    if kind == "llama":
        made |= {"attention_bias": heads.bias, "mlp_bias": spec.mlp_bias}
    elif spec.mlp_bias:
        raise HeadwiseError(f"the {kind} format cannot hold biases in the MLP; use model.save(folder).")
    if kind == "mistral":
        made["sliding_window"] = heads.window
    return made


def _rope_parameters(rotary: Rotary | None) -> dict[str, Any]:
    assert rotary is not None  # refused above
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
    scaling = rotary.scaling
    if scaling is not None:
        made |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        made |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return made


_OURS = {
    "tokens": "embed.tokens.weight",
    "norm_attention": "blocks.{i}.norm_attention.weight",
    "q": "blocks.{i}.attention.read.q_weight",
    "k": "blocks.{i}.attention.read.k_weight",
    "v": "blocks.{i}.attention.read.v_weight",
    "o": "blocks.{i}.attention.write.weight",
    "norm_mlp": "blocks.{i}.norm_mlp.weight",
    "gate": "blocks.{i}.mlp.gate.weight",
    "up": "blocks.{i}.mlp.up.weight",
    "down": "blocks.{i}.mlp.down.weight",
    "norm": "norm.weight",
    "output": "output.vocabulary.weight",
}
_HUGGING_FACE = {
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


def adjust(spec: ModelSpec, names: set[str], config: Config) -> ModelSpec:
    """Leave the output head out if the tensors are those of a LlamaModel, MistralModel or Qwen2Model.

    A folder that says ForCausalLM needs its head: tied to the embedding, or in the file.
    """
    classes = config.get("architectures")
    is_causal_lm = isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)
    is_body = "embed_tokens.weight" in names and "lm_head.weight" not in names
    return replace(spec, output="none") if is_body and not is_causal_lm else spec


def _has_own_output(spec: ModelSpec) -> bool:
    return spec.output == "lm" and not spec.tied


def lines(names: dict[str, str]) -> tuple[Line, ...]:
    """The map for one way of naming; biases are named after their weights."""
    made = []
    for part, theirs in names.items():
        ours = _OURS[part]
        rotated = part in ("q", "k")
        tied = part == "output"
        made.append(Line(theirs, ours, rotated=rotated, when=_has_own_output if tied else lambda spec: True))
        for parts, there in _BIASES:
            if part in parts:
                theirs_bias, ours_bias = theirs.replace(".weight", ".bias"), ours.replace("weight", "bias")
                made.append(Line(theirs_bias, ours_bias, rotated=rotated, when=there))
    return tuple(made)


_BIASES = (
    ("qkv", lambda spec: spec.attention.bias),
    ("o", lambda spec: spec.attention.out_bias),
    (("gate", "up", "down"), lambda spec: spec.mlp_bias),
)

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2"),
    spec=spec,
    config=config,
    lines=lines(_HUGGING_FACE),
    storage="q,k,v",
    adjust=adjust,
    prefixes=("model.", ""),
    export_prefix=lambda spec: "" if spec.output == "none" else "model.",
    ignored=("rotary_emb.inv_freq", "rope.freqs", "rope_freqs.weight", "lm_head.weight"),
    other_names={"meta": lines(META), "gguf": lines(GGUF)},
)
