"""The rule on figures made by hand, statistics against closed forms, and tiny models measured."""

from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.claims import quantization
from headwise.experiments.claims.quantization import (
    CLAIM,
    COUPLING,
    LITTLE,
    SIDES,
    SPREAD,
    Prices,
    added_up,
    coupling,
    drawn_keys,
    on,
    prices,
    readers,
    sides,
    spread,
)
from headwise.experiments.engine.statistic import Figure
from tests.distillation.tiny import make
from tests.experiments.tiny import tiny_lab

SURE, NOT, BOTH = [0.9, 0.91, 0.92], [0.01, 0.011, 0.012], [0.0, 0.3, 1.2]
VALUES = [-0.9, -0.91, -0.92]  # cached values drift further: keys are unlike values all the same


def rows(*each):
    return [(name, LITTLE, values) for name, values in zip((SPREAD, COUPLING, SIDES), each, strict=True)]


CASES = {
    "holds": rows(SURE, SURE, VALUES),
    "does not hold": rows(SURE, NOT, NOT),
    "depends": rows(SURE, NOT, SURE),
}


def test_what_depends_says_on_what() -> None:
    figures = quantization.Figures()
    for name, at, values in rows(SURE, BOTH, SURE):
        figures.add(name, at, values)
    assert str(CLAIM.judge(figures)).startswith(
        "depends: on the seed, or the text; shown: heads uneven (little models)"
    )


def by_hand(n: int = 40, noise: float = 0.0) -> Prices:
    """Four heads that cost 1, 2, 3 and 4 a token; pairs cost a quarter more than both alone; keys three times values."""
    dice = np.random.default_rng(3)
    counts = dice.integers(5, 20, n).astype(float)
    which = np.array([(a, b) for a in range(4) for b in range(a + 1, 4)])
    singles = np.arange(1.0, 5.0)[:, None] * counts + noise * dice.normal(size=(4, n)) * counts
    pairs = 1.25 * (singles[which[:, 0]] + singles[which[:, 1]])
    values = np.broadcast_to(counts, (4, n))
    return Prices(singles, singles, pairs, which, 2 * singles.sum(0), 3 * values, values, counts)


def test_closed_forms() -> None:
    made, once = by_hand(), np.ones(40)
    assert spread(made, once) == pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2.5)
    assert coupling(made, once) == pytest.approx(0.25)
    assert sides(made, once) == pytest.approx(np.log2(3))
    assert added_up(made, once) == pytest.approx(2)
    told = made.figure(spread)
    assert told.low == pytest.approx(told.high)  # texts all say the same


def test_what_is_due_to_texts_is_no_spread() -> None:
    """Heads that are alike, on texts that are not: the plain spread of their means is far from 0, this one is not."""
    n = 400
    dice = np.random.default_rng(0)
    alike = dice.normal(1, 3, size=(16, n))
    made = replace(by_hand(n), drifts=alike, counts=np.ones(n))
    plain = alike.mean(1)
    assert plain.std(ddof=1) / plain.mean() > 0.1
    told = made.figure(spread)
    assert told.mean < 0.15
    assert told.below(quantization.UNEVEN)
    uneven = replace(made, drifts=alike + np.arange(16)[:, None])
    assert spread(uneven, np.ones(n)) == pytest.approx(np.std(np.arange(16), ddof=1) / 8.5, rel=0.1)


def test_noise_is_no_coupling() -> None:
    dice, n = np.random.default_rng(1), 400
    made = replace(by_hand(n), counts=np.ones(n))
    alone = made.singles[made.which[:, 0]] + made.singles[made.which[:, 1]]
    noisy = replace(made, pairs=alone + dice.normal(0, 5, size=alone.shape))
    assert coupling(noisy, np.ones(n)) < 0.05
    assert noisy.figure(coupling).below(quantization.COUPLED)


def test_heads_that_share_keys_are_drawn_together() -> None:
    model = make(kv_heads=2)
    assert readers(model)["1.1"] == ("1.2", "1.3")
    assert drawn_keys(model, 8) == ["0.0", "0.1", "1.0", "1.1"]
    few = drawn_keys(model, 5)
    assert len(few) == 2, "the heads of two key heads are four, of three six"
    assert drawn_keys(model, 5) == few
    assert {tuple(drawn_keys(model, 5, seed)) for seed in range(20)} != {tuple(few)}


def test_little_models_are_measured(tmp_path) -> None:
    lab = tiny_lab(tmp_path, (0, 1))
    figures = CLAIM.measure(lab)
    own = prices(lab.made(lab.point(1)).model(), lab.documents(1))
    for name, statistic in quantization.STATISTICS.items():
        assert figures[name, LITTLE].values[1] == pytest.approx(statistic(own, np.ones(len(own.counts))), nan_ok=True)
    assert CLAIM.decide(figures)[1].word in CLAIM.words


def test_a_given_model() -> None:
    model = make(kv_heads=2)
    texts = ["to be or not to be", "that is the question", "whether it is nobler", "in the mind to suffer"]
    figures = on(model, texts)
    assert isinstance(figures[COUPLING, "given"], Figure)
    assert figures[SPREAD, "given"].low is not None
    with pytest.raises(HeadwiseError, match="two in each half"):
        on(model, texts[:3])
