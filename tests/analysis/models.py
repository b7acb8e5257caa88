"""Small decoders and encoders over a small alphabet with tokenizers, and their loss computed directly."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.recording.batching import TextSample
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.text.annotated_document import Document
from headwise.text.build_tokenizers import add_mask_token, character_tokenizer
from tests.contract.layers import make_model

TEXTS = ["the cat sat", "a mat", "it was a cat that sat there", "at"]


def character_model(spec: ModelSpec, **changes: Any) -> Transformer:
    """Make a model of a variant that reads text character by character."""
    tokenizer = add_mask_token(character_tokenizer("".join(TEXTS)))
    model = make_model(replace(spec, vocab=17, context=64, **changes))
    model.tokenizer = tokenizer
    return model


def encode_texts(model: Transformer) -> list[Tensor]:
    assert model.tokenizer is not None
    return [torch.tensor([model.tokenizer.encode(text)]) for text in TEXTS]


def text_loss(model: Transformer, ids: Tensor, last_only: bool = False) -> Tensor:
    """Return the summed −log p of the next tokens of one text, or of its last token alone, from all logits."""
    losses = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
    return losses[-1] if last_only else losses.sum()


def documents_of(samples: Iterable[TextSample]) -> list[Document]:
    """Return the documents of the samples that have one."""
    return [sample.document for sample in samples if sample.document is not None]
