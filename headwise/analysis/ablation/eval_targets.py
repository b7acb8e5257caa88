"""Evaluation targets for ablation: which tokens the model must predict, and the loss on them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.ablation.recorded_head_outputs import HeadOutputs, record_z
from headwise.analysis.recording.batching import TextSample, TokenBatch, make_batch, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import at_least_float32, float64_device, to_float64
from headwise.model import ModelProtocol
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import LayerAddress

EvalMetric = Literal["loss", "last"]
MAX_LOGITS = 1 << 24  # logits computed at once
MASK_FRACTION = 0.15  # fraction of tokens masked for an encoder (https://arxiv.org/abs/1810.04805)


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """A batch of texts with the target token of each position.

    Attributes:
        ids: Token ids, (B, T).
        real_tokens: (B, T), False at padding.
        targets: (B, T), IGNORE_INDEX at positions without a target. None for a model without an output layer, which is
            scored by its mean hidden state.
        attention_mask: (B, T), passed to the model. None if no mask is needed.
        sample_ids: Index of each text in the corpus.
        source: Source token ids of an encoder-decoder, (B, S).
        source_real_tokens: (B, S), False at padding.
        rivals: (B, T), alternative tokens. Their negative log-likelihood is subtracted from that of the targets.
    """

    ids: Tensor
    real_tokens: Tensor
    targets: Tensor | None
    attention_mask: Tensor | None
    sample_ids: tuple[int, ...] = ()
    source: Tensor | None = None
    source_real_tokens: Tensor | None = None
    rivals: Tensor | None = None

    @classmethod
    def of(cls, model: ModelProtocol, corpus: Any = None, *, texts: int, max_length: int) -> "TargetBatch":
        """Make one batch of the first texts of a corpus that are long enough to have a target.

        Args:
            model: The model that is evaluated.
            corpus: A text, a list of texts, a path or a `Corpus`. None is the default corpus of the model.
            texts: Number of texts.
            max_length: Maximum number of tokens per text, if the corpus is not tokenized yet.
        """
        tokenized = TokenizedCorpus.of(model, corpus, needs_targets=True, default_length=max_length)
        samples = list(islice(evaluable_samples(model, tokenized), texts))
        return make_target_batch(model, make_batch(samples, device=model.device))

    def final_hidden_states(self, model: ModelProtocol, gates: Any = None) -> Tensor:
        """Run the model and return the final hidden states, (B, T, D)."""
        return model(
            self.ids,
            attention_mask=self.attention_mask,
            source=self.source,
            source_attention_mask=self.source_real_tokens,
            gates=gates,
            hidden=True,
        )

    def record_head_outputs(self, model: ModelProtocol, heads: HeadPattern) -> HeadOutputs:
        """Run the model and return z of the selected heads."""
        return record_z(
            model,
            self.ids,
            heads,
            attention_mask=self.real_tokens,
            source=self.source,
            source_attention_mask=self.source_real_tokens,
        )

    def real_tokens_at(self, layer_address: LayerAddress) -> Tensor | None:
        """Return the mask of real tokens at a layer's queries: the source texts in an encoder layer."""
        return self.source_real_tokens if layer_address.stack == "enc" else self.real_tokens

    def ignore_first_targets(self, num_tokens: int) -> "TargetBatch":
        """Return a copy without targets at the first `num_tokens` tokens, which fit in every cache window."""
        if not num_tokens or self.targets is None:
            return self
        return replace(self, targets=self.targets.masked_fill(self.real_tokens.cumsum(1) <= num_tokens, IGNORE_INDEX))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding and source tokens included."""
        return self.ids.numel() + (0 if self.source is None else self.source.numel())

    @cached_property
    def targets_per_text(self) -> Tensor:
        """Number of targets of each text, (B,)."""
        if self.targets is None:
            return torch.ones(len(self.ids), dtype=torch.float64, device="cpu")
        return to_float64(self.targets != IGNORE_INDEX).sum(1).cpu()

    @cached_property
    def target_positions(self) -> Tensor | None:
        """Positions of the targets, (B, R), padded with other positions. None if nearly all positions have a target."""
        if self.targets is None:
            return None
        has_target = self.targets != IGNORE_INDEX
        R = max(1, int(has_target.sum(1).max()))
        if 3 * has_target.shape[1] < 4 * R:
            return None
        return has_target.int().topk(R, dim=1).indices  # target positions come first

    def select_target_rows(self, x: Tensor, copies: int = 1) -> Tensor:
        """Select the target rows of `copies` copies of the batch: (n·B, T, D) → (n·B, R, D)."""
        if self.target_positions is None:
            return x
        rows = self.target_positions.repeat(copies, 1)[..., None]  # (n·B, R, 1)
        return x.gather(1, rows.expand(-1, -1, x.shape[-1]))

    def score_hidden_states(self, model: ModelProtocol, hidden: Tensor) -> Tensor:
        """Score the final hidden states of the target rows.

        Returns the summed negative log-likelihood of each text, minus that of its rivals, (n·B,), or the mean hidden
        state (n·B, D) for a model without an output layer.
        """
        copies = len(hidden) // len(self.ids)
        if self.targets is None:
            real_tokens = self.real_tokens.repeat(copies, 1)[..., None]  # (n·B, T, 1)
            sums = to_float64(hidden.masked_fill(~real_tokens, 0)).sum(1)
            return sums / real_tokens.sum(1).to(sums.device)
        targets, rivals = (
            ids if ids is None or self.target_positions is None else ids.gather(1, self.target_positions)  # (B, R)
            for ids in (self.targets, self.rivals)
        )
        assert targets is not None
        nll = _nll_per_text(model, hidden, targets.repeat(copies, 1))
        return nll if rivals is None else nll - _nll_per_text(model, hidden, rivals.repeat(copies, 1))

    def loss_increase(self, scores: Tensor, clean: Tensor) -> Tensor:
        """Return how much worse the scores are than those of the unmodified model: (B, …), (B, …) → (B,)."""
        if self.targets is None:
            return 1 - F.cosine_similarity(scores, clean, dim=-1)
        return scores - clean


def make_target_batch(model: ModelProtocol, batch: TokenBatch, metric: EvalMetric = "loss") -> TargetBatch:
    """Choose the targets of a batch: all next tokens, the last next token, masked tokens, or none (no output layer)."""
    sample_ids = tuple(sample.index for sample in batch.samples)
    check_metric(model, metric)
    # Padding on the right is invisible to a causal model: pass no mask and use the plain causal kernel.
    padding_unseen = model.spec.kind != "encoder" and not bool(batch.first_token_positions.any())
    attention_mask = None if batch.is_unpadded or padding_unseen else batch.real_tokens
    if model.output is None:
        return TargetBatch(
            batch.ids, batch.real_tokens, None, attention_mask, sample_ids, batch.source, batch.source_attention_mask
        )
    if model.spec.kind == "encoder":
        ids, targets = _mask_tokens(model, batch)
        return TargetBatch(ids, batch.real_tokens, targets, attention_mask, sample_ids)
    # The last token of a text has no target, so it is not run.
    has_next = batch.real_tokens[:, :-1] & batch.real_tokens[:, 1:]  # (B, T − 1): real tokens followed by a real token
    targets = batch.ids[:, 1:].masked_fill(~has_next, IGNORE_INDEX)  # (B, T − 1)
    if metric == "last":
        remaining = has_next.flip(1).cumsum(1).flip(1)  # (B, T − 1): number of targets from here to the end
        targets = targets.masked_fill(remaining != 1, IGNORE_INDEX)
    attention_mask = None if attention_mask is None else attention_mask[:, :-1]
    return TargetBatch(
        batch.ids[:, :-1], has_next, targets, attention_mask, sample_ids, batch.source, batch.source_attention_mask
    )


def evaluable_samples(model: ModelProtocol, corpus: Iterable[TextSample]) -> Iterator[TextSample]:
    """Yield the texts that are long enough to have a target."""
    samples = (sample for sample in corpus if len(sample.ids) >= min_tokens(model))
    first = next(samples, None)
    if first is None:
        raise ArgumentError(
            "corpus: no text is long enough to have a target. A decoder needs texts of at least 2 tokens. Use longer texts."
        )
    yield first
    yield from samples


def min_tokens(model: ModelProtocol) -> int:
    """Return the minimum number of tokens of a text: 2 for a decoder with an output layer, else 1."""
    return 2 if model.spec.kind != "encoder" and model.output is not None else 1


def check_metric(model: ModelProtocol, metric: str) -> None:
    """Raise if the metric is unknown or the model does not support it."""
    if metric not in ("loss", "last"):
        raise ArgumentError(
            f"metric: must be 'loss' (mean over all tokens) or 'last' (last token of each text). Got {metric!r}."
        )
    if metric == "last" and (model.spec.kind == "encoder" or model.output is None):
        raise UnsupportedModelError(
            "metric='last': the loss of the last token needs a decoder with an output layer. Use metric='loss'."
        )


def _nll_per_text(model: ModelProtocol, hidden: Tensor, targets: Tensor) -> Tensor:
    """Sum −log p of the targets per text, with at most MAX_LOGITS logits in memory: (N, R, D), (N, R) → (N,)."""
    assert model.output is not None
    has_target = targets != IGNORE_INDEX
    states, target_ids = hidden[has_target], targets[has_target]  # (n, D), (n,)
    step = max(1, MAX_LOGITS // model.spec.vocab)
    parts = [
        F.cross_entropy(at_least_float32(model.output(chunk)), chunk_targets, reduction="none")
        for chunk, chunk_targets in zip(states.split(step), target_ids.split(step), strict=True)
    ]
    nll = torch.zeros(targets.shape, dtype=torch.float64, device=float64_device(hidden.device))
    nll[has_target.to(nll.device)] = to_float64(torch.cat(parts))
    return nll.sum(1)


def _mask_tokens(model: ModelProtocol, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Mask tokens of each text, sampled with the text's index as seed. Returns ids and targets, (B, T) each."""
    tokenizer = tokenizer_of(model)
    if tokenizer.mask is None:
        raise UnsupportedModelError(
            "model: the tokenizer of this encoder has no mask token, so the masked-token loss cannot be computed. "
            "Use a model with a mask token."
        )
    special = {token_id for token_id in tokenizer.special.values() if token_id is not None}
    ids, targets = batch.ids.clone(), torch.full_like(batch.ids, IGNORE_INDEX)
    for row, sample in enumerate(batch.samples):
        cols = batch.real_tokens[row].nonzero()[:, 0]
        masked_cols = cols[_masked_positions(sample, special)]
        targets[row, masked_cols] = ids[row, masked_cols]
        ids[row, masked_cols] = tokenizer.mask
    return ids, targets


def _masked_positions(sample: TextSample, special: set[int]) -> list[int]:
    candidates = [position for position, token in enumerate(sample.ids) if token not in special]
    num_masked = min(len(candidates), max(1, round(MASK_FRACTION * len(candidates))))
    return sorted(np.random.default_rng(sample.index).permutation(candidates)[:num_masked].tolist())
