"""Operations that a layer calls if other processes hold some of its heads. `headwise.distributed` implements them.

A layer without a partition runs in one process and does not use them.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headwise.heads.head import AttentionLayerProtocol
from headwise.kernels import ScoreParams, ScoreRequest
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.heads.attention import MultiHeadAttention


class CollectivesProtocol(Protocol):
    """Collective operations of the processes that share the heads of a layer, or the channels of an MLP."""

    def copy_to_group(self, x: Tensor) -> Tensor:
        """Mark a replicated tensor of which each process uses a part. The backward pass sums its gradients."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum the parts of all processes."""
        ...


class HeadPartitionProtocol(Protocol):
    """The heads of one layer, partitioned over several processes. Masks, biases and gates of callers cover all heads."""

    @property
    def collectives(self) -> CollectivesProtocol:
        """Collective operations of the processes that hold heads of the layer."""
        ...

    @property
    def full_spec(self) -> AttentionSpec:
        """The spec of the layer with all heads."""
        ...

    @property
    def has_replicated_kv(self) -> bool:
        """True if several processes hold a copy of the same KV head."""
        ...

    def local_gate(self, gate: Tensor) -> Tensor:
        """Select the gates of the heads of this process: (H,) or (B, H)."""
        ...

    def fork_rng_per_rank(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which each process draws different random numbers. Afterwards all draw equal ones."""
        ...

    def score_params(
        self, layer: "MultiHeadAttention", tensors: tuple[Tensor, Tensor, Tensor], request: ScoreRequest
    ) -> ScoreParams:
        """Build the score params of the heads of this process from a request for all heads."""
        ...

    def sum_kv_grads_in_backward(self, weight: Tensor, projections: str, sizes: dict[str, tuple[int, int]]) -> Tensor:
        """Return a weight or bias of some projections unchanged. The backward pass sums gradients of replicated KV heads."""
        ...

    def gathered_layer(self, layer: "MultiHeadAttention") -> AttentionLayerProtocol:
        """Return a view of the layer with the heads of all processes."""
        ...
