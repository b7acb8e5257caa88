"""`export`: a model written for an engine; one table says what each can hold."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.deploy.check import Checked, compare
from headwise.errors import HeadwiseError, close_names
from headwise.model import AnyModel
from headwise.weights.export import export as write_folder

PROMPTS = (
    "The teacher gave the students", "Once upon a time there was", "In 1969 the first", "She opened the door and",
)  # fmt: skip
TOKENS = 16  # that are written behind each when a file is checked


@dataclass(frozen=True)
class Exported:
    """What lies where, for whom, what was done about the rest, and, where it was asked for, how it does in its engine."""

    path: Path
    to: str
    notes: tuple[str, ...] = ()
    checked: Checked | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        told = {"path": str(self.path), "to": self.to, "notes": list(self.notes)}
        return (
            told if self.checked is None else {**told, "checked": vars(self.checked) | {"agrees": self.checked.agrees}}
        )


@dataclass(frozen=True)
class Target:
    """An engine: what it takes, what becomes of cut heads there, and how a model is written for it."""

    takes: str
    cut_heads: str
    write: Callable[..., tuple[str, ...]]
    check: Callable[[AnyModel, Path, Sequence[Sequence[int]]], Checked] | None = None


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
    Options of gguf: `dtype` (f32, f16, q8_0, q4_0), `tokenizer=False`; of onnx: `int8=True`.

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
    if family is not None:
        options["family"] = family
    target = TARGETS[to]
    try:
        notes = target.write(model, Path(path), **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise HeadwiseError(f"{to} has no option {str(error).rpartition(' ')[2]}.") from None
    if not check:
        return Exported(Path(path), to, notes)
    if target.check is None:
        raise HeadwiseError(f"what is written for {to} is checked by its tests, not here; leave check out.")
    most = max(1, model.spec.context - TOKENS - 1)
    prompts = [ids[:most] for text in PROMPTS if (ids := _ids(model, text))]
    return Exported(Path(path), to, notes, target.check(model, Path(path), prompts))


def _ids(model: AnyModel, text: str) -> list[int]:
    """A prompt in the model's tokens, or, where it has no tokenizer, the same letters as numbers."""
    if model.tokenizer is None:
        return [ord(letter) % model.spec.vocab for letter in text]
    return model.tokenizer.encode(text)


def _to_transformers(model: Any, path: Path, family: str | None = None) -> tuple[str, ...]:
    write_folder(model, path, family)
    gone = len(getattr(model.spec, "kept", ()))
    return ("cut heads are zeros: the numbers are those of the cut model, the size is not",) if gone else ()


def _to_gguf(model: Any, path: Path, dtype: str = "f32", tokenizer: bool = True) -> tuple[str, ...]:
    from headwise.deploy.gguf import write_gguf

    model.check_own("GGUF is written from headwise's own models")
    with _whole(path, b"GGUF", "GGUF file") as new:
        written = write_gguf(model, new, dtype, tokenizer)
    return (f"architecture {written.architecture}", *written.notes)


def _to_onnx(model: Any, path: Path, int8: bool = False) -> tuple[str, ...]:
    from headwise.deploy.onnx import write_onnx

    return write_onnx(model, path, int8)


def _to_torch(model: Any, path: Path) -> tuple[str, ...]:
    from headwise.deploy.pt2 import write_pt2

    if path.suffix != ".pt2":
        raise HeadwiseError(f"torch knows such files by their name, which ends in .pt2; got {path.name}.")
    with _whole(path, b"PK", "file of torch.export") as new:
        return write_pt2(model, new)


def _begins(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


@contextmanager
def _whole(path: Path, mark: bytes, what: str) -> Iterator[Path]:
    """A file to write into that takes its place only when all of it is there; one that is something else is left alone."""
    if path.is_dir() or (path.exists() and _begins(path, len(mark)) != mark):
        raise HeadwiseError(f"{path} is there already and is no {what}; choose another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    try:
        yield folder / path.name
        os.replace(folder / path.name, path)
    except OSError as error:
        raise HeadwiseError(f"{path} could not be written ({error}); nothing was changed.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_llama_cpp(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked:
    from headwise.deploy.llama_cpp import write_on

    answers, speed = write_on(path, prompts, TOKENS)
    return compare(model, prompts, answers, speed)


def _in_onnxruntime(model: AnyModel, path: Path, prompts: Sequence[Sequence[int]]) -> Checked:
    from headwise.deploy.onnx import write_on

    if model.spec.kind != "decoder":
        raise HeadwiseError("what a decoder writes is checked in its engine; leave check out for an encoder.")
    return compare(model, prompts, write_on(path, prompts, TOKENS))


TARGETS: dict[str, Target] = {
    "transformers": Target("GPT-2, GPT-Neo, BERT and Llama families", "zeros, in the full shape", _to_transformers),
    "gguf": Target("Llama families", "gone: heads are counted by layer", _to_gguf, _in_llama_cpp),
    "onnx": Target("decoders and encoders", "gone", _to_onnx, _in_onnxruntime),
    "torch": Target("decoders and encoders", "gone", _to_torch),
}
