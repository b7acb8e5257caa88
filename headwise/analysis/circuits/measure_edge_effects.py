"""Effects of edges: the direct path from one part of a decoder to another, by exact path patching of many edges at once.

An edge sender → receiver is patched as `hw.patched(path=(sender, receiver))` does it. The edges into one layer run together,
as copies of the batch in one forward pass that skips the blocks before that layer. Memory does not grow with the number of
edges, because the copies of a pass are limited.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.ablation.decoder_parts import (
    BlockInput,
    BlockRecord,
    DecoderParts,
    Part,
    on_block_input,
    with_first,
)
from headwise.analysis.ablation.path_patching import (
    SenderRecord,
    StreamDifference,
    clean_and_changed_mlp_output,
    recording_sender,
    sender_change,
)
from headwise.analysis.circuits.circuit_result import CircuitEstimate, EdgeEffect
from headwise.analysis.circuits.circuit_task import EncodedPrompt, MetricFunction
from headwise.analysis.circuits.prompt_batch import make_prompt_batches
from headwise.errors import ArgumentError
from headwise.kernels.matmul_tuner import large_products
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.model.resumable_forward import BlockOutputCache, final_hidden_states_of_copies
from headwise.spec import Address, EmbeddingOrLogitsAddress, HeadInputAddress, KVAddress, MLPAddress

MAX_TOKENS = 4096  # tokens of all copies in one pass
PROMPT_TOKENS = 1024  # tokens of a batch of prompts
Edge = tuple[Part, Part]
# Final hidden states of S copies of the batch, (S·R, T, D) → metric of each prompt, (S, P).
HiddenScores = Callable[[Tensor], Tensor]
# Logits at the last token, (R, V) → metric of each prompt, (R,).
LogitMetric = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Effects of edges on the metric of each prompt.

    Attributes:
        edges: Sender and receiver of each edge, as text.
        clean: Metric of the model on each prompt, (P,), float64.
        effects: Metric of the model minus metric with the edge patched, (E, P), float64.
    """

    edges: tuple[tuple[str, str], ...]
    clean: Tensor
    effects: Tensor

    @property
    def means(self) -> dict[tuple[str, str], float]:
        """Mean effect of each edge over the prompts."""
        return dict(zip(self.edges, self.effects.mean(1).tolist(), strict=True))

    def rows(
        self, estimate: Callable[[Tensor], CircuitEstimate] = lambda values: CircuitEstimate(float(values.mean()))
    ) -> tuple[EdgeEffect, ...]:
        """Return the edges with their effects, largest absolute value first.

        Args:
            estimate: Function from the effects of one edge on the prompts, (P,), to an estimate.
        """
        rows = [EdgeEffect(*edge, estimate(values)) for edge, values in zip(self.edges, self.effects, strict=True)]
        return tuple(sorted(rows, key=lambda row: -abs(row.effect.value)))


