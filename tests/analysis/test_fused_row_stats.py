"""Reduced detail: the fused kernel gives the same scores as full maps, and a row stride gives the scores of the selected
rows."""

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.metrics import batch_context, fused_row_stats, row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.recording.batching import make_batches
from headwise.analysis.roles.profile_sums import CollectOptions
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.probe import probe_set
from tests.analysis.dense_reference import SumsAndCounts, assert_matches_dense, streaming_and_dense
from tests.analysis.light_profile import light_profile
from tests.analysis.test_surface import FLAGS, VARIANTS, each_variant, random_samples
from tests.contract.layers import make_model

# metrics that detail="light" does not compute
FULL_DETAIL_METRICS = ("confidence", "argmax", "distance ", "long range")
WIDE = AttentionSpec(width=32, heads=2, head_dim=16)


def light_and_dense(model: Transformer, side: str) -> tuple[Accumulator, SumsAndCounts]:
    return streaming_and_dense(
        model, list(make_batches(random_samples(), 900, side=side)), FLAGS.double(), detail="light"
    )


def light_names(dense: SumsAndCounts) -> list[str]:
    return [name for name in dense if not name.startswith(FULL_DETAIL_METRICS)]


@each_variant
def test_light_detail_equals_dense_maps(variant: str, side: str) -> None:
    accumulator, dense = light_and_dense(make_model(VARIANTS[variant]), side)
    assert_matches_dense(accumulator, dense, light_names(dense))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_light_detail_uses_fused_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_row_stats, "blockwise_row_stats", lambda *_: pytest.fail("it walked"))
    spec = ModelSpec(vocab=23, context=256, layers=2, attention=WIDE, kind=kind)  # pyright: ignore[reportArgumentType]
    accumulator, dense = light_and_dense(make_model(spec), "right")
    assert_matches_dense(accumulator, dense, light_names(dense))
    assert not any(name.startswith(FULL_DETAIL_METRICS) for name in accumulator.fields)


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


def test_profile_light_detail_has_no_unmeasured_role() -> None:
    model, texts = hw.load("minilm"), list(probe_set())[::12]
    light_one, full = light_profile(model, texts), hw.profile(model, texts, causal=False)
    for name in ("entropy", "participation", "first", "delimiter value-weighted", "aimed 1", "induction"):
        np.testing.assert_allclose(light_one.accumulator.mean(name), full.accumulator.mean(name), atol=2e-4)
    assert "confidence" not in light_one.accumulator.fields
    assert all("long range" not in [s.role for s in light_one[a].evidence] for a in light_one.addresses)


def test_profile_invalid_detail_or_stride_raises() -> None:
    model = hw.load("minilm")
    with pytest.raises(HeadwiseError, match="must be 'full' or 'light'"):
        CollectOptions(detail="some")
    with pytest.raises(HeadwiseError, match="row_stride at least 1"):
        hw.profile(model, "text", row_stride=0)
