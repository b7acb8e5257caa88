"""Llama and those built like it (SmolLM2, TinyLlama, Mistral, Qwen2): rotary, RMS norms, swiglu, grouped keys."""

from dataclasses import replace
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families.family import Config, Family, choose, common_refusals, need, refuse
from headwise.weights.families.llama_files import GGUF, META
from headwise.weights.keymap import Line


def spec(config: Config) -> ModelSpec:
    """From Hugging Face's config.json."""
    kind = config.get("model_type", "llama")
    choose(config.get("hidden_act", "silu"), {"silu": "swiglu"}, "activation")
    heads = need(config, "num_attention_heads")
    layers = need(config, "num_hidden_layers")
    biased = kind == "qwen2" or bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if kind == "mistral" or config.get("use_sliding_window") else None
    return ModelSpec(
        vocab=need(config, "vocab_size"),
        context=need(config, "max_position_embeddings"),
        layers=layers,
        attention=AttentionSpec(
            need(config, "hidden_size"),
            heads,
            head_dim=config.get("head_dim") or 0,
            kv_heads=config.get("num_key_value_heads") or heads,
            bias=biased,
            out_bias=biased and kind != "qwen2",
            rotary=_rotary(config),
            window=None if kind == "qwen2" else window,
        ),
        hidden=need(config, "intermediate_size"),
        norm="rms",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        mlp_bias=bool(config.get("mlp_bias", False)),
        positions="none",
        windows=_qwen_windows(config, layers, window) if kind == "qwen2" and window else (),
        tied=config.get("tie_word_embeddings", False),
    )


def _qwen_windows(config: Config, layers: int, window: int) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", layers)
    return tuple(window if layer >= first else None for layer in range(layers))


def _rotary(config: Config) -> Rotary:
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = told.get("rope_theta") or config.get("rope_theta", 10000.0)
    kind = told.get("rope_type", told.get("type", "default"))
    if kind == "default":
        return Rotary(theta=theta)
    if kind == "linear":
        return Rotary(theta=theta, scaling=RotaryScaling("linear", told["factor"]))
    if kind == "llama3":
        scaling = RotaryScaling(
            "llama3",
            told["factor"],
            told["low_freq_factor"],
            told["high_freq_factor"],
            told["original_max_position_embeddings"],
        )
        return Rotary(theta=theta, scaling=scaling)
    raise HeadwiseError(f"rotary scaling {kind!r} is not supported; known: default, linear, llama3.")


def config(spec: ModelSpec) -> dict[str, Any]:
    """To config.json: as a Llama, a Mistral where there is a window, a Qwen2 where only q, k and v have biases."""
    heads = spec.attention
    refuse(
        {
            **common_refusals(spec),
            "anything but a decoder": spec.kind != "decoder" or spec.output != "lm",
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
    kind = "mistral" if heads.window is not None else "qwen2" if heads.bias and not heads.out_bias else "llama"
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    made: dict[str, Any] = {
        "model_type": kind,
        "architectures": [names[kind]],
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


def adjust(spec: ModelSpec, names: set[str]) -> ModelSpec:
    """What the tensors tell that a configuration may not: without an output of its own, the embedding serves."""
    outputs = {"lm_head.weight", "output.weight"}
    return spec if names & outputs else replace(spec, tied=True)


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
    "tokens": "model.embed_tokens.weight",
    "norm_attention": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "norm_mlp": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
}


def lines(names: dict[str, str]) -> tuple[Line, ...]:
    """The map for one way of naming; biases are named after their weights."""
    made = []
    for part, theirs in names.items():
        ours = _OURS[part]
        rotated = part in ("q", "k")
        tied = part == "output"
        made.append(
            Line(theirs, ours, rotated=rotated, when=(lambda spec: not spec.tied) if tied else lambda spec: True)
        )
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
    ignored=("rotary_emb.inv_freq", "rope.freqs", "rope_freqs.weight", "lm_head.weight"),
    other_names={"meta": lines(META), "gguf": lines(GGUF)},
)
