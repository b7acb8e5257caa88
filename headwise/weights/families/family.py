"""What a family is: how its configuration becomes a spec and back, and how its tensors are named."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import ModelSpec
from headwise.weights.keymap import Line

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[Config], ModelSpec]  # from config.json
    config: Callable[[ModelSpec], dict[str, Any]]  # to config.json; an error where the family cannot hold the spec
    lines: tuple[Line, ...]
    storage: str  # how their q, k and v lie: in one weight or in three
    adjust: Callable[[ModelSpec, set[str]], ModelSpec] = lambda spec, names: spec  # what the tensors' names add
    prefixes: tuple[str, ...] = ("",)  # what may stand before every name
    ignored: tuple[str, ...] = ()  # ends of names of buffers that are no weights
    export_prefix: Callable[[ModelSpec], str] = lambda spec: ""  # the one transformers expects
    other_names: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)  # the same model in other layouts


def need(config: Config, *names: str) -> Any:
    """The first of these settings that is there; an error that names it where none is."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise HeadwiseError(f"the configuration lacks {names[0]!r}; is config.json whole?")


def choose(value: Any, choices: Mapping[Any, str], what: str) -> Any:
    """Translate a setting; an error lists those that are known."""
    if value not in choices:
        raise HeadwiseError(f"{what} {value!r} is not supported; known: {', '.join(map(str, choices))}.")
    return choices[value]


def refuse(reasons: Mapping[str, bool], family: str) -> None:
    """An error for the first thing a family's format has no room for."""
    for reason, there in reasons.items():
        if there:
            raise HeadwiseError(
                f"the {family} format cannot hold {reason}; use model.save(folder), which holds everything."
            )


def common_refusals(spec: ModelSpec) -> dict[str, bool]:
    """What none of the formats can hold."""
    heads = spec.attention
    return {
        "an encoder-decoder": spec.kind == "encoder-decoder",
        "value_dim other than head_dim": heads.value_dim != heads.head_dim,
        "a learned sink or off-by-one softmax": heads.softmax != "plain",
        "capped scores": heads.softcap is not None,
        "ALiBi": heads.alibi,
        "gates": heads.gated,
        "input='slice'": heads.input == "slice",
        "parallel blocks": spec.form == "parallel",
        "sinusoidal positions": spec.positions == "sinusoidal",
        "an embedding scale": spec.embed_scale != 1.0,
    }
