"""One call at one site while a batch is read, as measures are shown it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from headwise.analysis.metrics.batch_context import Scene
from headwise.analysis.metrics.row_blocks import fetched
from headwise.heads.hook_point import Seen


@dataclass(frozen=True, eq=False)
class Call:
    """What was seen at a site, for which batch, and which heads of the model they are. What costs something is made when it
    is asked for, once."""

    seen: Seen
    scene: Scene
    first_head: int
    make_gram: Callable[[Seen], Tensor]

    @property
    def heads(self) -> slice:
        """Its heads, counted over all sites."""
        return slice(self.first_head, self.first_head + self.seen.q.shape[1])

    @property
    def across(self) -> bool:
        """Whether keys come from another text than queries."""
        return self.seen.site.address.stack == "cross"

    @cached_property
    def gram(self) -> Tensor:
        """W_O W_Oᵀ, (H, e, e); NaN where W_O cannot be shown."""
        return self.make_gram(self.seen)

    @cached_property
    def unknown(self) -> bool:
        """Whether W_O cannot be shown."""
        return bool(self.gram.isnan().any())

    @cached_property
    def norms(self) -> Tensor:
        """The length of what each key would write, (B, H, S)."""
        return fetched(self.seen, self.gram)

    @cached_property
    def inputs(self) -> Tensor:
        """All columns over the keys, (B, H, S, f)."""
        return self.scene.inputs(self.norms)
