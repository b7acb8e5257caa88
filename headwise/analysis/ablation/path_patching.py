"""Path patching: replace the output of one part of a decoder for one reader, and nothing else.

Two runs: the clean run is the call inside the context, and the other run is a call on another text with as many tokens. For
the path sender → receiver,

    δ    = output of the sender in the other run − its output in the clean run        (a change of the residual stream)
    x_R  = residual stream that the receiver reads in the clean run
    the receiver reads x_R + δ in place of x_R, through its own norm and weights.

So the change takes the direct path through the residual stream: all heads and MLPs between sender and receiver keep their
clean output. An input of the receiver that is not named keeps its clean value: with `18.6.k`, head 6 attends with its clean
queries to the changed keys and reads the clean values. Everything after the receiver runs on its changed output.

A sender is a head (z of the other run), a KV head (keys and values of the other run, read by the clean queries of all its
readers), an MLP or the embedding. A norm after attention (post-norm) belongs to the sender: the change passes through it
while the other heads of the layer stay clean.

Path patching: https://arxiv.org/abs/2211.00593 and https://arxiv.org/abs/2304.05969.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
from headwise.errors import ArgumentError
from headwise.heads.hook_point import Edit
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address, EmbeddingOrLogitsAddress, HeadInputAddress, KVAddress, MLPAddress


@dataclass(eq=False)
class SenderRecord:
    """Output of a sender in one pass.

    Attributes:
        run: Values of its block.
        stream: Residual stream before the first block, for the embedding.
    """

    run: BlockRecord
    stream: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StreamDifference:
    """Change that a part makes to the residual stream.

    Attributes:
        delta: Change of the residual stream, (B, T, D).
        layer: Layer of the part. −1 for the embedding.
        heads: Indices of the heads that change. Empty if the part is not a head.
        dz: Change of z of these heads, (B, n, T, e), or None.
    """

    delta: Tensor
    layer: int
    heads: tuple[int, ...] = ()
    dz: Tensor | None = None


@contextmanager
def path_patch_context(
    model: ModelProtocol, path: Sequence[Any], other_ids: Tensor, positions: Sequence[int] | None = None
) -> Iterator[None]:
    """Patch one path while the context is open. `patched(path=…)` documents it.

    Args:
        model: A decoder whose residual stream is a sum.
        path: Addresses of the sender, of any parts in between, and of the receiver.
        other_ids: Token ids of the other run, (1 or B, T).
        positions: Token positions at which the output of the sender is patched. None patches all positions.
    """
    with eval_mode(model):
        parts = DecoderParts(model)
    nodes = parse_path(parts, path)
    with torch.no_grad(), eval_mode(model):
        other = SenderRecord(BlockRecord())
        with recording_sender(parts, nodes[0], other):
            model(other_ids, hidden=True)
    with PathPatch(parts, nodes, other, positions).opened():
        yield


def parse_path(parts: DecoderParts, path: Sequence[Any]) -> tuple[Part, ...]:
    """Return the addresses of a path. Raise if a part cannot send to the next."""
    if isinstance(path, str) or len(path) < 2:
        raise ArgumentError(
            f"path: needs a sender and a receiver. Got {path!r}. Use a pair such as ('16.0', '18.6.k') or ('mlp.3', "
            f"'logits')."
        )
    nodes = tuple(parts.parse(node) for node in path)
    for sender, receiver in pairwise(nodes):
        writer = sender if sender is nodes[0] else _owner(sender)
        if parts.writes_at(writer) >= parts.reads_at(receiver):
            raise ArgumentError(
                f"path: {receiver} does not read the output of {sender}, because it comes earlier in the model or at the "
                f"same place. Put the sender first, and choose a receiver in a later layer."
            )
    return nodes


def _owner(part: Part) -> Part:
    """Return the head of an input. Between sender and receiver an input stands for the output of its head."""
    return part.head if isinstance(part, HeadInputAddress) else part


@contextmanager
def recording_sender(parts: DecoderParts, sender: Part, record: SenderRecord) -> Iterator[None]:
    """Record the output of a sender in the passes inside the context."""

    def keep_stream(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not parts.is_rerunning:
            record.stream = args[0] if args else kwargs["hidden_states"]

    with ExitStack() as stack:
        if isinstance(sender, Address | KVAddress | MLPAddress):
            parts.record_block(sender.layer, record.run, stack)
        else:
            first = parts.residual.first_module
            stack.callback(first.register_forward_pre_hook(keep_stream, with_kwargs=True).remove)
        yield


def sender_change(parts: DecoderParts, sender: Part, clean: SenderRecord, other: SenderRecord) -> StreamDifference:
    """Return the change of the residual stream if a sender writes its output of the other run."""
    if isinstance(sender, Address | KVAddress):
        heads = parts.head_indices(sender)
        call, other_call = clean.run.heads_call, other.run.heads_call
        _check_tokens(call.z.shape[2], other_call.z.shape[2])
        if isinstance(sender, Address):
            dz = other_call.z[:, list(heads)].to(call.z) - call.z[:, list(heads)]  # (B, 1, T, e)
        else:
            reads_other = torch.ones(1, len(heads), dtype=torch.bool, device=call.z.device)
            inputs = {"k": reads_other, "v": reads_other}
            dz = parts.z_with_inputs(sender.layer, call, other_call, inputs, heads) - call.z[:, list(heads)]
        delta = parts.head_change_in_stream(sender.layer, heads, dz, clean.run.attention_output)
        return StreamDifference(delta, sender.layer, heads, dz)
    clean_value, other_value = (
        record.run.mlp_output if isinstance(sender, MLPAddress) else record.stream for record in (clean, other)
    )
    assert clean_value is not None and other_value is not None, "recorded in both runs"  # noqa: PT018
    if clean_value.ndim == other_value.ndim == 3:
        _check_tokens(clean_value.shape[1], other_value.shape[1])
    layer = sender.layer if isinstance(sender, MLPAddress) else -1
    return StreamDifference(other_value.to(clean_value) - clean_value, layer)


def _check_tokens(tokens: int, other_tokens: int) -> None:
    if tokens != other_tokens:
        raise ArgumentError(
            f"other: must have as many tokens as the text that the model reads. Got {other_tokens} and {tokens}. Use two "
            f"texts with the same number of tokens."
        )


def clean_and_changed_mlp_output(
    parts: DecoderParts, layer: int, block_input: BlockInput, delta: Tensor | None, dz: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output of an MLP in the clean run, and if it reads a changed residual stream. Attention stays clean.

    Args:
        parts: Parts of the model.
        layer: Index of the layer.
        block_input: Clean input of the block.
        delta: Change of the residual stream before the block, (B, T, D), or None.
        dz: Change of z of the heads of the same layer, (B, H, T, e), or None.
    """
    clean = parts.run_block(layer, block_input, keep_edits=True)
    z = None if clean.call is None else clean.call.z
    z = z if z is None or dz is None else z + dz
    changed = parts.run_block(layer, block_input.plus(delta), z=z, keep_edits=True)
    assert clean.mlp_output is not None and changed.mlp_output is not None, "recorded in both runs"  # noqa: PT018
    return clean.mlp_output, changed.mlp_output


