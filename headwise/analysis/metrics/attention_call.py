"""One attention call during a forward pass, as passed to metrics and observers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from headwise.analysis.metrics.batch_context import BatchContext
from headwise.analysis.metrics.row_blocks import RowBlock, value_output_norms
from headwise.heads.hook_point import AttentionCall

BlockListener = Callable[[RowBlock], None]


@dataclass(frozen=True, eq=False)
class AttentionCallContext:
    """An attention call, the batch it belongs to, and the index of its first head. Derived tensors are computed once, on
    first access.

    Attributes:
        attention_call: q, k, v, z and score parameters of one hook point.
        batch_context: The batch, with its token features and key targets.
        first_head: Index of the first head, counted over all hook points.
        make_gram: Function that returns W_O W_Oᵀ of a call.
    """

    attention_call: AttentionCall
    batch_context: BatchContext
    first_head: int
    make_gram: Callable[[AttentionCall], Tensor]

    @property
    def head_slice(self) -> slice:
        """Heads of the call, counted over all hook points."""
        return slice(self.first_head, self.first_head + self.attention_call.q.shape[1])

    @property
    def is_cross_attention(self) -> bool:
        """Whether the keys come from another text than the queries."""
        return self.attention_call.hook_point.is_cross_attention

    @cached_property
    def output_gram(self) -> Tensor:
        """W_O W_Oᵀ, (H, e, e). NaN if W_O cannot be read."""
        return self.make_gram(self.attention_call)

    @cached_property
    def value_output_norms(self) -> Tensor:
        """Norm of the value output ‖v W_O‖ of each key, (B, H, S)."""
        return value_output_norms(self.attention_call, self.output_gram)

    @cached_property
    def key_features(self) -> Tensor:
        """All features of the keys, (B, H, S, f)."""
        return self.batch_context.key_features(self.value_output_norms)


class AttentionObserver(ABC):
    """Base class of objects that observe attention calls without computing a metric, for example to store examples.

    Attributes:
        follows_row_stride: Whether the observer gets only the blocks of rows that the row stride selects, not every block.
        supports_cross_attention: Whether the observer is called for cross-attention.
    """

    follows_row_stride = False
    supports_cross_attention = True

    @abstractmethod
    def on_call(self, call: AttentionCallContext) -> BlockListener | None:
        """Observe one attention call. Return a function to be called with each block of rows, or None."""
