"""One attention call while a batch is read, as metrics and observers see it."""

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
    """What was seen at a site, for which batch, and which heads of the model they are. What costs something is made when it
    is asked for, once."""

    attention_call: AttentionCall
    batch_context: BatchContext
    first_head: int
    make_gram: Callable[[AttentionCall], Tensor]

    @property
    def head_slice(self) -> slice:
        """Its heads, counted over all sites."""
        return slice(self.first_head, self.first_head + self.attention_call.q.shape[1])

    @property
    def is_cross_attention(self) -> bool:
        """Whether keys come from another text than queries."""
        return self.attention_call.hook_point.address.stack == "cross"

    @cached_property
    def output_gram(self) -> Tensor:
        """W_O W_Oᵀ, (H, e, e); NaN where W_O cannot be shown."""
        return self.make_gram(self.attention_call)

    @cached_property
    def is_output_weight_unknown(self) -> bool:
        """Whether W_O cannot be shown."""
        return bool(self.output_gram.isnan().any())

    @cached_property
    def value_output_norms(self) -> Tensor:
        """The length of what each key would write, (B, H, S)."""
        return value_output_norms(self.attention_call, self.output_gram)

    @cached_property
    def key_features(self) -> Tensor:
        """All columns over the keys, (B, H, S, f)."""
        return self.batch_context.key_features(self.value_output_norms)


class AttentionObserver(ABC):
    """Object that sees the attention calls of a pass and computes no metric. It keeps examples or rows of attention."""

    needs_full_detail = False  # it needs a walk over every cell, which detail="light" does not make
    supports_cross_attention = True

    @abstractmethod
    def on_call(self, call: AttentionCallContext) -> BlockListener | None:
        """See one attention call. Return a function that is called with each of its blocks of rows, or None."""
