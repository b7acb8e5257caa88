"""Measure the loss increase and KL divergence of each text under temporary changes of a model.

`PartialRerun` stores the residual stream before each block, so a change in a layer reruns only that layer and later ones.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from headwise.analysis.ablation.eval_targets import MAX_LOGITS, TargetBatch
from headwise.heads.head import AttentionLayerProtocol
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import float64_device, to_float64
from headwise.model import ModelProtocol, Transformer
from headwise.model.block import Block
from headwise.model.chunked_cross_entropy import IGNORE_INDEX

MAX_CACHED_LOG_PROBS = 2**26  # log-probabilities of the unmodified model cached per batch
BatchChange = Callable[[int], AbstractContextManager[None]]  # batch index → context in which the model is changed


class FullRerun:
    """Measure every change with full forward passes, for models that cannot be run block by block."""

    def __init__(self, model: ModelProtocol, batches: list[TargetBatch]) -> None:
        self.model, self.batches = model, batches
        self.states = [self.hidden_at_targets(i) for i in range(len(batches))]  # unmodified, (B, R, D) each
        self.clean_scores = [batch.score_hidden_states(model, x) for batch, x in zip(batches, self.states, strict=True)]
        pairs = zip(batches, self.states, strict=True)
        self.baseline_log_probs = [
            BaselineLogProbs(model, batch, x) if batch.targets is not None else None for batch, x in pairs
        ]

    def hidden_at_targets(self, batch_index: int) -> Tensor:
        """Run the model and return the final hidden states at the target positions, (B, R, D)."""
        return self.batches[batch_index].select_target_rows(self.batches[batch_index].final_hidden_states(self.model))

    def advance_to(self, layer: AttentionLayerProtocol) -> None:
        """Prepare for changes in this layer or later layers."""

    def measure_change(self, change: BatchChange) -> list[list[float]]:
        """Return the summed loss increase and KL divergence of each text under a change, as two lists."""
        results: list[Tensor] = []
        for i, batch in enumerate(self.batches):
            with change(i):
                states = self.hidden_at_targets(i)
            baseline = self.baseline_log_probs[i]
            if baseline is None:
                # (B,)
                lost = to_float64(
                    batch.loss_increase(batch.score_hidden_states(self.model, states), self.clean_scores[i])
                ).cpu()
                results.append(torch.stack((lost, lost)))
            else:
                results.append(baseline.loss_increase_and_kl(states))
        return torch.cat(results, 1).tolist()

    def clean_calls(self, layer: AttentionLayerProtocol) -> list[AttentionCall]:
        """Return the attention call of a layer in the unmodified model, for each batch."""
        calls: list[AttentionCall] = []
        for i in range(len(self.batches)):
            with layer.hook_point.listen(calls.append):
                self.hidden_at_targets(i)
        return calls

    def mean_clean_loss(self) -> float | None:
        """Mean loss of the unmodified model in nats per token. None if the model has no output layer."""
        if self.batches[0].targets is None:
            return None
        return float(
            sum(to_float64(scores).sum() for scores in self.clean_scores)
            / sum(batch.targets_per_text.sum() for batch in self.batches)
        )


class PartialRerun(FullRerun):
    """Measure changes by rerunning only the blocks from the current layer on."""

    def __init__(self, model: Transformer, batches: list[TargetBatch]) -> None:
        self.native_model, self.blocks = model, [block for block in model.blocks if isinstance(block, Block)]
        self.block_index = 0
        begun = [model.begin_forward(batch.ids, attention_mask=batch.attention_mask) for batch in batches]
        self.hidden_states, self.contexts = [x for x, _ in begun], [context for _, context in begun]
        super().__init__(model, batches)

    def hidden_at_targets(self, batch_index: int) -> Tensor:
        """Run the blocks from the current one and return the final hidden states at the target positions."""
        x, context = self.hidden_states[batch_index], self.contexts[batch_index]
        for block in self.blocks[self.block_index :]:
            x = block(x, context)
        x = self.batches[batch_index].select_target_rows(x)
        return x if self.native_model.norm is None else self.native_model.norm(x)

    def clean_calls(self, layer: AttentionLayerProtocol) -> list[AttentionCall]:
        """Return the attention call of a layer in the unmodified model, for each batch."""
        self.advance_to(layer)
        calls: list[AttentionCall] = []
        for x, context in zip(self.hidden_states, self.contexts, strict=True):
            with layer.hook_point.listen(calls.append):
                self.blocks[self.block_index](x, context)
        return calls

    def advance_to(self, layer: AttentionLayerProtocol) -> None:
        """Run the unmodified blocks up to this layer. Earlier layers cannot be measured afterwards."""
        while self.blocks[self.block_index].attention is not layer:
            pairs = zip(self.hidden_states, self.contexts, strict=True)
            self.hidden_states = [self.blocks[self.block_index](x, context) for x, context in pairs]
            self.block_index += 1


class BaselineLogProbs:
    """Log-probabilities of the unmodified model at the target positions."""

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
        self.cached = list(self._log_probs(states)) if fits_cache else None  # None: recomputed for each change

    def _log_probs(self, states: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities of the vocabulary in chunks of positions, (n, V)."""
        assert self.model.output is not None
        for chunk in states[self.has_target].split(self.chunk_rows):
            # float64, because small KL values are differences of nearly equal numbers
            yield to_float64(self.model.output(chunk)).log_softmax(-1)

    def loss_increase_and_kl(self, states: Tensor) -> Tensor:
        """Return the loss increase and KL(unmodified ‖ changed) of each text, summed over its targets: (2, B)."""
        has_target = self.has_target.to(float64_device(states.device))
        totals = torch.zeros(2, *has_target.shape, dtype=torch.float64, device=has_target.device)  # (2, B, R)
        chunks = []
        for clean, changed, target in zip(
            self.cached or self._log_probs(self.states), self._log_probs(states), self.targets, strict=True
        ):
            lost = (clean - changed).gather(1, target[:, None].to(clean.device))[:, 0]  # (n,)
            # KL is never negative except for rounding
            chunks.append(torch.stack((lost, (clean.exp() * (clean - changed)).sum(-1).clamp_min(0))))
        totals[:, has_target] = to_float64(torch.cat(chunks, 1)) if chunks else totals.new_zeros(2, 0)
        return totals.sum(2).cpu()
