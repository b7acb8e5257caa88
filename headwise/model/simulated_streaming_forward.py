"""Forward passes in which KV heads stream, to rank them: for models of blocks here, for attached models in `attached/`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from headwise.cache import NO_CACHE
from headwise.model.block import Block, BlockContext
from headwise.spec import Address, CachePolicy, LayerAddress
from headwise.spec.cache_policy import KEEP_ALL

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

# Called with a layer, its residual stream (B, T, D), and z over all keys and over the keys that streaming heads cache.
OnLayer = Callable[[Any, Tensor, Tensor, Tensor], None]


class SimulatedStreamingForward(Protocol):
    """Forward passes of a decoder over ids (1, T), without a cache."""

    def compare(self, ids: Tensor, policy: CachePolicy, on_layer: OnLayer) -> None:
        """Run the model and show each layer's z with all keys and with all its KV heads streaming, on the same input."""
        ...

    def per_head(self, ids: Tensor, policy: CachePolicy) -> Iterator[tuple[Address | None, Tensor]]:
        """Yield the final hidden states (1, T, D) of a pass, with None, then those with each KV head streaming alone."""
        ...

    def gated(self, ids: Tensor, gates: Mapping[LayerAddress, Tensor], policy: CachePolicy) -> Tensor:
        """Return final hidden states with a gate on each KV head, (B, K) per layer: 1 uses all keys, 0 streams."""
        ...


class NativeSimulatedStreamingForward:
    """Streaming passes of a native decoder, block by block."""

    def __init__(self, model: "Transformer") -> None:
        self.model = model

    def compare(self, ids: Tensor, policy: CachePolicy, on_layer: OnLayer) -> None:
        """Run the model and show each layer's z with all keys and with all its KV heads streaming, on the same input."""
        x, context = self.model.begin_forward(ids)
        for block in self._blocks():
            on_layer(block.attention, x, *_full_and_streamed(block, block.attention_input(x), context, policy))
            x = block(x, context)

    def per_head(self, ids: Tensor, policy: CachePolicy) -> Iterator[tuple[Address | None, Tensor]]:
        """Yield the final hidden states (1, T, D) of a pass, with None, then those with each KV head streaming alone."""
        model = self.model
        x, context = model.begin_forward(ids)
        block_inputs = []  # residual stream before each block
        for block in model.blocks:
            block_inputs.append(x)
            x = block(x, context)
        yield None, self._final_norm(x)
        for head in model.spec.cached_kv_head_addresses:  # blocks before its layer are not affected
            x = block_inputs[head.layer]
            with streaming(model, (head,), policy):
                for block in model.blocks[head.layer :]:
                    x = block(x, context)
            yield head, self._final_norm(x)

    def gated(self, ids: Tensor, gates: Mapping[LayerAddress, Tensor], policy: CachePolicy) -> Tensor:
        """Return final hidden states with a gate on each KV head, (B, K) per layer: 1 uses all keys, 0 streams."""
        x, context = self.model.begin_forward(ids)
        for block in self._blocks():
            layer, attention_input = block.attention, block.attention_input(x)
            full, streamed = _full_and_streamed(block, attention_input, context, policy)
            gate = gates[layer.hook_point.address][:, list(layer.spec.kv_of_head), None, None]  # (B, H, 1, 1)
            x = block.finish(
                x, attention_input, layer.output_projection(streamed + gate.to(streamed) * (full - streamed)), context
            )
        return self._final_norm(x)

    def _blocks(self) -> Iterator[Block]:
        for block in self.model.blocks:
            assert isinstance(block, Block)
            yield block

    def _final_norm(self, x: Tensor) -> Tensor:
        return x if self.model.norm is None else self.model.norm(x)


def _full_and_streamed(
    block: Block, attention_input: Tensor, context: BlockContext, policy: CachePolicy
) -> tuple[Tensor, Tensor]:
    """Return z over all keys and z over the keys that a streaming head caches, (B, H, T, e) each."""
    layer, score_request = block.attention, context.score_request(NO_CACHE, attention_input.shape[1])
    positions = context.rotary_tables[block.position_kind]
    full = layer.compute_z(attention_input, request=score_request, positions=positions)
    with cache_policy_override(layer, list(layer.spec.kv_head_ids), policy):
        return full, layer.compute_z(attention_input, request=score_request, positions=positions)


@contextmanager
def streaming(model: Any, heads: tuple[Address, ...], policy: CachePolicy) -> Iterator[None]:
    """Let KV heads of a native or attached model stream with this cache policy inside the context."""
    with ExitStack() as stack:
        for layer in model.attention_layers():
            kv_heads = [head.head for head in heads if head.layer_address == layer.hook_point.address]
            if kv_heads:
                stack.enter_context(cache_policy_override(layer, kv_heads, policy))
        yield


@contextmanager
def cache_policy_override(layer: Any, head_ids: list[int], policy: CachePolicy) -> Iterator[None]:
    """Set the cache policy of KV heads of one layer, by their original ids, inside the context."""
    saved_spec = layer.spec
    cache = list(saved_spec.cache or (KEEP_ALL,) * saved_spec.kv_heads)
    for head_id in head_ids:
        cache[head_id] = policy
    layer.spec = replace(saved_spec, cache=tuple(cache))
    try:
        yield
    finally:
        layer.spec = saved_spec
