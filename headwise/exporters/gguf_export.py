"""Export to GGUF for stock llama.cpp: full and pruned Llama models, other decoders, BERTs, T5 and DeepSeek-V2.

Each architecture lists, for every field of our specs, the value it requires or `ANY_VALUE`. A field that is not listed must
be None, so a new field is never ignored by mistake.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, UnsupportedModelError, suggest_names
from headwise.exporters.gguf_decoders import decoder_problem_conditions, nearest_decoder, write_decoder
from headwise.exporters.gguf_deepseek import deepseek_problems, write_deepseek
from headwise.exporters.gguf_t5 import t5_problems, write_t5
from headwise.exporters.gguf_tensors import (
    GGUF_TYPES,
    QUANT_BLOCK,
    GgufFile,
    encoder_windows_and_rotaries,
    llama_architecture_name,
    write_bert,
    write_gpt2,
    write_llama,
    write_modern_bert,
)
from headwise.exporters.gguf_tokenizer import placeholder_tokenizer_fields, tokenizer_fields
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.spec.attention import POSITION_BIASES
from headwise.text import Tokenizer
from headwise.weights.families.gguf_decoders import DECODER_FORMATS

ANY_VALUE = object()

# Fields common to all architectures. Windows, scale and positions have their own rules below.
SIZE_FIELDS = dict.fromkeys(
    ("vocab", "context", "layers", "attention", "mlp_width", "norm_eps", "dropout", "kept_heads"), ANY_VALUE
)
MODEL_FIELDS = {
    **SIZE_FIELDS, "encoder_layers": 0, "windows": ANY_VALUE, "embed_scale": 1.0, "tied": ANY_VALUE, "cache": (),
    "weight_rules": (), "activation_bits": 32, "stacks": (),
    "embed_width": 0, "shared_layers": False, "position_offset": ANY_VALUE, "output_activation": ANY_VALUE,
    "causal_t5_buckets": ANY_VALUE, "decoder_start_id": None, "logit_scale": 1.0,
    "rotaries": (), "logit_softcap": None, "first_norm": True, "transform_bias": ANY_VALUE,
}  # fmt: skip
ATTENTION_FIELDS = {
    **dict.fromkeys(("width", "heads", "head_dim", "value_dim", "kv_heads", "kv_width"), ANY_VALUE),
    **dict.fromkeys(("dropout", "head_dropout", "head_dropout_schedule"), ANY_VALUE),
    "bias": ANY_VALUE, "out_bias": ANY_VALUE, "scale": ANY_VALUE, "window": ANY_VALUE, "kept_heads": None, "cache": (),
    "weight_bits": None,
    # llama.cpp supports no position bias
    **{field.name: field.default for field in fields(AttentionSpec) if field.name in POSITION_BIASES},
    "t5_max_distance": ANY_VALUE, "t5_bidirectional": ANY_VALUE,
    "softcap": None, "softmax": "plain", "head_input": "full", "gated": False, "output_gate": None,
    "qk_norm": None, "query_scaling": None, "latent": None,
}  # fmt: skip


@dataclass(frozen=True)
class GgufArchitectureRequirements:
    """Values that one of llama.cpp's architectures requires of our specs.

    Attributes:
        name: Name of the architecture.
        model_fields: Required value of each field of `ModelSpec`.
        attention_fields: Required value of each field of `AttentionSpec`.
    """

    name: str
    model_fields: dict[str, Any]
    attention_fields: dict[str, Any]


LLAMA = GgufArchitectureRequirements(
    "llama",
    {
        **MODEL_FIELDS, "kind": "decoder", "norm_placement": "pre", "norm": "rms", "activation": "swiglu",
        "mlp_bias": ANY_VALUE, "positions": "none",
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**ATTENTION_FIELDS, "rotary": ANY_VALUE},
)  # fmt: skip
GPT2 = GgufArchitectureRequirements(
    "gpt2",
    {
        **MODEL_FIELDS, "kind": "decoder", "norm_placement": "pre", "norm": "layer", "activation": "gelu_tanh",
        "mlp_bias": ANY_VALUE, "positions": ANY_VALUE,
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "lm",
    },
    {**ATTENTION_FIELDS, "rotary": None},
)  # fmt: skip
BERT = GgufArchitectureRequirements(
    "bert",
    {
        **MODEL_FIELDS, "kind": "encoder", "norm_placement": "post", "norm": "layer", "activation": "gelu",
        "mlp_bias": ANY_VALUE, "positions": ANY_VALUE,
        "embed_norm": True, "token_types": ANY_VALUE, "pooler": ANY_VALUE, "output": "none",
    },
    {**ATTENTION_FIELDS, "rotary": None},
)  # fmt: skip
MODERN_BERT = GgufArchitectureRequirements(
    "modern-bert",
    {
        **BERT.model_fields, "norm_placement": "pre", "norm": "layer_no_bias", "activation": ANY_VALUE,
        "mlp_bias": False, "positions": "none", "token_types": 0, "pooler": False, "first_norm": False,
        "rotaries": ANY_VALUE,
    },
    {**ATTENTION_FIELDS, "rotary": ANY_VALUE, "bias": False, "out_bias": False},
)  # fmt: skip
T5_ENCODER = GgufArchitectureRequirements(
    "t5encoder",
    {
        **MODEL_FIELDS, "kind": "encoder", "norm_placement": "pre", "norm": "rms", "activation": ANY_VALUE,
        "mlp_bias": False, "positions": "none",
        "embed_norm": False, "token_types": 0, "pooler": False, "output": "none",
    },
    {
        **ATTENTION_FIELDS, "rotary": None, "t5_buckets": ANY_VALUE, "t5_bidirectional": ANY_VALUE, "window": None,
        "bias": False, "out_bias": False,
    },
)  # fmt: skip
T5 = GgufArchitectureRequirements(
    "t5",
    {
        **T5_ENCODER.model_fields, "kind": "encoder-decoder", "output": "lm", "encoder_layers": ANY_VALUE,
        "decoder_start_id": ANY_VALUE, "logit_scale": ANY_VALUE,
    },
    T5_ENCODER.attention_fields,
)  # fmt: skip
ENCODERS = ("bert", "modern-bert", "t5encoder")  # their hidden states can be pooled


RMS_DECODER = LLAMA.model_fields | {"mlp_bias": False, "rotaries": ANY_VALUE}
HEAD_NORM = LLAMA.attention_fields | {"qk_norm": ANY_VALUE, "bias": False, "out_bias": False}
PLAIN = LLAMA.attention_fields | {"bias": False, "out_bias": False}
GEMMA = {
    "norm": "rms_plus_one",
    "norm_placement": "sandwich",
    "activation": "geglu_tanh",
    "embed_scale": ANY_VALUE,
    "tied": True,
}
DECODERS = {
    decoder.name: decoder
    for decoder in (
        LLAMA,
        GgufArchitectureRequirements("qwen3", RMS_DECODER, HEAD_NORM),
        GgufArchitectureRequirements(
            "gemma2", RMS_DECODER | GEMMA | {"logit_softcap": ANY_VALUE}, PLAIN | {"softcap": ANY_VALUE}
        ),
        GgufArchitectureRequirements("gemma3", RMS_DECODER | GEMMA, HEAD_NORM),
        GgufArchitectureRequirements("olmo2", RMS_DECODER | {"norm_placement": "output"}, HEAD_NORM),
        GgufArchitectureRequirements("phi3", RMS_DECODER, PLAIN),
        GgufArchitectureRequirements("smollm3", RMS_DECODER, PLAIN),
        GgufArchitectureRequirements("mistral3", RMS_DECODER, PLAIN | {"query_scaling": ANY_VALUE}),
        GgufArchitectureRequirements(
            "deepseek2", LLAMA.model_fields | {"mlp_bias": False}, PLAIN | {"latent": ANY_VALUE}
        ),
    )
}


def choose_gguf_architecture(spec: ModelSpec) -> GgufArchitectureRequirements:
    """Return the llama.cpp architecture that computes this model. Raise an error that lists the reasons if there is none."""
    if spec.weight_rules:
        raise UnsupportedModelError(
            "to='gguf': weights quantized per head cannot be stored in GGUF. Dequantize the model first: "
            "hw.dequantize(model)."
        )
    nearest = _nearest_architecture(spec)
    if problems := [*_field_differences(spec, nearest), *_size_problems(spec, nearest)]:
        suffix = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        others, noun = ("", spec.kind) if spec.kind == "encoder-decoder" else ("to='onnx', or ", "model")
        raise UnsupportedModelError(
            f"to='gguf': llama.cpp's {nearest.name} architecture cannot compute this {noun}: {'; '.join(problems[:3])}"
            f"{suffix}. Use {others}model.save(folder)."
        )
    return nearest


def _nearest_architecture(spec: ModelSpec) -> GgufArchitectureRequirements:
    if spec.kind == "encoder-decoder":
        return T5
    if spec.kind == "encoder":
        has_rotary_layer_norms = spec.attention.rotary is not None and spec.norm.startswith("layer")
        return T5_ENCODER if spec.attention.t5_buckets else MODERN_BERT if has_rotary_layer_norms else BERT
    return GPT2 if spec.norm == "layer" else DECODERS[nearest_decoder(spec)]


def _field_differences(spec: ModelSpec, architecture: GgufArchitectureRequirements) -> list[str]:
    problems = []
    for part_spec, required, prefix in (
        (spec, architecture.model_fields, ""),
        (spec.attention, architecture.attention_fields, "attention."),
    ):
        for field in fields(part_spec):
            value, required_value = getattr(part_spec, field.name), required.get(field.name, None)
            if required_value is not ANY_VALUE and value != required_value:
                problems.append(f"{prefix}{field.name} is {value!r}, but must be {required_value!r}")
    if spec.attention.out_bias and architecture.attention_fields["out_bias"] is False and not spec.attention.bias:
        problems.append(
            "the output bias comes from folded means or a folded steering; prune with fold_mean=False, or export the model "
            "without steering"
        )
    return problems


def _size_problems(spec: ModelSpec, architecture: GgufArchitectureRequirements) -> list[str]:
    attention, rotary = spec.attention, spec.attention.rotary
    if architecture in (T5, T5_ENCODER):
        return [reason for reason, applies in t5_problems(spec).items() if applies]
    if architecture.name == "deepseek2":
        return [reason for reason, applies in deepseek_problems(spec).items() if applies] if attention.latent else []
    if architecture.name in DECODER_FORMATS:
        reasons = decoder_problem_conditions(spec, architecture.name)
        reasons["value_dim differs from head_dim"] = attention.value_dim != attention.head_dim
        caps = (
            {"softcap": attention.softcap, "logit_softcap": spec.logit_softcap} if architecture.name == "gemma2" else {}
        )
        reasons |= {f"{name} is None, but must be a number": value is None for name, value in caps.items()}
        return [reason for reason, applies in reasons.items() if applies]
    problems = _modern_bert_problem_conditions(spec) if architecture is MODERN_BERT else {}
    problems["its attention window is shorter than its context"] = architecture is not MODERN_BERT and any(
        window is not None and window < spec.context for window in (attention.window, *spec.windows)
    )
    problems["value_dim differs from head_dim"] = attention.value_dim != attention.head_dim
    if architecture is LLAMA:
        problems["it has no rotary positions"] = rotary is None
        kind = "none" if rotary is None or rotary.scaling is None else rotary.scaling.kind
        problems[f"its rotary scaling is {kind}"] = kind not in ("none", "linear", "llama3", "yarn")
        problems["YaRN with truncate=False"] = (
            rotary is not None and rotary.scaling is not None and (not rotary.scaling.truncate)
        )
        problems["rotary positions apply to only part of a head's channels"] = (
            rotary is not None
            and rotary.dims
            not in (
                None,
                attention.head_dim,
            )
        )
    else:
        problems[
            f"heads × head_dim is {attention.heads} × {attention.head_dim}, but must equal the width {spec.width}"
        ] = attention.heads * attention.head_dim != spec.width
    return [problem for problem, applies in problems.items() if applies]


def _modern_bert_problem_conditions(spec: ModelSpec) -> dict[str, bool]:
    """Return the reasons why `modern-bert` cannot hold an encoder with rotary positions, and whether they apply."""
    attention, layers = spec.attention, encoder_windows_and_rotaries(spec)
    windows, rotaries = {window for window, _ in layers} - {None}, {rotary for _, rotary in layers}
    return {
        f"its activation is {spec.activation}, but must be geglu or swiglu": spec.activation not in ("geglu", "swiglu"),
        f"it has {attention.kv_heads} KV heads, but must have {attention.heads}": attention.kv_heads != attention.heads,
        "its layers have different windows": len(windows) > 1,
        "its window is a single token": 1 in windows,
        "every layer has a window": None not in {window for window, _ in layers},
        "it has layers without positions": None in rotaries,
        "its rotary positions are scaled, interleaved, or apply to only part of a head's channels": any(
            replace(rotary, dims=rotary.dims or attention.head_dim) != Rotary(rotary.theta, dims=attention.head_dim)
            for rotary in rotaries
            if rotary is not None
        ),
        "its layers have rotary positions that differ in another way than by their windows": any(
            len({rotary for window, rotary in layers if (window is None) is is_full}) > 1 for is_full in (True, False)
        ),
    }


WRITER_TAG = "written by headwise"


@dataclass(frozen=True)
class GgufResult:
    """Result of `write_gguf`.

    Attributes:
        path: File that was written.
        architecture: Name of the llama.cpp architecture.
        notes: Remarks on how the model was represented.
    """

    path: Path
    architecture: str
    notes: tuple[str, ...]


def write_gguf(
    model: Transformer, path: Path, dtype: str = "f32", tokenizer: bool = True, pooling: str | None = None
) -> GgufResult:
    """Write a GGUF file. Raise an error if llama.cpp would compute different outputs.

    Args:
        model: Native model.
        path: Output file.
        dtype: Data type of the weights: f32, f16, q8_0 or q4_0.
        tokenizer: Store the tokenizer. If False, texts are token ids in decimal digits.
        pooling: How llama.cpp pools an encoder's hidden states: mean (default), cls or none.
    """
    if dtype not in GGUF_TYPES:
        raise ArgumentError(
            f"dtype={dtype!r}: must be one of {', '.join(GGUF_TYPES)}; {suggest_names(dtype, GGUF_TYPES)}"
        )
    architecture = choose_gguf_architecture(model.spec).name
    if pooling is not None and architecture not in ENCODERS:
        raise ArgumentError(f"pooling={pooling!r}: applies only to encoders. Got kind={model.spec.kind!r}. Remove it.")
    has_tokenizer = tokenizer and model.tokenizer is not None
    fields = (
        _tokenizer_fields(model)
        if has_tokenizer
        else placeholder_tokenizer_fields(model.spec.vocab, getattr(model.tokenizer, "special", {}))
    )
    name = llama_architecture_name(model) if architecture == "llama" else architecture
    store = GgufFile(path, name, dtype)
    store.writer.add_name(WRITER_TAG)
    notes = _write_model(model, store, name, pooling or "mean")
    _write_tokenizer(store.writer, fields)
    store.close()
    notes += (
        [f"{store.unquantized_tensors} tensors whose rows are not a multiple of {QUANT_BLOCK} are stored as f16"]
        if store.unquantized_tensors
        else []
    )
    notes += [] if has_tokenizer else ["no tokenizer: texts are token ids in decimal digits"]
    return GgufResult(path, name, tuple(notes))


def _write_model(model: Transformer, store: GgufFile, name: str, pooling: str) -> list[str]:
    """Write sizes and tensors. Returns notes."""
    if name in ENCODERS:
        write_encoder = {"bert": write_bert, "modern-bert": write_modern_bert, "t5encoder": write_t5}[name]
        return write_encoder(model, store, pooling)
    if name in DECODER_FORMATS:
        return write_decoder(model, store, name)
    if name == "t5":
        return write_t5(model, store, pooling)
    if name == "deepseek2":
        return write_deepseek(model, store)
    return write_gpt2(model, store) if name == "gpt2" else write_llama(model, store, name)


def written_by_headwise(path: Path) -> bool:
    """Return whether Headwise wrote a file, according to the model name in its header."""
    with path.open("rb") as file:
        header = file.read(256)
    return header.startswith(b"GGUF") and WRITER_TAG.encode() in header


def _tokenizer_fields(model: Transformer) -> dict[str, Any]:
    if not isinstance(model.tokenizer, Tokenizer):
        raise UnsupportedModelError(
            f"{type(model.tokenizer).__name__}: this tokenizer cannot be stored in GGUF. Set tokenizer=False."
        )
    return tokenizer_fields(model.tokenizer, model.spec.vocab)


def _write_tokenizer(writer: Any, fields: dict[str, Any]) -> None:
    setters = {"model": writer.add_tokenizer_model, "pre": writer.add_tokenizer_pre, "tokens": writer.add_token_list}
    setters |= {
        "token_type": writer.add_token_types,
        "merges": writer.add_token_merges,
        "scores": writer.add_token_scores,
        "precompiled_charsmap": writer.add_precompiled_charsmap,
    }
    setters |= {"add_bos_token": writer.add_add_bos_token, "add_eos_token": writer.add_add_eos_token}
    for name, value in fields.items():
        if name in setters:
            setters[name](value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
