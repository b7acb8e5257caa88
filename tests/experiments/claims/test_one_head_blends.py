import pytest

from headwise.experiments.claim_tests.one_head_blends import CLAIM, HEADS
from headwise.experiments.engine.statistic import StatisticTable
from tests.experiments.stub_experiment import stub_experiment

LOOKUP_ROWS = [("all look-ups right", 1, 0.0), ("all look-ups right", 2, 0.1), ("all look-ups right", 4, 1.0),
        ("all look-ups right", 8, 1.0)]  # fmt: skip
SURNAME_ROW = ("lost by one head", "surname", [0.8, 0.9, 0.85])
CASES = {
    "holds": [*LOOKUP_ROWS, SURNAME_ROW, ("lost by one head", "bracket", [0.0, 0.01, -0.01])],
    "depends": [*LOOKUP_ROWS, SURNAME_ROW, ("lost by one head", "bracket", [-0.1, -0.12, -0.11])],
    "does not hold": [
        *(("all look-ups right", heads, 1.0) for heads in HEADS),
        ("lost by one head", "surname", [0.01, -0.01, 0.0]),
    ],
}
WIDE_INTERVAL = [0.1, -0.1, 0.0]


def test_one_head_blends_intervals_are_corrected():
    # Six seeds: mean 0.09524, interval 0.0534 to 0.1371 alone: above the threshold of 0.05. As one of seven that the rule
    # looks at, t of 5 degrees is 4.38 in place of 2.57, and the interval begins at .024.
    values = [0.09524 + step * 0.03986 for step in (-1.3363, -0.8018, -0.2673, 0.2673, 0.8018, 1.3363)]
    statistics = StatisticTable()
    for row in (*LOOKUP_ROWS, ("lost by one head", "referent", values)):
        statistics.add(*row)
    uncorrected = statistics["lost by one head", "referent"]
    assert uncorrected.low == pytest.approx(0.0534, abs=1e-3)
    assert CLAIM.judge(statistics).word == "holds"
    for relation in ("bracket", "surname", "agreement"):
        statistics.add("lost by one head", relation, [0.0, 0.01, -0.01, 0.02, 0.0, 0.0])
    for heads in (1, 4, 8):
        statistics.add("all look-ups right", heads, [float(heads > 1)] * 6)
    corrected, verdict = CLAIM.correct_and_judge(statistics)
    assert corrected["lost by one head", "referent"].level == pytest.approx(1 - 0.05 / 7)
    assert corrected["lost by one head", "referent"].low == pytest.approx(0.0240, abs=1e-3)
    assert verdict.word == "holds"  # the primary quantity, look-ups through one head
    assert "Secondary quantities: undecided: one head loses no relation significantly; open: referent" in verdict.detail


@pytest.mark.parametrize(
    ("one_head", "four", "lost", "word", "reason"),
    [
        (1.0, 1.0, WIDE_INTERVAL, "undecided", "one head loses no relation significantly; open: surname"),
        ([0.4, 0.5, 0.6], 1.0, 0.0, "undecided", ""),
        (0.0, [0.9, 0.96, 1.0], 0.0, "undecided", ""),
        (0.0, 1.0, WIDE_INTERVAL, "undecided", ""),
        (
            0.0,
            1.0,
            0.0,
            "depends",
            "on the relation: one head loses no relation significantly; 4 look-ups at once do not go",
        ),
        (1.0, 1.0, 0.8, "depends", "on the relation: one head loses surname; 4 look-ups at once go through one"),
        (0.0, 0.1, 0.0, "does not hold", "4 look-ups at once are not learned"),
    ],
)
def test_one_head_blends_open_interval_depends(one_head, four, lost, word, reason):
    statistics = StatisticTable().add("all look-ups right", 1, one_head).add("all look-ups right", 4, four)
    verdict = CLAIM.judge(statistics.add("lost by one head", "surname", lost))
    assert verdict.word == word
    assert verdict.detail.startswith(reason)


def test_one_head_blends_loss_is_reported_per_relation(tmp_path):
    accuracies = {1: {"bracket": 0.9, "surname": 0.25}, 4: {"bracket": 0.9, "surname": 0.75}}
    experiment = stub_experiment(tmp_path, lambda config: {"probe_accuracy": accuracies[config.spec.attention.heads]})
    statistics = CLAIM.measure(experiment)
    assert statistics["lost by one head", "surname"].mean == 0.5
    assert statistics["lost by one head", "bracket"].mean == 0
    assert tuple(statistics.by_condition("all look-ups right")) == HEADS
    assert tuple(statistics.by_condition("all look-ups right, MLP behind")) == HEADS[:-1]
    verdict = CLAIM.judge(statistics)
    assert verdict.word == "depends"  # a handful of steps teaches no look-ups
    assert "one head loses surname" in verdict.detail
    assert "not learned" in verdict.detail
    assert set(CLAIM.training_configs(experiment)) == {experiment.make_config(0, 1), experiment.make_config(0)}
