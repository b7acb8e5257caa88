"""GGUF for stock llama.cpp: Llamas whole or cut, GPT-2 and BERT."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, suggest_names
from headwise.exporters.gguf_compat import architecture_for
from headwise.exporters.gguf_gpt2_bert import write_bert, write_gpt2
from headwise.exporters.gguf_llama import gguf_architecture, write_llama
from headwise.exporters.gguf_tokenizer import placeholder_tokenizer_fields, tokenizer_fields
from headwise.exporters.gguf_writer import GGUF_TYPES, QUANT_BLOCK, GgufFile
from headwise.model import Transformer
from headwise.text import Tokenizer

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
    architecture = architecture_for(model.spec).name
    if pooling is not None and architecture != "bert":
        raise HeadwiseError("pooling makes one vector of a text that an encoder read; leave it out for a decoder.")
    has_tokenizer = tokenizer and model.tokenizer is not None
    fields = (
        _tokenizer_fields(model)
        if has_tokenizer
        else placeholder_tokenizer_fields(model.spec.vocab, getattr(model.tokenizer, "special", {}))
    )
    name = gguf_architecture(model) if architecture == "llama" else architecture
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
