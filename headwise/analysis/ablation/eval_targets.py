"""What a model is asked for while heads are taken from it: which tokens at which places, and how badly it answers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.ablation.head_outputs import HeadOutputs, record_z
from headwise.analysis.recording.batching import TextSample, TokenBatch, make_batch, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol
from headwise.model.loss import IGNORE_INDEX
from headwise.spec import LayerAddress

EvalMetric = Literal["loss", "last"]
MAX_LOGITS = 1 << 24  # logits computed at once
MASK_FRACTION = 0.15  # the share of tokens an encoder is asked to guess (https://arxiv.org/abs/1810.04805)


@dataclass(frozen=True, eq=False)
class TargetBatch:
    """Texts, and the token asked for at each place, IGNORE_INDEX where none is; no targets: the mean state is what counts."""

    ids: Tensor  # (B, T)
    real_tokens: Tensor  # (B, T)
    targets: Tensor | None  # (B, T)
    attention_mask: Tensor | None  # (B, T), as the model must be told it
    sample_ids: tuple[int, ...] = ()
    source: Tensor | None = None  # (B, S), what an encoder-decoder reads
    source_real_tokens: Tensor | None = None  # (B, S)
    # (B, T), tokens whose surprise is subtracted: answers are then minus the lead over them
    rivals: Tensor | None = None

    @classmethod
    def of(cls, model: ModelProtocol, corpus: Any = None, *, texts: int, max_length: int) -> "TargetBatch":
        """Make one batch of the first texts of a corpus that are long enough to have a target.

        Args:
            model: The model that is evaluated.
            corpus: A text, a list of texts, a path or a `Corpus`. None is the default corpus of the model.
            texts: Number of texts.
            max_length: Tokens of one text at most, if the corpus is not tokenized yet.
        """
        tokenized = TokenizedCorpus.of(model, corpus, needs_targets=True, default_length=max_length)
        samples = list(islice(evaluable_samples(model, tokenized), texts))
        return make_target_batch(model, make_batch(samples, device=model.device))

    def final_hidden_states(self, model: ModelProtocol, gates: Any = None) -> Tensor:
        """One forward pass: final states (B, T, D)."""
        return model(
            self.ids,
            attention_mask=self.attention_mask,
            source=self.source,
            source_attention_mask=self.source_real_tokens,
            gates=gates,
            hidden=True,
        )

    def record_head_outputs(self, model: ModelProtocol, heads: HeadPattern) -> HeadOutputs:
        """What heads gave in such a pass."""
        return record_z(
            model,
            self.ids,
            heads,
            attention_mask=self.real_tokens,
            source=self.source,
            source_attention_mask=self.source_real_tokens,
        )

    def real_tokens_at(self, layer_address: LayerAddress) -> Tensor | None:
        """Which tokens are real where a layer's queries stand: those of the sources in an encoder's layer."""
        return self.source_real_tokens if layer_address.stack == "enc" else self.real_tokens

    def ignore_first_targets(self, num_tokens: int) -> "TargetBatch":
        """The same, asked for nothing at the first so many places: what a head that forgets cannot have forgotten yet."""
        if not num_tokens or self.targets is None:
            return self
        return replace(self, targets=self.targets.masked_fill(self.real_tokens.cumsum(1) <= num_tokens, IGNORE_INDEX))

    @cached_property
    def targets_per_text(self) -> Tensor:
        """How many answers each text gives, (B,)."""
        if self.targets is None:
            return torch.ones(len(self.ids), dtype=torch.float64)
        return (self.targets != IGNORE_INDEX).sum(1).double().cpu()

    @cached_property
    def target_positions(self) -> Tensor | None:
        """The places asked about, (B, R), filled up with other places; None where they are nearly all."""
        if self.targets is None:
            return None
        has_target = self.targets != IGNORE_INDEX
        R = max(1, int(has_target.sum(1).max()))
        if 3 * has_target.shape[1] < 4 * R:
            return None
        return has_target.int().topk(R, dim=1).indices  # those asked about first

    def select_target_rows(self, x: Tensor, copies: int = 1) -> Tensor:
        """The rows asked about, of so many copies of the batch: (n·B, T, D) → (n·B, R, D)."""
        if self.target_positions is None:
            return x
        rows = self.target_positions.repeat(copies, 1)[..., None]  # (n·B, R, 1)
        return x.gather(1, rows.expand(-1, -1, x.shape[-1]))

    def score_hidden_states(self, model: ModelProtocol, hidden: Tensor) -> Tensor:
        """Final states of the rows asked about → the summed surprise of each text, minus that of its rivals (n·B,), or its
        mean state (n·B, D)."""
        copies = len(hidden) // len(self.ids)
        if self.targets is None:
            real_tokens = self.real_tokens.repeat(copies, 1)[..., None]  # (n·B, T, 1)
            return hidden.masked_fill(~real_tokens, 0).double().sum(1) / real_tokens.sum(1)
        targets, rivals = (
            ids if ids is None or self.target_positions is None else ids.gather(1, self.target_positions)  # (B, R)
            for ids in (self.targets, self.rivals)
        )
        assert targets is not None
        nll = _summed_nll(model, hidden, targets.repeat(copies, 1))
        return nll if rivals is None else nll - _summed_nll(model, hidden, rivals.repeat(copies, 1))

    def loss_increase(self, scores: Tensor, clean: Tensor) -> Tensor:
        """How much worse answers are than the untouched model's: (B, …), (B, …) → (B,)."""
        if self.targets is None:
            return 1 - F.cosine_similarity(scores, clean, dim=-1)
        return scores - clean