class PathPatch:
    """One path of a model, patched in every pass inside a context.

    Args:
        parts: Parts of the model.
        nodes: Sender, parts in between, and receiver.
        other: Output of the sender in the other run.
        positions: Token positions at which the sender is patched. None means all.
    """

    def __init__(
        self, parts: DecoderParts, nodes: tuple[Part, ...], other: SenderRecord, positions: Sequence[int] | None
    ) -> None:
        self.parts, self.nodes, self.other, self.positions = parts, nodes, other, positions
        self.clean = SenderRecord(BlockRecord())
        self.change: StreamDifference | None = None  # of the last part of the path that ran
        self.replacement: Tensor | None = None  # output of the receiver in this pass

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Patch the path in the passes inside the context."""
        *_, receiver = self.nodes
        with ExitStack() as stack:
            stack.enter_context(recording_sender(self.parts, self.nodes[0], self.clean))
            for node in self.nodes[1:]:
                if not isinstance(node, EmbeddingOrLogitsAddress):
                    layer, is_last = self.parts.reads_at(node)[0], node is receiver
                    run = partial(self._run_receiver, node, is_last=is_last)
                    stack.enter_context(on_block_input(self.parts, layer, run))
            self._open_replacement(receiver, stack)
            yield

    def _open_replacement(self, receiver: Part, stack: ExitStack) -> None:
        """Replace the output of the receiver."""
        if isinstance(receiver, EmbeddingOrLogitsAddress):
            norm = self.parts.residual.norm.module
            stack.callback(norm.register_forward_pre_hook(self._change_final_stream).remove)
        elif isinstance(receiver, MLPAddress):
            mlp = self.parts.residual.layers[receiver.layer].mlp
            stack.callback(mlp.register_forward_hook(self._replace_mlp).remove)
        else:
            hook_point = self.parts.hook_point(self.parts.reads_at(receiver)[0])
            stack.enter_context(hook_point.replaced(self._z_edit(receiver)))

    def _change_final_stream(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(self.nodes) == 2:
            self.change = None  # a new pass
        delta = self._incoming_change().delta
        return (args[0] + delta.reshape(args[0].shape).to(args[0]), *args[1:])

    def _replace_mlp(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.parts.is_rerunning or self.replacement is None:
            return output
        return with_first(output, self.replacement)

    def _z_edit(self, receiver: Address | KVAddress | HeadInputAddress) -> Edit:
        heads = [*next(iter(self.parts.inputs_of(receiver).values()))]

        def edit(z: Tensor) -> Tensor:
            if self.replacement is None:
                return z
            changed = z.clone()
            changed[:, heads] = self.replacement.to(z)
            return changed

        return edit

    def _incoming_change(self, same_layer: BlockRecord | None = None) -> StreamDifference:
        """Return the change that the next part reads. The sender's change is computed when its first reader runs."""
        if self.change is None:
            clean = self.clean if same_layer is None else SenderRecord(same_layer)
            self.change = self._at_positions(sender_change(self.parts, self.nodes[0], clean, self.other))
        return self.change

    def _at_positions(self, change: StreamDifference) -> StreamDifference:
        """Set the change to zero at the positions that are not patched."""
        if self.positions is None:
            return change
        T = change.delta.shape[1]
        invalid = [row for row in self.positions if not -T <= row < T]
        if invalid:
            raise ArgumentError(
                f"positions: out of range for {T} tokens. Got {invalid[0]}. Use 0 to {T - 1}, or -1 to {-T} from the end."
            )
        mask = change.delta.new_zeros(T)
        mask[[row % T for row in self.positions]] = 1
        dz = None if change.dz is None else change.dz * mask[:, None].to(change.dz)
        return StreamDifference(change.delta * mask[:, None], change.layer, change.heads, dz)

    def _run_receiver(self, node: Part, block_input: BlockInput, *, is_last: bool) -> None:
        """Compute the output of a part of the path with the change that it reads, before its block runs."""
        if node is self.nodes[1]:
            self.change = None  # a new pass
        if isinstance(node, MLPAddress):
            clean, changed = self._changed_mlp(node, block_input)
            output, change = changed, StreamDifference((changed - clean).reshape(block_input.x.shape), node.layer)
        else:
            output, change = self._changed_heads(node, block_input)  # pyright: ignore[reportArgumentType]
        self.change, self.replacement = change, output if is_last else None

    def _changed_mlp(self, node: MLPAddress, block_input: BlockInput) -> tuple[Tensor, Tensor]:
        sender = self.nodes[self.nodes.index(node) - 1]
        if self.parts.writes_at(_owner(sender))[0] != node.layer:
            return clean_and_changed_mlp_output(self.parts, node.layer, block_input, self._incoming_change().delta)
        change = self._incoming_change(self.parts.run_block(node.layer, block_input, keep_edits=True))
        assert change.dz is not None, "a sender of the same layer is a head"
        z_shape = (*change.dz.shape[:1], len(self.parts.layers[node.layer].spec.head_ids), *change.dz.shape[2:])
        dz = change.dz.new_zeros(z_shape)
        dz[:, list(change.heads)] = change.dz
        return clean_and_changed_mlp_output(self.parts, node.layer, block_input, None, dz)

    def _changed_heads(
        self, node: Address | KVAddress | HeadInputAddress, block_input: BlockInput
    ) -> tuple[Tensor, StreamDifference]:
        inputs = self.parts.inputs_of(node)
        layer, heads = self.parts.reads_at(node)[0], next(iter(inputs.values()))
        clean = self.parts.run_block(layer, block_input)
        other = self.parts.run_block(layer, block_input.plus(self._incoming_change().delta))
        reads_other = torch.ones(1, len(heads), dtype=torch.bool, device=block_input.x.device)
        masks = dict.fromkeys(inputs, reads_other)
        z = self.parts.z_with_inputs(layer, clean.heads_call, other.heads_call, masks, heads)
        dz = z - clean.heads_call.z[:, list(heads)]
        delta = self.parts.head_change_in_stream(layer, heads, dz, clean.attention_output)
        return z, StreamDifference(delta, layer, heads, dz)
