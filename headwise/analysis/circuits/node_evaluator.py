"""Metric of prompts while sets of nodes are replaced: by their value on the corrupted prompt, by their mean, or by zero.

Many sets are evaluated in one batch, as copies of the prompts. If the copies differ from a reference pass only from a later
layer on, the earlier blocks return their recorded outputs instead of running again. Only the values of one batch of prompts
are in memory, so that memory does not grow with the number of nodes or sets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.circuits.circuit_task import EncodedPrompt, MetricFunction
from headwise.analysis.circuits.model_nodes import ModelNodes, NodeEdit, NodeTensorHook, opened_hooks
from headwise.analysis.circuits.prompt_batch import PromptBatch, make_prompt_batches
from headwise.model import ModelProtocol, eval_mode
from headwise.model.resumable_forward import final_hidden_states_of_copies, repeat_batch

PROMPT_TOKENS = 1024  # tokens of one batch of prompts
COPY_TOKENS = 2048  # tokens of one forward pass, copies included
MAX_CACHED_BYTES = 2**29  # recorded values that are kept for the next call
SKIP_TOLERANCE = 1e-4  # of the metric, relative to its size, if earlier blocks are skipped

NodeValues = dict[str, Tensor]  # by hook: values of its nodes, (R, n, T, c), or (1, n, T, c) for all prompts


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
        self._corrupted: dict[int, NodeValues] = {}
        self._can_skip: bool | None = None

    @torch.no_grad()
    def clean_metrics(self) -> np.ndarray:
        """Return the metric of the unmodified model on each prompt, (P,)."""
        result = np.zeros(len(self.prompts))
        with eval_mode(self.model):
            for batch in self.batches:
                result[list(batch.indices)] = self._forward(batch, 1)[0].cpu().numpy()
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
        with eval_mode(self.model):
            for b, batch in enumerate(self.batches):
                values = self._replacements(b, ablation, means)
                scores = [self._run(batch, chunk, values) for chunk in masks.split(self._copies(batch))]
                result[:, list(batch.indices)] = torch.cat(scores).cpu().numpy()
        return result

    @torch.no_grad()
    def sweep(
        self, candidates: Sequence[int], base: np.ndarray, report: Callable[[int], object] | None = None
    ) -> np.ndarray:
        """Return the metric of each prompt without one more node at a time, (candidates, P), with resample ablation.

        Args:
            candidates: Indices of the nodes, removed one at a time.
            base: True at the nodes that compute their value in all passes, (N,).
            report: Called with the number of finished nodes and prompts, as a product.
        """
        result = np.zeros((len(candidates), len(self.prompts)))
        base_mask = torch.from_numpy(np.asarray(base, bool)).to(self.model.device)
        with eval_mode(self.model):
            for b, batch in enumerate(self.batches):
                values = self._replacements(b, "resample", None)
                outputs = self._block_outputs(batch, base_mask, values)
                for layer, rows in _rows_by_layer(self.nodes, candidates):
                    masks = base_mask.repeat(len(rows), 1)
                    masks[torch.arange(len(rows), device="cpu"), [candidates[row] for row in rows]] = False
                    for start in range(0, len(rows), self._copies(batch)):
                        chunk = slice(start, start + self._copies(batch))
                        with _blocks_replaced_by_recorded_outputs(
                            self.nodes.blocks, outputs, layer, len(batch.ids), len(masks[chunk])
                        ):
                            scores = self._run(batch, masks[chunk], values)
                        for row, score in zip(rows[chunk], scores.cpu().numpy(), strict=True):
                            result[row, list(batch.indices)] = score
                    if report is not None:
                        report(len(rows) * len(batch.indices))
        return result

    def corrupted_values(self, batch_index: int) -> NodeValues:
        """Return the values of all nodes on the corrupted prompts of a batch."""
        if batch_index not in self._corrupted:
            values = self.record(self.batches[batch_index], corrupted=True)
            size = sum(tensor.nbytes for stored in (values, *self._corrupted.values()) for tensor in stored.values())
            if size > MAX_CACHED_BYTES:
                self._corrupted.clear()
            self._corrupted[batch_index] = values
        return self._corrupted[batch_index]

    @torch.no_grad()
    def record(self, batch: PromptBatch, *, corrupted: bool) -> NodeValues:
        """Run the clean or the corrupted prompts of a batch and return the values of all nodes."""
        values: NodeValues = {}

        def edit_of(hook: NodeTensorHook) -> NodeEdit:
            return lambda value: values.update({hook.key: value.detach().clone()})

        with eval_mode(self.model), opened_hooks(self.nodes.hooks, edit_of):
            final_hidden_states_of_copies(
                self.model, batch.corrupted_ids if corrupted else batch.ids, None, None, None, 1
            )
        return values

    def _forward(self, batch: PromptBatch, copies: int) -> Tensor:
        """Run the model with the open edits and return the metrics, (copies, P)."""
        return batch.scores(self.model, final_hidden_states_of_copies(self.model, batch.ids, None, None, None, copies))

    def _run(self, batch: PromptBatch, masks: Tensor, values: NodeValues) -> Tensor:
        """Return the metrics with replaced nodes: masks (S, N) → (S, P)."""
        hooks = [hook for hook in self.nodes.hooks if not bool(masks[:, hook.nodes].all())]

        def edit_of(hook: NodeTensorHook) -> NodeEdit:
            return lambda value: replace_unmasked_nodes(value, masks[:, hook.nodes], values[hook.key])

        with opened_hooks(hooks, edit_of):
            return self._forward(batch, len(masks))

    def _copies(self, batch: PromptBatch) -> int:
        return max(1, self.copy_tokens // batch.ids.numel())

    def _replacements(self, batch_index: int, ablation: str, means: "NodeMeans | None") -> NodeValues:
        if ablation == "resample":
            return self.corrupted_values(batch_index)
        batch = self.batches[batch_index]
        if ablation == "mean":
            assert means is not None
            return means.values(batch.ids.shape[1])
        return {
            hook.key: torch.zeros(1, 1, 1, 1, device=self.model.device, dtype=torch.float32)
            for hook in self.nodes.hooks
        }

    def _block_outputs(self, batch: PromptBatch, base: Tensor, values: NodeValues) -> dict[nn.Module, Any]:
        """Return the output of each block in the base pass. Empty if blocks cannot be skipped."""
        if self._can_skip is False or not self.nodes.blocks or self.model.why_not_resumable():
            return {}
        outputs: dict[nn.Module, Any] = {}
        with ExitStack() as stack:
            for block in self.nodes.blocks:
                hook = block.register_forward_hook(lambda block, args, output: outputs.update({block: output}))
                stack.callback(hook.remove)
            self._run(batch, base[None], values)
        if len(outputs) != len(self.nodes.blocks):
            self._can_skip = False
        if self._can_skip is None:
            self._can_skip = self._check_skipping(batch, base, values, outputs)
        return outputs if self._can_skip else {}

    def _check_skipping(
        self, batch: PromptBatch, base: Tensor, values: NodeValues, outputs: dict[nn.Module, Any]
    ) -> bool:
        """Return whether passes that skip blocks give the metrics of full passes, with a node replaced in a late layer."""
        layer = len(self.nodes.blocks) * 2 // 3
        masks = base.repeat(2, 1)
        masks[1, [i for i, node_layer in enumerate(self.nodes.layers) if node_layer == layer]] = False
        full = self._run(batch, masks, values)
        with _blocks_replaced_by_recorded_outputs(self.nodes.blocks, outputs, layer, len(batch.ids), 2):
            skipped = self._run(batch, masks, values)
        return bool((full - skipped).abs().max() <= SKIP_TOLERANCE * full.abs().max().clamp(min=1))


class NodeMeans:
    """Mean value of each node by token position, over the corrupted prompts of one split.

    Args:
        evaluator: Evaluator of the split.
    """

    def __init__(self, evaluator: NodeEvaluator) -> None:
        width = max(batch.ids.shape[1] for batch in evaluator.batches)
        self._counts = torch.zeros(width, device=evaluator.model.device, dtype=torch.float32)
        self._sums: NodeValues = {}
        for b, batch in enumerate(evaluator.batches):
            real = batch.real_tokens.float()  # (R, T)
            self._counts[: real.shape[1]] += real.sum(0)
            for key, value in evaluator.corrupted_values(b).items():
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
