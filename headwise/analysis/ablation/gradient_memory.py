"""Limit the memory of gradients with respect to heads: activations stored for the backward pass.

A forward pass with gradients stores several activations per token and layer, 1.3 MB per token in SmolLM2. Weights are
frozen, so that their inputs are not stored for gradients that nothing reads. Batches are made so small that the stored
activations fit into a fraction of the size of the model, which costs no time. Blocks are recomputed in the backward pass
only if a single text is too long for that.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.enable_grad import enable_gradients
from headwise.model import ModelProtocol
from headwise.model.chunked_cross_entropy import chunked_cross_entropy

MIN_GRAPH_BYTES = 2**23  # a graph of this size fits, however small the model
GRAPH_FRACTION = 0.4  # stored activations as a fraction of the size of the weights
SAMPLE_TOKENS = 64  # tokens of the forward pass on which stored activations are measured
MAX_LOGITS = 1 << 21  # logits in memory at once (8 MB in float32)


@dataclass(frozen=True)
class GradientMemoryPlan:
    """Number of tokens whose activations fit into memory.

    Attributes:
        max_tokens: Tokens per forward pass, source tokens included.
    """

    max_tokens: int

    @classmethod
    def measure(cls, model: ModelProtocol, ids: Tensor, source: Tensor | None = None) -> "GradientMemoryPlan":
        """Measure stored activations per token with a forward pass over the beginning of one text.

        Args:
            model: The model. Its weights must be frozen.
            ids: Token ids, (B, T).
            source: Source token ids of an encoder-decoder, (B, S).
        """
        ids = ids[:1, :SAMPLE_TOKENS]
        source = None if source is None else source[:1, :SAMPLE_TOKENS]
        weight_storages = {
            weight.untyped_storage().data_ptr()
            for weight in model.parameters()
            if type(weight) in (torch.Tensor, torch.nn.Parameter)
        }
        stored: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # subclasses may have no storage of their own
                stored[id(tensor)] = tensor.numel() * tensor.element_size()
                return tensor
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weight_storages:
                stored[storage.data_ptr()] = storage.nbytes()
            return tensor

        gates = {
            hook_point.address: torch.ones(
                len(hook_point.head_ids), device=ids.device, requires_grad=True, dtype=torch.float32
            )
            for hook_point in model.gathered_hook_points()
            if hook_point.head_ids
        }
        with enable_gradients(model), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = model(ids, source=source, gates=gates, hidden=True)
        del output
        num_tokens = ids.numel() + (0 if source is None else source.numel())
        weight_bytes = sum(weight.nbytes for weight in model.parameters())
        bytes_per_token = max(1.0, sum(stored.values()) / max(1, num_tokens))
        return cls(max(1, int(max(GRAPH_FRACTION * weight_bytes, MIN_GRAPH_BYTES) / bytes_per_token)))

    def recompute_blocks_if_large(self, model: ModelProtocol, num_tokens: int) -> Any:
        """Return a context in which blocks are recomputed in the backward pass if this many tokens do not fit."""
        return model.recompute_blocks() if num_tokens > self.max_tokens else nullcontext()


@contextmanager
def frozen_weights(model: ModelProtocol) -> Iterator[None]:
    """Compute no gradients of weights inside the context, and restore their flags after it."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


def summed_cross_entropy(model: ModelProtocol, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of targets (N,) from final hidden states (N, D), with few logits in memory."""
    assert model.output is not None
    return chunked_cross_entropy(model.output, model.spec.vocab, hidden, targets, total=1, max_logits=MAX_LOGITS)
