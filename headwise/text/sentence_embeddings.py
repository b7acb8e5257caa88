"""Sentence embeddings: hidden states of an encoder, averaged over real tokens (https://arxiv.org/abs/1908.10084)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.model import ModelProtocol, eval_mode


@torch.no_grad()
def embed(model: ModelProtocol, texts: str | Sequence[str], *, normalize: bool = True, batch_size: int = 32) -> Tensor:
    """Embed texts as the mean hidden states of an encoder.

    Args:
        model: An encoder with a tokenizer.
        texts: A text or a list of texts. Texts longer than the context of the model are truncated.
        normalize: Scale the vectors to length 1.
        batch_size: Texts per forward pass.

    Returns:
        One vector per text, (N, D), in float32.

    Raises:
        UnsupportedModelError: If the model is not an encoder or has no tokenizer.
        ArgumentError: If a text is empty.

    >>> from headwise.weights import load
    >>> a, b, c = embed(load("minilm"), ["a cat sat down", "a kitten was sitting", "the stock market fell"])
    >>> bool(a @ b > a @ c)
    True
    """
    if model.spec.kind != "encoder":
        raise UnsupportedModelError(
            f"model: embeddings need an encoder. Got a model of kind {model.spec.kind}. Use an encoder, such as minilm."
        )
    if model.tokenizer is None:
        raise UnsupportedModelError(
            "model: it has no tokenizer, so it cannot embed texts. Load a model with a tokenizer, or compute token ids "
            "yourself and average the hidden states over the tokens: model(ids, attention_mask=…, hidden=True)."
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise ArgumentError("texts: at least one text is needed. Got none. Give a list of texts.")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ArgumentError(
                f"texts: text {index} of {len(texts)} is empty or not a string. Got {text!r}. Remove it from the list."
            )
    rows = [_truncate(model.tokenizer.encode(text), model.spec.context) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # batches of similar lengths need little padding
    vectors = torch.empty(len(rows), model.spec.width, device=model.device, dtype=torch.float32)
    for start in range(0, len(order), batch_size):
        batch_indices = order[start : start + batch_size]
        vectors[batch_indices] = _mean_hidden_state(model, [rows[i] for i in batch_indices]).float()
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def _mean_hidden_state(model: ModelProtocol, rows: list[list[int]]) -> Tensor:
    max_length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (max_length - len(row)) for row in rows], device=model.device)  # (B, T)
    attention_mask = torch.tensor(
        [[True] * len(row) + [False] * (max_length - len(row)) for row in rows], device=model.device
    )
    with eval_mode(model):
        hidden = model(ids, attention_mask=attention_mask, hidden=True)  # (B, T, D)
    return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def _truncate(ids: list[int], context: int) -> list[int]:
    """Truncate ids to the context, and keep the last token."""
    return ids if len(ids) <= context else [*ids[: context - 1], ids[-1]]
