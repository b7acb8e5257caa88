"""A row stride gives the scores of the selected rows."""

import pytest

import headwise as hw
from headwise.analysis.metrics import batch_context, row_blocks
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError
from tests.analysis.dense_reference import assert_matches_dense, streaming_and_dense
from tests.analysis.test_surface import FLAGS, VARIANTS, each_variant, random_samples
from tests.contract.layers import make_model


@each_variant
def test_row_stride_uses_middle_block_of_each_run(variant: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with full maps of the same rows: the middle block of each group of three. Repeated tokens are cached for the
    next layer while they are few, otherwise they are computed again."""
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 5)
    monkeypatch.setattr(batch_context, "MAX_CACHED_PAIRS", 40)
    batches = list(make_batches(random_samples(), 900, side=side))
    accumulator, dense = streaming_and_dense(
        make_model(VARIANTS[variant]), batches, FLAGS.double(), block=5, row_stride=3
    )
    assert_matches_dense(accumulator, dense)
    assert 0 < dense["entropy"][1].sum() < dense["output norm"][1].sum()


def test_profile_invalid_row_stride_raises() -> None:
    with pytest.raises(HeadwiseError, match="row_stride: must be at least 1"):
        hw.profile(hw.load("minilm"), "text", row_stride=0)
