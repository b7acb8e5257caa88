import pytest

import headwise as hw
from headwise.analysis.roles.profile import profile
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.specialization import (
    judge,
    measure,
    measure_model,
    relation_gains_and_significance,
    role_fraction,
)
from headwise.experiments.engine.statistic import StatisticTable
from tests.analysis import constructed_heads
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_experiment

SHARE, FOLLOWED = "share of heads with a role", "relations followed"


def make_rows(fraction, gained, relations):
    return [
        (SHARE, "trained", fraction), (f"{SHARE}, gained", None, gained),
        (FOLLOWED, "trained", relations), (f"{FOLLOWED}, gained", None, relations),
    ]  # fmt: skip


CASES = {
    "holds": make_rows([0.8, 0.82, 0.8], [0.8, 0.82, 0.8], [5, 5, 6]),
    "depends": make_rows([0.3, 0.32, 0.3], [0.3, 0.32, 0.3], [2, 2, 3]),
    "does not hold": make_rows([0.8, 0.8, 0.8], [0.0, 0.0, 0.01], [0, 0, 0]),
}


@pytest.mark.parametrize(
    ("gained", "relations", "reason"),
    [
        ([0.0, 0.0, 0.01], [0, 1, 0], ""),
        ([-0.1, 0.0, 0.2], [0, 0, 0], ""),
        ([0.2, 0.21, 0.2], [0, 1, 0], ""),
        ([0.2, 0.21, 0.2], [0, 0, 0], "on the head"),
    ],
)
def test_specialization_open_interval_depends(gained, relations, reason):
    statistics = StatisticTable()
    for row in make_rows([0.8, 0.8, 0.8], gained, relations):
        statistics.add(*row)
    verdict = judge(statistics)
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


def test_role_share_untrained_model(tmp_path):
    experiment = tiny_experiment(tmp_path)
    head_profile = profile(
        experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus(), causal=False
    )
    assert role_fraction(head_profile) == sum(head.role != "unclear" for head in head_profile) / 8
    assert not any(counts for _, counts in relation_gains_and_significance(head_profile, min_arcs=1).values())


def test_specialization_constructed_heads_have_roles():
    # Twelve heads, seven of which were given a job; one of them follows brackets wherever they are.
    head_profile = profile(constructed_heads.decoder(), constructed_heads.documents(), causal=False)
    assert (
        role_fraction(head_profile)
        == sum(role != "unclear" for role, _ in constructed_heads.DECODER.values()) / 12
        == 7 / 12
    )
    gain, counts = relation_gains_and_significance(head_profile)["bracket"]
    assert gain > 0.8
    assert counts
    assert judge(measure_model(constructed_heads.decoder(), constructed_heads.documents())).word == "holds"


def test_specialization_tiny_experiment_gives_statistics(tmp_path):
    experiment = tiny_experiment(tmp_path)
    statistics = measure(experiment)
    assert judge(statistics).word in VERDICTS
    gained = statistics[f"{SHARE}, gained"].mean
    assert gained == pytest.approx(statistics[SHARE, "trained"].mean - statistics[SHARE, "untrained"].mean)


def test_specialization_given_model_gives_verdict(tmp_path):
    experiment = tiny_experiment(tmp_path)
    assert (
        judge(
            measure_model(
                experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus()
            )
        ).word
        in VERDICTS
    )


def test_specialization_attached_model_gives_verdict():
    model = hw.attach(*build("gpt2"))
    assert judge(measure_model(model, documents(24))).word in VERDICTS
