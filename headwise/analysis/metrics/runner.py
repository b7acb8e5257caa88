"""The one runner: a model reads, and any measures are shown what its heads do. Profiles, histories, comparisons and tasks
all look like this.

Each number is a mean over rows, so what is kept is sums and counts, per unit and head. Sums add up, whatever the batches,
blocks, padding or processes were. No n×n map is held.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import ColumnLayout, Scene
from headwise.analysis.metrics.fused_row_stats import glance
from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.metric import Measure, Number
from headwise.analysis.metrics.row_blocks import unknown_gram, walk
from headwise.analysis.metrics.row_stats import See, fill_rows
from headwise.analysis.recording.batching import Batch, read_sites, run
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen, Site
from headwise.heads.per_head_output import gram
from headwise.model import AnyModel


class Runner:
    """Shows measures what heads do, and adds their numbers up in a tally. One for a whole corpus.

    `full` walks over every cell, or, with `every`, over one block of rows in so many. `light` takes from all rows what the
    fused kernel gives without showing a map: everything but the largest weights (confidence, argmax, evidence), far
    distances and long range. Measures of blocks that are not `full` see every block all the same.
    """

    def __init__(self, tally: Tally, measures: Iterable[Measure], every: int = 1, detail: str = "full") -> None:
        self.tally, self.every, self.walks = tally, every, detail == "full"
        self.measures = [measure for measure in measures if self.walks or not measure.full]
        self.layout = ColumnLayout.of(self.measures)
        self._grams: dict[Site, tuple[tuple[int, int], Tensor]] = {}
        self._scene: Scene | None = None
        for measure in self.measures:
            if measure.numbers:
                tally.expect(measure.names)

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All that is counted."""
        return tuple(number for measure in self.measures for number in measure.numbers)

    def read(self, model: AnyModel, batches: Iterable[Batch]) -> None:
        """Let a model read batches."""
        sites = read_sites(model)
        for batch in batches:
            self.scene(batch)  # counted even where every head is cut
            with listening(sites, self.see, batch):
                run(model, batch)

    def see(self, seen: Seen, batch: Batch, first_head: int) -> None:
        """One call at one site; its heads are counted from `first_head` on."""
        scene = self.scene(batch)
        if not seen.q.shape[1]:
            return
        call = Call(seen, scene, first_head, self._gram)
        asked = [measure for measure in self.measures if measure.across or not call.across]
        taking = [(measure, measure.at(call)) for measure in asked]
        each = self.walks and self.every == 1  # the walk for all rows shows every block
        beside = [taker.see for measure, taker in taking if taker is not None and (each or measure.full)]
        alone = [taker.see for measure, taker in taking if taker is not None and not (each or measure.full)]
        rowwise = [measure for measure, taker in taking if taker is None and measure.numbers]
        if rowwise:
            self._take_rows(rowwise, call, beside)
        else:
            _show(call, beside, self.every)
        _show(call, alone)
        for measure, taker in taking:
            self._add(measure, call, None if taker is None else taker.take())

    def scene(self, batch: Batch) -> Scene:
        """What all layers have in common, made once for a batch."""
        if self._scene is None or self._scene.batch is not batch:
            self._scene = Scene(batch, self.layout)
            for measure in self.measures:
                measure.begin(batch)
        return self._scene

    def forget(self) -> None:
        """Work out anew what was worked out for the last batch."""
        self._scene = None

    def _take_rows(self, measures: Sequence[Measure], call: Call, beside: Sequence[See]) -> None:
        """Fill the rows of a call, once for all measures, and let each take its own."""
        rows = fill_rows(call, self.every, beside) if self.walks else glance(call)
        for measure in measures:
            self._add(measure, call, measure.take(rows))

    def _add(self, measure: Measure, call: Call, made: tuple[Tensor, Tensor] | None) -> None:
        if made is None:
            return
        sums, counts = made
        B, H = call.seen.q.shape[:2]
        if sums.shape != (B, H, len(measure.numbers)):
            raise HeadwiseError(
                f"{measure.names[0]!r} took {tuple(sums.shape)} from rows of {B} texts and {H} heads; "
                f"give {(B, H, len(measure.numbers))}."
            )
        if call.across:
            told = torch.tensor([not number.placed for number in measure.numbers], device=sums.device)
            sums, counts = sums * told, counts * told
        if call.unknown:  # what is made of W_O was not measured; all else was
            told = ~sums.isnan()
            sums, counts = sums.nan_to_num(0.0), counts * told
        self.tally.add(measure.names, call.heads, [unit.bucket for unit in call.scene.batch.units], sums, counts)

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


def _show(call: Call, see: Sequence[See], every: int = 1) -> None:
    """Show every block of a call, or one in so many, to those who want to see them."""
    if see:
        for block in walk(call.seen, call.inputs, every, call.scene.seen):
            for one in see:
                one(block)
