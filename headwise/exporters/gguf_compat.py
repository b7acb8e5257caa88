"""Which of llama.cpp's architectures computes a model, and why none does.

What an architecture computes is said field by field of our specs: a value it insists on, or that any value will do. A field
that is named nowhere is refused, so that a new one is never forgotten.
"""

from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.attention import POSITION_BIASES

ANY_VALUE = object()

# What is the same for all of them. Windows, scale and positions have rules of their own below.
SIZE_FIELDS = dict.fromkeys(
    ("vocab", "context", "layers", "attention", "mlp_width", "norm_eps", "dropout", "kept_heads"), ANY_VALUE
)
MODEL_FIELDS = {
    **SIZE_FIELDS, "encoder_layers": 0, "windows": ANY_VALUE, "embed_scale": 1.0, "tied": ANY_VALUE, "cache": (),
    "weight_rules": (), "activation_bits": 32, "stacks": (),
}  # fmt: skip
ATTENTION_FIELDS = {
    **dict.fromkeys(("width", "heads", "head_dim", "value_dim", "kv_heads", "kv_width"), ANY_VALUE),
    **dict.fromkeys(("dropout", "head_dropout", "head_dropout_schedule"), ANY_VALUE),
    "bias": ANY_VALUE, "out_bias": ANY_VALUE, "scale": ANY_VALUE, "window": ANY_VALUE, "kept_heads": None, "cache": (),
    "weight_bits": None,
    **{field.name: field.default for field in fields(AttentionSpec) if field.name in POSITION_BIASES},  # it has none
    "softcap": None, "softmax": "plain", "head_input": "full", "gated": False,
}  # fmt: skip


@dataclass(frozen=True)
class GgufArchitecture:
    """What one of llama.cpp's models insists on."""

    name: str
    model_fields: dict[str, Any]
    attention_fields: dict[str, Any]


LLAMA = GgufArchitecture(
    "llama",
    {
        **MODEL_FIELDS, "kind": "decoder", "norm_placement": "pre", "norm": "rms", "activation": "swiglu",
        "mlp_bias": ANY_VALUE, "positions": "none",
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**ATTENTION_FIELDS, "rotary": ANY_VALUE},
)  # fmt: skip
GPT2 = GgufArchitecture(
    "gpt2",
    {
        **MODEL_FIELDS, "kind": "decoder", "norm_placement": "pre", "norm": "layer", "activation": "gelu_tanh",
        "mlp_bias": ANY_VALUE, "positions": ANY_VALUE,
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**ATTENTION_FIELDS, "rotary": None},
)  # fmt: skip
BERT = GgufArchitecture(
    "bert",
    {
        **MODEL_FIELDS, "kind": "encoder", "norm_placement": "post", "norm": "layer", "activation": "gelu",
        "mlp_bias": ANY_VALUE, "positions": ANY_VALUE,
        "embed_norm": True, "token_types": ANY_VALUE, "pooler": ANY_VALUE, "output": "none",
    },
    {**ATTENTION_FIELDS, "rotary": None},
)  # fmt: skip


def architecture_for(spec: ModelSpec) -> GgufArchitecture:
    """The architecture that computes what the model does; refused, with every reason, where none does."""
    if spec.weight_rules:
        raise HeadwiseError(
            "GGUF has no weights at bits by head; write the numbers: hw.export(hw.dequantize(model), …, to='gguf')."
        )
    nearest = BERT if spec.kind == "encoder" else LLAMA if spec.norm == "rms" else GPT2
    if problems := [*_field_differences(spec, nearest), *_size_problems(spec, nearest)]:
        suffix = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise HeadwiseError(
            f"llama.cpp's {nearest.name} cannot compute this model: {'; '.join(problems[:3])}{suffix}. "
            f"Use to='onnx', or model.save(folder)."
        )
    return nearest


def _field_differences(spec: ModelSpec, architecture: GgufArchitecture) -> list[str]:
    problems = []
    for part_spec, required, prefix in (
        (spec, architecture.model_fields, ""),
        (spec.attention, architecture.attention_fields, "attention."),
    ):
        for field in fields(part_spec):
            value, required_value = getattr(part_spec, field.name), required.get(field.name, None)
            if required_value is not ANY_VALUE and value != required_value:
                problems.append(f"{prefix}{field.name} is {value!r}, there it is {required_value!r}")
    return problems


def _size_problems(spec: ModelSpec, architecture: GgufArchitecture) -> list[str]:
    attention, rotary = spec.attention, spec.attention.rotary
    problems = {
        "it looks back only so far (window)": any(
            window is not None and window < spec.context for window in (attention.window, *spec.windows)
        ),
        "values have another size than keys": attention.value_dim != attention.head_dim,
    }
    if architecture is LLAMA:
        problems["it has no rotary positions"] = rotary is None
        problems["only part of a head's channels turn"] = rotary is not None and rotary.dims not in (
            None,
            attention.head_dim,
        )
    else:
        problems[
            f"its heads are {attention.heads} × {attention.head_dim} wide, there they fill the width {spec.width}"
        ] = attention.heads * attention.head_dim != spec.width
    return [problem for problem, applies in problems.items() if applies]
