"""One clean pass that stops at every attention layer, so that the rest of it can be run for many copies with another z.

The stream up to a layer is the same whatever is done to that layer's heads. So it is computed once. Our own single stacks are
walked through block by block; any other model is run whole, and for the copies the blocks before the layer do not run again:
they give what they gave.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen, Site
from headwise.model.block import Beside, Block
from headwise.spec import SiteAddress

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

Pick = Callable[[Tensor, int], Tensor]  # the rows wanted, of so many copies of the batch: (n·B, T, D) → (n·B, R, D)


@dataclass(frozen=True, eq=False)
class Stop:
    """The walk at one layer: z as it enters W_O, (B, H, T, e), and the pass from there on with another z."""

    site: Site
    z: Tensor
    onward: Callable[[Tensor], Tensor]  # z of so many copies of the batch, (n·B, H, T, e) → final states (n·B, R, D)


class Walk(Protocol):
    """A clean pass: iterate over its stops; then `states` are the final states of the rows wanted, (B, R, D)."""

    @property
    def states(self) -> Tensor:
        """(B, R, D), once the walk has come to its end."""
        ...

    def __iter__(self) -> Iterator[Stop]: ...


def walk(
    model: "Transformer",
    ids: Tensor,
    wanted: Collection[SiteAddress],
    pick: Pick,
    *,
    padding: Tensor | None = None,
    source: Tensor | None = None,
    source_padding: Tensor | None = None,
) -> Walk:
    """A clean pass over ids (B, T) that stops at the layers wanted; of the last block no more is finished than is picked."""
    if model.spec.kind != "encoder-decoder":
        return BlockWalk(model, ids, padding, wanted, pick)
    return Replay(
        partial(run_copies, model, ids, padding, source, source_padding),
        len(ids),
        {site: block for site, block in two_stacks(model) if site.address in wanted},
        [*model.encoder_blocks, *model.blocks],
        pick,
    )


def two_stacks(model: "Transformer") -> Iterator[tuple[Site, nn.Module]]:
    """Every site of an encoder-decoder, with its block."""
    for block in (*model.encoder_blocks, *model.blocks):
        assert isinstance(block, Block)
        for layer in (block.attention, block.cross):
            if layer is not None:
                yield layer.everywhere.site, block


class BlockWalk:
    """A walk through the blocks of one stack of ours. Copies begin behind the kernel of the layer that is changed."""

    def __init__(
        self, model: "Transformer", ids: Tensor, padding: Tensor | None, wanted: Collection[SiteAddress], pick: Pick
    ) -> None:
        self.model, self.ids, self.padding, self.wanted, self.pick = model, ids, padding, wanted, pick
        self.states = ids.new_zeros(0)

    def __iter__(self) -> Iterator[Stop]:
        x, beside = self.model.begin(self.ids, padding=self.padding)
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        for layer, block in enumerate(blocks):
            site, read, calls = block.attention.everywhere.site, block.reads(x), list[Seen]()
            with site.listen(calls.append):
                wrote = block.attend(read, beside)  # (B, T, D)
            if site.address in self.wanted:
                yield Stop(site, calls[0].z, partial(self._onward, blocks[layer:], x, read, beside))
            x = block.finish(x, read, wrote, beside)
        self.states = self._normed(self.pick(x, 1))

    def _onward(self, blocks: list[Block], x: Tensor, read: Tensor, beside: Beside, z: Tensor) -> Tensor:
        n, (block, *behind) = len(z) // len(x), blocks
        beside = _copied(beside, n)
        x, read = x.repeat(n, 1, 1), read.repeat(n, 1, 1)  # (n·B, T, D)
        wrote = block.attention.write(block.attention.everywhere.site.here(z))  # (n·B, T, D)
        for following in behind:
            x = block.finish(x, read, wrote, beside)
            block, read = following, following.reads(x)
            wrote = block.attend(read, beside)
        pick = self.pick
        return self._normed(block.finish(pick(x, n), pick(read, n), pick(wrote, n), beside))

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.model.norm is None else self.model.norm(x)


def _copied(beside: Beside, copies: int) -> Beside:
    """What travels beside so many copies of the batch."""
    real, angles = beside.real, beside.angles
    if real is not None:
        real = real.repeat(copies, 1)
    if angles is not None and len(angles.cos) > 1:
        angles = replace(angles, cos=angles.cos.repeat(copies, 1, 1, 1), sin=angles.sin.repeat(copies, 1, 1, 1))
    return replace(beside, real=real, angles=angles)


class Replay:
    """A walk through anybody's blocks: one whole pass in which they are kept in mind, then passes that begin at a block.

    `run(n)` is the pass over n copies of the batch; `sites` gives the block of each site wanted, `blocks` are all that may be
    left out. Without any every pass is a whole one.
    """

    def __init__(
        self,
        run: Callable[[int], Tensor],
        batch: int,
        sites: Mapping[Site, nn.Module],
        blocks: Sequence[nn.Module],
        pick: Pick,
    ) -> None:
        self.run, self.sites, self.pick = run, sites, pick
        self.memory = Memory(blocks, batch)
        self.states = torch.zeros(0)

    def __iter__(self) -> Iterator[Stop]:
        z: dict[Site, Tensor] = {}
        with ExitStack() as stack:
            for site in self.sites:
                stack.enter_context(site.listen(lambda seen: z.update({seen.site: seen.z})))
            stack.enter_context(self.memory.kept())
            states = self.run(1)  # (B, T, D)
        for site, block in self.sites.items():
            if site not in z:
                raise HeadwiseError(
                    f"layer {site.address} was not called in this pass, so its heads cannot be ablated."
                )
            yield Stop(site, z[site], partial(self._onward, site, block))
        self.states = self.pick(states, 1)

    def _onward(self, site: Site, block: nn.Module, z: Tensor) -> Tensor:
        n = len(z) // self.memory.batch
        with site.replaced(lambda _: z), self.memory.before(block, n):
            return self.pick(self.run(n), n)


class Memory:
    """What blocks gave in one pass, to stand in for them in others."""

    def __init__(self, blocks: Sequence[nn.Module], batch: int) -> None:
        self.blocks, self.batch = dict.fromkeys(blocks), batch
        self.gave: dict[nn.Module, Any] = {}  # in the order in which they were called
        self.again: list[nn.Module] = []  # called more than once

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While open, what blocks give is kept: before hooks of others, which are called on what stands in for it too."""
        self.gave, self.again = {}, []
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_hook(self._keep, prepend=True).remove)
            yield

    def _keep(self, block: nn.Module, given: Any, made: Any) -> None:
        if block in self.gave:
            self.again.append(block)
        self.gave[block] = made

    @contextmanager
    def before(self, block: nn.Module, copies: int) -> Iterator[None]:
        """While open, the blocks called before this one do not run: they give what they gave, for so many copies."""
        order = list(self.gave)
        with ExitStack() as stack:
            for earlier in order[: order.index(block)] if block in self.gave else ():
                stack.enter_context(_giving(earlier, copied(self.gave[earlier], self.batch, copies)))
            yield


