"""Judge of a steering for encoders: sentence embeddings, which a steering moves from the negative to the positive texts.

An encoder has no log-probability of a text. The margin of a text with embedding e is

    cos(e, mean embedding of positive texts) − cos(e, mean embedding of negative texts)

with both means over the unsteered texts of the selection half. Embeddings are mean hidden states of the completion tokens
(https://arxiv.org/abs/1908.10084); without a prompt these are all tokens, as in `hw.embed`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.steering.contrast_texts import ContrastSetText, text_batches
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode


@dataclass(frozen=True, eq=False)
class TextEmbeddingContrast:
    """Mean embeddings of the unsteered positive and negative texts of the selection half, each of length 1, (D,)."""

    positive: Tensor
    negative: Tensor

    def margins(self, embeddings: Tensor) -> list[float]:
        """Return the margin of each embedding, (N, D) of length 1."""
        return (embeddings @ (self.positive - self.negative)).tolist()


@torch.no_grad()
def text_embeddings(model: ModelProtocol, texts: Sequence[ContrastSetText]) -> Tensor:
    """Return the mean hidden state over the completion of each text, scaled to length 1, (N, D), in float64."""
    vectors = torch.zeros(len(texts), model.spec.width, dtype=torch.float64, device="cpu")
    with eval_mode(model):
        for indices, batch in text_batches(texts, model.device):
            hidden = to_float64(model(batch.ids, attention_mask=batch.real_tokens, hidden=True))  # (B, T, D)
            scored = batch.scored.to(hidden)
            vectors[indices] = (torch.einsum("bt,btd->bd", scored, hidden) / scored.sum(1, keepdim=True)).cpu()
    return normalize(vectors, dim=-1)


def embedding_axis(model: ModelProtocol, texts: Sequence[ContrastSetText]) -> TextEmbeddingContrast:
    """Return the axis from the negative to the positive texts."""
    embeddings = text_embeddings(model, texts)
    is_positive = torch.tensor([text.is_positive for text in texts], device="cpu")
    means = (embeddings[is_positive].mean(0), embeddings[~is_positive].mean(0))
    return TextEmbeddingContrast(*(normalize(mean, dim=0) for mean in means))


@torch.no_grad()
def embedding_distances(
    model: ModelProtocol, texts: TokenizedCorpus, change: Callable[[], AbstractContextManager[Any]]
) -> list[list[float]]:
    """Return the cosine distance between the plain and the steered embedding of each text, as rows [0, distance, 1]."""
    rows = []
    with eval_mode(model):
        for sample in texts:
            ids = make_batch([sample], device=model.device).ids
            plain = to_float64(model(ids, hidden=True))[0].mean(0)
            with change():
                steered = to_float64(model(ids, hidden=True))[0].mean(0)
            rows.append([0.0, 1.0 - float(torch.cosine_similarity(plain, steered, dim=0)), 1.0])
    return rows
