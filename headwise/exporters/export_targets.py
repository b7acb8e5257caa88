"""`export` and the table of export targets."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, MissingDependencyError, UnsupportedModelError, suggest_names
from headwise.exporters.engine_parity import (
    EncoderParityReport,
    ParityReport,
    as_cpu_model,
    compare_generated,
    compare_hidden_states,
    end_token_ids,
    float32_copy,
)
from headwise.io.atomic_write import atomic_file
from headwise.kernels.rounding_tolerance import without_autocast
from headwise.model import ModelProtocol
from headwise.weights.export import export as write_folder
from headwise.weights.to_native import to_native

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
CHECK_TOKENS = 16  # tokens generated per prompt when an export is checked


@dataclass(frozen=True)
class ExportResult:
    """Result of `export`.

    Attributes:
        path: File or folder that was written.
        to: Name of the target.
        notes: Remarks on how the model was represented, for example on pruned heads.
        parity: Comparison with the original model; None unless `check=True`.
    """

    path: Path
    to: str
    notes: tuple[str, ...] = ()
    parity: ParityReport | EncoderParityReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON."""
        result = {"path": str(self.path), "to": self.to, "notes": list(self.notes)}
        return (
            result if self.parity is None else {**result, "checked": vars(self.parity) | {"agrees": self.parity.agrees}}
        )


@dataclass(frozen=True)
class ExportTarget:
    """How to write a model for an engine and how to check the result.

    Attributes:
        write: Writes the model and returns notes.
        check: Runs the written model in its engine and compares it with the original.
        engine: Package that runs the export.
        install_extra: Extra of Headwise that installs the package; None if it is always installed.
    """

    write: Callable[..., tuple[str, ...]]
    check: Callable[[ModelProtocol, Path, Sequence[Sequence[int]]], ParityReport | EncoderParityReport]
    engine: str
    install_extra: str | None


@without_autocast
def export(
    model: ModelProtocol,
    path: str | Path,
    family: str | None = None,
    *,
    to: str = "transformers",
    check: bool = False,
    **options: Any,
) -> ExportResult:
    """Write a model for another engine.

    A part of the model that the engine does not support raises an error that names it. Some parts are written in an
    equivalent form; `notes` of the result lists them. An earlier export at the same path is replaced. Other existing files
    are never overwritten.

    Args:
        model: Native or attached model. For targets other than `transformers`, an attached model is first converted by
            `hw.to_native`.
        path: Output folder for `transformers` and `onnx`, output file for `gguf` and `torch` (`.pt2`).
        family: Model family of a transformers export, for example `gpt2`. Default: the family that the model was loaded from,
            or the first family that can represent it.
        to: Target: `transformers`, `gguf` (llama.cpp), `onnx` (onnxruntime) or `torch` (torch.export).
        check: Run the exported model in its engine and compare it with `model`.
        **options: Options of the target. gguf: `dtype` (f32, f16, q8_0, q4_0), `tokenizer` (False writes token ids instead of
            a tokenizer), `pooling` (mean, cls or none; encoders only). onnx: `int8` (True quantizes weights to 8 bits).

    Returns:
        Path, notes, and the comparison if `check` is True.

    Raises:
        HeadwiseError: The target cannot represent the model, or `path` exists and was not written by Headwise.

    >>> import tempfile
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> small = preset("gpt2").resized(layers=1, width=16, heads=2, context=16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(Transformer(small), folder + "/out").to
    'transformers'
    """
    if to not in TARGETS:
        raise ArgumentError(f"to={to!r}: unknown export target; {suggest_names(to, TARGETS)}")
    if model.spec.cache:
        raise UnsupportedModelError(
            f"to={to!r}: per-head cache policies cannot be exported, and the model computes different outputs without "
            f"them. Save it in Headwise's format: model.save(folder)."
        )
    target = TARGETS[to]
    if family is not None:
        options["family"] = family
    option_names = list(inspect.signature(target.write).parameters)[2:]
    if unknown := [name for name in options if name not in option_names]:
        raise ArgumentError(
            f"to={to!r}: unknown option {', '.join(unknown)}. Valid options: {', '.join(option_names) or 'none'}."
        )
    if check:
        _require_check_engine(model, to, target)
    notes = target.write(model, Path(path), **options)
    if not check:
        return ExportResult(Path(path), to, notes)
    max_tokens = max(1, model.spec.context - (CHECK_TOKENS if model.spec.kind == "decoder" else 0) - 1)
    prompts = [ids[:max_tokens] for text in PROMPTS if (ids := _prompt_ids(model, text))]
    reference = model if to == "torch" else float32_copy(model)  # the other engines compute in float32
    return ExportResult(Path(path), to, notes, target.check(reference, Path(path), prompts))


def _require_check_engine(model: ModelProtocol, to: str, target: ExportTarget) -> None:
    """Raise an error if the export could not be checked, before anything is written."""
    if find_spec(target.engine) is None:
        raise MissingDependencyError(
            f"check=True: an export to {to} is checked in {target.engine}, which is not installed. Run: pip install "
            f"'headwise[{target.install_extra}]', or set check=False."
        )
    if model.spec.kind == "encoder-decoder" or (model.spec.kind == "decoder" and model.output is None):
        raise UnsupportedModelError(
            "check=True: only decoders with an LM head and encoders can be checked. Got "
            f"{'an encoder-decoder' if model.spec.kind == 'encoder-decoder' else 'a decoder without an LM head'}. Set "
            "check=False."
        )


def _prompt_ids(model: ModelProtocol, text: str) -> list[int]:
    """Tokenize a prompt. Without a tokenizer, map its characters to token ids."""
    if model.tokenizer is None:
        return [ord(char) % model.spec.vocab for char in text]
    return list(model.tokenizer.encode(text))


# Writers.


def _write_transformers(model: Any, path: Path, family: str | None = None) -> tuple[str, ...]:
    write_folder(model, path, family)
    pruned_layers = len(getattr(model.spec, "kept_heads", ()))
    note = "pruned heads are stored as zeros: outputs equal those of the pruned model, but the size is not reduced"
    return (note,) if pruned_layers else ()


def _write_gguf(
    model: Any, path: Path, dtype: str = "f32", tokenizer: bool = True, pooling: str | None = None
) -> tuple[str, ...]:
    from headwise.exporters.gguf_export import write_gguf, written_by_headwise

    native = to_native(model)
    with atomic_file(path, written_by_headwise, "GGUF file") as staging:
        result = write_gguf(native, staging, dtype, tokenizer, pooling)
    return (f"architecture {result.architecture}", *result.notes)


def _write_onnx(model: Any, path: Path, int8: bool = False) -> tuple[str, ...]:
    from headwise.exporters.onnx_export import write_onnx

    native = as_cpu_model(to_native(model))
    full_model = float32_copy(native)
    note = "weights in float32, because onnxruntime lacks half-precision operators on CPUs"
    notes = () if full_model is native else (note,)
    return (*write_onnx(full_model, path, int8=int8), *notes)


def _write_torch_export(model: Any, path: Path) -> tuple[str, ...]:
    from headwise.exporters.torch_export import write_pt2, written_by_headwise

    if path.suffix != ".pt2":
        raise ArgumentError(f"path={path.name!r}: a torch.export file must end in .pt2. Rename it.")
    native = as_cpu_model(to_native(model))
    with atomic_file(path, written_by_headwise, "torch.export file") as staging:
        return write_pt2(native, staging)


# Checks.


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
    from headwise.exporters import llama_cpp_runner as engine

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
    "torch": ExportTarget(_write_torch_export, _check_torch, "torch", None),
}
