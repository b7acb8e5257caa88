"""Parts of config.json that decoders of the Llama lineage share: sizes, rotary embedding, layer types, tensor names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families.family import (
    Config,
    bool_setting,
    decoder_unsupported,
    positive_int_or_none,
    positive_int_setting,
    reject_unsupported,
    required_setting,
    setting_or_default,
    translate_setting,
)
from headwise.weights.keymap import TensorMapping

SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
SWIGLU = {"silu": "swiglu", "swish": "swiglu"}


@dataclass(frozen=True)
class DecoderDefaults:
    """Defaults of transformers for the settings of one model type.

    Attributes:
        context: max_position_embeddings.
        kv_heads: num_key_value_heads. None means the number of heads.
        head_dim: head_dim. 0 means hidden_size / num_attention_heads.
        theta: rope_theta.
        tied: tie_word_embeddings.
        norm_eps: rms_norm_eps.
        activation: Name of the setting of the activation.
        partial_rotary: Whether the family reads partial_rotary_factor.
    """

    context: int
    kv_heads: int | None = None
    head_dim: int = 0
    theta: float = 10000.0
    tied: bool = False
    norm_eps: float = 1e-6
    activation: str = "hidden_act"
    partial_rotary: bool = False


def decoder_spec(
    config: Config,
    defaults: DecoderDefaults,
    *,
    attention: Mapping[str, Any],
    activations: Mapping[str, str] | None = None,
    **model_fields: Any,
) -> ModelSpec:
    """Convert the settings that all decoders of the Llama lineage share.

    Args:
        config: Configuration.
        defaults: Defaults of the model type.
        attention: Further fields of `AttentionSpec`.
        activations: Supported activations by their name in config.json. Default: SwiGLU.
        **model_fields: Further fields of `ModelSpec`.
    """
    reject_unsupported(decoder_unsupported(config))
    activations = SWIGLU if activations is None else activations
    default_activation = next(iter(activations))
    heads, width = (
        positive_int_setting(config, "num_attention_heads", default=32),
        required_setting(config, "hidden_size"),
    )
    fields = {
        "vocab": required_setting(config, "vocab_size"),
        "context": positive_int_setting(config, "max_position_embeddings", default=defaults.context),
        "layers": required_setting(config, "num_hidden_layers"),
        "attention": AttentionSpec(
            width,
            heads,
            head_dim=positive_int_or_none(config, "head_dim", default=defaults.head_dim or None) or 0,
            kv_heads=positive_int_or_none(config, "num_key_value_heads", default=defaults.kv_heads) or heads,
            **attention,
        ),
        "mlp_width": required_setting(config, "intermediate_size"),
        "norm": "rms",
        "norm_eps": setting_or_default(config, "rms_norm_eps", default=defaults.norm_eps),
        "activation": translate_setting(
            setting_or_default(config, defaults.activation, default=default_activation), activations, "activation"
        ),
        "mlp_bias": False,
        "positions": "none",
        "tied": bool_setting(config, "tie_word_embeddings", default=defaults.tied),
    }
    return ModelSpec(**fields | model_fields)


def head_dim_of(config: Config, defaults: DecoderDefaults) -> int:
    """Return the number of channels per head."""
    head_dim = positive_int_or_none(config, "head_dim", default=defaults.head_dim or None)
    heads = positive_int_setting(config, "num_attention_heads", default=32)
    return head_dim or required_setting(config, "hidden_size") // heads


def layer_types_of(config: Config, default: Callable[[int], str], allowed: Sequence[str]) -> list[str]:
    """Return the type of each layer: `layer_types`, or the default by layer number."""
    layers = required_setting(config, "num_hidden_layers")
    names = setting_or_default(config, "layer_types", default=None, allow_null=True)
    names = [default(layer) for layer in range(layers)] if names is None else names
    if not isinstance(names, list) or len(names) != layers or any(name not in allowed for name in names):
        raise FileFormatError(
            f"layer_types must list one of {', '.join(allowed)} for each of {layers} layers. Got {names}."
        )
    return names


def windows_of(kinds: Sequence[str], window: int | None) -> list[int | None]:
    """Return the window of each layer by its type. Raise an error if the size is missing, as transformers does."""
    if window is None and "sliding_attention" in kinds:
        raise FileFormatError(
            "sliding_window is null or missing, but layer_types has layers with a window. Set sliding_window, or layer_types."
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def shortest_period(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest pattern whose repetition gives these values; empty if all are equal.

    >>> shortest_period([1, 2, 1, 2, 1]), shortest_period([3, 3])
    ((1, 2), ())
    """
    n = len(values)
    period = next((p for p in range(1, n + 1) if all(values[i] == values[i % p] for i in range(n))), 0)
    return () if period <= 1 else tuple(values[:period])


