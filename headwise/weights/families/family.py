"""`ModelFamily`: conversion between a family's configuration and a spec, and its tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise.errors import FileFormatError, HeadwiseError, UnsupportedModelError
from headwise.spec import ModelSpec
from headwise.weights.keymap import TensorMapping

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelFamilySpec:
    """One family of models.

    Attributes:
        name: Name of the family.
        model_types: Values of `model_type` in config.json.
        spec_from_config: Converts config.json to a spec.
        config_from_spec: Converts a spec to config.json; raises an error if the family cannot represent the spec.
        mappings: Tensor name map.
        storage: How q, k and v are stored: `qkv` (one weight) or `q,k,v` (three weights).
        adjust: Completes the spec with parts that only the tensor names reveal. Takes the spec, the names and config.json.
        prefixes: Prefixes that all names may have.
        ignored_suffixes: Suffixes of tensors that are not weights.
        export_prefix: Prefix that transformers expects.
        other_mappings: Tensor name maps of other file layouts, by layout.
        architectures: Classes of transformers whose tensors the name map covers. `hw.load` attaches folders of other classes,
            and folders with settings that the spec cannot represent. Empty means that they raise an error.
    """

    name: str
    model_types: tuple[str, ...]
    spec_from_config: Callable[[Config], ModelSpec]
    config_from_spec: Callable[[ModelSpec], dict[str, Any]]
    mappings: tuple[TensorMapping, ...]
    storage: str
    adjust: Callable[[ModelSpec, set[str], Config], ModelSpec] = lambda spec, names, config: spec
    prefixes: tuple[str, ...] = ("",)
    ignored_suffixes: tuple[str, ...] = ()
    export_prefix: Callable[[ModelSpec], str] = lambda spec: ""
    other_mappings: Mapping[str, tuple[TensorMapping, ...]] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()

    def attach_reason(self, config: Config) -> str:
        """Return why a folder with this config.json must be attached. Empty if the family can load it, or raises itself."""
        classes = config.get("architectures")
        if not self.architectures or not isinstance(classes, list):
            return ""
        if not any(name in self.architectures for name in classes):
            return f"Headwise does not implement {', '.join(map(str, classes))}"
        try:
            self.spec_from_config(config)
        except UnsupportedModelError as error:
            return str(error).split(". ")[0]
        except (HeadwiseError, KeyError, TypeError, AttributeError, ValueError, ArithmeticError):
            pass  # loading reports the damaged file
        return ""


def required_setting(config: Config, *names: str) -> Any:
    """Return a setting that must be present under one of its names."""
    value = setting_or_default(config, *names, default=None, allow_null=True)
    if value is None:
        raise FileFormatError(
            f"{names[0]!r} is missing in the configuration. The file may be truncated; download it again."
        )
    return value


def setting_or_default(config: Config, *names: str, default: Any, allow_null: bool = False) -> Any:
    """Return a setting as transformers reads it, under any of its names, or its default if it is absent.

    Args:
        config: Configuration.
        *names: Alternative names of the setting.
        default: Value if the setting is absent.
        allow_null: Whether null is a valid value. If not, null raises an error, as in transformers.
    """
    values = {name: config[name] for name in names if name in config}
    if not values:
        return default
    first = next(iter(values))
    if any(value != values[first] for value in values.values()):
        conflicts = ", ".join(f"{name} {value!r}" for name, value in values.items())
        raise FileFormatError(f"conflicting values for one setting: {conflicts}. Keep only the correct one.")
    if values[first] is None and not allow_null:
        raise FileFormatError(
            f"{first} is null, which is not a valid value. Set it, or remove it to use the default {default!r}."
        )
    return values[first]


def bool_setting(config: Config, *names: str, default: bool) -> bool:
    """Return a boolean setting."""
    value = setting_or_default(config, *names, default=default)
    if not isinstance(value, bool):
        raise FileFormatError(f"{names[0]} must be true or false. Got {value!r}.")
    return value


def positive_int_setting(config: Config, *names: str, default: int) -> int:
    """Return an integer setting of at least 1."""
    value = setting_or_default(config, *names, default=default)
    if type(value) is not int or value < 1:
        raise FileFormatError(f"{names[0]} must be an integer of at least 1. Got {value!r}.")
    return value


def positive_int_or_none(config: Config, *names: str, default: int | None = None) -> int | None:
    """Return an integer setting of at least 1, or None if it is null."""
    value = setting_or_default(config, *names, default=default, allow_null=True)
    return None if value is None else positive_int_setting({names[0]: value}, names[0], default=value)


def translate_setting(value: Any, choices: Mapping[Any, str], name: str) -> Any:
    """Translate the value of a setting. An unknown value raises an error that lists the supported ones."""
    if value not in choices:
        raise UnsupportedModelError(f"{name} {value!r} is not supported. Supported: {', '.join(map(str, choices))}.")
    return choices[value]


def reject_unsupported(reasons: Mapping[str, bool]) -> None:
    """Raise an error for the first requested feature that Headwise does not support."""
    for reason, is_requested in reasons.items():
        if is_requested:
            raise UnsupportedModelError(
                f"the configuration requests {reason}, which Headwise does not support. Load the model with transformers "
                f"and pass it to hw.attach."
            )


def common_unsupported(config: Config) -> dict[str, bool]:
    """Return the features that Headwise supports in no family, and whether the configuration requests them."""
    return {
        "quantized weights (quantization_config)": bool(config.get("quantization_config")),
        "heads pruned by transformers (pruned_heads)": bool(config.get("pruned_heads")),
        "an encoder-decoder (is_encoder_decoder)": bool(config.get("is_encoder_decoder")),
        "cross-attention (add_cross_attention)": bool_setting(config, "add_cross_attention", default=False),
    }


def decoder_unsupported(config: Config) -> dict[str, bool]:
    """Return the features that Headwise does not support in decoders, and whether the configuration requests them."""
    return common_unsupported(config) | {
        "a decoder with bidirectional attention (is_causal false)": not bool_setting(config, "is_causal", default=True),
    }


def reject_unrepresentable(reasons: Mapping[str, bool], family: str) -> None:
    """Raise an error for the first feature that the format of a family cannot represent."""
    for reason, is_used in reasons.items():
        if is_used:
            raise UnsupportedModelError(
                f"the {family} format cannot represent {reason}. Use model.save(folder), which supports every model."
            )


def gates_and_norms(spec: ModelSpec) -> dict[str, bool]:
    """Return the parts of attention that most families lack, and whether the spec uses them."""
    attention = spec.attention
    return {
        "gates": attention.gated or attention.output_gate is not None,
        "a norm of queries and keys": attention.qk_norm is not None,
        "queries scaled by position": attention.query_scaling is not None,
        "rotary positions that differ between layers": bool(spec.rotaries),
        "soft-capped logits": spec.logit_softcap is not None,
        "a first block without a norm": not spec.first_norm,
    }


def unrepresentable_feature_flags(spec: ModelSpec) -> dict[str, bool]:
    """Return the features that no family can represent, and whether the spec uses them."""
    attention = spec.attention
    return gates_and_norms(spec) | {
        "latent projections (MLA)": attention.latent is not None,
        "an encoder-decoder": spec.kind == "encoder-decoder",
        "value_dim other than head_dim": attention.value_dim != attention.head_dim,
        "a learned sink or off-by-one softmax": attention.softmax != "plain",
        "soft-capped scores": attention.softcap is not None,
        f"a position bias ({attention.position_bias_field})": attention.position_bias_field is not None,
        "norms on the outputs of sub-layers": spec.norm_placement in ("sandwich", "output"),
        "norms whose gain is 1 + weight": spec.norm == "rms_plus_one",
        "norms without bias": spec.norm == "layer_no_bias",
        "a transform layer without bias": spec.output == "mlm" and not spec.transform_bias,
        "head_input='slice'": attention.head_input == "slice",
        "parallel blocks": spec.norm_placement == "parallel",
        "sinusoidal positions": spec.positions == "sinusoidal",
        "an embedding scale": spec.embed_scale != 1.0,
        "embeddings narrower than the model": bool(spec.embed_width),
        "layers that share their weights": spec.shared_layers,
        "scaled logits": spec.logit_scale != 1.0,
        "rows of the position table before the first token": spec.position_offset > 0,
        f"a transform layer with {spec.output_activation}": spec.output_activation not in ("", spec.activation),
    }
