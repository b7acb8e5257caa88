"""What some key heads of a layer keep: all tokens, or the first and the last; and the heads that read them.

Keys are stored after positions turned them, so that positions stay those of the text, whatever is forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.kv_buffer import Shelf
from headwise.kernels import Mask, Terms, run
from headwise.kernels.bias import Given
from headwise.kernels.masks import Causal, Padding
from headwise.kernels.sink_window_masks import Held, MaskColumns, all_parts, take_columns
from headwise.spec import Keeps

ROWS = 256  # queries of a prompt at a time, where most keys are out of their sight


@dataclass(frozen=True, eq=False)
class CacheStep:
    """What one step of a layer gives to each part of its cache."""

    length: int  # tokens that came before
    starts: Tensor | None  # (B,): where the text of each row begins, padding being on its left; None: at 0
    terms: Terms  # of all heads, over all keys that ever came
    backend: str
    window: Mask | None = None  # of the layer, which each part of the cache sees to itself

    @cached_property
    def unmasked(self) -> Terms:
        """The terms without their mask."""
        return replace(self.terms, mask=None)

    @cached_property
    def extra(self) -> tuple[Mask, ...]:
        """Masks besides looking back and, where it is known where texts begin, padding."""
        told = (Causal, Padding) if self.starts is not None else (Causal,)
        others = (mask for mask in all_parts(self.terms.mask) if not isinstance(mask, told))
        return tuple(mask for mask in others if mask != self.window)

    @cached_property
    def looks_back(self) -> bool:
        """Whether no query looks ahead."""
        return any(mask == Causal() for mask in all_parts(self.terms.mask))

    def check_looks_back(self) -> None:
        """Refuse a call whose queries look ahead."""
        if not self.looks_back:
            raise HeadwiseError("a head that forgets what lies behind must not look ahead; pass mask=hw.causal().")


class Some:
    """Some heads of those on the second axis of tensors: numbers in a row, which copy nothing, or any."""

    def __init__(self, numbers: list[int]) -> None:
        self.which = _run(numbers)
        self._index = torch.tensor(numbers, dtype=torch.long)

    def of(self, x: Tensor) -> Tensor:
        """(B, H, …) → (B, h, …)"""
        if isinstance(self.which, slice):
            return x.narrow(1, self.which.start, self.which.stop - self.which.start)
        self._index = self._index.to(x.device)
        return x.index_select(1, self._index)


class Part:
    """Key heads of a layer that keep everything, and the heads that read them."""

    def __init__(self, heads: list[int], keys: list[int], groups: tuple[int, ...], bits: int, size: int | None) -> None:
        self.numbers, self.keys, self.groups, self.size = heads, keys, groups, size
        self.most = size  # tokens there will be room for
        self.heads, self.key_heads = Some(heads), Some(keys)
        self.k, self.v = Shelf(bits), Shelf(bits)
        self._known: tuple[Terms, Terms | None] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: CacheStep) -> Tensor:
        """(B, h, T, d), (B, keys, T, ·) twice → (B, h, T, e)"""
        self.keep(k, v, call.length)
        held = slice(0, call.length + k.shape[2])
        if self._known is None or self._known[0] is not call.terms:
            self._known = call.terms, call.terms.pick(self.heads.which, self.groups)
        terms = self._known[1]
        assert terms is not None
        return run(q, self.k.get(held), self.v.get(held), terms, call.backend)

    def keep(self, k: Tensor, v: Tensor, start: int) -> None:
        """Keep the tokens from place `start` on: (B, keys, T, ·) twice."""
        end = start + k.shape[2]
        if self.size is not None and end > self.size:
            raise HeadwiseError(
                f"the cache is full: it holds {self.size} tokens, {start} are there and {end - start} more came; make it "
                f"larger, or use a growing one."
            )
        for shelf, new in ((self.k, k), (self.v, v)):
            coded = shelf.coded(new)
            shelf.make_room(coded, self.size or end, self.most)
            shelf.put_at(coded, start)

    def lay_out(self, whole: Tensor, shelf: Shelf, length: int, starts: Tensor | None) -> None:
        """Put what is held at its places: whole is (B, K, S, ·)."""
        if length:
            whole[:, self.keys, :length] = shelf.get(slice(0, length))


class BeforeForgetting(Part):
    """All key heads of a layer, while none of them has forgotten anything: they are attended to in one call."""

    def __init__(self, groups: tuple[int, ...], keys: int, most: int) -> None:
        super().__init__(list(range(len(groups))), list(range(keys)), groups, 32, None)
        self.most = most

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: CacheStep) -> Tensor:
        """(B, H, T, d), (B, K, T, ·) twice → (B, H, T, e)"""
        if self._known is None or self._known[0] is not call.terms:
            call.check_looks_back()
        return super().attend(q, k, v, call)

    def hand_over(self, parts: "list[Part]", length: int) -> None:
        """From now on the key heads go their own ways."""
        for part in parts:
            part.k.held = part.v.held = ()  # of a step that failed
            if length:
                k, v = (part.key_heads.of(shelf.get(slice(0, length))) for shelf in (self.k, self.v))
                part.keep(k, v, 0)
        self.k.held = self.v.held = ()


class StreamingPart(Part):
    """Key heads that keep the first tokens of the text and the last.

    The token at place p of its text stands in slot p while there is room, `first` + `last` slots. After that it takes the
    slot of the token that is forgotten: the last ones go round in a ring behind the first ones.
    """

    def __init__(
        self, heads: list[int], keys: list[int], groups: tuple[int, ...], keeps: Keeps, window: int | None
    ) -> None:
        super().__init__(heads, keys, groups, keeps.bits, None)
        assert keeps.last is not None
        self.first, self.last, self.window = keeps.first, keeps.last, window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: CacheStep) -> Tensor:
        """(B, h, T, d), (B, keys, T, ·) twice → (B, h, T, e)"""
        T, room = k.shape[2], self.first + self.last
        terms = self._terms_of_one(call) if T == 1 and call.starts is None else None
        if terms is None:
            call.check_looks_back()
        coded = self.k.coded(k), self.v.coded(v)
        self.k.make_room(coded[0], min(room, call.length + T), room)
        self.v.make_room(coded[1], min(room, call.length + T), room)
        if terms is not None:  # what is held is what is seen
            slot, held = self._slot(call.length), slice(0, min(room, call.length + 1))
            self.k.put_at(coded[0], slot)
            self.v.put_at(coded[1], slot)
            return run(q, self.k.get(held), self.v.get(held), terms, call.backend)
        plain = call.starts is None and self.window is None and not call.extra
        new = self.k.decoded(coded[0]), self.v.decoded(coded[1])
        if plain and call.length == 0 and room >= T:  # nobody has forgotten anything yet
            z = run(q, new[0], new[1], call.terms.pick(self.heads.which, self.groups), call.backend)
            self._keep(coded, call)
            return z
        if T == 1:
            self._keep(coded, call)
            return self._look(q, (), range(1), 1, call)
        self._keep_first(coded, call)
        blocks = [range(a, min(a + ROWS, T)) for a in range(0, T, ROWS)]
        z = torch.cat([self._look(q[:, :, b.start : b.stop], new, b, T, call) for b in blocks], 2)
        if call.length:
            self.k.copy()  # a step that fails later finds the old ones again
            self.v.copy()
        self._keep(coded, call)
        return z

    def _terms_of_one(self, call: CacheStep) -> Terms | None:
        """What goes with one token that sees all that is held; None where it may not. Steps of a text have the same terms, so
        that this is found out once."""
        if self._known is None or self._known[0] is not call.terms:
            plain = self.window is None and not call.extra and call.terms.bias is None and call.looks_back
            self._known = call.terms, call.unmasked.pick(self.heads.which, self.groups) if plain else None
        return self._known[1]

    def keep(self, k: Tensor, v: Tensor, start: int) -> None:
        """Keep those of the tokens from place `start` on that are not forgotten at once."""
        room = min(self.first + self.last, start + k.shape[2])
        coded = self.k.coded(k), self.v.coded(v)
        for shelf, rows in zip((self.k, self.v), coded, strict=True):
            shelf.make_room(rows, room, self.first + self.last)
        self._keep(coded, CacheStep(start, None, Terms(1.0, ()), ""))

    def _look(self, q: Tensor, new: tuple[Tensor, ...], rows: range, T: int, call: CacheStep) -> Tensor:
        """Some queries of T, and the keys they can see: the first, the ring as it was, and those that came with them.

        Without new keys everything is in its slot already.
        """
        begins = q.new_zeros(1, 1, dtype=torch.long) if call.starts is None else call.starts[:, None]  # (1 or B, 1)
        slots = torch.arange(self.k.room, device=q.device)[None]  # (1, room)
        before = (call.length - begins).clamp(min=0)  # (1 or B, 1): tokens of the text that are in their slots
        after = call.length + T - begins
        if not new:
            keys = [self.k.get(slice(0, self.k.room))], [self.v.get(slice(0, self.v.room))]
            places = [self._place_in(slots, after)]
        else:
            first = slice(0, min(self.first, self.k.room))
            ring = slice(first.stop, self.k.room if call.length and rows.start + 1 < self.last else first.stop)
            near = slice(max(0, rows.start - self.last + 1), rows.stop)
            keys = [
                [shelf.get(first), shelf.get(ring), fresh[:, :, near]]
                for shelf, fresh in zip((self.k, self.v), new, strict=True)
            ]
            at = torch.arange(near.start, near.stop, device=q.device) + call.length - begins  # (1 or B, n)
            places = [
                torch.where(slots[:, first] < after, slots[:, first], -1),
                self._place_in(slots[:, ring], before),
                torch.where(at < self.first, -1, at),  # among the first already
            ]
        held = torch.cat([one.expand(len(begins), -1) for one in places], 1)  # (1 or B, C)
        queries = torch.arange(rows.start, rows.stop, device=q.device) + call.length - begins  # (1 or B, R)
        terms = self._terms(held, queries, begins, rows, T, call)
        return run(q, torch.cat(keys[0], 2), torch.cat(keys[1], 2), terms, call.backend)

    def _terms(self, held: Tensor, queries: Tensor, begins: Tensor, rows: range, T: int, call: CacheStep) -> Terms:
        """What goes with keys in this order: held and queries are their places, (1 or B, C) and (1 or B, R)."""
        S = call.length + T
        columns = torch.where(held < 0, -1, held + begins)  # among all keys
        mask: Mask = Held(queries, held, self.first, self.last, self.window)
        for other in call.extra:
            mask = mask & MaskColumns(other.for_heads(self.heads.which), columns, S, rows, T)
        terms = call.unmasked.pick(self.heads.which, self.groups)
        if terms.bias is None:
            return replace(terms, mask=mask)
        whole = terms.bias.block(rows, range(S), T, S)  # by true places, whatever order keys are in
        bias = Given(take_columns(whole[(None,) * (4 - whole.ndim)], columns[:, None, None], S))
        return replace(terms, mask=mask, bias=bias)

    def _place_in(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """The place of the token in each slot once so many came, or −1: (1, n), (1 or B, 1) → (1 or B, n)."""
        newest = tokens - 1
        round_about = newest - (newest - slots) % self.last  # the last place that falls into this slot of the ring
        places = torch.where(slots < self.first, slots, torch.where(round_about < self.first, -1, round_about))
        return torch.where(places > newest, -1, places)

    def _slot(self, place: int) -> int:
        return place if place < self.first else self.first + (place - self.first) % self.last

    def _keep(self, coded: Sequence[tuple[Tensor, ...]], call: CacheStep) -> None:
        """Put new tokens into their slots; of many, those that are not forgotten at once."""
        T = coded[0][0].shape[2]
        if T == 1 and call.starts is not None:
            place = (call.length - call.starts).clamp(min=0)  # padding lands where the first token will
            slot = torch.where(place < self.first, place, self.first + (place - self.first) % self.last)  # (B,)
            for shelf, rows in zip((self.k, self.v), coded, strict=True):
                shelf.put_each(rows, slot)
            return
        self._keep_first(coded, call)
        for row, begin in self._texts(call):
            end = call.length + T - begin  # the text's own places
            start = max(self.first, call.length - begin, end - self.last)
            if start < end:
                slots = [self._slot(place) for place in range(start, end)]
                self._write(coded, row, slots, start + begin - call.length)

    def _keep_first(self, coded: Sequence[tuple[Tensor, ...]], call: CacheStep) -> None:
        """Put those of the new tokens that are among the first of their text into their slots."""
        for row, begin in self._texts(call):
            start, end = max(0, call.length - begin), call.length + coded[0][0].shape[2] - begin
            slots = list(range(start, min(end, self.first)))
            if slots:
                self._write(coded, row, slots, start + begin - call.length)

    def _write(self, coded: Sequence[tuple[Tensor, ...]], row: slice, slots: list[int], first: int) -> None:
        for shelf, rows in zip((self.k, self.v), coded, strict=True):
            shelf.put(tuple(x[row, :, first : first + len(slots)] for x in rows), _run(slots), row)

    def _texts(self, call: CacheStep) -> list[tuple[slice, int]]:
        """Rows of the batch, and where their text begins."""
        if call.starts is None:
            return [(slice(None), 0)]
        return [(slice(b, b + 1), begin) for b, begin in enumerate(call.starts.tolist())]

    def lay_out(self, whole: Tensor, shelf: Shelf, length: int, starts: Tensor | None) -> None:
        """Put what is held at its places: whole is (B, K, S, ·)."""
        if not length:
            return
        rows = shelf.get(slice(0, shelf.room))  # (B, keys, room, ·)
        slots = torch.arange(shelf.room, device=whole.device)[None]
        for row, begin in self._texts(CacheStep(length, starts, Terms(1.0, ()), "")):
            places = self._place_in(slots, torch.tensor([[length - begin]], device=whole.device))[0]  # (room,)
            there = places >= 0
            part = whole[row, self.keys]
            part[:, :, places[there] + begin] = rows[row, :, there]
            whole[row, self.keys] = part


def make_part(
    heads: list[int], keys: list[int], groups: tuple[int, ...], keeps: Keeps, window: int | None, size: int | None
) -> Part:
    """The part for key heads that keep alike, in a layer with this window."""
    if window is not None and (keeps.last is None or keeps.last >= window):  # all it sees is the layer's window
        keeps, window = Keeps(keeps.bits, 0, window), None
    if keeps.last is None:
        return Part(heads, keys, groups, keeps.bits, size)
    return StreamingPart(heads, keys, groups, keeps, window)


def _run(numbers: list[int]) -> slice | list[int]:
    """Numbers in a row as a slice, which copies nothing."""
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
    return slice(numbers[0], numbers[-1] + 1) if whole else numbers