def varied_fields(windows: Sequence[int | None], rotaries: Sequence[Rotary | None]) -> tuple[dict, dict]:
    """Return fields of `AttentionSpec` and of `ModelSpec` for the windows and rotary embeddings of the layers."""
    attention = {"window": windows[0] if windows else None, "rotary": rotaries[0] if rotaries else None}
    window_pattern, rotary_pattern = shortest_period(windows), shortest_period(rotaries)
    # a pattern must not leave the shared field with the value of one kind of layer
    attention |= {"window": None} if window_pattern else {}
    attention |= {"rotary": next((r for r in rotaries if r is not None), None)} if rotary_pattern else {}
    return attention, {"windows": window_pattern, "rotaries": rotary_pattern}


# Rotary embeddings.


def rope_settings(config: Config) -> Mapping[str, Any]:
    """Return rope_scaling (transformers 4) or rope_parameters (transformers 5). rope_scaling takes precedence."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModelError(f"rope_parameters must be a mapping. Got {settings!r}.")
    return settings


def layer_rope_settings(config: Config, layer_type: str, theta_name: str) -> Mapping[str, Any]:
    """Return the rotary settings of one type of layers, where `rope_parameters` is nested by type or common to all.

    Args:
        config: Configuration.
        layer_type: Type of the layers.
        theta_name: Older setting with the theta of these layers.
    """
    settings: Mapping[str, Any] = config.get("rope_parameters") or {}
    settings = settings.get(layer_type) or ({} if any(isinstance(v, Mapping) for v in settings.values()) else settings)
    older = config.get("rope_scaling")
    if older and layer_type == "full_attention":
        settings = {**settings, **older}
    return settings if theta_name not in config else {"rope_theta": config[theta_name], **settings}


def read_rotary(config: Config, settings: Mapping[str, Any], defaults: DecoderDefaults) -> Rotary:
    """Convert rotary settings.

    Args:
        config: Configuration, for the context lengths and the older rope_theta.
        settings: Rotary settings of the layers.
        defaults: Defaults of the model type.
    """
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModelError(
            f"rotary positions that differ between layers are not supported here. Got {settings}."
        )
    context = positive_int_setting(config, "max_position_embeddings", default=defaults.context)
    theta = setting_or_default(
        settings, "rope_theta", default=setting_or_default(config, "rope_theta", default=defaults.theta)
    )
    head_dim = head_dim_of(config, defaults)
    share = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dims = int(head_dim * share)
    if dims != head_dim and not defaults.partial_rotary:
        raise UnsupportedModelError(
            f"partial_rotary_factor {share} is not supported: in this model family all channels of a head are rotated. "
            f"Remove it."
        )
    return Rotary(theta, dims=None if dims == head_dim else dims, scaling=read_scaling(config, settings, context))


def read_scaling(config: Config, settings: Mapping[str, Any], context: int) -> RotaryScaling | None:
    """Convert the settings of a rotary scaling. `context` is the context length of the model."""
    kind = setting_or_default(settings, "rope_type", default=settings.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rotary scaling {kind!r} is not supported. Supported: {', '.join(SCALINGS)}.")
    if kind == "default":
        return None
    if kind == "linear":
        return RotaryScaling("linear", required_setting(settings, "factor"))
    if kind == "dynamic":
        return RotaryScaling("dynamic", required_setting(settings, "factor"), original_context=context)
    original = config.get("original_max_position_embeddings")  # as in transformers, the outer setting takes precedence
    has_original = original or settings.get("original_max_position_embeddings")
    original = original or positive_int_setting(settings, "original_max_position_embeddings", default=context)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (required_setting(settings, name) for name in names)
        return RotaryScaling("llama3", factor, low, high, original)
    factor = settings.get("factor") or (context / original if has_original else required_setting(settings, "factor"))
    attention_factor = settings.get("attention_factor")
    if kind == "longrope":
        short, long = (tuple(required_setting(settings, f"{name}_factor")) for name in ("short", "long"))
        return RotaryScaling(
            "longrope",
            factor,
            original_context=original,
            attention_factor=attention_factor,
            short_factors=short,
            long_factors=long,
        )
    mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all:
        attention_factor = yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all)
    return RotaryScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        truncate=bool_setting(settings, "truncate", default=True),
        attention_factor=attention_factor,
    )


def yarn_factor(factor: float, mscale: float) -> float:
    """Return YaRN's factor of cosines and sines, whose logarithmic part some models weight by `mscale`."""
    scaling = RotaryScaling("yarn", factor)
    return 1.0 + mscale * (scaling.cos_sin_factor - 1.0)


