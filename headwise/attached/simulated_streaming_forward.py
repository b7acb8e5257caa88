"""Forward passes of an attached model in which KV heads stream (`headwise.model.simulated_streaming_forward`)."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.attached.residual_stream import block_of
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.model.resumable_forward import BlockOutputCache, final_hidden_states_of_copies
from headwise.model.simulated_streaming_forward import OnLayer, cache_policy_override, streaming
from headwise.spec import Address, CachePolicy, LayerAddress
from headwise.spec.model import CACHED_STACKS


class AttachedSimulatedStreamingForward:
    """Streaming passes of an attached decoder, by hooks on its blocks."""

    def __init__(self, attached: Any) -> None:
        self.attached = attached
        self.layers = [
            layer for layer in attached.attention_layers() if layer.hook_point.address.stack in CACHED_STACKS
        ]

    def compare(self, ids: Tensor, policy: CachePolicy, on_layer: OnLayer) -> None:
        """Run the model. Each block runs again with all KV heads of its layer streaming, on the same input."""
        with ExitStack() as stack:
            for layer in self.layers:
                if layer.spec.head_ids:
                    block = block_of(self.attached.model, layer)
                    block_rerun = _BlockRerun(layer, policy, on_layer)
                    stack.enter_context(layer.hook_point.listen(block_rerun.record))
                    hook = block.register_forward_hook(UncopiedHook(block_rerun.rerun), with_kwargs=True)
                    stack.callback(hook.remove)
            self.attached(ids, hidden=True)

    def per_head(self, ids: Tensor, policy: CachePolicy) -> Iterator[tuple[Address | None, Tensor]]:
        """Yield the final hidden states of a pass, with None, then those with each KV head streaming alone.

        Blocks before the layer of a head return their recorded outputs.
        """
        attached = self.attached
        forward = partial(final_hidden_states_of_copies, attached, ids, None, None, None)
        blocks = {layer.hook_point.address: block_of(attached.model, layer) for layer in self.layers}
        skippable = [] if attached.why_not_resumable() else list(blocks.values())
        outputs = BlockOutputCache(skippable, 1)
        with outputs.recording():
            hidden = forward(1)
        yield None, hidden
        for head in attached.spec.cached_kv_head_addresses:
            with streaming(attached, (head,), policy), outputs.skip_blocks_before(blocks[head.layer_address], 1):
                hidden = forward(1)
            yield head, hidden

    def gated(self, ids: Tensor, gates: Mapping[LayerAddress, Tensor], policy: CachePolicy) -> Tensor:
        """Return final hidden states with a gate on each KV head, (B, K) per layer: 1 uses all keys, 0 streams."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(cache_policy_override(layer, list(layer.spec.kv_head_ids), policy))
                stack.enter_context(_gated(layer, gates[layer.hook_point.address]))
            return self.attached(ids, hidden=True)


@contextmanager
def _gated(layer: AttachedLayer, gate: Tensor) -> Iterator[None]:
    """Mix streaming with all keys by a gate, (B, K), inside the context."""
    layer.cache_gate = gate
    try:
        yield
    finally:
        layer.cache_gate = None


class _BlockRerun:
    """Forward hook that runs a block a second time with streaming KV heads."""

    def __init__(self, layer: AttachedLayer, policy: CachePolicy, on_layer: OnLayer) -> None:
        self.layer, self.policy, self.on_layer = layer, policy, on_layer
        self.z: list[Tensor] = []

    def record(self, call: AttentionCall) -> None:
        """Store z of a call."""
        self.z.append(call.z)

    def rerun(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Run the block again and pass both z on."""
        with cache_policy_override(self.layer, list(self.layer.spec.kv_head_ids), self.policy):
            block.forward(*args, **kwargs)
        residual = args[0] if args else kwargs.get("hidden_states")
        if len(self.z) != 2 or not isinstance(residual, Tensor):
            raise UnsupportedModelError(
                f"{self.layer.info.name}: its block cannot be run again with streaming heads. Use another ranking method, "
                f"for example ranking='attention'."
            )
        full, streamed = self.z
        self.z = []
        self.on_layer(self.layer, residual, full, streamed)
