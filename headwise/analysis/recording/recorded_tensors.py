"""What a recording keeps of a layer: copies of the heads asked for, and keys once for all the steps that look at them."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen, Site
from headwise.kernels.score_params import Terms


class Growing:
    """Keys, or values, of one sequence: columns are added behind, and none is ever written again."""

    def __init__(self, first: Tensor) -> None:
        self.buffer, self.length = first.clone(), first.shape[2]  # (B, K, room, d)

    def take(self, whole: Tensor, new: int) -> range | None:
        """Which columns hold `whole`, whose last `new` are added if need be; None where it is another sequence's.

        A growing cache shows all that came before, a sliding one the end of it, a source the same at every step. What is
        compared is the numbers: a cache may have been reordered or set back meanwhile.
        """
        B, K, S, d = whole.shape
        if (B, K, d) != (*self.buffer.shape[:2], self.buffer.shape[3]) or self.buffer.dtype != whole.dtype:
            return None
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return None  # torch lets nobody write into it here
        if self.length == S and torch.equal(whole, self.buffer[:, :, :S]):
            return range(S)
        before = S - new
        if not 0 < before <= self.length:
            return None
        start = self.length - before
        if not torch.equal(whole[:, :, :before], self.buffer[:, :, start : self.length]):
            return None
        if (
            self.length + new > self.buffer.shape[2]
        ):  # twice the room, so that a step costs the same however many came before
            room = max(2 * self.buffer.shape[2], self.length + new)
            larger = whole.new_empty(B, K, room, d)
            larger[:, :, : self.length] = self.buffer[:, :, : self.length]
            self.buffer = larger
        self.buffer[:, :, self.length : self.length + new] = whole[:, :, before:]
        self.length += new
        return range(start, self.length)


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of a sequence that may have grown since."""

    of: Growing
    places: range

    def of_head(self, head: int) -> Tensor:
        """One key/value head, (B, S, ·)."""
        return self.of.buffer[:, head, self.places.start : self.places.stop]


@dataclass(frozen=True, eq=False)
class SiteCall:
    """One call of one layer, the heads asked for."""

    sizes: tuple[int, int]  # T, S
    terms: Terms  # of all heads of the layer
    W_O: Tensor | HeadwiseError  # (H, e, D): the weights themselves, not a copy; or why they cannot be shown
    weights_were: int | None  # their version when the call was made
    q: Tensor | None  # (B, h, T, d)
    k: Columns | None  # (B, k, S, d)
    v: Columns | None  # (B, k, S, e)
    z: Tensor | None  # (B, h, T, e)


@dataclass(eq=False)
class SiteRecord:
    """All calls of one layer."""

    site: Site
    heads: tuple[int, ...]  # on the head axis
    letters: frozenset[str]
    calls: list[SiteCall] = field(default_factory=list)
    _open: dict[str, Growing] = field(default_factory=dict)

    def hear(self, seen: Seen) -> None:
        """Keep what was asked for of one call."""
        T, S = seen.q.shape[2], seen.k.shape[2]
        with torch.no_grad():
            q = self._rows(seen.q, "q")
            z = self._rows(seen.z, "z")
            k, v = self._columns(seen.k, "k", seen, T), self._columns(seen.v, "v", seen, T)
        try:
            W_O = seen.site.W_O.detach()
        except HeadwiseError as why:  # only what heads write needs it
            W_O = why
        self.calls.append(SiteCall((T, S), _kept_terms(seen.terms), W_O, version(W_O), q, k, v, z))

    def _rows(self, x: Tensor, letter: str) -> Tensor | None:
        if letter not in self.letters:
            return None
        return x.detach().index_select(1, torch.tensor(self.heads, device=x.device))  # a copy: (B, h, T, ·)

    def _columns(self, x: Tensor, letter: str, seen: Seen, T: int) -> Columns | None:
        if letter not in self.letters:
            return None
        shared = self.kv_heads(seen.terms.groups)
        x = x.detach()
        x = x if len(shared) == x.shape[1] else x.index_select(1, torch.tensor(shared, device=x.device))
        growing = self._open.get(letter)
        places = None if growing is None else growing.take(x, T)
        if growing is None or places is None:
            growing = self._open[letter] = Growing(x)
            places = range(x.shape[2])
        return Columns(growing, places)

    def kv_heads(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        """The key/value heads that the heads asked for read, on their axis."""
        return tuple(sorted({groups[head] for head in self.heads}))


def _kept_terms(terms: Terms) -> Terms:
    """Learned tensors among them may change later: they are copied."""
    bias = None if terms.bias is None else terms.bias.kept()
    return replace(terms, bias=bias, sink=None if terms.sink is None else terms.sink.detach().clone())


def version(weight: Tensor | HeadwiseError) -> int | None:
    """How often a tensor was written into, as far as torch counts."""
    return None if isinstance(weight, HeadwiseError) or weight.is_inference() else weight._version