@torch.no_grad()
def measure_edge_effects(
    model: ModelProtocol,
    batch: tuple[Tensor, Tensor],
    senders: Sequence[str | Part],
    receivers: Sequence[str | Part],
    metric: LogitMetric,
) -> EdgeTable:
    """Measure the direct effect of each sender on each receiver, by exact path patching.

    Args:
        model: A decoder whose residual stream is a sum, native or attached.
        batch: Token ids of the clean prompts and of the corrupted prompts, (R, T) each, without padding.
        senders: Heads `16.0`, KV heads `16.kv1`, MLPs `mlp.16` and `embedding`.
        receivers: Inputs of heads `18.6.k`, `18.kv2.k` (also without a projection), MLPs and `logits`.
        metric: Function of the logits at the last token, (R, V), that returns the metric of each prompt, (R,).

    Returns:
        One row per pair whose receiver reads the output of the sender. An effect is the metric of the model minus the metric
        with the edge patched.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> table = measure_edge_effects(
    ...     Transformer(preset("nano")), (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4, 3]])),
    ...     ["0.1", "mlp.0"], ["3.2.k", "logits"], lambda logits: logits[:, 5] - logits[:, 6],
    ... )
    >>> table.edges[0], table.effects.shape
    (('0.1', '3.2.k'), torch.Size([4, 1]))
    """
    ids, other_ids = batch
    if ids.ndim != 2 or ids.shape != other_ids.shape:
        raise ArgumentError(
            f"batch: clean and corrupted token ids must have the same shape (R, T). Got {tuple(ids.shape)} and "
            f"{tuple(other_ids.shape)}."
        )

    def scores(hidden: Tensor) -> Tensor:
        assert model.output is not None
        logits = to_float64(model.output(hidden[:, -1])).unflatten(0, (-1, len(ids)))  # (S, R, V)
        values = [metric(copy) for copy in logits]
        if any(not isinstance(value, Tensor) or value.shape != (len(ids),) for value in values):
            raise ArgumentError(f"metric: must return a tensor of shape ({len(ids)},), one number per prompt.")
        return to_float64(torch.stack(values))

    with eval_mode(model):
        parts = DecoderParts(model)
        edges = edges_between(parts, senders, receivers)
        runner = PatchedEdgeRunner(parts, ids, other_ids, tuple(dict.fromkeys(sender for sender, _ in edges)), scores)
        patched = runner.metrics(edges)
    names = tuple((str(sender), str(receiver)) for sender, receiver in edges)
    return EdgeTable(names, runner.clean, runner.clean - patched)


@torch.no_grad()
def circuit_edges(
    model: ModelProtocol, nodes: Sequence[str], prompts: Sequence[EncodedPrompt], metric: MetricFunction | None = None
) -> EdgeTable:
    """Measure the direct effect of each node of a circuit on each reader in the circuit and on the logits.

    Query heads read with their queries. Their keys and values belong to the KV heads if those are nodes of their own
    (grouped-query attention), otherwise to the query heads.

    Args:
        model: The model.
        nodes: Names of the nodes of the circuit.
        prompts: Encoded prompts.
        metric: Metric of the user. None: log-probability of the right answers minus that of the wrong ones.

    Returns:
        The effects on each prompt.
    """
    table: list[tuple[tuple[int, ...], Tensor, Tensor]] = []
    edges: list[Edge] = []
    with eval_mode(model), large_products(model.matmul_tuner):
        parts = DecoderParts(model)
        members = [parts.parse(node) for node in nodes]
        edges = edges_between(parts, members, circuit_receivers(parts, members))
        senders = tuple(dict.fromkeys(sender for sender, _ in edges))
        for batch in make_prompt_batches(prompts, PROMPT_TOKENS, model.device, metric):
            runner = PatchedEdgeRunner(parts, batch.ids, batch.corrupted_ids, senders, partial(batch.scores, model))
            table.append((batch.indices, runner.clean, runner.clean - runner.metrics(edges)))
    clean, effects = (
        torch.zeros(len(prompts), device="cpu").double(),
        torch.zeros(len(edges), len(prompts), device="cpu").double(),
    )
    for indices, batch_clean, batch_effects in table:
        clean[list(indices)], effects[:, list(indices)] = batch_clean.cpu(), batch_effects.cpu()
    return EdgeTable(tuple((str(sender), str(receiver)) for sender, receiver in edges), clean, effects)


def circuit_receivers(parts: DecoderParts, members: Sequence[Part]) -> list[Part]:
    """Return the readers of a circuit: inputs of its heads and KV heads, its MLPs, and the logits."""
    receivers: list[Part] = []
    for member in members:
        if isinstance(member, Address):
            spec = parts.layers[member.layer].spec
            has_own_kv = len(spec.kv_head_ids) == len(spec.head_ids)
            receivers += [HeadInputAddress(member, projection) for projection in ("qkv" if has_own_kv else "q")]
        elif isinstance(member, KVAddress):
            receivers += [HeadInputAddress(member, projection) for projection in "kv"]
        elif isinstance(member, MLPAddress):
            receivers.append(member)
    return [*receivers, EmbeddingOrLogitsAddress.LOGITS]


