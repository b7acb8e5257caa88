"""A forward pass with a checkpoint at every attention layer, from which it is resumed for many copies with another z.

The residual stream before a layer does not depend on the heads of that layer, so it is computed once. A native model with
one stack runs block by block. Any other model runs in full; if it is resumed, the blocks before the layer return their
recorded outputs instead of running again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.model.block import Block, BlockContext
from headwise.spec import LayerAddress

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

# Selects rows from n copies of the batch. Arguments: states (n·B, T, D) and n. Returns (n·B, R, D).
RowSelector = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class LayerCheckpoint:
    """State of a forward pass at one attention layer.

    Attributes:
        hook_point: Hook point of the layer.
        z: Head outputs before W_O, (B, H, T, e).
        resume: Function that runs the remaining pass with another z for n copies of the batch, (n·B, H, T, e), and returns
            the final hidden states of the selected rows, (n·B, R, D).
    """

    hook_point: HookPoint
    z: Tensor
    resume: Callable[[Tensor], Tensor]


class ResumableForward(Protocol):
    """A forward pass. Iterate over its checkpoints; `last_hidden_state` is available afterwards."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Final hidden states of the selected rows, (B, R, D), after the iteration has ended."""
        ...

    def __iter__(self) -> Iterator[LayerCheckpoint]: ...


def resumable_forward(
    model: "Transformer",
    ids: Tensor,
    layer_addresses: Collection[LayerAddress],
    select_rows: RowSelector,
    *,
    attention_mask: Tensor | None = None,
    source: Tensor | None = None,
    source_attention_mask: Tensor | None = None,
) -> ResumableForward:
    """Run a forward pass over ids (B, T) with checkpoints at some layers. The last block computes only selected rows."""
    if model.spec.kind != "encoder-decoder":
        return BlockResumableForward(model, ids, attention_mask, layer_addresses, select_rows)
    return ReplayForward(
        partial(final_hidden_states_of_copies, model, ids, attention_mask, source, source_attention_mask),
        len(ids),
        {
            hook_point: block
            for hook_point, block in hook_points_with_blocks(model)
            if hook_point.address in layer_addresses
        },
        [*model.encoder_blocks, *model.blocks],
        select_rows,
    )


def hook_points_with_blocks(model: "Transformer") -> Iterator[tuple[HookPoint, nn.Module]]:
    """Yield every hook point of an encoder-decoder with its block."""
    for block in (*model.encoder_blocks, *model.blocks):
        assert isinstance(block, Block)
        for layer in (block.attention, block.cross):
            if layer is not None:
                yield layer.gathered_layer.hook_point, block


class BlockResumableForward:
    """Forward pass through the blocks of a native model with one stack. It is resumed after the kernel of a layer."""

    def __init__(
        self,
        model: "Transformer",
        ids: Tensor,
        attention_mask: Tensor | None,
        layer_addresses: Collection[LayerAddress],
        select_rows: RowSelector,
    ) -> None:
        self.model, self.ids, self.attention_mask, self.layer_addresses, self.select_rows = (
            model,
            ids,
            attention_mask,
            layer_addresses,
            select_rows,
        )
        self.last_hidden_state = ids.new_zeros(0)

    def __iter__(self) -> Iterator[LayerCheckpoint]:
        x, context = self.model.begin_forward(self.ids, attention_mask=self.attention_mask)
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        for layer, block in enumerate(blocks):
            hook_point, normed, calls = (
                block.attention.gathered_layer.hook_point,
                block.attention_input(x),
                list[AttentionCall](),
            )
            with hook_point.listen(calls.append):
                attention_output = block.attend(normed, context)  # (B, T, D)
            if hook_point.address in self.layer_addresses:
                yield LayerCheckpoint(hook_point, calls[0].z, partial(self._resume, blocks[layer:], x, normed, context))
            x = block.finish(x, normed, attention_output, context)
        self.last_hidden_state = self._final_norm(self.select_rows(x, 1))

    def _resume(self, blocks: list[Block], x: Tensor, normed: Tensor, context: BlockContext, z: Tensor) -> Tensor:
        copies, (block, *later_blocks) = len(z) // len(x), blocks
        context = _repeat_context(context, copies)
        x, normed = x.repeat(copies, 1, 1), normed.repeat(copies, 1, 1)  # (n·B, T, D)
        attention_output = block.attention.output_projection(
            block.attention.gathered_layer.hook_point.local_z(z)
        )  # (n·B, T, D)
        for next_block in later_blocks:
            x = block.finish(x, normed, attention_output, context)
            block, normed = next_block, next_block.attention_input(x)
            attention_output = block.attend(normed, context)
        select_rows = self.select_rows
        return self._final_norm(
            block.finish(
                select_rows(x, copies), select_rows(normed, copies), select_rows(attention_output, copies), context
            )
        )

    def _final_norm(self, x: Tensor) -> Tensor:
        return x if self.model.norm is None else self.model.norm(x)


def _repeat_context(context: BlockContext, copies: int) -> BlockContext:
    """Return the block context of `copies` copies of the batch."""
    attention_mask = context.attention_mask
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(copies, 1)
    tables = tuple(None if table is None else table.repeat_batch(copies) for table in context.rotary_tables)
    return replace(context, attention_mask=attention_mask, rotary_tables=tables)


