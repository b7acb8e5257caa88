"""One example as input of a model: token ids, and the tokens of each unit (word, token, character, patch, frame)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.finding.job_examples import LabeledExample, Unit
from headwise.analysis.recording.batching import forward_batch, make_batch, tokenizer_of
from headwise.analysis.recording.read_images import image_sample, read_image
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.model import ModelProtocol
from headwise.text.token_alignment import Alignment

TokenSets = tuple[tuple[int, ...], ...]  # tokens of each unit


@dataclass(frozen=True, eq=False)
class UnitTokens:
    """Units of one side of an attention map: a word, token, character or patch, with its tokens.

    Attributes:
        tokens: Token positions of each unit.
        labels: Text of each unit.
        where: Name of the argument, for errors.
    """

    tokens: TokenSets
    labels: tuple[str, ...]
    where: str

    def index(self, unit: Unit) -> int:
        """Return the index of a unit, given as an index or as a text that occurs once."""
        if isinstance(unit, str):
            matches = [index for index, label in enumerate(self.labels) if label == unit]
            if len(matches) != 1:
                problem = "is not in the text" if not matches else f"occurs {len(matches)} times"
                raise ArgumentError(
                    f"{self.where}: {unit!r} {problem}. Use its index, from 0 to {len(self.labels) - 1}."
                )
            return matches[0]
        if not 0 <= unit < len(self.tokens):
            raise ArgumentError(
                f"{self.where}: position {unit} is outside the text, which has {len(self.tokens)} units. Use positions from "
                f"0 to {len(self.tokens) - 1}."
            )
        return unit


@dataclass(frozen=True, eq=False)
class PreparedExample:
    """An example as input of a model.

    Attributes:
        example: The example.
        ids: Token ids, (1, T). Empty for images and for arguments of an attached model.
        source: Source token ids, (1, S), or None.
        image: Preprocessed image, or None.
        queries: Units of the text.
        keys: Units of the source, or of the text itself.
        is_cross: Whether the keys are those of cross-attention.
        where: Name of the argument, for errors.
    """

    example: LabeledExample
    ids: Tensor
    source: Tensor | None
    image: Any
    queries: UnitTokens
    keys: UnitTokens
    is_cross: bool
    where: str

    def run(self, model: ModelProtocol, *, hidden: bool = True) -> Any:
        """Run one forward pass. Return hidden states, logits, or the output of an attached model."""
        untyped_model: Any = model
        if self.example.inputs is not None:
            return untyped_model(**{name: _to_device(value, model) for name, value in self.example.inputs.items()})
        if self.image is not None:
            return forward_batch(model, make_batch([image_sample(0, self.image)], device=model.device), hidden=hidden)
        source = self.ids if self.source is None and model.spec.kind == "encoder-decoder" else self.source
        return model(self.ids, hidden=hidden) if source is None else model(self.ids, source=source, hidden=hidden)


def prepare_example(model: ModelProtocol, example: LabeledExample) -> PreparedExample:
    """Tokenize one example and find the tokens of its units."""
    where = example.where
    empty = torch.zeros(1, 0, dtype=torch.long, device="cpu")
    if example.inputs is not None:
        return _prepare_with_position_units(example, empty, where)
    if example.image is not None:
        image = read_image(model, example.image)
        tokens = tuple((token,) for token in image.grid.token_of_patch)
        units = UnitTokens(tokens, tuple(image.grid.token_names[token] for (token,) in tokens), where)
        return PreparedExample(example, empty, None, image, units, units, False, where)
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids
    text = tokenizer.align(example.text, example.words)
    if example.source is None:
        _check_length(model, len(text.ids), where)
        units = _units(text, len(prefix), len(suffix), example.unit, where)
        return PreparedExample(example, _as_ids(text.ids, model), None, None, units, units, False, where)
    if model.spec.kind != "encoder-decoder":
        raise UnsupportedModelError(
            f"{where}: has a source, but this model is not an encoder-decoder. Remove source, or use an encoder-decoder."
        )
    text = tokenizer.align(example.text, example.words, add_special_tokens=False)
    source = tokenizer.align(example.source, example.source_words, add_special_tokens=False)
    source_ids, ids = tokenizer.wrap_pair(source.ids, text.ids, model.decoder_start_token)
    _check_length(model, max(len(ids), len(source_ids)), where)
    queries = _units(text, 0, 0, example.unit, where, shift=1 + len(prefix))
    keys = _units(source, 0, 0, example.unit, where, shift=len(prefix))
    return PreparedExample(example, _as_ids(ids, model), _as_ids(source_ids, model), None, queries, keys, True, where)


def _prepare_with_position_units(example: LabeledExample, empty: Tensor, where: str) -> PreparedExample:
    """Use positions as units. Their number is known only when the model runs, so it is checked there."""
    is_cross = example.unit == "frame"
    highest = max(
        [unit for query, keys in example.pairs for unit in (query, *keys) if isinstance(unit, int)], default=0
    )
    tokens = tuple((position,) for position in range(highest + 1))
    units = UnitTokens(tokens, tuple(map(str, range(highest + 1))), where)
    return PreparedExample(example, empty, None, None, units, units, is_cross, where)


def _units(alignment: Alignment, prefix: int, suffix: int, unit: str, where: str, shift: int = 0) -> UnitTokens:
    """Return the tokens of each unit. `shift` is the number of special tokens that are added in front later."""
    if unit == "token":
        positions = range(prefix, len(alignment.ids) - suffix)
        groups: Sequence[tuple[int, ...]] = [(position,) for position in positions]
        labels = [alignment.tokens[position] for position in positions]
    elif unit == "char":
        groups = [
            tuple(token for token, (start, end) in enumerate(alignment.spans) if start <= char < end)
            for char in range(len(alignment.text))
        ]
        labels = list(alignment.text)
    elif unit == "word":
        groups, labels = alignment.tokens_of_word, list(alignment.words)
    else:
        raise ArgumentError(f"{where}: unit={unit!r} does not fit a text. Use word, token or char.")
    return UnitTokens(tuple(tuple(token + shift for token in group) for group in groups), tuple(labels), where)


def _check_length(model: ModelProtocol, length: int, where: str) -> None:
    if length > model.spec.max_input_tokens:
        raise ArgumentError(
            f"{where}: has {length} tokens, more than the {model.spec.max_input_tokens} positions of the model. Shorten it."
        )


def _as_ids(ids: Sequence[int], model: ModelProtocol) -> Tensor:
    return torch.tensor([list(ids)], device=model.device)


def _to_device(value: Any, model: ModelProtocol) -> Any:
    return value.to(model.device) if isinstance(value, Tensor) else value
