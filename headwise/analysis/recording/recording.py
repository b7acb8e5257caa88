"""Record what heads do: q, k, v and z of every call, and from them what each head wrote and where it looked, on demand.

Kept are copies, without their graphs, of the heads asked for alone. Keys that came with a cache are kept once, however many
steps look at them. Maps are never kept: rows of them are rebuilt from q and k when somebody asks.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from headwise.analysis.recording.recorded_tensors import SiteCall, SiteRecord, version
from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Site
from headwise.kernels.precision import at_least_float32
from headwise.kernels.score_params import raw_scores, visible_scores, weights
from headwise.spec import Address, select

WHAT = ("q", "k", "v", "z", "write", "map")
NEEDS = {"q": "q", "k": "k", "v": "v", "z": "z", "write": "z", "map": "qk"}  # which tensors each is made from
ROWS = 128  # rows of a map rebuilt at once
Which = int | slice | range | Sequence[int] | None
X = TypeVar("X")


class HasSites(Protocol):
    """A model whose attention can be listened to."""

    def all_sites(self) -> list[Site]:
        """Every place where attention happens, with all heads."""
        ...


@dataclass(frozen=True, eq=False)
class HeadCall:
    """One head during one call of the model. B is the batch, T the queries of this call, S the keys they could see."""

    address: Address
    _record: SiteRecord
    _call: SiteCall

    @property
    def q(self) -> Tensor:
        """(B, T, d), after positions."""
        return _there(self._call.q, "q")[:, self._place]

    @property
    def k(self) -> Tensor:
        """(B, S, d), after positions: all keys of then, those in a cache included."""
        return _there(self._call.k, "k").of_head(self._kv_place)

    @property
    def v(self) -> Tensor:
        """(B, S, e)"""
        return _there(self._call.v, "v").of_head(self._kv_place)

    @property
    def z(self) -> Tensor:
        """(B, T, e): what the head found, as it entered W_O, gates and edits included."""
        return _there(self._call.z, "z")[:, self._place]

    @property
    def write(self) -> Tensor:
        """(B, T, D): what the head added to the stream, z W_O[h]."""
        W_O = self._call.W_O
        if isinstance(W_O, HeadwiseError):
            raise W_O
        if version(W_O) != self._call.weights_were:
            raise HeadwiseError(
                f"W_O of {self.address} has changed since the call was recorded; take .write before the weights change."
            )
        return _there(self._call.z, "write")[:, self._place] @ W_O[self._index]

    def map(self, rows: Which = None, cols: Which = None) -> Tensor:
        """Who looked at whom, (B, R, C): all queries and keys, or those asked for. No other row is rebuilt.

        With a sink rows sum to less than 1: the rest is the sink's. Dropout on weights is left out. Weights are at
        least float32.
        """
        q = at_least_float32(_there(self._call.q, "map")[:, self._place])  # (B, T, d)
        k = _there(self._call.k, "map").of_head(self._kv_place).to(q)
        T, S = self._call.sizes
        chosen, wanted = _places(rows, T, "query"), _places(cols, S, "key")
        group = self._call.terms.groups[self._index]
        terms = self._call.terms.for_heads(range(self._index, self._index + 1), range(group, group + 1))
        made = q.new_zeros(q.shape[0], len(chosen), len(wanted))  # (B, R, C)
        done = 0
        for run in _runs(chosen):
            part = q[:, None, run.start : run.stop]  # (B, 1, r, d)
            scores = visible_scores(raw_scores(part, k[:, None], terms), terms, run, range(S), T, S)
            share = weights(scores, terms, terms.may_be_empty(T, S))[:, 0]  # (B, r, S)
            made[:, done : done + len(run)] = share if cols is None else share[:, :, wanted]
            done += len(run)
        return made

    @property
    def _index(self) -> int:
        return self._record.site.index(self.address)

    @property
    def _place(self) -> int:
        return self._record.heads.index(self._index)

    @property
    def _kv_place(self) -> int:
        groups = self._call.terms.groups
        return self._record.kv_heads(groups).index(groups[self._index])


@dataclass(frozen=True, eq=False)
class Recorded:
    """What was recorded of one head. With one call `.q`, `.map()` and the others are that call's; with several take one."""

    address: Address
    calls: tuple[HeadCall, ...]

    def call(self, number: int) -> HeadCall:
        """One call of several, from 0; −1 is the last."""
        if not -len(self.calls) <= number < len(self.calls):
            raise HeadwiseError(f"there is no call {number} of {self.address}; {len(self.calls)} were recorded.")
        return self.calls[number]

    @property
    def only(self) -> HeadCall:
        """The call, where there was just one."""
        if len(self.calls) != 1:
            raise HeadwiseError(
                f"{self.address} was called {len(self.calls)} times while it was recorded; say which: .call(0), .call(-1)."
            )
        return self.calls[0]

    @property
    def q(self) -> Tensor:
        """(B, T, d)"""
        return self.only.q

    @property
    def k(self) -> Tensor:
        """(B, S, d)"""
        return self.only.k

    @property
    def v(self) -> Tensor:
        """(B, S, e)"""
        return self.only.v

    @property
    def z(self) -> Tensor:
        """(B, T, e)"""
        return self.only.z

    @property
    def write(self) -> Tensor:
        """(B, T, D)"""
        return self.only.write

    def map(self, rows: Which = None, cols: Which = None) -> Tensor:
        """(B, R, C)"""
        return self.only.map(rows, cols)


