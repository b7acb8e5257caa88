"""A model as it is and as a change leaves it: what each text loses, and how far the model drifts on it.

A clean walk keeps the stream before each block, so that a change in a layer costs a pass from there on.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from headwise.analysis.ablation.eval_targets import MAX_LOGITS, TargetBatch
from headwise.heads.head import AttentionLayerProtocol
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol, Transformer
from headwise.model.block import Block
from headwise.model.loss import IGNORE_INDEX

MAX_CACHED_LOG_PROBS = 2**26  # log-probabilities of the untouched model that are kept of a batch
BatchChange = Callable[[int], AbstractContextManager[None]]  # what is changed while a batch, by its number, is run


class FullRerun:
    """Every question by whole passes: for models that are not walked through block by block."""

    def __init__(self, model: ModelProtocol, batches: list[TargetBatch]) -> None:
        self.model, self.batches = model, batches
        self.states = [self.hidden_at_targets(i) for i in range(len(batches))]  # untouched, (B, R, D) each
        self.clean_scores = [batch.score_hidden_states(model, x) for batch, x in zip(batches, self.states, strict=True)]
        pairs = zip(batches, self.states, strict=True)
        self.baseline_log_probs = [
            BaselineLogProbs(model, batch, x) if batch.targets is not None else None for batch, x in pairs
        ]

    def hidden_at_targets(self, batch_index: int) -> Tensor:
        """Final states as they are now, at the places asked about: (B, R, D)."""
        return self.batches[batch_index].select_target_rows(self.batches[batch_index].final_hidden_states(self.model))

    def advance_to(self, layer: AttentionLayerProtocol) -> None:
        """Changes in this layer or behind it are asked about next."""

    def measure_change(self, change: BatchChange) -> list[list[float]]:
        """What each text loses by a change, and how far the model drifts on it."""
        results: list[Tensor] = []
        for i, batch in enumerate(self.batches):
            with change(i):
                states = self.hidden_at_targets(i)
            baseline = self.baseline_log_probs[i]
            if baseline is None:
                # (B,)
                lost = (
                    batch.loss_increase(batch.score_hidden_states(self.model, states), self.clean_scores[i])
                    .double()
                    .cpu()
                )
                results.append(torch.stack((lost, lost)))
            else:
                results.append(baseline.loss_increase_and_kl(states))
        return torch.cat(results, 1).tolist()

    def clean_calls(self, layer: AttentionLayerProtocol) -> list[AttentionCall]:
        """The clean call of a layer, on each batch."""
        calls: list[AttentionCall] = []
        for i in range(len(self.batches)):
            with layer.hook_point.listen(calls.append):
                self.hidden_at_targets(i)
        return calls

    def mean_clean_loss(self) -> float | None:
        """The mean loss of the untouched model."""
        if self.batches[0].targets is None:
            return None
        return float(
            sum(scores.double().sum() for scores in self.clean_scores)
            / sum(batch.targets_per_text.sum() for batch in self.batches)
        )


class PartialRerun(FullRerun):
    """The stream before the layer the walk has come to is kept, and passes begin there."""

    def __init__(self, model: Transformer, batches: list[TargetBatch]) -> None:
        self.native_model, self.blocks = model, [block for block in model.blocks if isinstance(block, Block)]
        self.block_index = 0
        begun = [model.begin_forward(batch.ids, attention_mask=batch.attention_mask) for batch in batches]
        self.hidden_states, self.contexts = [x for x, _ in begun], [context for _, context in begun]
        super().__init__(model, batches)

    def hidden_at_targets(self, batch_index: int) -> Tensor:
        """From the block the walk has come to."""
        x, context = self.hidden_states[batch_index], self.contexts[batch_index]
        for block in self.blocks[self.block_index :]:
            x = block(x, context)
        x = self.batches[batch_index].select_target_rows(x)
        return x if self.native_model.norm is None else self.native_model.norm(x)

    def clean_calls(self, layer: AttentionLayerProtocol) -> list[AttentionCall]:
        """The clean call of a layer, on each batch."""
        self.advance_to(layer)
        calls: list[AttentionCall] = []
        for x, context in zip(self.hidden_states, self.contexts, strict=True):
            with layer.hook_point.listen(calls.append):
                self.blocks[self.block_index](x, context)
        return calls

    def advance_to(self, layer: AttentionLayerProtocol) -> None:
        """Take the streams on, clean, to the block of this layer; changes before it can no longer be asked about."""
        while self.blocks[self.block_index].attention is not layer:
            pairs = zip(self.hidden_states, self.contexts, strict=True)
            self.hidden_states = [self.blocks[self.block_index](x, context) for x, context in pairs]
            self.block_index += 1


class BaselineLogProbs:
    """What the untouched model says at the places asked about, to hold what it says later against."""

    def __init__(self, model: ModelProtocol, batch: TargetBatch, states: Tensor) -> None:
        assert batch.targets is not None
        targets = (
            batch.targets if batch.target_positions is None else batch.targets.gather(1, batch.target_positions)
        )  # (B, R)
        self.model, self.states = model, states
        self.has_target = targets != IGNORE_INDEX  # (B, R)
        self.chunk_rows = max(1, MAX_LOGITS // model.spec.vocab)
        self.targets = targets[self.has_target].split(self.chunk_rows)
        fits_cache = int(self.has_target.sum()) * model.spec.vocab <= MAX_CACHED_LOG_PROBS
        self.cached = list(self._log_probs(states)) if fits_cache else None  # else worked out anew each time

    def _log_probs(self, states: Tensor) -> Iterator[Tensor]:
        """log p of every token, a few places at a time: (n, V)."""
        assert self.model.output is not None
        for chunk in states[self.has_target].split(self.chunk_rows):
            # small drifts are differences of near-equal numbers
            yield self.model.output(chunk).double().log_softmax(-1)

    def loss_increase_and_kl(self, states: Tensor) -> Tensor:
        """What each text loses by these states (B, R, D), and KL(untouched ‖ these), summed over its places: (2, B)."""
        totals = torch.zeros(2, *self.has_target.shape, dtype=torch.float64, device=states.device)  # (2, B, R)
        chunks = []
        for clean, changed, target in zip(
            self.cached or self._log_probs(self.states), self._log_probs(states), self.targets, strict=True
        ):
            lost = (clean - changed).gather(1, target[:, None])[:, 0]  # (n,)
            # never below 0 but for rounding
            chunks.append(torch.stack((lost, (clean.exp() * (clean - changed)).sum(-1).clamp_min(0))))
        totals[:, self.has_target] = torch.cat(chunks, 1).double() if chunks else totals.new_zeros(2, 0)
        return totals.sum(2).cpu()
