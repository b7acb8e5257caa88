"""Texts as vectors: an encoder's hidden states, averaged over real tokens (https://arxiv.org/abs/1908.10084)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet


@torch.no_grad()
def embed(model: AnyModel, texts: str | Sequence[str], *, normalise: bool = True, batch: int = 32) -> Tensor:
    """One vector per text, (N, D), of length 1 if `normalise`. Texts longer than the model's context are cut.

    >>> from headwise.weights import load
    >>> a, b, c = embed(load("minilm"), ["a cat sat down", "a kitten was sitting", "the stock market fell"])
    >>> bool(a @ b > a @ c)
    True
    """
    if model.spec.kind != "encoder":
        raise HeadwiseError(f"embeddings come from an encoder; this model is of kind {model.spec.kind}.")
    if model.tokenizer is None:
        raise HeadwiseError("this model has no tokenizer; take the mean of model(ids, padding=…, hidden=True) instead.")
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise HeadwiseError("there are no texts to embed; give at least one.")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise HeadwiseError(f"text {number} of {len(texts)} is empty or no text ({text!r}); leave it out.")
    rows = [_cut(model.tokenizer.encode(text), model.spec.context) for text in texts]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # texts of like length together: little padding
    vectors = torch.empty(len(rows), model.spec.width, device=model.device)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        vectors[some] = _mean(model, [rows[i] for i in some]).float()
    return torch.nn.functional.normalize(vectors, dim=-1) if normalise else vectors


def _mean(model: AnyModel, rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)  # (B, T)
    real = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows], device=model.device)
    with quiet(model):
        hidden = model(ids, padding=real, hidden=True)  # (B, T, D)
    return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)


def _cut(ids: list[int], context: int) -> list[int]:
    """The closing token stays where a text is cut."""
    return ids if len(ids) <= context else [*ids[: context - 1], ids[-1]]
