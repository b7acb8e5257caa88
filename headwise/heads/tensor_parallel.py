"""A layer whose heads are held by several processes: each has some, whole, and all write into one stream.

What a caller gives for heads (a mask for each, a bias, gates) is for all of them; each process takes its own. `LayerShare`
says who has which. A layer's own site shows the heads that are here; `WholeSite` shows all of them, in every process, and
`WholeLayer` their weights: whoever asks them must do so in every process, for they are fetched from where they are.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.heads.hook_point import Edit, Listener, Seen, Site, expanded
from headwise.heads.layer_score_params import CallTerms, layer_terms
from headwise.kernels import Bias, Mask, Terms
from headwise.kernels.bias import Given
from headwise.kernels.collectives import Together
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.heads.attention import MultiHeadAttention


class LayerShare:
    """Who holds which heads of one layer. `whole` is the layer with all of them, `heads` those of each process by number."""

    def __init__(self, together: Together, whole: AttentionSpec, heads: Sequence[tuple[int, ...]]) -> None:
        self.together, self.whole = together, whole
        keys = [whole.keep(some).kv_ids for some in heads]
        self.places = [[whole.head_ids.index(number) for number in some] for some in heads]  # on the whole head axis
        self.key_places = [[whole.kv_ids.index(number) for number in some] for some in keys]
        self.mine, self.my_keys = self.places[together.rank], self.key_places[together.rank]

    @cached_property
    def repeats_keys(self) -> bool:
        """Whether some key head is held by two processes."""
        return sum(map(len, self.key_places)) > len(self.whole.kv_ids)

    def heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """All heads, in their order, from the heads that are here."""
        return self._whole(x, dim, self.places)

    def keys(self, x: Tensor, dim: int = 1) -> Tensor:
        """All key heads, in their order; of one that several hold, the first copy."""
        return self._whole(x, dim, self.key_places)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """The heads that are here, from all of them."""
        return self.together.own(x, dim, self.places)

    def own_gate(self, gate: Tensor) -> Tensor:
        """The gates of the heads that are here, from those of all: (H,) or (B, H)."""
        fits = isinstance(gate, Tensor) and gate.ndim in (1, 2) and gate.shape[-1] == len(self.whole.head_ids)
        return self.own(gate, gate.ndim - 1) if fits else gate  # what does not fit is refused by who applies it

    def own_mask(self, mask: Mask | None) -> Mask | None:
        """A mask for the heads that are here."""
        if not isinstance(mask, Mask) or not self.mine:  # without heads nobody looks
            return mask if self.mine else None
        return mask if mask.planes()[1] == 1 else mask.for_heads(self.mine)

    def own_bias(self, bias: Bias | Tensor | None) -> Bias | Tensor | None:
        """A bias for the heads that are here."""
        bias = Given(bias) if isinstance(bias, Tensor) and bias.ndim == 4 else bias
        if not isinstance(bias, Bias) or not self.mine:
            return bias if self.mine else None
        return bias if bias.planes()[1] == 1 else bias.for_heads(self.mine)

    def _whole(self, x: Tensor, dim: int, places: Sequence[Sequence[int]]) -> Tensor:
        behind = self.together.gather(x, dim, [len(some) for some in places])
        order = [place for some in places for place in some]
        wanted = [order.index(place) for place in range(len(set(order)))]
        if wanted == list(range(behind.shape[dim])):
            return behind
        return behind.index_select(dim, torch.tensor(wanted, dtype=torch.long, device=x.device))

    @contextmanager
    def drawing_apart(self, device: torch.device) -> Iterator[None]:
        """What is drawn inside is each process's own; afterwards all draw alike again, however much that was."""
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_kind(device)):
            torch.manual_seed(seed + self.together.rank)
            yield

    def drawing(self, draws: bool, device: torch.device) -> Any:
        """The same where something is drawn."""
        return self.drawing_apart(device) if draws else nullcontext()

    def same_keys(self, weight: Tensor, letters: str, sizes: dict[str, tuple[int, int]]) -> Tensor:
        """The weight or bias of some letters, as it is; its gradient, for keys that several hold, is that of all of them."""
        return _SameKeys.apply(weight, self, letters, sizes) if self.repeats_keys else weight  # pyright: ignore


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