def make_target_batch(model: ModelProtocol, batch: TokenBatch, metric: EvalMetric = "loss") -> TargetBatch:
    """What a model is asked on a batch: next tokens (all, or the last), hidden tokens, or its state."""
    sample_ids = tuple(sample.index for sample in batch.samples)
    check_metric(model, metric)
    # What stands behind a text is never seen where a model reads forwards: no mask, and the plain causal kernel.
    padding_unseen = model.spec.kind != "encoder" and not bool(batch.first_token_positions.any())
    attention_mask = None if batch.is_unpadded or padding_unseen else batch.real_tokens
    if model.output is None:
        return TargetBatch(
            batch.ids, batch.real_tokens, None, attention_mask, sample_ids, batch.source, batch.source_attention_mask
        )
    if model.spec.kind == "encoder":
        ids, targets = _mask_tokens(model, batch)
        return TargetBatch(ids, batch.real_tokens, targets, attention_mask, sample_ids)
    # Nobody reads a text's last token to guess another, so it is not read at all.
    has_next = batch.real_tokens[:, :-1] & batch.real_tokens[:, 1:]  # (B, T − 1): a token, and one behind it
    targets = batch.ids[:, 1:].masked_fill(~has_next, IGNORE_INDEX)  # (B, T − 1)
    if metric == "last":
        remaining = has_next.flip(1).cumsum(1).flip(1)  # (B, T − 1): how many are asked for from here on
        targets = targets.masked_fill(remaining != 1, IGNORE_INDEX)
    attention_mask = None if attention_mask is None else attention_mask[:, :-1]
    return TargetBatch(
        batch.ids[:, :-1], has_next, targets, attention_mask, sample_ids, batch.source, batch.source_attention_mask
    )


def evaluable_samples(model: ModelProtocol, corpus: Iterable[TextSample]) -> Iterator[TextSample]:
    """The texts of a reading that a model can be asked about."""
    samples = (sample for sample in corpus if len(sample.ids) >= min_tokens(model))
    first = next(samples, None)
    if first is None:
        raise HeadwiseError("no text is long enough to ask for a token; a decoder needs texts of two tokens.")
    yield first
    yield from samples


def min_tokens(model: ModelProtocol) -> int:
    """Shorter texts ask nothing: a decoder needs a token to start from and one to guess."""
    return 2 if model.spec.kind != "encoder" and model.output is not None else 1


def check_metric(model: ModelProtocol, metric: str) -> None:
    """Whether this can be asked of this model."""
    if metric not in ("loss", "last"):
        raise HeadwiseError(f"the metric is 'loss', over all tokens, or 'last', the last one alone; got {metric!r}.")
    if metric == "last" and (model.spec.kind == "encoder" or model.output is None):
        raise HeadwiseError("metric='last' asks for the last token, so it needs a decoder with an output; use 'loss'.")


def _summed_nll(model: ModelProtocol, hidden: Tensor, targets: Tensor) -> Tensor:
    """−log p of the tokens asked for, summed by text, never holding more than MAX_LOGITS logits: (N, R, D), (N, R) → (N,)."""
    assert model.output is not None
    has_target = targets != IGNORE_INDEX
    states, target_ids = hidden[has_target], targets[has_target]  # (n, D), (n,)
    step = max(1, MAX_LOGITS // model.spec.vocab)
    parts = [
        F.cross_entropy(at_least_float32(model.output(chunk)), chunk_targets, reduction="none")
        for chunk, chunk_targets in zip(states.split(step), target_ids.split(step), strict=True)
    ]
    nll = torch.zeros(targets.shape, dtype=torch.float64, device=hidden.device)
    nll[has_target] = torch.cat(parts).double()
    return nll.sum(1)


def _mask_tokens(model: ModelProtocol, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Some tokens of each text become the mask; which ones follows from the text's number alone. (B, T), (B, T)"""
    tokenizer = tokenizer_of(model)
    if tokenizer.mask is None:
        raise HeadwiseError("this encoder's tokenizer has no mask, so it cannot be asked for hidden tokens.")
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
