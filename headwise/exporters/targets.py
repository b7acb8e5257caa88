"""`export`: a model written for an engine; one table says what each can hold."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, close_names
from headwise.exporters.parity import Checked, CheckedStates, barred, compare, compare_states
from headwise.io.atomic_write import whole_file_of
from headwise.model import AnyModel
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
TOKENS = 16  # that are written behind each when a file is checked


@dataclass(frozen=True)
class Exported:
    """What lies where, for whom, what was done about the rest, and, where it was asked for, how it does in its engine."""

    path: Path
    to: str
    notes: tuple[str, ...] = ()
    checked: Checked | CheckedStates | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        told = {"path": str(self.path), "to": self.to, "notes": list(self.notes)}
        return (
            told if self.checked is None else {**told, "checked": vars(self.checked) | {"agrees": self.checked.agrees}}
        )


@dataclass(frozen=True)
class ExportTarget:
    """An engine: what it takes, what becomes of cut heads there, how a model is written for it and run in it."""

    takes: str
    cut_heads: str
    write: Callable[..., tuple[str, ...]]
    check: Callable[[AnyModel, Path, Sequence[Sequence[int]]], Checked | CheckedStates]
    engine: str  # the package that runs it
    extra: str | None  # what brings that package


def export(
    model: AnyModel,
    path: str | Path,
    family: str | None = None,
    *,
    to: str = "transformers",
    check: bool = False,
    **options: Any,
) -> Exported:
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
        raise HeadwiseError(f"there is no target {to!r}; {close_names(to, TARGETS)}")
    if model.spec.cache:
        raise HeadwiseError(
            f"{to} cannot let heads keep caches of their own, and without them the model says other things; use "
            f"model.save(folder)."
        )
    target = TARGETS[to]
    if family is not None:
        options["family"] = family
    known = list(inspect.signature(target.write).parameters)[2:]
    if wrong := [name for name in options if name not in known]:
        raise HeadwiseError(f"{to} has no option {', '.join(wrong)}; it has {', '.join(known) or 'none'}.")
    if check:
        _check_can_check(model, to, target)
    notes = target.write(model, Path(path), **options)
    if not check:
        return Exported(Path(path), to, notes)
    most = max(1, model.spec.context - (TOKENS if model.spec.kind == "decoder" else 0) - 1)
    prompts = [ids[:most] for text in PROMPTS if (ids := _ids(model, text))]
    return Exported(Path(path), to, notes, target.check(model, Path(path), prompts))


def _check_can_check(model: AnyModel, to: str, target: ExportTarget) -> None:
    """Before anything is written."""
    if find_spec(target.engine) is None:
        raise HeadwiseError(
            f"what is written for {to} is checked in {target.engine}; pip install "
            f"'headwise[{target.extra}]', or leave check out."
        )
    if model.spec.kind == "encoder-decoder" or (model.spec.kind == "decoder" and model.output is None):
        raise HeadwiseError(
            "a check compares what a decoder writes or what an encoder makes of a text; this model does "
            "neither, leave check out."
        )


def _ids(model: AnyModel, text: str) -> list[int]:
    """A prompt in the model's tokens, or, where it has no tokenizer, the same letters as numbers."""
    if model.tokenizer is None:
        return [ord(letter) % model.spec.vocab for letter in text]
    return list(model.tokenizer.encode(text))


# How each is written.


def _to_transformers(model: Any, path: Path, family: str | None = None) -> tuple[str, ...]:
    write_folder(model, path, family)
    gone = len(getattr(model.spec, "kept", ()))
    return ("cut heads are zeros: the numbers are those of the cut model, the size is not",) if gone else ()


def _to_gguf(
    model: Any, path: Path, dtype: str = "f32", tokenizer: bool = True, pooling: str | None = None
) -> tuple[str, ...]:
    from headwise.exporters.gguf import is_ours, write_gguf

    model.check_own("GGUF is written from headwise's own models")
    with whole_file_of(path, is_ours, "GGUF file") as new:
        written = write_gguf(model, new, dtype, tokenizer, pooling)
    return (f"architecture {written.architecture}", *written.notes)


def _to_onnx(model: Any, path: Path, int8: bool = False) -> tuple[str, ...]:
    from headwise.exporters.onnx import write_onnx

    return write_onnx(model, path, int8)


def _to_torch(model: Any, path: Path) -> tuple[str, ...]:
    from headwise.exporters.torch_export import is_ours, write_pt2

    if path.suffix != ".pt2":
        raise HeadwiseError(f"torch knows such files by their name, which ends in .pt2; got {path.name}.")
    with whole_file_of(path, is_ours, "file of torch.export") as new:
        return write_pt2(model, new)


# How each is run.


def _in_transformers(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked | CheckedStates:
    from headwise.exporters import transformers_engine as engine

    if model.spec.kind == "encoder":
        return compare_states(model, prompts, engine.states(path, prompts, logits=model.output is not None))
    return compare(model, prompts, engine.write_on(path, prompts, TOKENS, barred(model)))


def _in_llama_cpp(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked | CheckedStates:
    from headwise.exporters import llama_cpp as engine

    if model.spec.kind == "encoder":
        return compare_states(model, prompts, engine.states(path, prompts))
    return compare(model, prompts, engine.write_on(path, prompts, TOKENS))


def _in_onnxruntime(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked | CheckedStates:
    from headwise.exporters import onnx as engine

    if model.spec.kind == "encoder":
        return compare_states(model, prompts, engine.states(path, prompts))
    return compare(model, prompts, engine.write_on(path, prompts, TOKENS, barred(model)))


def _in_torch(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked | CheckedStates:
    from headwise.exporters import torch_export as engine

    if model.spec.kind == "encoder":
        return compare_states(model, prompts, engine.states(path, prompts))
    return compare(model, prompts, engine.write_on(path, prompts, TOKENS, barred(model)))


TARGETS: dict[str, ExportTarget] = {
    "transformers": ExportTarget(
        "GPT-2, GPT-Neo, BERT and Llama families", "zeros, in the full shape", _to_transformers, _in_transformers,
        "transformers", "attach",
    ),
    "gguf": ExportTarget(
        "Llama, GPT-2 and BERT families", "gone from Llamas: heads are counted by layer; zeros in GPT-2 and BERT", _to_gguf,
        _in_llama_cpp, "xllamacpp", "deploy",
    ),
    "onnx": ExportTarget("decoders and encoders", "gone", _to_onnx, _in_onnxruntime, "onnxruntime", "deploy"),
    "torch": ExportTarget("decoders and encoders", "gone", _to_torch, _in_torch, "torch", None),
}  # fmt: skip