class _SameKeys(torch.autograd.Function):
    """Copies of a key head are one: what is learned about it anywhere is learned everywhere."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, share: LayerShare, letters: str, sizes: dict[str, tuple[int, int]]) -> Tensor:
        ctx.share, ctx.letters, ctx.sizes = share, letters, sizes
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        share, rows = ctx.share, [ctx.sizes[letter][0] * ctx.sizes[letter][1] for letter in ctx.letters]
        made = []
        for letter, piece in zip(ctx.letters, slope.split(rows), strict=True):
            if letter != "q":
                channels, mine = (
                    ctx.sizes[letter][1],
                    torch.tensor(share.my_keys, dtype=torch.long, device=slope.device),
                )
                whole = piece.new_zeros(len(share.whole.kv_ids), channels, *piece.shape[1:])
                whole.index_copy_(0, mine, piece.unflatten(0, (len(share.my_keys), channels)))
                piece = share.together.added(whole).index_select(0, mine).flatten(0, 1)
            made.append(piece)
        return torch.cat(made), None, None, None


@dataclass(frozen=True, eq=False)
class ShareTerms(Terms):
    """The terms of the heads that are here, and how those of all heads are made, from the q, k and v of all."""

    whole: Callable[[Tensor, Tensor, Tensor], Terms] | None = None


def share_terms(
    layer: "MultiHeadAttention", share: LayerShare, tensors: tuple[Tensor, ...], given: CallTerms
) -> ShareTerms:
    """The terms of a call at a layer that is shared; what is given is about all heads."""
    mask, bias, keeps, starts, keys = given
    q, k, _ = tensors
    for part in (mask, Given(bias) if isinstance(bias, Tensor) else bias):
        if isinstance(part, Mask | Bias):
            part.check(len(q), len(share.whole.head_ids), q.shape[2], k.shape[2] if keys is None else keys)
    own = share.own_mask(mask), share.own_bias(bias), tuple(keeps[i] for i in share.my_keys) if keeps else ()
    made = layer_terms(layer.spec, layer.sink, layer.position, tensors, (*own, starts, keys), layer.training)  # pyright: ignore

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Terms:
        sink, position = (None if x is None else share.heads(x, 0) for x in (layer.sink, layer.position))
        return layer_terms(share.whole, sink, position, (q, k, v), given, layer.training)

    return ShareTerms(**vars(made), whole=whole)


class WholeSite(Site):
    """A site with all heads of a layer, wherever they are. Listened to and edited in every process alike."""

    def __init__(self, layer: "MultiHeadAttention", share: LayerShare) -> None:
        super().__init__(layer.site.address, share.whole.head_ids, layer.write, share.whole.window)
        self.layer, self.share = layer, share

    @property
    def W_O(self) -> Tensor:
        """The heads' output projections, (H, e, D): fetched, so not live."""
        return self.share.heads(self.layer.write.slices, 0)

    @property
    def is_open(self) -> bool:
        """Whether somebody listens or edits there now."""
        return self.layer.site.is_open

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens there now."""
        return self.layer.site.is_heard

    @property
    def is_edited(self) -> bool:
        """Whether what passes is changed now."""
        return self.layer.site.is_edited

    def here(self, z: Tensor) -> Tensor:
        """Of z of all heads, (B, H, T, e), that of the heads this process has."""
        return self.share.own(z, 1)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener, with the q, k, v and z of all heads."""
        with self.layer.site.listen(lambda seen: listener(self._whole(seen))):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale each head's z: (H,) or (B, H)."""
        with self.layer.site.scaled(self.share.own_gate(gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Put another z in: a tensor that broadcasts to (B, H, T, e), or a function of the z of all heads."""
        edit: Edit = value if callable(value) else lambda z: expanded(value, z)

        def edited(z: Tensor) -> Tensor:
            whole = self.share.heads(z)
            changed = edit(whole)
            self.check_shape(whole, changed)
            return self.here(changed)

        with self.layer.site.replaced(edited):
            yield

    def _whole(self, seen: Seen) -> Seen:
        q, z = self.share.heads(seen.q), self.share.heads(seen.z)
        k, v = self.share.keys(seen.k), self.share.keys(seen.v)
        assert isinstance(seen.terms, ShareTerms)
        assert seen.terms.whole is not None
        return Seen(self, q, k, v, seen.terms.whole(q, k, v), z)


@dataclass(frozen=True, eq=False)
class WholeLayer:
    """All heads of a layer as an object that heads can be taken from; weights are fetched when asked for, so not live."""

    layer: "MultiHeadAttention"
    share: LayerShare

    def __deepcopy__(self, memo: dict) -> "WholeLayer":
        return WholeLayer(copy.deepcopy(self.layer, memo), self.share)  # with a site of its own

    @property
    def site(self) -> Site:
        """Where calls of all heads are seen."""
        return self._site

    @cached_property
    def _site(self) -> WholeSite:
        return WholeSite(self.layer, self.share)

    @property
    def spec(self) -> AttentionSpec:
        """The sizes of the whole layer."""
        return self.share.whole

    @property
    def read(self) -> "WholeRead":
        """q, k and v."""
        return WholeRead(self.layer, self.share)

    @property
    def write(self) -> "WholeWrite":
        """W_O."""
        return WholeWrite(self.layer, self.site)

    @property
    def gate(self) -> Tensor | None:
        """A learned scalar per head, (H,)."""
        return None if self.layer.gate is None else self.share.heads(self.layer.gate, 0)

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,): every process has it."""
        return self.layer.b_O


@dataclass(frozen=True, eq=False)
class WholeRead:
    """The projections of all heads."""

    layer: "MultiHeadAttention"
    share: LayerShare

    def weight(self, letter: str) -> Tensor:
        """(heads, channels, width)"""
        return self._fetched(self.layer.read.weight(letter), letter)

    def bias(self, letter: str) -> Tensor | None:
        """(heads, channels)"""
        bias = self.layer.read.bias(letter)
        return None if bias is None else self._fetched(bias, letter)

    def _fetched(self, x: Tensor, letter: str) -> Tensor:
        return self.share.heads(x, 0) if letter == "q" else self.share.keys(x, 0)


@dataclass(frozen=True, eq=False)
class WholeWrite:
    """The output projection of all heads."""

    layer: "MultiHeadAttention"
    site: Site

    @property
    def slices(self) -> Tensor:
        """(H, e, D)"""
        return self.site.W_O

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device: its own."""
        return self.layer.write.weight
