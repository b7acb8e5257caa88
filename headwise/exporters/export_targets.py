"""`export`: a model written for an engine; one table says what each can hold."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, suggest_names
from headwise.exporters.engine_parity import (
    EncoderParityReport,
    ParityReport,
    compare_generated,
    compare_hidden_states,
    end_token_ids,
)
from headwise.io.atomic_write import atomic_file
from headwise.model import ModelProtocol
from headwise.weights.export import export as write_folder

PROMPTS = (
    "The teacher gave the students", "Once upon a time there was", "In 1969 the first", "She opened the door and",
)  # fmt: skip
TEXTS = (
    *PROMPTS,
    "Crème brûlée costs 3,14 €…\n\n\tno?",
    "I'll say: don't\u00a0GO  there!",
    "日本語 и Москва 🙂",
    "x = f(1999, 'a_b')",
)
CHECK_TOKENS = 16  # that are written behind each when a file is checked


@dataclass(frozen=True)
class ExportResult:
    """What lies where, for whom, what was done about the rest, and, where it was asked for, how it does in its engine."""

    path: Path
    to: str
    notes: tuple[str, ...] = ()
    parity: ParityReport | EncoderParityReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        result = {"path": str(self.path), "to": self.to, "notes": list(self.notes)}
        return (
            result if self.parity is None else {**result, "checked": vars(self.parity) | {"agrees": self.parity.agrees}}
        )


@dataclass(frozen=True)
class ExportTarget:
    """An engine: how a model is written for it and checked in it."""

    write: Callable[..., tuple[str, ...]]
    check: Callable[[ModelProtocol, Path, Sequence[Sequence[int]]], ParityReport | EncoderParityReport]
    engine: str  # the package that runs it
    install_extra: str | None  # what brings that package


def export(
    model: ModelProtocol,
    path: str | Path,
    family: str | None = None,
    *,
    to: str = "transformers",
    check: bool = False,
    **options: Any,
) -> ExportResult:
    """Write a model for another engine: `transformers` and `onnx` (a folder), `gguf` and `torch` (a file).

    What an engine cannot hold is refused with the reason, or done otherwise with the same numbers, as the notes say. What
    was written here before is replaced, anything else refused. `check` runs the file in its real engine and compares.
    Options of gguf: `dtype` (f32, f16, q8_0, q4_0), `tokenizer=False`, `pooling` (of an encoder: mean, cls, none); of onnx:
    `int8=True`.

    >>> import tempfile
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> small = preset("gpt2").resized(layers=1, width=16, heads=2, context=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(Transformer(small), folder + "/out").to
    'transformers'
    """
    if to not in TARGETS:
        raise HeadwiseError(f"there is no target {to!r}; {suggest_names(to, TARGETS)}")
    if model.spec.cache:
        raise HeadwiseError(
            f"{to} cannot let heads keep caches of their own, and without them the model says other things; use "
            f"model.save(folder)."
        )
    target = TARGETS[to]
    if family is not None:
        options["family"] = family
    option_names = list(inspect.signature(target.write).parameters)[2:]
    if unknown := [name for name in options if name not in option_names]:
        raise HeadwiseError(f"{to} has no option {', '.join(unknown)}; it has {', '.join(option_names) or 'none'}.")
    if check:
        _require_engine(model, to, target)
    notes = target.write(model, Path(path), **options)
    if not check:
        return ExportResult(Path(path), to, notes)
    max_tokens = max(1, model.spec.context - (CHECK_TOKENS if model.spec.kind == "decoder" else 0) - 1)
    prompts = [ids[:max_tokens] for text in PROMPTS if (ids := _prompt_ids(model, text))]
    return ExportResult(Path(path), to, notes, target.check(model, Path(path), prompts))


def _require_engine(model: ModelProtocol, to: str, target: ExportTarget) -> None:
    """Before anything is written."""
    if find_spec(target.engine) is None:
        raise HeadwiseError(
            f"what is written for {to} is checked in {target.engine}; pip install "
            f"'headwise[{target.install_extra}]', or leave check out."
        )
    if model.spec.kind == "encoder-decoder" or (model.spec.kind == "decoder" and model.output is None):
        raise HeadwiseError(
            "a check compares what a decoder writes or what an encoder makes of a text; this model does "
            "neither, leave check out."
        )


def _prompt_ids(model: ModelProtocol, text: str) -> list[int]:
    """A prompt in the model's tokens, or, where it has no tokenizer, the same letters as numbers."""
    if model.tokenizer is None:
        return [ord(char) % model.spec.vocab for char in text]
    return list(model.tokenizer.encode(text))


# How each is written.


def _write_transformers(model: Any, path: Path, family: str | None = None) -> tuple[str, ...]:
    write_folder(model, path, family)
    pruned_layers = len(getattr(model.spec, "kept_heads", ()))
    return ("cut heads are zeros: the numbers are those of the cut model, the size is not",) if pruned_layers else ()


def _write_gguf(
    model: Any, path: Path, dtype: str = "f32", tokenizer: bool = True, pooling: str | None = None
) -> tuple[str, ...]:
    from headwise.exporters.gguf_export import write_gguf, written_by_headwise

    model.check_native("GGUF is written from headwise's own models")
    with atomic_file(path, written_by_headwise, "GGUF file") as staging:
        result = write_gguf(model, staging, dtype, tokenizer, pooling)
    return (f"architecture {result.architecture}", *result.notes)


def _write_onnx(model: Any, path: Path, int8: bool = False) -> tuple[str, ...]:
    from headwise.exporters.onnx_export import write_onnx

    return write_onnx(model, path, int8)


def _write_torch(model: Any, path: Path) -> tuple[str, ...]:
    from headwise.exporters.torch_export import write_pt2, written_by_headwise

    if path.suffix != ".pt2":
        raise HeadwiseError(f"torch knows such files by their name, which ends in .pt2; got {path.name}.")
    with atomic_file(path, written_by_headwise, "file of torch.export") as staging:
        return write_pt2(model, staging)


# How each is run.


def _check_transformers(
    model: ModelProtocol, path: Path, prompts: Sequence[Sequence[int]]
) -> ParityReport | EncoderParityReport:
    from headwise.exporters import transformers_runner as engine

    if model.spec.kind == "encoder":
        return compare_hidden_states(
            model, prompts, engine.hidden_states(path, prompts, logits=model.output is not None)
        )
    return compare_generated(model, prompts, engine.generate(path, prompts, CHECK_TOKENS, end_token_ids(model)))


def _check_llama_cpp(
    model: ModelProtocol, path: Path, prompts: Sequence[Sequence[int]]
) -> ParityReport | EncoderParityReport:
    from headwise.exporters import llama_cpp as engine

    if model.spec.kind == "encoder":
        return compare_hidden_states(model, prompts, engine.hidden_states(path, prompts))
    return compare_generated(model, prompts, engine.generate(path, prompts, CHECK_TOKENS))


def _check_onnxruntime(
    model: ModelProtocol, path: Path, prompts: Sequence[Sequence[int]]
) -> ParityReport | EncoderParityReport:
    from headwise.exporters import onnx_export as engine

    if model.spec.kind == "encoder":
        return compare_hidden_states(model, prompts, engine.hidden_states(path, prompts))
    return compare_generated(model, prompts, engine.generate(path, prompts, CHECK_TOKENS, end_token_ids(model)))


def _check_torch(
    model: ModelProtocol, path: Path, prompts: Sequence[Sequence[int]]
) -> ParityReport | EncoderParityReport:
    from headwise.exporters import torch_export as engine

    if model.spec.kind == "encoder":
        return compare_hidden_states(model, prompts, engine.hidden_states(path, prompts))
    return compare_generated(model, prompts, engine.generate(path, prompts, CHECK_TOKENS, end_token_ids(model)))


TARGETS: dict[str, ExportTarget] = {
    "transformers": ExportTarget(_write_transformers, _check_transformers, "transformers", "attach"),
    "gguf": ExportTarget(_write_gguf, _check_llama_cpp, "xllamacpp", "deploy"),
    "onnx": ExportTarget(_write_onnx, _check_onnxruntime, "onnxruntime", "deploy"),
    "torch": ExportTarget(_write_torch, _check_torch, "torch", None),
}