def rope_parameters(rotary: Rotary | None, head_dim: int) -> dict[str, Any]:
    """Convert a rotary embedding to the settings of transformers 5."""
    rotary = Rotary() if rotary is None else rotary
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
    if rotary.dims not in (None, head_dim):
        settings["partial_rotary_factor"] = rotary.dims / head_dim  # pyright: ignore[reportOptionalOperand]
    scaling = rotary.scaling
    if scaling is None:
        return settings
    settings |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind not in ("linear", "dynamic"):
        settings["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        settings |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind in ("yarn", "longrope") and scaling.attention_factor is not None:
        settings["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        settings |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if scaling.kind == "longrope":
        settings |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return settings


# Export.


def decoder_config(spec: ModelSpec, model_type: str, class_name: str) -> dict[str, Any]:
    """Return the settings that all decoders of the Llama lineage share."""
    attention = spec.attention
    return {
        "model_type": model_type,
        "architectures": [class_name + ("Model" if spec.output == "none" else "ForCausalLM")],
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
        "tie_word_embeddings": spec.tied,
        "attention_dropout": attention.dropout,
        "pad_token_id": None,  # the defaults of some model types are outside a small vocabulary
    }


def layer_windows_and_rotaries(spec: ModelSpec) -> tuple[list[int | None], list[Rotary | None]]:
    """Return the window and the rotary embedding of each layer."""
    layers = [spec.attention_at(address) for address in spec.layer_addresses]
    return [layer.window for layer in layers], [layer.rotary for layer in layers]


def require_same_spec(
    spec: ModelSpec, config: dict[str, Any], spec_from_config: Callable[[Config], ModelSpec], family: str
) -> dict[str, Any]:
    """Return an exported configuration if it gives the same model when it is read. Raise an error otherwise."""
    try:
        same = spec_from_config(config)
    except (FileFormatError, UnsupportedModelError) as error:
        raise UnsupportedModelError(f"the {family} format cannot represent this model: {error}") from None
    neutral = {"dropout": 0.0, "head_dropout": 0.0, "head_dropout_schedule": "constant"}
    expected, actual = (
        replace(
            value,
            output="none" if spec.output == "none" else value.output,
            dropout=0.0,
            attention=replace(value.attention, **neutral),
        )
        for value in (spec, same)
    )
    if spec.output not in ("lm", "none") or spec.dropout:
        raise UnsupportedModelError(
            f"the {family} format cannot represent output={spec.output!r} or dropout={spec.dropout}."
        )
    layers = zip(
        *([value.attention_at(a) for a in value.layer_addresses] for value in (expected, actual)), strict=False
    )
    pairs = [("", remove_layer_fields(expected), remove_layer_fields(actual))]
    pairs += [("attention.", _with_half_layout(written), read) for written, read in layers]
    for prefix, written, read in pairs:
        for name in written.__dataclass_fields__:
            if getattr(written, name) != getattr(read, name):
                raise UnsupportedModelError(
                    f"the {family} format cannot represent {prefix}{name}={getattr(written, name)!r}. Use "
                    f"model.save(folder), which supports every model."
                )
    return config


def _with_half_layout(attention: AttentionSpec) -> AttentionSpec:
    """Return a layer with the rotary layout of transformers: export reorders the rows of q and k, and their norms."""
    rotary = attention.rotary
    if rotary is None or rotary.dims not in (None, attention.head_dim):
        return attention
    return replace(attention, rotary=replace(rotary, layout="half"))


def remove_layer_fields(spec: ModelSpec) -> ModelSpec:
    """Return a spec without the fields that `attention_at` reads, to compare the remaining ones."""
    attention = AttentionSpec(width=spec.width, heads=1)
    return replace(spec, attention=attention, windows=(), rotaries=())


# Tensor names.

NAMES = {
    "embed.tokens.weight": "embed_tokens.weight",
    "blocks.{i}.norm_attention.weight": "layers.{i}.input_layernorm.weight",
    "blocks.{i}.attention.qkv.q_weight": "layers.{i}.self_attn.q_proj.weight",
    "blocks.{i}.attention.qkv.k_weight": "layers.{i}.self_attn.k_proj.weight",
    "blocks.{i}.attention.qkv.v_weight": "layers.{i}.self_attn.v_proj.weight",
    "blocks.{i}.attention.output_projection.weight": "layers.{i}.self_attn.o_proj.weight",
    "blocks.{i}.norm_mlp.weight": "layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.mlp.gate.weight": "layers.{i}.mlp.gate_proj.weight",
    "blocks.{i}.mlp.up.weight": "layers.{i}.mlp.up_proj.weight",
    "blocks.{i}.mlp.down.weight": "layers.{i}.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "output.vocabulary.weight": "/lm_head.weight",
}
QK_NORM_NAMES = {
    "blocks.{i}.attention.q_norm.weight": "layers.{i}.self_attn.q_norm.weight",
    "blocks.{i}.attention.k_norm.weight": "layers.{i}.self_attn.k_norm.weight",
}
OUTPUT_NORM_NAMES = {  # two norms around each sub-layer, as in Gemma 2
    "blocks.{i}.norm_attention_output.weight": "layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.norm_mlp.weight": "layers.{i}.pre_feedforward_layernorm.weight",
    "blocks.{i}.norm_mlp_output.weight": "layers.{i}.post_feedforward_layernorm.weight",
}


def decoder_mappings(*changes: Mapping[str, str]) -> tuple[TensorMapping, ...]:
    """Return the name map of a decoder: the names above, replaced and extended by `changes` (native to external)."""
    names = dict(NAMES)
    for change in changes:
        names |= change
    mappings = []
    for native, external in names.items():
        is_rotary = any(part in native for part in (".qkv.q_", ".qkv.k_", ".q_norm.", ".k_norm."))
        when = _has_own_output if native.startswith("output.") else _always
        mappings.append(TensorMapping(external, native, is_rotary=is_rotary, when=when))
        condition = _bias_predicate(native)
        if condition is not None:
            native_bias, external_bias = native.replace("weight", "bias"), external.replace(".weight", ".bias")
            mappings.append(TensorMapping(external_bias, native_bias, is_rotary=is_rotary, when=condition))
    return tuple(mappings)


def _always(spec: ModelSpec) -> bool:
    return True


def _has_own_output(spec: ModelSpec) -> bool:
    return spec.output == "lm" and not spec.tied


def _bias_predicate(native_weight_name: str) -> Callable[[ModelSpec], bool] | None:
    if ".qkv." in native_weight_name:
        return lambda spec: spec.attention.bias
    if ".output_projection." in native_weight_name:
        return lambda spec: spec.attention.out_bias
    return (lambda spec: spec.mlp_bias) if ".mlp." in native_weight_name else None
