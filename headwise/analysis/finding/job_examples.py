"""Examples of a job, read from JSON Lines or from dicts, and checked before the model runs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ArgumentError, FileFormatError, suggest_names
from headwise.io.resolve_path import read_text

JOBS = ("pairs", "alignment", "classes", "effect")
UNITS = ("word", "token", "char", "patch", "frame")
FIELDS = {
    "text", "source", "words", "source_words", "image", "inputs", "unit", "pairs", "candidates", "label", "span",
    "answer", "wrong_answer", "name",
}  # fmt: skip
MIN_EXAMPLES_PER_HALF = 5  # different inputs in each half, so that a sign-flip test can reach 5%
Unit = int | str
Pair = tuple[Unit, tuple[Unit, ...]]
AudioConverter = Callable[[dict[str, Any], str], dict[str, Any]]  # example, its name → example with inputs


@dataclass(frozen=True, eq=False)
class LabeledExample:
    """One example of a job.

    Attributes:
        text: The text. In an encoder-decoder with a source, the target text.
        source: Source text of an encoder-decoder. The keys of pairs are then units of the source.
        words: Words of the text, in order. None splits it at spaces and punctuation.
        source_words: Words of the source.
        image: Path of an image, or a preprocessed tensor.
        inputs: Arguments of an attached model, such as {"input_features": …}. Units are then positions of tokens and frames.
        unit: Unit of the positions: "word", "token", "char", "patch" or "frame".
        pairs: Query unit and its gold key units.
        candidates: Key units among which the largest weight is searched. None means all.
        label: Class of the example.
        span: First and last + 1 unit of the marked span.
        answer: Text that should follow, for the effect on an answer.
        wrong_answer: Text that should not follow.
        name: Label of the example. It is part of its identity.
        data: The example as it was given, for metrics of the user.
        where: File and line, or index, for errors.
    """

    text: str = ""
    source: str | None = None
    words: tuple[str, ...] | None = None
    source_words: tuple[str, ...] | None = None
    image: Any = None
    inputs: Mapping[str, Any] | None = None
    unit: str = "word"
    pairs: tuple[Pair, ...] = ()
    candidates: tuple[Unit, ...] | None = None
    label: bool | None = None
    span: tuple[int, int] | None = None
    answer: str | None = None
    wrong_answer: str | None = None
    name: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @cached_property
    def key(self) -> str:
        """Digest of the input of the model. Equal inputs have equal keys and are always in the same half.

        Two image files with equal bytes are equal inputs.
        """
        parts: list[Any] = [self.text, self.source, "", self.name]
        hasher = hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass"))
        for value in (self.image, *(self.inputs or {}).values()):
            hasher.update(_content_bytes(value))
        return hasher.hexdigest()[:16]


def _content_bytes(value: Any) -> bytes:
    """Return the content of a tensor, an array, an image or an image file. Other values give their text."""
    if value is None:
        return b""
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        return path.read_bytes() if path.is_file() else str(value).encode("utf-8", "surrogatepass")
    if isinstance(value, Tensor):
        return value.detach().cpu().float().contiguous().numpy().tobytes()
    if hasattr(value, "__array__"):  # a NumPy array or a Pillow image
        return np.ascontiguousarray(value).tobytes()
    return repr(value).encode("utf-8", "surrogatepass")


def read_examples(examples: Any, job: str, convert_audio: AudioConverter | None = None) -> list[LabeledExample]:
    """Read examples from a JSON Lines file, from dicts, or from `LabeledExample` objects, and check them for a job.

    `convert_audio` replaces the fields `audio` and `times` of an example by the inputs of a model.
    """
    if job not in JOBS:
        raise ArgumentError(f"job={job!r}: unknown job; {suggest_names(str(job), JOBS)}")
    parsed = [
        replace(item, where=where)
        if isinstance(item, LabeledExample)
        else _parse_example(_with_inputs(item, where, convert_audio), where)
        for where, item in _iterate(examples)
    ]
    for example in parsed:
        _check_example(example, job)
    _check_count(parsed, job)
    return parsed


def _with_inputs(item: Any, where: str, convert_audio: AudioConverter | None) -> Any:
    is_audio = isinstance(item, Mapping) and "audio" in item and convert_audio is not None
    return convert_audio(dict(item), where) if is_audio and convert_audio is not None else item


def assign_halves(keys: Sequence[str]) -> dict[str, int]:
    """Assign inputs to the selection half (0) and the reporting half (1), alternating in the order of their keys.

    >>> assign_halves(["b", "a", "c", "a"])
    {'a': 0, 'b': 1, 'c': 0}
    """
    return {key: rank % 2 for rank, key in enumerate(sorted(set(keys)))}


def split_examples(examples: Sequence[LabeledExample]) -> dict[str, int]:
    """Assign examples to halves. Each class is split on its own, so that both halves contain both classes."""
    labels = {example.label for example in examples}
    return {
        key: half
        for label in labels
        for key, half in assign_halves([example.key for example in examples if example.label == label]).items()
    }


def _iterate(examples: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(examples, str | Path):
        path = Path(examples).expanduser()
        if not path.is_file():
            raise ArgumentError(
                f"examples: the file {path} does not exist. Give a JSON Lines file, one example per line."
            )
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise FileFormatError(
                        f"{path}, line {number}: not valid JSON: {error}. Write one JSON object per line."
                    ) from None
        return
    if not isinstance(examples, Iterable) or isinstance(examples, Mapping):
        raise ArgumentError(
            f"examples: must be a JSON Lines file or a list of dicts. Got {type(examples).__name__}. See "
            f"docs/tasks/find-heads.md."
        )
    for number, item in enumerate(examples):
        yield f"examples[{number}]", item


def _parse_example(item: Any, where: str) -> LabeledExample:
    if not isinstance(item, Mapping):
        raise ArgumentError(f"{where}: must be an object with fields such as text and pairs. Got {item!r:.60}.")
    unknown = [name for name in item if name not in FIELDS and not str(name).startswith("_")]
    if unknown:
        raise ArgumentError(
            f"{where}: unknown field {unknown[0]!r}; {suggest_names(str(unknown[0]), FIELDS)} Begin the names of your own "
            f"fields with _."
        )
    unit = item.get("unit", "patch" if item.get("image") is not None else "token" if item.get("inputs") else "word")
    if unit not in UNITS:
        raise ArgumentError(f"{where}: unit={unit!r} is unknown; {suggest_names(str(unit), UNITS)}")
    for name in ("text", "source", "answer", "wrong_answer", "name"):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise ArgumentError(f"{where}: {name} must be a text. Got {item[name]!r:.60}.")
    for name in ("words", "source_words", "pairs", "candidates", "span"):
        if item.get(name) is not None and not isinstance(item[name], list | tuple):
            raise ArgumentError(f"{where}: {name} must be a list. Got {item[name]!r:.60}.")
    for name in ("words", "source_words"):
        listed = item.get(name)
        if listed is not None and not all(isinstance(word, str) for word in listed):
            raise ArgumentError(f"{where}: {name} must be a list of texts. Got {listed!r:.60}.")
    return LabeledExample(
        text=item.get("text") or "", source=item.get("source"), words=_tuple_or_none(item.get("words")),
        source_words=_tuple_or_none(item.get("source_words")), image=item.get("image"),
        inputs=_parse_model_kwargs(item.get("inputs"), where),
        unit=unit, pairs=_parse_pairs(item.get("pairs") or (), where),
        candidates=_tuple_or_none(item.get("candidates")), label=_parse_bool_label(item.get("label"), where),
        span=_parse_span(item.get("span"), where), answer=item.get("answer"), wrong_answer=item.get("wrong_answer"),
        name=item.get("name") or "", data=item, where=where,
    )  # fmt: skip


def _tuple_or_none(values: Any) -> Any:
    return None if values is None else tuple(values)


def _parse_model_kwargs(inputs: Any, where: str) -> dict[str, Any] | None:
    """Convert lists and arrays to tensors."""
    if inputs is None:
        return None
    if not isinstance(inputs, Mapping) or not inputs:
        raise ArgumentError(
            f'{where}: inputs must be arguments of the model by name, such as {{"input_ids": [[5, 7]]}}. Got {inputs!r:.60}.'
        )
    converted = {}
    for name, value in inputs.items():
        try:
            converted[str(name)] = torch.as_tensor(value) if isinstance(value, list | np.ndarray) else value
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{where}: inputs[{name!r}] is not an array of numbers: {error}. Give equally long rows."
            ) from None
    return converted


def _parse_pairs(pairs: Any, where: str) -> tuple[Pair, ...]:
    parsed = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ArgumentError(f"{where}: a pair must be [query, key] or [query, [key, …]]. Got {pair!r:.60}.")
        query, keys = pair
        gold = tuple(keys) if isinstance(keys, Sequence) and not isinstance(keys, str) else (keys,)
        if not gold or not all(_is_str_or_int(unit) for unit in (query, *gold)):
            raise ArgumentError(
                f"{where}: the positions of a pair must be integers from 0, or words that occur once. Got {pair!r:.60}."
            )
        parsed.append((query, gold))
    return tuple(parsed)


def _is_str_or_int(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _parse_bool_label(label: Any, where: str) -> bool | None:
    if label is None or isinstance(label, bool):
        return label
    if label in (0, 1):
        return bool(label)
    raise ArgumentError(f"{where}: label must be true or false (or 1 or 0). Got {label!r:.60}.")


def _parse_span(span: Any, where: str) -> tuple[int, int] | None:
    if span is None:
        return None
    if len(span) != 2 or not all(type(end) is int for end in span) or not 0 <= span[0] < span[1]:
        raise ArgumentError(
            f"{where}: span must be [first, last + 1], two integers in ascending order. Got {span!r:.60}."
        )
    return (span[0], span[1])


def _check_example(example: LabeledExample, job: str) -> None:
    where = example.where
    if not example.text and example.image is None and example.inputs is None:
        raise ArgumentError(f"{where}: has no input. Give text, image or inputs.")
    for name, value in {"image": example.image, **(example.inputs or {})}.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            label = "image" if value is example.image else f"inputs[{name!r}]"
            raise ArgumentError(f"{where}: {label} contains NaN or infinite values. Check the audio or image.")
    if job == "pairs" and not example.pairs:
        raise ArgumentError(f"{where}: has no pairs. The job 'pairs' needs pairs=[[query, key], …].")
    if job == "alignment" and example.source is None and not example.pairs and example.inputs is None:
        raise ArgumentError(f"{where}: has no source. The job 'alignment' needs text and source, or gold pairs.")
    if job == "classes" and example.label is None:
        raise ArgumentError(
            f"{where}: has no label. The job 'classes' needs label=true or label=false in each example."
        )
    if example.unit == "frame" and example.inputs is None:
        raise ArgumentError(f"{where}: unit='frame' needs inputs, the arguments of an attached model.")


def _check_count(examples: Sequence[LabeledExample], job: str) -> None:
    groups: dict[bool | None, Sequence[LabeledExample]] = {None: examples}
    if job == "classes":
        groups = {label: [item for item in examples if item.label is label] for label in (False, True)}
    for label, members in groups.items():
        count, needed = len({example.key for example in members}), 2 * MIN_EXAMPLES_PER_HALF
        if count < needed:
            group = "" if label is None else f" with label {str(label).lower()}"
            raise ArgumentError(
                f"examples: heads are chosen on one half and judged on the other, so at least {needed} examples{group} with "
                f"different inputs are needed. Got {count}. Add examples."
            )
    if job == "classes" and (twice := {item.key for item in groups[False]} & {item.key for item in groups[True]}):
        text = next(example.text for example in examples if example.key in twice)
        raise ArgumentError(f"examples: an input has both labels: {text[:60]!r}. Remove one of the two examples.")
    if len({example.image is not None for example in examples}) > 1:
        raise ArgumentError("examples: some have an image and others do not. Use one kind of input.")


def examples_digest(examples: Sequence[LabeledExample]) -> str:
    """Return a digest of inputs and gold data of all examples."""
    hasher = hashlib.sha256()
    for example in examples:
        gold = [example.key, example.unit, example.pairs, example.candidates, example.label, example.span]
        hasher.update(json.dumps([*gold, example.answer, example.wrong_answer]).encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()[:16]
