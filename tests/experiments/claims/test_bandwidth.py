import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.claims.bandwidth import CLAIM, measure, on, times
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(one, most):
    return [
        (name, at, v) for name in ("batched forward", "fused forward") for at, v in ((1, one), (8, 1.0), (64, most))
    ]


CASES = {"holds": rows(0.7, 2.0), "depends": rows(1.0, 2.0), "does not hold": rows(0.9, 1.05)}


def test_a_clock_that_cannot_tell_is_no_answer():
    figures = Figures()
    for name, at, _ in rows(1, 1):
        figures.add(name, at, Figure.turns([1.0, 1.2] * 8))
    assert CLAIM.decide(figures)[1].on.startswith("on the turn of the clock: whether 64 heads")


def test_many_maps_take_long():
    made = times(64, 128, (8, 64), form="batched", turns=5)
    assert made[8].mean == 1
    assert made[64].mean > 1.2  # eight times as many exponentials


def test_eight_heads_are_the_measure():
    with pytest.raises(HeadwiseError, match="8 among them"):
        times(12, 4, (1, 2))


def test_it_measures_and_judges(tmp_path):
    found = measure(Lab(Store(tmp_path), size=LabSize(width=16, context=4)), turns=3)
    assert list(found.at("fused with backward")) == [1, 2, 4, 8, 16, 32, 64]
    assert CLAIM.judge(found)


def test_on_a_model():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    found = on(model, turns=3)
    assert list(found.at("batched forward")) == [1, 2, 4, 8, 16]
    assert CLAIM.judge(found)
