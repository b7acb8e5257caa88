"""Parts of a decoder by address, their terms of the residual stream, and blocks that run again with another input.

Path patching and edge effects use this. A block runs again as a function of its input: with the same positions and masks as
in the pass, and without calling the listeners of the pass. So nothing here depends on an architecture.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall, HookPoint, listeners_suspended
from headwise.kernels import rounding_bound, run_kernel
from headwise.model import ModelProtocol
from headwise.spec import (
    Address,
    EmbeddingOrLogitsAddress,
    HeadInputAddress,
    KVAddress,
    MLPAddress,
    NodeAddress,
    parse_node,
)

# Order of the parts within a layer: the heads read the stream, the heads write, the MLP reads, the MLP writes.
HEADS_READ, HEADS_WRITE, MLP_READS, MLP_WRITES = range(4)
# Roundings of an attention output, and relative tolerance in full precision, of the check that z is the attention of q, k, v.
ROUNDINGS, TOLERANCE = 16, 1e-5
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
Part = NodeAddress | HeadInputAddress


@dataclass(frozen=True, eq=False)
class BlockInput:
    """Arguments of one call of a block.

    Attributes:
        x: Residual stream before the block, (B, T, D).
        args: Further positional arguments.
        kwargs: Keyword arguments, without the residual stream.
        name: Name of the argument that holds the residual stream. Empty if it is the first positional argument.
    """

    x: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = ""

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "BlockInput":
        """Return the input of a call. Raise if the call has a KV cache, which a second run would change."""
        stream, *rest = args or (kwargs["hidden_states"],)
        others = {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
        caches = [others.get(name) for name in CACHE_ARGUMENTS] + [getattr(value, "cache", None) for value in rest]
        if any(cache is not None for cache in caches):
            raise ArgumentError(
                "path: path patching runs blocks again, so the model must be called without a KV cache. Got a call with a "
                "cache. Call model(ids), or pass use_cache=False to a transformers model."
            )
        return BlockInput(stream, tuple(rest), others, "" if args else "hidden_states")

    def plus(self, delta: Tensor | None) -> "BlockInput":
        """Return the input with a change of the residual stream, (B, T, D)."""
        return self if delta is None else replace(self, x=self.x + delta.to(self.x))

    def run(self, block: nn.Module) -> Any:
        """Run the forward function of a block, without its hooks."""
        if self.name:
            return block.forward(*self.args, **{self.name: self.x}, **self.kwargs)
        return block.forward(self.x, *self.args, **self.kwargs)


@dataclass(eq=False)
class BlockRecord:
    """Values of one run of a block.

    Attributes:
        call: Attention call. None if the layer has no heads.
        attention_output: Attention output before its post-norm, (B, T, D). None if the layer has no post-norm.
        mlp_output: Output of the MLP as it is added to the residual stream, in the shape of the module.
    """

    call: AttentionCall | None = None
    attention_output: Tensor | None = None
    mlp_output: Tensor | None = None

    @property
    def heads_call(self) -> AttentionCall:
        """Attention call of a layer with heads."""
        assert self.call is not None, "the layer has heads"
        return self.call


class DecoderParts:
    """Parts of a decoder by address.

    Args:
        model: A decoder whose residual stream is a sum (pre-norm or parallel), in eval mode.

    Attributes:
        model: The model.
        residual: Structure of its residual stream.
        layers: Attention layers by index.
        is_rerunning: True while a block runs again inside a pass.
    """

    def __init__(self, model: ModelProtocol) -> None:
        if model.is_sharded:
            raise UnsupportedModelError("path: not supported for models whose heads are split over several processes.")
        if model.spec.kind != "decoder" or model.spec.norm_placement == "post":
            raise UnsupportedModelError(
                f"path: needs a decoder whose residual stream is a sum (pre-norm or parallel). Got kind={model.spec.kind!r} "
                f"and norm_placement={model.spec.norm_placement!r}. Use heads= to patch the output of heads."
            )
        self.model, self.residual = model, model.residual_stream()
        self.layers = {layer.hook_point.address.layer: layer for layer in model.attention_layers()}
        self.is_rerunning = False

    # Addresses.

    def parse(self, text: Any) -> Part:
        """Return the address of a part. Raise if the model does not have the part."""
        part = text if not isinstance(text, str) else parse_node(text)
        if not isinstance(part, Part):
            raise ArgumentError(f"path: {part!r} is not an address. Use a string such as '18.6', '18.6.k' or 'mlp.18'.")
        owner = part.head if isinstance(part, HeadInputAddress) else part
        if isinstance(owner, EmbeddingOrLogitsAddress):
            return part
        if owner.stack or owner.layer not in self.residual.layers:
            raise ArgumentError(
                f"path: the model does not have {part}. It has the layers 0 to {max(self.residual.layers)}."
            )
        if not isinstance(owner, MLPAddress):
            self._check_head(part, owner)
        return part

    def _check_head(self, part: Part, owner: Address | KVAddress) -> None:
        spec = self.layers[owner.layer].spec
        number, numbers = (
            (owner.head, spec.head_ids) if isinstance(owner, Address) else (owner.kv_head, spec.kv_head_ids)
        )
        if number not in numbers:
            kind = "heads" if isinstance(owner, Address) else "KV heads"
            raise ArgumentError(
                f"path: the model does not have {part}. Layer {owner.layer} has the {kind} {_join(numbers)}."
            )

    def writes_at(self, part: Part) -> tuple[int, int]:
        """Return the layer and the place in it at which a part adds to the residual stream."""
        if isinstance(part, HeadInputAddress) or part is EmbeddingOrLogitsAddress.LOGITS:
            raise ArgumentError(
                f"path: {part} does not write to the residual stream, so a path cannot start there. Start with a head, a KV "
                f"head, an MLP or the embedding, for example {part.head if isinstance(part, HeadInputAddress) else '5.1'}."
            )
        if isinstance(part, EmbeddingOrLogitsAddress):
            return -1, MLP_WRITES
        return part.layer, MLP_WRITES if isinstance(part, MLPAddress) else HEADS_WRITE

    def reads_at(self, part: Part) -> tuple[int, int]:
        """Return the layer and the place in it at which a part reads the residual stream."""
        if part is EmbeddingOrLogitsAddress.EMBEDDING:
            raise ArgumentError(
                "path: the embedding does not read the residual stream, so a path cannot lead there. Put it first."
            )
        if isinstance(part, EmbeddingOrLogitsAddress):
            return max(self.residual.layers) + 1, HEADS_READ
        owner = part.head if isinstance(part, HeadInputAddress) else part
        return owner.layer, MLP_READS if isinstance(owner, MLPAddress) else HEADS_READ

    def inputs_of(self, part: Address | KVAddress | HeadInputAddress) -> dict[str, tuple[int, ...]]:
        """Return the indices of the query heads that read other inputs if a part is the receiver, by projection."""
        owner = part.head if isinstance(part, HeadInputAddress) else part
        projections = part.projection if isinstance(part, HeadInputAddress) else "qkv"
        if isinstance(owner, KVAddress):
            projections = projections.replace("q", "")
        return dict.fromkeys(projections, self.head_indices(owner))

    def head_indices(self, owner: Address | KVAddress) -> tuple[int, ...]:
        """Return the index of a query head on the head axis, or those of all readers of a KV head."""
        spec = self.layers[owner.layer].spec
        if isinstance(owner, Address):
            return (spec.head_ids.index(owner.head),)
        kv_index = spec.kv_head_ids.index(owner.kv_head)
        return tuple(i for i, index in enumerate(spec.kv_of_head) if index == kv_index)

    def hook_point(self, layer: int) -> HookPoint:
        """Return the hook point of a layer."""
        return self.layers[layer].hook_point

    # Values.

    def run_block(
        self, layer: int, block_input: BlockInput, *, z: Tensor | None = None, keep_edits: bool = False
    ) -> BlockRecord:
        """Run a block again and record it.

        Args:
            layer: Index of the layer.
            block_input: Input of the block.
            z: Head outputs that replace those of the run, (B, H, T, e).
            keep_edits: Whether edits of heads that the caller has opened apply.
        """
        run, is_nested = BlockRecord(), self.is_rerunning
        self.is_rerunning = True
        try:
            with listeners_suspended(keep_edits=keep_edits), ExitStack() as stack:
                self.record_block(layer, run, stack)
                if z is not None:
                    stack.enter_context(self.hook_point(layer).replaced(lambda _: z))
                block_input.run(self.residual.layers[layer].block)
        finally:
            self.is_rerunning = is_nested
        return run

    def record_block(self, layer: int, run: BlockRecord, stack: ExitStack) -> None:
        """Record the values of a block in the passes inside a context."""
        residual_layer = self.residual.layers[layer]

        def keep_call(call: AttentionCall) -> None:
            run.call = call

        def keep_attention_output(module: nn.Module, args: tuple[Any, ...]) -> None:
            run.attention_output = args[0]

        def keep_mlp(module: nn.Module, args: Any, output: Any) -> None:
            run.mlp_output = first_of(output)

        if layer in self.layers and self.layers[layer].spec.head_ids:
            stack.enter_context(self.hook_point(layer).listen(keep_call))
        if residual_layer.post_norm is not None:
            stack.callback(residual_layer.post_norm.module.register_forward_pre_hook(keep_attention_output).remove)
        stack.callback(residual_layer.mlp.register_forward_hook(keep_mlp).remove)

    def head_change_in_stream(
        self, layer: int, heads: Sequence[int], dz: Tensor, attention_output: Tensor | None
    ) -> Tensor:
        """Return the change of the residual stream if z of some heads changes by dz: (B, n, T, e) → (B, T, D).

        The other heads stay as they are. With a post-norm, the change passes through it.
        """
        W_O = self.hook_point(layer).W_O_for_listeners[list(heads)]  # (n, e, D)
        change = torch.einsum("bnte,ned->btd", dz, W_O.to(dz))
        post_norm = self.residual.layers[layer].post_norm
        if post_norm is None:
            return change
        assert attention_output is not None, "recorded before the post-norm"
        clean = attention_output.reshape(-1, *change.shape[1:]) if attention_output.ndim < 3 else attention_output
        return post_norm.module(clean + change) - post_norm.module(clean)

    def z_with_inputs(
        self, layer: int, clean: AttentionCall, other: AttentionCall, inputs: Mapping[str, Tensor], heads: Sequence[int]
    ) -> Tensor:
        """Return z of some heads if they read q, k or v of another call: (B, n, T, e).

        Args:
            layer: Index of the layer.
            clean: The call of the pass.
            other: The call with the other q, k and v.
            inputs: For "q", "k" and "v": whether a head reads that of the other call, (B or 1, n).
            heads: Indices of the heads.
        """
        index, kv_index = list(heads), [clean.params.kv_of_head[head] for head in heads]
        params = clean.params.select_heads(index, tuple(range(len(index))))
        gate = getattr(self.layers[layer], "gate", None)
        factor = 1.0 if gate is None else gate[index][:, None, None]
        columns = {"q": index, "k": kv_index, "v": kv_index}
        own, others = (
            {name: getattr(call, name)[:, columns[name]] for name in "qkv"} for call in (clean, other)
        )  # (B, n, T or S, ·) each

        def attend(tensors: Mapping[str, Tensor]) -> Tensor:
            return run_kernel(tensors["q"], tensors["k"], tensors["v"], params) * factor

        self._check_attention(layer, clean.z[:, index], attend(own))
        self._check_attention(layer, other.z[:, index], attend(others))  # a bias may depend on q and k
        mixed = {
            name: torch.where(inputs[name][..., None, None], others[name].to(tensor), tensor)
            if name in inputs
            else tensor
            for name, tensor in own.items()
        }
        return attend(mixed)

    def _check_attention(self, layer: int, z: Tensor, expected: Tensor) -> None:
        """Raise if z of a call is not the attention of its q, k and v."""
        tolerance = max(TOLERANCE, rounding_bound(z.dtype, ROUNDINGS))
        if (z - expected).norm() > tolerance * z.norm():
            raise UnsupportedModelError(
                f"path: z of the heads of layer {layer} is not the attention of their q, k and v under known masks and "
                f"biases (for example, it is multiplied by a gate or by gates= of the call, or the model is in training "
                f"mode), so it cannot be computed from other inputs. Use heads= to patch the output of heads."
            )


def first_of(output: Any) -> Any:
    """Return the tensor of a module's output: the output itself, or the first item of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def with_first(output: Any, value: Tensor) -> Any:
    """Return a module's output with another tensor in the place of the first."""
    value = value.reshape(first_of(output).shape).to(first_of(output))
    return (value, *output[1:]) if isinstance(output, tuple) else value


@contextmanager
def on_block_input(parts: DecoderParts, layer: int, listener: Callable[[BlockInput], None]) -> Iterator[None]:
    """Show the input of a block to a listener before the block runs."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not parts.is_rerunning:
            listener(BlockInput.of(args, kwargs))

    handle = parts.residual.layers[layer].block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