def edges_between(
    parts: DecoderParts, senders: Sequence[str | Part], receivers: Sequence[str | Part]
) -> list[tuple[Part, Part]]:
    """Return all pairs of a sender and a receiver that reads the output of the sender."""
    sending, receiving = ([parts.parse(item) for item in dict.fromkeys(items)] for items in (senders, receivers))
    return [
        (sender, receiver)
        for sender in sending
        for receiver in receiving
        if parts.writes_at(sender) < parts.reads_at(receiver)
    ]


class PatchedEdgeRunner:
    """Runs a batch with patched edges.

    Args:
        parts: Parts of the model, in eval mode.
        ids: Clean token ids, (R, T). Padding, if any, is on the right.
        other_ids: Corrupted token ids, (R, T).
        senders: Senders of all edges.
        scores: Function from final hidden states to metrics.

    Attributes:
        clean: Metric of each prompt, (P,).
    """

    def __init__(
        self, parts: DecoderParts, ids: Tensor, other_ids: Tensor, senders: Sequence[Part], scores: HiddenScores
    ) -> None:
        self.parts, self.ids, self.scores = parts, ids, scores
        blocks = [layer.block for _, layer in sorted(parts.residual.layers.items())]
        skippable: list[nn.Module] = [] if parts.model.why_not_resumable() else blocks
        self.outputs = BlockOutputCache(skippable, len(ids))
        other, clean = ({sender: SenderRecord(BlockRecord()) for sender in senders} for _ in range(2))
        self._run_recorded(other, other_ids)
        norm = parts.residual.norm.module
        with ExitStack() as stack:
            stack.enter_context(self.outputs.recording())
            stack.callback(norm.register_forward_pre_hook(self._keep_final_stream).remove)
            hidden = self._run_recorded(clean, ids)
        self.clean = scores(hidden)[0]  # (P,)
        self.changes = {sender: sender_change(parts, sender, clean[sender], other[sender]) for sender in senders}

    def _run_recorded(self, records: dict[Part, SenderRecord], ids: Tensor) -> Tensor:
        with ExitStack() as stack:
            for sender, record in records.items():
                stack.enter_context(recording_sender(self.parts, sender, record))
            return self.parts.model(ids, hidden=True)

    def _keep_final_stream(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.final_stream: Tensor = args[0]

    def metrics(self, edges: Sequence[Edge]) -> Tensor:
        """Return the metric of each prompt with each edge patched alone, (E, P)."""
        result = self.clean.expand(len(edges), -1).clone()
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (_, receiver) in enumerate(edges):
            groups.setdefault(self.parts.reads_at(receiver), []).append(i)
        for (layer, _), members in groups.items():
            for chunk in self._chunks(members):
                result[chunk] = self.scores(self._run([edges[i] for i in chunk], layer))
        return result

    def _chunks(self, members: list[int]) -> Iterator[list[int]]:
        step = max(1, MAX_TOKENS // self.ids.numel())
        yield from (members[start : start + step] for start in range(0, len(members), step))

    def _run(self, edges: Sequence[Edge], layer: int) -> Tensor:
        """Return the final hidden states of one copy of the batch per edge, (S·R, T, D)."""
        receiver = edges[0][1]
        deltas = [self.changes[sender].delta for sender, _ in edges]
        if isinstance(receiver, EmbeddingOrLogitsAddress):
            return self.parts.residual.norm.module(self.final_stream.repeat(len(edges), 1, 1) + torch.cat(deltas))
        block = self.parts.residual.layers[layer].block
        patch = self._mlp_patch(edges, layer) if isinstance(receiver, MLPAddress) else self._head_patch(edges, layer)
        with ExitStack() as stack:
            stack.enter_context(self.outputs.skip_blocks_before(block, len(edges)))
            patch.open(stack)
            return final_hidden_states_of_copies(self.parts.model, self.ids, None, None, None, len(edges))

    def _head_patch(self, edges: Sequence[Edge], layer: int) -> "HeadInputPatch":
        delta = torch.cat([self.changes[sender].delta for sender, _ in edges])  # (S·R, T, D)
        inputs = [self.parts.inputs_of(receiver) for _, receiver in edges]  # pyright: ignore[reportArgumentType]
        heads = sorted({head for item in inputs for readers in item.values() for head in readers})
        masks = {
            name: torch.tensor([[head in item.get(name, ()) for head in heads] for item in inputs], device=delta.device)
            .repeat_interleave(len(self.ids), 0)  # (S·R, n)
            for name in "qkv"
        }  # fmt: skip
        return HeadInputPatch(self.parts, layer, delta, heads, masks)

    def _mlp_patch(self, edges: Sequence[Edge], layer: int) -> "MLPInputPatch":
        deltas, dz = [], None
        heads = len(self.parts.layers[layer].spec.head_ids) if layer in self.parts.layers else 0
        for copy, (sender, _) in enumerate(edges):
            change: StreamDifference = self.changes[sender]
            is_same_layer = change.layer == layer
            deltas.append(torch.zeros_like(change.delta) if is_same_layer else change.delta)
            if is_same_layer and change.dz is not None:
                R, _, T, e = change.dz.shape
                dz = change.dz.new_zeros(len(edges) * R, heads, T, e) if dz is None else dz
                dz[copy * R : (copy + 1) * R, list(change.heads)] = change.dz
        return MLPInputPatch(self.parts, layer, torch.cat(deltas), dz)


@dataclass(eq=False)
class HeadInputPatch:
    """Patch of inputs of heads in one layer, another one in each row of the batch.

    Attributes:
        parts: Parts of the model.
        layer: Index of the layer.
        delta: Change of the residual stream that the inputs read, (B, T, D).
        heads: Indices of the heads.
        masks: For q, k and v: True if a head reads the changed input in a row, (B, n).
    """

    parts: DecoderParts
    layer: int
    delta: Tensor
    heads: list[int]
    masks: dict[str, Tensor]
    z: Tensor | None = None

    def open(self, stack: ExitStack) -> None:
        """Open the hooks of the patch."""
        stack.enter_context(on_block_input(self.parts, self.layer, self._compute))
        stack.enter_context(self.parts.hook_point(self.layer).replaced(self._edit))

    def _compute(self, block_input: BlockInput) -> None:
        clean = self.parts.run_block(self.layer, block_input).heads_call
        other = self.parts.run_block(self.layer, block_input.plus(self.delta)).heads_call
        self.z = self.parts.z_with_inputs(self.layer, clean, other, self.masks, self.heads)

    def _edit(self, z: Tensor) -> Tensor:
        if self.z is None:
            return z
        is_patched = torch.stack(list(self.masks.values())).any(0)[..., None, None]  # (B, n, 1, 1)
        changed = z.clone()
        changed[:, self.heads] = torch.where(is_patched, self.z.to(z), z[:, self.heads])
        return changed


@dataclass(eq=False)
class MLPInputPatch:
    """Patch of the input of one MLP, another one in each row of the batch.

    Attributes:
        parts: Parts of the model.
        layer: Index of the layer.
        delta: Change of the residual stream before the block, (B, T, D).
        dz: Change of z of the heads of the same layer, (B, H, T, e), or None.
    """

    parts: DecoderParts
    layer: int
    delta: Tensor
    dz: Tensor | None
    output: Tensor | None = None

    def open(self, stack: ExitStack) -> None:
        """Open the hooks of the patch."""
        stack.enter_context(on_block_input(self.parts, self.layer, self._compute))
        mlp = self.parts.residual.layers[self.layer].mlp
        stack.callback(mlp.register_forward_hook(self._replace).remove)

    def _compute(self, block_input: BlockInput) -> None:
        _, self.output = clean_and_changed_mlp_output(self.parts, self.layer, block_input, self.delta, self.dz)

    def _replace(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.parts.is_rerunning or self.output is None else with_first(output, self.output)
