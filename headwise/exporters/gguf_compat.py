"""Which of llama.cpp's architectures computes a model, and why none does.

What an architecture computes is said field by field of our specs: a value it insists on, or that any value will do. A field
that is named nowhere is refused, so that a new one is never forgotten.
"""

from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.attention import POSITION_BIASES

ANY = object()

# What is the same for all of them. Windows, scale and positions have rules of their own below.
SIZES = dict.fromkeys(("vocab", "context", "layers", "attention", "hidden", "norm_eps", "dropout", "kept"), ANY)
MODEL = {
    **SIZES, "encoder_layers": 0, "windows": ANY, "embed_scale": 1.0, "tied": ANY, "cache": (), "weights": (),
    "activations": 32, "stacks": (),
}  # fmt: skip
HEADS = {
    **dict.fromkeys(("width", "heads", "head_dim", "value_dim", "kv_heads", "kv_width"), ANY),
    **dict.fromkeys(("dropout", "head_dropout", "head_dropout_schedule"), ANY),
    "bias": ANY, "out_bias": ANY, "scale": ANY, "window": ANY, "kept": None, "cache": (), "weights": None,
    **{field.name: field.default for field in fields(AttentionSpec) if field.name in POSITION_BIASES},  # it has none
    "softcap": None, "softmax": "plain", "input": "full", "gated": False,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What one of llama.cpp's models insists on."""

    name: str
    model: dict[str, Any]
    heads: dict[str, Any]


LLAMA = Architecture(
    "llama",
    {
        **MODEL, "kind": "decoder", "form": "pre", "norm": "rms", "activation": "swiglu", "mlp_bias": ANY,
        "positions": "none",
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**HEADS, "rotary": ANY},
)  # fmt: skip
GPT2 = Architecture(
    "gpt2",
    {
        **MODEL, "kind": "decoder", "form": "pre", "norm": "layer", "activation": "gelu_tanh", "mlp_bias": ANY,
        "positions": ANY,
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**HEADS, "rotary": None},
)  # fmt: skip
BERT = Architecture(
    "bert",
    {
        **MODEL, "kind": "encoder", "form": "post", "norm": "layer", "activation": "gelu", "mlp_bias": ANY,
        "positions": ANY,
        "embed_norm": True, "token_types": ANY, "pooler": ANY, "output": "none",
    },
    {**HEADS, "rotary": None},
)  # fmt: skip


def architecture_for(spec: ModelSpec) -> Architecture:
    """The architecture that computes what the model does; refused, with every reason, where none does."""
    if spec.weights:
        raise HeadwiseError(
            "GGUF has no weights at bits by head; write the numbers: hw.export(hw.dequantise(model), …, to='gguf')."
        )
    nearest = BERT if spec.kind == "encoder" else LLAMA if spec.norm == "rms" else GPT2
    if wrong := [*_differences(spec, nearest), *_sizes(spec, nearest)]:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise HeadwiseError(
            f"llama.cpp's {nearest.name} cannot compute this model: {'; '.join(wrong[:3])}{more}. "
            f"Use to='onnx', or model.save(folder)."
        )
    return nearest


def _differences(spec: ModelSpec, one: Architecture) -> list[str]:
    told = []
    for what, wanted, prefix in ((spec, one.model, ""), (spec.attention, one.heads, "attention.")):
        for field in fields(what):
            value, want = getattr(what, field.name), wanted.get(field.name, None)
            if want is not ANY and value != want:
                told.append(f"{prefix}{field.name} is {value!r}, there it is {want!r}")
    return told


def _sizes(spec: ModelSpec, one: Architecture) -> list[str]:
    attention, rotary = spec.attention, spec.attention.rotary
    wrong = {
        "it looks back only so far (window)": any(
            window is not None and window < spec.context for window in (attention.window, *spec.windows)
        ),
        "values have another size than keys": attention.value_dim != attention.head_dim,
    }
    if one is LLAMA:
        wrong["it has no rotary positions"] = rotary is None
        wrong["only part of a head's channels turn"] = rotary is not None and rotary.dims not in (
            None,
            attention.head_dim,
        )
    else:
        wrong[
            f"its heads are {attention.heads} × {attention.head_dim} wide, there they fill the width {spec.width}"
        ] = attention.heads * attention.head_dim != spec.width
    return [why for why, is_so in wrong.items() if is_so]
