"""Long texts: what a walk holds does not grow while it goes on, and what it takes grows as the text, not as its square."""

import gc
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics import batch_context, row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.metric import Measure, Taker
from headwise.analysis.metrics.row_blocks import KeptSights, RowBlock, sights
from headwise.analysis.metrics.runner import Runner
from headwise.kernels import Mask, causal, padding_mask, per_head, window
from headwise.kernels.score_params import Terms
from tests.analysis.long_script import FLAGS, TOKENIZER, batch_of, long_model

CPU = torch.device("cpu")


class Watch(Measure):
    """How many tensors there are, and how many numbers in them, whenever a block goes by."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def at(self, call: Call) -> "Count":
        """One call at one site."""
        return Count(self.found)


class Count(Taker):
    """Counts at one site."""

    def __init__(self, found: list[tuple[int, int]]) -> None:
        self.found = found

    def see(self, block: RowBlock) -> None:
        """One block."""
        alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]  # asks no object anything
        self.found.append((len(alive), sum(one.numel() for one in alive)))

    def take(self) -> None:
        """It has no numbers."""


def test_a_walk_keeps_nothing_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between blocks that grow leaves holes behind, which grow with the square of a text."""
    monkeypatch.setattr(batch_context, "PAIRS", 0)
    watch = Watch()
    gc.collect()  # garbage of other tests would go while this one counts
    with torch.no_grad():
        Runner(Tally(1), [*usual_measures(FLAGS), watch]).read(long_model(), [batch_of(2048)])
    assert len(watch.found) == 2048 // row_blocks.ROWS
    assert {more - count for (count, _), (more, _) in pairwise(watch.found)} == {0}
    most = 12 * row_blocks.ROWS * row_blocks.ROWS  # cells that a block has more than the last, in a dozen tensors
    assert max(more - numbers for (_, numbers), (_, more) in pairwise(watch.found)) < most


@pytest.mark.slow
def test_memory_grows_as_the_text() -> None:
    command = [sys.executable, "-m", "tests.analysis.long_script", "32768"]
    took = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert took < 1000  # 3,030 where pairs of repeated tokens and holes between blocks were left behind


def test_what_is_shown_does_not_grow_with_the_text() -> None:
    """A head that looks back sees none of a text behind the place that is shown."""
    model, text = long_model(), " ".join(f"w{7 * number % 61}" for number in range(1500))
    model.tokenizer = TOKENIZER
    made = hw.profile(model, [text], longest=2000, relations=False, causal=False)
    assert made.about["tokens"] == 1500
    assert made.cases.arrays["maps"].shape[2] < 150
    assert max(len(place.names) for place in made.cases.rows) < 150


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(11),
    "ahead": window(5),
    "padding left": causal() & padding_mask(torch.arange(61) >= torch.tensor([[0], [7]])),
    "padding right": padding_mask(torch.arange(61) < torch.tensor([[61], [40]])),
    "by head": per_head([causal(), causal() & window(9), window(61)]),
    "one column": Mask.of(torch.ones(1, 1, 61, 1, dtype=torch.bool)),
    "anything": Mask.of(torch.rand(2, 3, 61, 61, generator=torch.Generator().manual_seed(1)) < 0.5),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("piece", [7, 4096])
def test_sights_are_the_mask(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "ROWS", 13)
    monkeypatch.setattr(row_blocks, "PIECE", piece)
    mask, T, B = MASKS[name], 61, 2
    terms = Terms(1.0, (0, 1, 2), mask=mask)
    whole = torch.ones(1, 1, T, T, dtype=torch.bool) if mask is None else mask.dense(T, T).expand(-1, -1, T, T)
    dice = torch.Generator().manual_seed(2)
    values = torch.randn(B, T, 3, generator=dice, dtype=torch.float64)
    target = torch.randint(-1, T, (B, T), generator=dice)
    seen = 0
    for sight in sights(terms, T, T, CPU):
        some = whole[:, :, sight.rows.start : sight.rows.stop]  # (1 or B, 1 or H, R, S)
        cols = slice(sight.cols.start, sight.cols.stop)
        assert not some[..., : cols.start].any()
        assert not some[..., cols.stop :].any()
        assert torch.equal(sight.allowed().expand_as(some[..., cols]), some[..., cols])
        assert torch.equal(sight.allowed(slice(3, 9)), sight.allowed()[..., 3:9])
        assert torch.equal(sight.visible.expand(some.shape[:3]), some.sum(-1))
        torch.testing.assert_close(
            sight.sums(values).expand(B, some.shape[1], -1, -1), some.double() @ values[:, None], rtol=0, atol=1e-12
        )
        where = target[:, sight.rows.start : sight.rows.stop]
        hit = (some & (torch.arange(T) == where[:, None, :, None])).any(-1)  # (B, 1 or H, R)
        assert torch.equal(sight.sees(where).expand_as(hit), hit)
        first = (some & (torch.arange(T) == torch.tensor([0, 7])[:, None, None, None])).any(-1)
        assert torch.equal(sight.sees(torch.tensor([[0], [7]])).expand_as(first), first)
        seen += len(sight.rows)
    assert seen == T


def test_few_cells_of_sights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "KEPT", 64 * 61)
    known, terms = KeptSights(), Terms(1.0, (0, 1, 2), mask=MASKS["anything"])
    once, twice = (list(sights(terms, 61, 61, CPU, known=known)) for _ in range(2))
    assert known.cells == 0  # six planes of 61 × 61 are more
    assert torch.equal(once[0].seen, twice[0].seen)
    terms = Terms(1.0, (0, 1, 2), mask=causal())
    assert list(sights(terms, 61, 61, CPU, known=known)) == list(sights(terms, 61, 61, CPU, known=known))
    assert known.cells == 61 * 60  # but for the first column, which all see
