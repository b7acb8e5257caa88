"""Looking at less: the same numbers from the fused kernel as from whole maps, and from some rows as from those of a map."""

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.metrics import batch_context, fused_row_stats, row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.probe import probe_set
from tests.analysis.dense_reference import Rows, assert_alike, watch
from tests.analysis.test_surface import FLAGS, VARIANTS, each_variant, texts
from tests.contract.layers import make_model

FULL = ("confidence", "argmax", "distance ", "long range")  # what the light way does not tell
WIDE = AttentionSpec(width=32, heads=2, head_dim=16)


def measure(model: Transformer, side: str) -> tuple[Tally, Rows]:
    return watch(model, list(make_batches(texts(), 900, side=side)), FLAGS.double(), detail="light")


def light_names(dense: Rows) -> list[str]:
    return [name for name in dense if not name.startswith(FULL)]


@each_variant
def test_light_agrees_with_whole_maps(variant: str, side: str) -> None:
    tally, dense = measure(make_model(VARIANTS[variant]), side)
    assert_alike(tally, dense, light_names(dense))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_kernel_is_what_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_row_stats, "fill_rows", lambda *_: pytest.fail("it walked"))
    spec = ModelSpec(vocab=23, context=256, layers=2, attention=WIDE, kind=kind)  # pyright: ignore[reportArgumentType]
    tally, dense = measure(make_model(spec), "right")
    assert_alike(tally, dense, light_names(dense))
    assert not any(name.startswith(FULL) for name in tally.fields)


@each_variant
def test_one_block_of_rows_in_so_many(variant: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whole maps of the same rows: the middle block of each run of three, and no other. Repeated tokens are kept for the
    next layer while they are few, and found again where there are more."""
    monkeypatch.setattr(row_blocks, "ROWS", 5)
    monkeypatch.setattr(batch_context, "PAIRS", 40)
    batches = list(make_batches(texts(), 900, side=side))
    tally, dense = watch(make_model(VARIANTS[variant]), batches, FLAGS.double(), block=5, every=3)
    assert_alike(tally, dense)
    assert 0 < dense["entropy"][1].sum() < dense["write"][1].sum()


def test_a_light_profile_has_no_role_it_did_not_measure() -> None:
    model, texts = hw.load("minilm"), list(probe_set())[::12]
    light_one, full = (hw.profile(model, texts, causal=False, detail=detail) for detail in ("light", "full"))
    for name in ("entropy", "participation", "first", "delimiter valued", "aimed 1", "induction"):
        np.testing.assert_allclose(light_one.tally.mean(name), full.tally.mean(name), atol=2e-4)
    assert "confidence" not in light_one.tally.fields
    assert all("long range" not in [s.role for s in light_one[a].supports] for a in light_one.addresses)


def test_what_is_refused() -> None:
    model = hw.load("minilm")
    with pytest.raises(HeadwiseError, match="detail is 'full' or 'light'"):
        hw.profile(model, "text", detail="some")
    with pytest.raises(HeadwiseError, match="every at least 1"):
        hw.profile(model, "text", every=0)
