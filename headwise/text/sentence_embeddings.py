"""Texts as vectors: an encoder's hidden states, averaged over real tokens (https://arxiv.org/abs/1908.10084)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode


@torch.no_grad()
def embed(model: ModelProtocol, texts: str | Sequence[str], *, normalize: bool = True, batch_size: int = 32) -> Tensor:
    """One vector per text, (N, D), of length 1 if `normalize`. Texts longer than the model's context are cut.

    >>> from headwise.weights import load
    >>> a, b, c = embed(load("minilm"), ["a cat sat down", "a kitten was sitting", "the stock market fell"])
    >>> bool(a @ b > a @ c)
    True
    """
    if model.spec.kind != "encoder":
        raise HeadwiseError(f"embeddings come from an encoder; this model is of kind {model.spec.kind}.")
    if model.tokenizer is None:
        raise HeadwiseError(
            "this model has no tokenizer; take the mean of model(ids, attention_mask=…, hidden=True) instead."
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise HeadwiseError("there are no texts to embed; give at least one.")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise HeadwiseError(f"text {index} of {len(texts)} is empty or no text ({text!r}); leave it out.")
    rows = [_truncate(model.tokenizer.encode(text), model.spec.context) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # texts of like length together: little padding
    vectors = torch.empty(len(rows), model.spec.width, device=model.device)
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
    """The closing token stays where a text is cut."""
    return ids if len(ids) <= context else [*ids[: context - 1], ids[-1]]