class Recording:
    """What `record` keeps, by head: recording["5.1"]."""

    def __init__(self, records: Iterable[SiteRecord], addresses: tuple[Address, ...]) -> None:
        self._records = {record.site.address: record for record in records}
        self.addresses = addresses

    def __getitem__(self, head: str | Address) -> Recorded:
        address = Address.parse(head) if isinstance(head, str) else head
        if address not in self.addresses:
            some = ", ".join(map(str, self.addresses[:8])) + (", …" if len(self.addresses) > 8 else "")
            raise HeadwiseError(f"{address} was not recorded; recorded are {some}.")
        record = self._records[address.site]
        if not record.calls:
            raise HeadwiseError(f"nothing was recorded of {address}; call the model inside the with block.")
        return Recorded(address, tuple(HeadCall(address, record, call) for call in record.calls))

    def __iter__(self) -> Iterator[Recorded]:
        return (self[address] for address in self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def bytes(self) -> int:
        """Memory held."""
        kept: dict[int, Tensor] = {}
        for record in self._records.values():
            for call in record.calls:
                tensors = [call.q, call.z, *(c.of.buffer for c in (call.k, call.v) if c is not None)]
                kept |= {id(x): x for x in tensors if x is not None}
        return sum(x.numel() * x.element_size() for x in kept.values())


@contextmanager
def record(model: HasSites, heads: Pattern = "*", what: str | Iterable[str] = WHAT) -> Iterator[Recording]:
    """Keep q, k, v and z of some heads while the model is called; outputs stay bitwise what they are.

    >>> import torch
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> with record(model, "5.1,3.*") as recording:
    ...     logits = model(torch.tensor([[72, 105, 33]]))
    >>> recording["5.1"].z.shape, recording["5.1"].map(rows=[2]).shape
    (torch.Size([1, 3, 64]), torch.Size([1, 1, 3]))
    """
    letters = _letters(what)
    sites = model.all_sites()
    chosen = pick(heads, [address for site in sites for address in site.addresses])
    wanted = {site: tuple(i for i, a in enumerate(site.addresses) if a in set(chosen)) for site in sites}
    records = [SiteRecord(site, places, letters) for site, places in wanted.items() if places]
    with ExitStack() as listening:
        for one in records:
            listening.enter_context(one.site.listen(one.hear))
        yield Recording(records, chosen)


def pick(heads: Pattern | Iterable[str], among: Iterable[Address]) -> tuple[Address, ...]:
    """The heads a pattern names; `*` is all of them, in models of several stacks too."""
    return tuple(among) if isinstance(heads, str) and heads.strip() == "*" else select(heads, among)


def _letters(what: str | Iterable[str]) -> frozenset[str]:
    names = (what,) if isinstance(what, str) else tuple(what)
    for name in names:
        if name not in NEEDS:
            raise HeadwiseError(f"{name!r} cannot be recorded; {close_names(str(name), WHAT)}")
    if not names:
        raise HeadwiseError(f"nothing is to be recorded; name some of {', '.join(WHAT)}.")
    return frozenset("".join(NEEDS[name] for name in names))


def _there(tensor: X | None, name: str) -> X:
    if tensor is None:
        raise HeadwiseError(f'{name} was not recorded; ask for it: record(model, heads, what=("{name}",)).')
    return tensor


def _places(which: Which, length: int, kind: str) -> list[int]:
    if which is None:
        return list(range(length))
    if isinstance(which, slice):
        return list(range(length))[which]
    given = [which] if isinstance(which, int) else [int(place) for place in which]
    for place in given:
        if not -length <= place < length:
            raise HeadwiseError(f"there is no {kind} {place}; this call has {length}.")
    return [place % length for place in given]


def _runs(places: list[int]) -> Iterator[range]:
    """Neighbouring places together, not too many at once."""
    start = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1 or i - start == ROWS:
            yield range(places[start], places[i - 1] + 1)
            start = i
