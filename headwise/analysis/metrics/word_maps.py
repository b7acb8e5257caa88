"""Word-by-word attention of a batch, put together from blocks of rows: what heads do on the arcs between words."""

from functools import partial

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import NORM
from headwise.analysis.metrics.example_sampler import Draw
from headwise.analysis.metrics.metric import Taker
from headwise.analysis.metrics.relation_metrics import HITS, MASS, Question
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.metrics.word_arcs import BatchArcs


class WordMaps(Taker):
    """Maps between the words of each text of a call, plain and weighted by what is fetched. `draw` takes down what heads do
    at some places."""

    def __init__(self, arcs: BatchArcs, call: Call, questions: tuple[Question, ...], draw: Draw | None) -> None:
        self.arcs, self.call, self.questions, self.draw = arcs, call, questions, draw
        self.norm = call.scene.layout.place[NORM]
        size = len(arcs.own), call.seen.q.shape[1], arcs.words, arcs.to_word.shape[-1]
        self.plain, self.valued = torch.zeros(2, *size).unbind()  # (N, H, W, W + shared)

    def see(self, block: RowBlock) -> None:
        """One block of rows."""
        if not self.arcs.own:
            return
        rows, cols = (slice(some.start, some.stop) for some in (block.rows, block.cols))
        into, out = self.arcs.from_word[:, None, :, rows], self.arcs.to_word[:, None, cols]
        norms = self.call.norms[:, block.heads, None, cols]
        fetched = block.features[..., self.norm].clamp(min=1e-30)[..., None]
        for made, p in ((self.plain, block.share(block.e)), (self.valued, block.e * norms / fetched)):
            if len(self.arcs.own) < len(p):
                p = p[self.arcs.examples]
            if not self.arcs.batch.whole:  # what stands in rows of padding may be anything, and 0 times NaN is NaN
                p.masked_fill_(~self.arcs.batch.real[self.arcs.examples, None, rows, None], 0.0)
            made[:, block.heads] += into @ (p.float().cpu() @ out)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Sums over rows, by question and kind, (B, H, numbers), and how many rows there are, (B, 1, numbers)."""
        if not self.questions:
            return None
        arcs = self.arcs
        plain, valued = (arcs.without_self(maps) for maps in (self.plain, self.valued))  # (N, H, W, W)
        made = arcs.measured(plain, valued)
        if self.draw is not None:
            for text, (example, one) in enumerate(zip(arcs.examples, arcs.own, strict=True)):
                rows = slice(arcs.starts[text], arcs.starts[text + 1])
                find, unit = partial(one.find, self.questions), arcs.batch.units[example]
                hit, weight = (made[kind][rows].T for kind in (HITS, MASS))
                maps = plain[text, :, : len(one.from_word), : len(one.from_word)]
                self.draw.see_words(unit, find, hit, weight, maps, self.call.heads)
        return arcs.sums(made), arcs.counts
