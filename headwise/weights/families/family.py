"""What a family is: how its configuration becomes a spec and back, and how its tensors are named."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import ModelSpec
from headwise.weights.keymap import TensorMapping

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """One family of models."""

    name: str
    model_types: tuple[str, ...]
    spec_from_config: Callable[[Config], ModelSpec]  # from config.json
    config_from_spec: Callable[
        [ModelSpec], dict[str, Any]
    ]  # to config.json; an error where the family cannot hold the spec
    mappings: tuple[TensorMapping, ...]
    storage: str  # how their q, k and v lie: in one weight or in three
    # Parts of the model that only the names of the tensors show: from the spec, those names and config.json.
    adjust: Callable[[ModelSpec, set[str], Config], ModelSpec] = lambda spec, names, config: spec
    prefixes: tuple[str, ...] = ("",)  # what may stand before every name
    ignored_suffixes: tuple[str, ...] = ()  # ends of names of buffers that are no weights
    export_prefix: Callable[[ModelSpec], str] = lambda spec: ""  # the one transformers expects
    other_mappings: Mapping[str, tuple[TensorMapping, ...]] = field(
        default_factory=dict
    )  # the same model in other layouts


def required_setting(config: Config, *names: str) -> Any:
    """A setting without which a model cannot be read, under any of its names."""
    value = setting_or_default(config, *names, default=None, allow_null=True)
    if value is None:
        raise HeadwiseError(f"the configuration lacks {names[0]!r}; is config.json whole?")
    return value


def setting_or_default(config: Config, *names: str, default: Any, allow_null: bool = False) -> Any:
    """A setting as transformers reads it: what is given under any of its names, its default where it is left out.

    `allow_null`: whether null says something; where it does not, it is an error, as it is in transformers.
    """
    values = {name: config[name] for name in names if name in config}
    if not values:
        return default
    first = next(iter(values))
    if any(value != values[first] for value in values.values()):
        conflicts = ", ".join(f"{name} {value!r}" for name, value in values.items())
        raise HeadwiseError(f"the configuration says one thing twice and differently: {conflicts}; keep the right one.")
    if values[first] is None and not allow_null:
        raise HeadwiseError(f"{first} is null, which says nothing; give a value, or leave it out for {default!r}.")
    return values[first]


def bool_setting(config: Config, *names: str, default: bool) -> bool:
    """A setting that is true or false."""
    value = setting_or_default(config, *names, default=default)
    if not isinstance(value, bool):
        raise HeadwiseError(f"{names[0]} must be true or false, got {value!r}.")
    return value


def positive_int_setting(config: Config, *names: str, default: int) -> int:
    """A setting that counts something, 1 or more."""
    value = setting_or_default(config, *names, default=default)
    if type(value) is not int or value < 1:
        raise HeadwiseError(f"{names[0]} must be a whole number of at least 1, got {value!r}.")
    return value


def positive_int_or_none(config: Config, *names: str, default: int | None = None) -> int | None:
    """The same where null says something too."""
    value = setting_or_default(config, *names, default=default, allow_null=True)
    return None if value is None else positive_int_setting({names[0]: value}, names[0], default=value)


def translate_setting(value: Any, choices: Mapping[Any, str], name: str) -> Any:
    """Translate a setting; an error lists those that are known."""
    if value not in choices:
        raise HeadwiseError(f"{name} {value!r} is not supported; known: {', '.join(map(str, choices))}.")
    return choices[value]


def reject_unsupported(reasons: Mapping[str, bool]) -> None:
    """An error for the first thing a configuration asks for that is not computed here: never left out in silence."""
    for reason, is_requested in reasons.items():
        if is_requested:
            raise HeadwiseError(
                f"the configuration asks for {reason}, which Headwise does not compute; load the model with "
                f"transformers and give it to hw.attach."
            )


def common_unsupported(config: Config) -> dict[str, bool]:
    """What no family's configuration may ask for."""
    return {
        "quantised weights (quantization_config)": bool(config.get("quantization_config")),
        "heads cut by transformers (pruned_heads)": bool(config.get("pruned_heads")),
        "an encoder-decoder (is_encoder_decoder)": bool(config.get("is_encoder_decoder")),
        "cross-attention (add_cross_attention)": bool_setting(config, "add_cross_attention", default=False),
    }


def decoder_unsupported(config: Config) -> dict[str, bool]:
    """What no decoder's configuration may ask for."""
    return common_unsupported(config) | {
        "a decoder that sees what comes later (is_causal false)": not bool_setting(config, "is_causal", default=True),
    }


def reject_unrepresentable(reasons: Mapping[str, bool], family: str) -> None:
    """An error for the first thing a family's format has no room for."""
    for reason, is_used in reasons.items():
        if is_used:
            raise HeadwiseError(
                f"the {family} format cannot hold {reason}; use model.save(folder), which holds everything."
            )


def common_unrepresentable(spec: ModelSpec) -> dict[str, bool]:
    """What none of the formats can hold."""
    attention = spec.attention
    return {
        "an encoder-decoder": spec.kind == "encoder-decoder",
        "value_dim other than head_dim": attention.value_dim != attention.head_dim,
        "a learned sink or off-by-one softmax": attention.softmax != "plain",
        "capped scores": attention.softcap is not None,
        f"a bias by distance ({attention.position_bias_field})": attention.position_bias_field is not None,
        "gates": attention.gated,
        "head_input='slice'": attention.head_input == "slice",
        "parallel blocks": spec.norm_placement == "parallel",
        "sinusoidal positions": spec.positions == "sinusoidal",
        "an embedding scale": spec.embed_scale != 1.0,
    }