@contextmanager
def _giving(block: nn.Module, made: Any) -> Iterator[None]:
    """While open, a module gives this and does not run; a forward of its own, as others may have put there, comes back."""
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = lambda *arguments, **named: made
    try:
        yield
    finally:
        block.__dict__.pop("forward")
        if own is not None:
            block.__dict__["forward"] = own


def copied(made: Any, batch: int, copies: int) -> Any:
    """What a module gave, as it gives it for so many copies of the batch: tensors with a batch axis are repeated.

    >>> [part if part is None else tuple(part.shape) for part in copied((torch.zeros(2, 3), None, torch.zeros(1, 3)), 2, 3)]
    [(6, 3), None, (1, 3)]
    """
    if isinstance(made, Tensor):
        return made.repeat(copies, *[1] * (made.ndim - 1)) if made.ndim and len(made) == batch else made
    if isinstance(made, dict):
        return type(made)(**{name: copied(value, batch, copies) for name, value in made.items()})
    if isinstance(made, tuple | list):
        return type(made)(copied(value, batch, copies) for value in made)
    return made


def run_copies(
    model: Any,
    ids: Tensor,
    padding: Tensor | None,
    source: Tensor | None,
    source_padding: Tensor | None,
    copies: int,
) -> Tensor:
    """Final states of so many copies of a batch: (n·B, T, D)."""
    given = {"padding": padding, "source": source, "source_padding": source_padding}
    given = {name: None if value is None else value.repeat(copies, 1) for name, value in given.items()}
    return model(ids.repeat(copies, 1), **given, hidden=True)