class ReplayForward:
    """Forward pass of any model: one full pass that records the outputs of blocks, then passes that skip earlier blocks.

    Args:
        forward: Function that runs the model on n copies of the batch.
        batch: Batch size.
        block_of_hook_point: Block of each hook point that needs a checkpoint.
        blocks: Blocks that can be skipped. If it is empty, every pass runs in full.
        select_rows: Selects rows of the final hidden states.
    """

    def __init__(
        self,
        forward: Callable[[int], Tensor],
        batch: int,
        block_of_hook_point: Mapping[HookPoint, nn.Module],
        blocks: Sequence[nn.Module],
        select_rows: RowSelector,
    ) -> None:
        self.forward, self.block_of_hook_point, self.select_rows = forward, block_of_hook_point, select_rows
        self.output_cache = BlockOutputCache(blocks, batch)
        self.last_hidden_state = torch.zeros(0)

    def __iter__(self) -> Iterator[LayerCheckpoint]:
        z: dict[HookPoint, Tensor] = {}
        with ExitStack() as stack:
            for hook_point in self.block_of_hook_point:
                stack.enter_context(hook_point.listen(lambda call: z.update({call.hook_point: call.z})))
            stack.enter_context(self.output_cache.recording())
            hidden_states = self.forward(1)  # (B, T, D)
        for hook_point, block in self.block_of_hook_point.items():
            if hook_point not in z:
                raise UnsupportedModelError(
                    f"layer {hook_point.address}: its heads cannot be ablated, because the model did not call this layer in "
                    f"the forward pass."
                )
            yield LayerCheckpoint(hook_point, z[hook_point], partial(self._resume, hook_point, block))
        self.last_hidden_state = self.select_rows(hidden_states, 1)

    def _resume(self, hook_point: HookPoint, block: nn.Module, z: Tensor) -> Tensor:
        copies = len(z) // self.output_cache.batch
        with hook_point.replaced(lambda _: z), self.output_cache.skip_blocks_before(block, copies):
            return self.select_rows(self.forward(copies), copies)


class BlockOutputCache:
    """Outputs of blocks, recorded in one forward pass and returned by the blocks in later passes."""

    def __init__(self, blocks: Sequence[nn.Module], batch: int) -> None:
        self.blocks, self.batch = dict.fromkeys(blocks), batch
        self.outputs: dict[nn.Module, Any] = {}  # in call order
        self.called_again: list[nn.Module] = []  # blocks that were called more than once

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the outputs of blocks inside the context, before other forward hooks.

        The other hooks run again on the recorded outputs in later passes.
        """
        self.outputs, self.called_again = {}, []
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_hook(self._record, prepend=True).remove)
            yield

    def _record(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if block in self.outputs:
            self.called_again.append(block)
        self.outputs[block] = output

    @contextmanager
    def skip_blocks_before(self, block: nn.Module, copies: int) -> Iterator[None]:
        """Inside the context, blocks called before this one return their recorded outputs, repeated for the copies."""
        order = list(self.outputs)
        with ExitStack() as stack:
            for earlier in order[: order.index(block)] if block in self.outputs else ():
                stack.enter_context(_returning(earlier, repeat_batch(self.outputs[earlier], self.batch, copies)))
            yield


@contextmanager
def _returning(block: nn.Module, output: Any) -> Iterator[None]:
    """Inside the context, a module returns this output and does not run. An instance-level `forward` is restored."""
    own_forward = block.__dict__.get("forward")
    block.__dict__["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        block.__dict__.pop("forward")
        if own_forward is not None:
            block.__dict__["forward"] = own_forward


def repeat_batch(output: Any, batch: int, copies: int) -> Any:
    """Repeat the tensors with a batch axis in the output of a module, as for several copies of the batch.

    >>> repeated = repeat_batch((torch.zeros(2, 3), None, torch.zeros(1, 3)), 2, 3)
    >>> [part if part is None else tuple(part.shape) for part in repeated]
    [(6, 3), None, (1, 3)]
    """
    if isinstance(output, Tensor):
        return output.repeat(copies, *[1] * (output.ndim - 1)) if output.ndim and len(output) == batch else output
    if isinstance(output, dict):
        return type(output)(**{name: repeat_batch(value, batch, copies) for name, value in output.items()})
    if isinstance(output, tuple | list):
        return type(output)(repeat_batch(value, batch, copies) for value in output)
    return output


def final_hidden_states_of_copies(
    model: Any,
    ids: Tensor,
    attention_mask: Tensor | None,
    source: Tensor | None,
    source_attention_mask: Tensor | None,
    copies: int,
) -> Tensor:
    """Return the final hidden states of several copies of a batch, (n·B, T, D)."""
    inputs = {"attention_mask": attention_mask, "source": source, "source_attention_mask": source_attention_mask}
    inputs = {name: None if value is None else value.repeat(copies, 1) for name, value in inputs.items()}
    return model(ids.repeat(copies, 1), **inputs, hidden=True)
