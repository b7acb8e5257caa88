"""GGUF for stock llama.cpp: Llamas full or pruned, GPT-2 and BERT.

Each architecture says field by field of our specs which value it requires, or that any value will do. A field that is
named nowhere is refused, so that a new one is never forgotten.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, suggest_names
from headwise.exporters.gguf_tensors import (
    GGUF_TYPES,
    QUANT_BLOCK,
    GgufFile,
    llama_architecture_name,
    write_bert,
    write_gpt2,
    write_llama,
)
from headwise.exporters.gguf_tokenizer import placeholder_tokenizer_fields, tokenizer_fields
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.attention import POSITION_BIASES
from headwise.text import Tokenizer

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


def choose_gguf_architecture(spec: ModelSpec) -> GgufArchitecture:
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


WRITER_TAG = "written by headwise"


@dataclass(frozen=True)
class GgufResult:
    """What was written, and what was done about what the target cannot hold."""

    path: Path
    architecture: str
    notes: tuple[str, ...]


def write_gguf(
    model: Transformer, path: Path, dtype: str = "f32", tokenizer: bool = True, pooling: str | None = None
) -> GgufResult:
    """Write one file; refused, with the reason, where llama.cpp would compute something else."""
    if dtype not in GGUF_TYPES:
        raise HeadwiseError(
            f"weights are written as {', '.join(GGUF_TYPES)}, got {dtype!r}; {suggest_names(dtype, GGUF_TYPES)}"
        )
    architecture = choose_gguf_architecture(model.spec).name
    if pooling is not None and architecture != "bert":
        raise HeadwiseError("pooling makes one vector of a text that an encoder read; leave it out for a decoder.")
    has_tokenizer = tokenizer and model.tokenizer is not None
    fields = (
        _tokenizer_fields(model)
        if has_tokenizer
        else placeholder_tokenizer_fields(model.spec.vocab, getattr(model.tokenizer, "special", {}))
    )
    name = llama_architecture_name(model) if architecture == "llama" else architecture
    store = GgufFile(path, name, dtype)
    store.writer.add_name(WRITER_TAG)
    if architecture == "llama":
        notes = write_llama(model, store, name)
    elif architecture == "gpt2":
        notes = write_gpt2(model, store)
    else:
        notes = write_bert(model, store, pooling or "mean")
    _write_tokenizer(store.writer, fields)
    store.close()
    notes += (
        [f"{store.unquantized_tensors} tensors whose rows are no multiple of {QUANT_BLOCK} are at 16 bits"]
        if store.unquantized_tensors
        else []
    )
    notes += [] if has_tokenizer else ["no tokenizer: it reads and writes ids as numbers"]
    return GgufResult(path, name, tuple(notes))


def written_by_headwise(path: Path) -> bool:
    """Whether a file was written here: its name, among the first things in it, says so."""
    with path.open("rb") as file:
        header = file.read(256)
    return header.startswith(b"GGUF") and WRITER_TAG.encode() in header


def _tokenizer_fields(model: Transformer) -> dict[str, Any]:
    if not isinstance(model.tokenizer, Tokenizer):
        raise HeadwiseError(f"{type(model.tokenizer).__name__} is no tokenizer GGUF could hold; use tokenizer=False.")
    return tokenizer_fields(model.tokenizer, model.spec.vocab)


def _write_tokenizer(writer: Any, fields: dict[str, Any]) -> None:
    setters = {"model": writer.add_tokenizer_model, "pre": writer.add_tokenizer_pre, "tokens": writer.add_token_list}
    setters |= {
        "token_type": writer.add_token_types,
        "merges": writer.add_token_merges,
        "scores": writer.add_token_scores,
    }
    setters |= {"add_bos_token": writer.add_add_bos_token, "add_eos_token": writer.add_add_eos_token}
    for name, value in fields.items():
        if name in setters:
            setters[name](value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
