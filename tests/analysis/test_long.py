"""Long texts: memory is constant between blocks, and total memory grows linearly with the text, not quadratically."""

import gc
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics import batch_context, row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver, BlockListener
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.row_blocks import RowBlock, VisibilityCache, visible_blocks
from headwise.kernels import Mask, causal, padding_mask, per_head, window
from headwise.kernels.score_params import ScoreParams
from tests.analysis.long_script import FLAGS, TOKENIZER, batch_of, long_model

CPU = torch.device("cpu")


class TensorCounter(AttentionObserver):
    """Count the live tensors and their elements at every block."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def on_call(self, call: AttentionCallContext) -> BlockListener:
        """Count at every block of the call."""
        return self.count_tensors

    def count_tensors(self, block: RowBlock) -> None:
        """Count the tensors that are alive."""
        # issubclass does not call methods of the objects
        alive = [tensor for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)]
        self.counts.append((len(alive), sum(tensor.numel() for tensor in alive)))


def test_metric_runner_holds_no_tensors_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are allocated between growing blocks fragment the memory, quadratically in the length of the text."""
    monkeypatch.setattr(batch_context, "MAX_CACHED_PAIRS", 0)
    counter = TensorCounter()
    gc.collect()  # garbage of other tests would change the count
    with torch.no_grad():
        MetricRunner(Accumulator(1), default_metrics(FLAGS), observers=[counter]).run(long_model(), [batch_of(2048)])
    assert len(counter.counts) == 2048 // row_blocks.BLOCK_ROWS
    assert {later - count for (count, _), (later, _) in pairwise(counter.counts)} == {0}
    # growth of a block in elements, in a dozen tensors
    max_growth = 12 * row_blocks.BLOCK_ROWS * row_blocks.BLOCK_ROWS
    assert max(later - numbers for (_, numbers), (_, later) in pairwise(counter.counts)) < max_growth


@pytest.mark.slow
def test_metric_runner_memory_grows_linearly() -> None:
    command = [sys.executable, "-m", "tests.analysis.long_script", "32768"]
    took = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert took < 1000  # 3,030 MB with cached pairs of repeated tokens and fragmented memory


def test_profile_examples_do_not_grow_with_text() -> None:
    """For a causal head the tokens after an example are not stored."""
    model, text = long_model(), " ".join(f"w{7 * index % 61}" for index in range(1500))
    model.tokenizer = TOKENIZER
    profiled = hw.profile(model, [text], max_length=2000, relations=False, causal=False)
    assert profiled.metadata["tokens"] == 1500
    assert profiled.examples.arrays["maps"].shape[2] < 150
    assert max(len(position.names) for position in profiled.examples.rows) < 150


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
def test_visible_blocks_equal_dense_mask(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 13)
    monkeypatch.setattr(row_blocks, "CHUNK_KEYS", piece)
    mask, T, B = MASKS[name], 61, 2
    params = ScoreParams(1.0, (0, 1, 2), mask=mask)
    dense_mask = torch.ones(1, 1, T, T, dtype=torch.bool) if mask is None else mask.dense(T, T).expand(-1, -1, T, T)
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(B, T, 3, generator=generator, dtype=torch.float64)
    target = torch.randint(-1, T, (B, T), generator=generator)
    num_rows = 0
    for visible in visible_blocks(params, T, T, CPU):
        mask_rows = dense_mask[:, :, visible.rows.start : visible.rows.stop]  # (1 or B, 1 or H, R, S)
        cols = slice(visible.cols.start, visible.cols.stop)
        assert not mask_rows[..., : cols.start].any()
        assert not mask_rows[..., cols.stop :].any()
        assert torch.equal(visible.allowed_mask().expand_as(mask_rows[..., cols]), mask_rows[..., cols])
        assert torch.equal(visible.allowed_mask(slice(3, 9)), visible.allowed_mask()[..., 3:9])
        assert torch.equal(visible.visible_keys.expand(mask_rows.shape[:3]), mask_rows.sum(-1))
        torch.testing.assert_close(
            visible.visible_sums(values).expand(B, mask_rows.shape[1], -1, -1),
            mask_rows.double() @ values[:, None],
            rtol=0,
            atol=1e-12,
        )
        where = target[:, visible.rows.start : visible.rows.stop]
        hit = (mask_rows & (torch.arange(T) == where[:, None, :, None])).any(-1)  # (B, 1 or H, R)
        assert torch.equal(visible.sees_keys(where).expand_as(hit), hit)
        first = (mask_rows & (torch.arange(T) == torch.tensor([0, 7])[:, None, None, None])).any(-1)
        assert torch.equal(visible.sees_keys(torch.tensor([[0], [7]])).expand_as(first), first)
        num_rows += len(visible.rows)
    assert num_rows == T


def test_visibility_cache_respects_cell_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "MAX_CACHED_CELLS", 64 * 61)
    cache, params = VisibilityCache(), ScoreParams(1.0, (0, 1, 2), mask=MASKS["anything"])
    once, twice = (list(visible_blocks(params, 61, 61, CPU, cache=cache)) for _ in range(2))
    assert cache.cached_cells == 0  # six planes of 61 × 61 exceed the limit
    assert torch.equal(once[0].partial_mask, twice[0].partial_mask)
    params = ScoreParams(1.0, (0, 1, 2), mask=causal())
    assert list(visible_blocks(params, 61, 61, CPU, cache=cache)) == list(
        visible_blocks(params, 61, 61, CPU, cache=cache)
    )
    assert cache.cached_cells == 61 * 60  # without the first column, which all rows see
