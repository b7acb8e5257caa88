"""Who listens at the sites of a model while it reads, and adds any measures up, row by row.

Each number is a mean over rows, so what is kept is sums and counts, per unit and head. Sums add up, whatever the batches,
blocks, padding or processes were. No n×n map is held.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.site import Seen, Site
from headwise.heads.writes import gram
from headwise.look.measure.classes import class_measures
from headwise.look.measure.diagonals import Far, Largest, LongRange, Near
from headwise.look.measure.draw import Draw
from headwise.look.measure.evidence import Evidence
from headwise.look.measure.light import glance
from headwise.look.measure.measure import Measure, Number
from headwise.look.measure.row_numbers import Rows, See, fill_rows
from headwise.look.measure.rows import Block, fetched, unknown_gram
from headwise.look.measure.scene import FIRST, Layout, Scene
from headwise.look.measure.shape import Confidence, Shape, Writes
from headwise.look.measure.tally import Tally
from headwise.look.record.units import Batch


def usual_measures(flags: Tensor) -> list[Measure]:
    """All that is taken from the rows of texts; `flags` (V, c) are the classes of tokens."""
    return [Writes(), Confidence(), Largest(), Far(), LongRange(), Shape(), *class_measures(flags), Near()]


class Surface:
    """Listens at the sites of a model and adds any measures up.

    `full` walks over every cell, or, with `every`, over one block of rows in so many. `light` takes from all rows what the
    fused kernel gives without showing a map: everything but the largest weights (confidence, argmax, evidence), far
    distances and long range.
    """

    def __init__(
        self,
        tally: Tally,
        evidence: Evidence | None,
        measures: Iterable[Measure],
        every: int = 1,
        detail: str = "full",
        draw: Draw | None = None,
    ) -> None:
        self.tally, self.evidence, self.every, self.draw = tally, evidence, every, draw
        self.walks = detail == "full"
        self.measures = [measure for measure in measures if self.walks or not measure.full]
        self.layout = Layout.of(self.measures)
        self._grams: dict[Site, tuple[tuple[int, int], Tensor]] = {}
        self._scene: Scene | None = None
        for measure in self.measures:
            tally.expect(measure.names)

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All that is counted."""
        return tuple(number for measure in self.measures for number in measure.numbers)

    def see(self, seen: Seen, batch: Batch, first_head: int) -> None:
        """One call at one site; its heads are counted from `first_head` on."""
        if not seen.q.shape[1]:
            return
        scene, own = self.scene(batch), self._gram(seen)
        norms = fetched(seen, own)  # (B, H, S)
        if self.draw is not None:
            self.draw.see_tokens(seen, scene, first_head)
        if self.walks:
            rows = fill_rows(seen, scene, norms, own, self.every, self._keep(scene, seen, first_head))
        else:
            rows = glance(seen, scene, norms, own)
        unknown = bool(own.isnan().any())
        for measure in self.measures:
            self._add(measure, rows, first_head, unknown)

    def scene(self, batch: Batch) -> Scene:
        """What all layers have in common, made once for a batch."""
        if self._scene is None or self._scene.batch is not batch:
            self._scene = Scene(batch, self.layout)
        return self._scene

    def forget(self) -> None:
        """Work out anew what was worked out for the last batch."""
        self._scene = None

    def _add(self, measure: Measure, rows: Rows, first_head: int, unknown: bool) -> None:
        sums, counts = measure.take(rows)
        B, H = rows.total.shape[:2]
        if sums.shape != (B, H, len(measure.numbers)):
            raise HeadwiseError(
                f"{measure.names[0]!r} took {tuple(sums.shape)} from rows of {B} texts and {H} heads; "
                f"give {(B, H, len(measure.numbers))}."
            )
        if rows.seen.site.address.stack == "cross":
            told = torch.tensor([not number.placed for number in measure.numbers], device=sums.device)
            sums, counts = sums * told, counts * told
        if unknown:  # what is made of W_O was not measured; all else was
            told = ~sums.isnan()
            sums, counts = sums.nan_to_num(0.0), counts * told
        buckets = [unit.bucket for unit in rows.scene.batch.units]
        self.tally.add(measure.names, slice(first_head, first_head + H), buckets, sums, counts)

    def _keep(self, scene: Scene, seen: Seen, first_head: int) -> Sequence[See]:
        """Shows evidence the rows of each block that do not rest, on the first token or on themselves."""
        evidence, batch, first = self.evidence, scene.batch, self.layout.place[FIRST]
        if evidence is None:
            return ()
        across = seen.site.address.stack == "cross"

        def see(block: Block) -> None:
            itself = (block.at(0, 1)[..., 0] == 1) & (not across)
            real = batch.real[:, block.rows.start : block.rows.stop]
            resting = itself | (block.features[..., first] == 1) | ~real[:, None]
            heads = slice(first_head + block.heads.start, first_head + block.heads.stop)
            evidence.add(heads, block, resting, batch.units, batch.first)

        return (see,)

    def _gram(self, seen: Seen) -> Tensor:
        """W_O W_Oᵀ, (H, e, e), until the weights change; NaN, and so what is made of it, where W_O cannot be shown."""
        site = seen.site
        try:
            W_O = site.W_O
        except HeadwiseError:
            return unknown_gram(seen)
        state = (W_O.data_ptr(), W_O._version)
        if self._grams.get(site, (None,))[0] != state:
            self._grams[site] = state, gram(W_O)
        return self._grams[site][1]
