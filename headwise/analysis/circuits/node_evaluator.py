"""Metric of prompts while sets of nodes are replaced: by their value on the corrupted prompt, by their mean, or by zero.

Many sets are evaluated in one batch, as copies of the prompts. Three properties save computation, and results stay exact:

- The first tokens that a clean and a corrupted prompt share do not change if nodes have their corrupted values. Their keys
  and values are computed once per batch, and passes run over the remaining tokens.
- If the copies differ from a reference pass only from a later layer on, the earlier blocks return their recorded outputs.
- Large matrix products use the fastest operator of this machine.

The first two are tested on the model before use. Only the values of the prompts are in memory, so that memory does not grow
with the number of nodes or sets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.circuits.circuit_task import EncodedPrompt, MetricFunction
from headwise.analysis.circuits.model_nodes import ModelNodes, NodeEdit, NodeTensorHook, opened_hooks
from headwise.analysis.circuits.prompt_batch import (
    PromptBatch,
    make_prefix_batches,
    make_prompt_batches,
    without_prefix,
)
from headwise.errors import HeadwiseError
from headwise.kernels.matmul_tuner import large_products
from headwise.model import ModelProtocol, eval_mode
from headwise.model.prefix_forward import PrefixForward
from headwise.model.resumable_forward import final_hidden_states_of_copies, repeat_batch

PROMPT_TOKENS = 1024  # tokens of one batch of prompts
COPY_TOKENS = 2048  # tokens of one forward pass, copies included
MAX_CACHED_BYTES = 2**29  # recorded values that are kept for the next call
TEST_TOLERANCE = 1e-4  # of the metric, relative to its size, if prefixes are shared or earlier blocks are skipped

NodeValues = dict[str, Tensor]  # by hook: values of its nodes, (R, n, T, c), or (1, n, T, c) for all prompts


@dataclass(eq=False)
class BasePass:
    """Pass over a batch with a fixed set of replaced nodes.

    Attributes:
        base: True at the nodes that compute their value, (1, N).
        outputs: Output of each block.
        scores: Metric of each prompt, (1, P).
    """

    base: Tensor
    outputs: dict[nn.Module, Any]
    scores: Tensor


@dataclass(eq=False)
class BatchState:
    """Recorded values of one batch of prompts.

    Attributes:
        forward: Passes after the prefix of the batch. None without a prefix.
        corrupted: Values of all nodes on the corrupted prompts.
        base_pass: The last base pass of a sweep, or None.
    """

    forward: PrefixForward | None
    corrupted: NodeValues
    base_pass: BasePass | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(value.nbytes for value in self.corrupted.values())


class NodeEvaluator:
    """Evaluates sets of nodes on the prompts of one split.

    Args:
        model: The model.
        nodes: Its nodes.
        prompts: Encoded prompts.
        metric: Metric of the user, or None.
        copy_tokens: Tokens of one forward pass, copies included.
    """

    def __init__(
        self,
        model: ModelProtocol,
        nodes: ModelNodes,
        prompts: Sequence[EncodedPrompt],
        metric: MetricFunction | None = None,
        copy_tokens: int = COPY_TOKENS,
    ) -> None:
        self.model, self.nodes, self.prompts, self.copy_tokens = model, nodes, tuple(prompts), copy_tokens
        self.metric = metric
        self.batches = list(make_prompt_batches(prompts, PROMPT_TOKENS, model.device, metric))
        self._prefix_batches: list[PromptBatch] | None = None  # None: not tested yet
        self._states: dict[PromptBatch, BatchState] = {}
        self._can_skip: bool | None = None

    @torch.no_grad()
    def clean_metrics(self) -> np.ndarray:
        """Return the metric of the unmodified model on each prompt, (P,)."""
        result = np.zeros(len(self.prompts))
        with eval_mode(self.model), large_products(self.model.matmul_tuner):
            for batch in self.batches:
                result[list(batch.indices)] = self._forward(batch, 1, None)[0].cpu().numpy()
        return result

    @torch.no_grad()
    def evaluate(
        self, kept_nodes: np.ndarray, ablation: str = "resample", means: "NodeMeans | None" = None
    ) -> np.ndarray:
        """Return the metric of each prompt with sets of nodes, (S, P).

        Args:
            kept_nodes: True at the nodes that compute their value, False at those that are replaced, (S, N).
            ablation: Replacement: "resample", "mean" or "zero".
            means: Means of the nodes, for "mean".
        """
        result = np.zeros((len(kept_nodes), len(self.prompts)))
        masks = torch.from_numpy(np.asarray(kept_nodes, bool)).to(self.model.device)
        with eval_mode(self.model), large_products(self.model.matmul_tuner):
            for batch in self.prefix_batches() if ablation == "resample" else self.batches:
                values = self._replacements(batch, ablation, means)
                forward = self._state(batch).forward if ablation == "resample" else None
                chunks = masks.split(self._copies(batch))
                scores = torch.cat([self._run(batch, chunk, values, forward) for chunk in chunks])
                result[:, list(batch.indices)] = scores.cpu().numpy()
        return result

    @torch.no_grad()
    def sweep(
        self, candidates: Sequence[int], base: np.ndarray, report: Callable[[int], object] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the metric of each prompt without one more node at a time, with resample ablation.

        Args:
            candidates: Indices of the nodes, removed one at a time.
            base: True at the nodes that compute their value in all passes, (N,).
            report: Called with the number of finished nodes and prompts, as a product.

        Returns:
            Metrics with the base, (P,), and without each candidate, (candidates, P).
        """
        base_scores, result = np.zeros(len(self.prompts)), np.zeros((len(candidates), len(self.prompts)))
        base_mask = torch.from_numpy(np.asarray(base, bool)).to(self.model.device)[None]  # (1, N)
        with eval_mode(self.model), large_products(self.model.matmul_tuner):
            for batch in self.prefix_batches():
                base_pass, indices = self._base_pass(batch, base_mask), list(batch.indices)
                base_scores[indices] = base_pass.scores[0].cpu().numpy()
                for layer, rows in _rows_by_layer(self.nodes, candidates):
                    scores = self._sweep_layer(batch, base_pass, layer, [candidates[row] for row in rows])
                    result[np.ix_(rows, indices)] = scores.cpu().numpy()
                    if report is not None:
                        report(len(rows) * len(indices))
        return base_scores, result

    def _sweep_layer(self, batch: PromptBatch, base_pass: BasePass, layer: int, nodes: Sequence[int]) -> Tensor:
        """Return the metrics of a batch without one more node of a layer at a time, (nodes, P)."""
        state, outputs = self._state(batch), base_pass.outputs if self._can_skip else {}
        masks = base_pass.base.repeat(len(nodes), 1)
        masks[torch.arange(len(nodes), device="cpu"), list(nodes)] = False
        scores = []
        for chunk in masks.split(self._copies(batch)):
            with _blocks_replaced_by_recorded_outputs(self.nodes.blocks, outputs, layer, len(batch.ids), len(chunk)):
                scores.append(self._run(batch, chunk, state.corrupted, state.forward))
        return torch.cat(scores)

    def corrupted_values(self, batch: PromptBatch) -> NodeValues:
        """Return the values of all nodes on the corrupted prompts of a batch, after its prefix."""
        return self._state(batch).corrupted

    @torch.no_grad()
    def record(self, batch: PromptBatch, *, corrupted: bool, forward: PrefixForward | None = None) -> NodeValues:
        """Run the clean or the corrupted prompts of a batch and return the values of all nodes.

        Args:
            batch: The batch.
            corrupted: Run the corrupted prompts.
            forward: Passes after the prefix of the batch. None without a prefix.
        """
        values: NodeValues = {}
        ids = batch.corrupted_ids if corrupted else batch.ids

        def edit_of(hook: NodeTensorHook) -> NodeEdit:
            return lambda value: values.update({hook.key: value.detach().clone()})

        with eval_mode(self.model), opened_hooks(self.nodes.hooks, edit_of):
            if forward is None:
                final_hidden_states_of_copies(self.model, ids, None, None, None, 1)
            else:
                forward(ids, 1)
        return values

    def prefix_batches(self) -> list[PromptBatch]:
        """Return the batches for resample ablation: with shared prefixes if the model supports them."""
        if self._prefix_batches is None:
            device, metric = self.model.device, self.metric
            batches = make_prefix_batches(self.prompts, PROMPT_TOKENS, device, metric)
            self._prefix_batches = batches if self._check_prefixes(batches) else self.batches
        return self._prefix_batches

    def _check_prefixes(self, batches: Sequence[PromptBatch]) -> bool:
        """Return whether passes after a prefix give the metrics of full passes, with every second node replaced."""
        batch = max(batches, key=lambda batch: batch.prefix_ids.shape[1])
        if not batch.prefix_ids.shape[1]:
            return True
        try:
            state = self._state(batch)
        except HeadwiseError:  # the model cannot be called with a cache
            return False
        if state.forward is None:
            return False
        masks = torch.ones(1, len(self.nodes), dtype=torch.bool, device=self.model.device)
        masks[:, ::2] = False
        shared, full_batch = self._run(batch, masks, state.corrupted, state.forward), without_prefix(batch)
        full = self._run(full_batch, masks, self.record(full_batch, corrupted=True), None)
        return _same(shared, full)

    def _state(self, batch: PromptBatch) -> BatchState:
        """Return the recorded values of a batch."""
        if batch not in self._states:
            forward = self.model.prefix_forward(batch.prefix_ids) if batch.prefix_ids.shape[1] else None
            state = BatchState(forward, self.record(batch, corrupted=True, forward=forward))
            if sum(stored.nbytes for stored in (state, *self._states.values())) > MAX_CACHED_BYTES:
                self._states.clear()
            self._states[batch] = state
        return self._states[batch]

    def _forward(self, batch: PromptBatch, copies: int, forward: PrefixForward | None) -> Tensor:
        """Run the model with the open edits and return the metrics, (copies, P)."""
        if forward is None:
            return batch.scores(
                self.model, final_hidden_states_of_copies(self.model, batch.ids, None, None, None, copies)
            )
        return batch.scores(self.model, forward(batch.ids, copies))

    def _run(self, batch: PromptBatch, masks: Tensor, values: NodeValues, forward: PrefixForward | None) -> Tensor:
        """Return the metrics with replaced nodes: masks (S, N) → (S, P)."""
        hooks = [hook for hook in self.nodes.hooks if not bool(masks[:, hook.nodes].all())]

        def edit_of(hook: NodeTensorHook) -> NodeEdit:
            return lambda value: replace_unmasked_nodes(value, masks[:, hook.nodes], values[hook.key])

        with opened_hooks(hooks, edit_of):
            return self._forward(batch, len(masks), forward)

    def _copies(self, batch: PromptBatch) -> int:
        return max(1, self.copy_tokens // batch.ids.numel())

    def _replacements(self, batch: PromptBatch, ablation: str, means: "NodeMeans | None") -> NodeValues:
        if ablation == "resample":
            return self.corrupted_values(batch)
        if ablation == "mean":
            assert means is not None
            return means.values(batch.ids.shape[1])
        return {
            hook.key: torch.zeros(1, 1, 1, 1, device=self.model.device, dtype=torch.float32)
            for hook in self.nodes.hooks
        }

    def _base_pass(self, batch: PromptBatch, base: Tensor) -> BasePass:
        """Return the pass of a batch with the base, (1, N), with the outputs of blocks if they can be skipped."""
        state = self._state(batch)
        if state.base_pass is not None and torch.equal(state.base_pass.base, base):
            return state.base_pass
        outputs: dict[nn.Module, Any] = {}
        if self._can_skip is None and (not self.nodes.blocks or self.model.why_not_resumable()):
            self._can_skip = False
        with ExitStack() as stack:
            for block in () if self._can_skip is False else self.nodes.blocks:
                hook = block.register_forward_hook(lambda block, args, output: outputs.update({block: output}))
                stack.callback(hook.remove)
            scores = self._run(batch, base, state.corrupted, state.forward)
        state.base_pass = BasePass(base, outputs, scores)
        if self._can_skip is None:
            self._can_skip = len(outputs) == len(self.nodes.blocks) and self._check_skipping(batch, state.base_pass)
        return state.base_pass

    def _check_skipping(self, batch: PromptBatch, base_pass: BasePass) -> bool:
        """Return whether passes that skip blocks give the metrics of full passes, with a node replaced in a late layer."""
        layer, state = len(self.nodes.blocks) * 2 // 3, self._state(batch)
        masks = base_pass.base.repeat(2, 1)
        masks[1, [i for i, node_layer in enumerate(self.nodes.layers) if node_layer == layer]] = False
        full = self._run(batch, masks, state.corrupted, state.forward)
        with _blocks_replaced_by_recorded_outputs(self.nodes.blocks, base_pass.outputs, layer, len(batch.ids), 2):
            skipped = self._run(batch, masks, state.corrupted, state.forward)
        return _same(skipped, full)


class NodeMeans:
    """Mean value of each node by token position, over the corrupted prompts of one split.

    Args:
        evaluator: Evaluator of the split.
    """

    def __init__(self, evaluator: NodeEvaluator) -> None:
        width = max(batch.ids.shape[1] for batch in evaluator.batches)
        self._counts = torch.zeros(width, device=evaluator.model.device, dtype=torch.float32)
        self._sums: NodeValues = {}
        for batch in evaluator.batches:
            real = batch.real_tokens.float()  # (R, T)
            self._counts[: real.shape[1]] += real.sum(0)
            for key, value in evaluator.corrupted_values(batch).items():
                total = torch.einsum("rntc,rt->ntc", value, real.to(value))
                sums = self._sums.setdefault(key, value.new_zeros(total.shape[0], width, total.shape[2]))
                sums[:, : total.shape[1]] += total

    def values(self, width: int) -> NodeValues:
        """Return the means at the first positions, (1, n, width, c) by hook. Later positions repeat the last one."""
        last = int(self._counts.count_nonzero()) - 1
        positions = torch.arange(width, device=self._counts.device).clamp(max=last)
        counts = self._counts[positions, None]  # (width, 1)
        return {key: (sums[:, positions.to(sums.device)] / counts.to(sums))[None] for key, sums in self._sums.items()}


def replace_unmasked_nodes(computed: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Replace the values of nodes for S copies of a batch: (S·R, n, T, c), (S, n), (R or 1, n, T, c) → (S·R, n, T, c).

    A boolean mask selects exactly. A mask of numbers from 0 (replaced) to 1 (computed) interpolates.
    """
    copies = computed.unflatten(0, (len(mask), -1))  # (S, R, n, T, c)
    mask = mask[:, None, :, None, None].to(computed.device)
    if mask.dtype == torch.bool:
        return torch.where(mask, copies, values[None].to(copies)).flatten(0, 1)
    values = values.to(computed.device)
    return (values[None] + mask.to(copies) * (copies - values[None])).flatten(0, 1)


def _same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether metrics are equal up to rounding."""
    return bool((actual - expected).abs().max() <= TEST_TOLERANCE * expected.abs().max().clamp(min=1))


def _rows_by_layer(nodes: ModelNodes, candidates: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield each layer with the rows of its candidates."""
    by_layer: dict[int, list[int]] = {}
    for row, node in enumerate(candidates):
        by_layer.setdefault(nodes.layers[node], []).append(row)
    yield from sorted(by_layer.items())


@contextmanager
def _blocks_replaced_by_recorded_outputs(
    blocks: Sequence[nn.Module], outputs: dict[nn.Module, Any], layer: int, batch: int, copies: int
) -> Iterator[None]:
    """Inside the context, the blocks before a layer return their recorded outputs.

    Only the last of them repeats its output for the copies, because the blocks after it ignore the others.
    """
    skipped = list(blocks[: max(0, layer)]) if outputs else []
    own_forwards = [block.__dict__.get("forward") for block in skipped]
    for block in skipped:
        output = repeat_batch(outputs[block], batch, copies) if block is skipped[-1] else outputs[block]
        block.__dict__["forward"] = lambda *args, result=output, **kwargs: result
    try:
        yield
    finally:
        for block, own_forward in zip(skipped, own_forwards, strict=True):
            block.__dict__.pop("forward")
            if own_forward is not None:
                block.__dict__["forward"] = own_forward
