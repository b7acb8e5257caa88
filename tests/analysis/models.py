"""Models that read: variants of decoders and encoders over a small alphabet, and their loss the plain way."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.recording.batching import Unit
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.text.build_tokenizers import add_mask, character_tokenizer
from headwise.text.documents import Document
from tests.contract.layers import make_model

TEXTS = ["the cat sat", "a mat", "it was a cat that sat there", "at"]


def reading(spec: ModelSpec, **changes: Any) -> Transformer:
    """A model of a variant that reads text, letter by letter."""
    tokenizer = add_mask(character_tokenizer("".join(TEXTS)))
    model = make_model(replace(spec, vocab=17, context=64, **changes))
    model.tokenizer = tokenizer
    return model


def encoded(model: Transformer) -> list[Tensor]:
    assert model.tokenizer is not None
    return [torch.tensor([model.tokenizer.encode(text)]) for text in TEXTS]


def surprise(model: Transformer, ids: Tensor, last: bool = False) -> Tensor:
    """Summed −log p of the next tokens of one text, or of its last token alone, from all the logits."""
    made = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
    return made[-1] if last else made.sum()


def documents_of(units: Iterable[Unit]) -> list[Document]:
    """The documents of some units, where they have any."""
    return [unit.document for unit in units if unit.document is not None]
