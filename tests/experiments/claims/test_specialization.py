import pytest

import headwise as hw
from headwise.analysis.roles.profile import profile
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.specialization import followed, having_roles, judge, measure, on
from headwise.experiments.engine.statistic import Figures
from tests.analysis import constructed_heads
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_lab

SHARE, FOLLOWED = "share of heads with a role", "relations followed"


def told(share, gained, relations):
    return [
        (SHARE, "trained", share), (f"{SHARE}, gained", None, gained),
        (FOLLOWED, "trained", relations), (f"{FOLLOWED}, gained", None, relations),
    ]  # fmt: skip


CASES = {
    "holds": told([0.8, 0.82, 0.8], [0.8, 0.82, 0.8], [5, 5, 6]),
    "depends": told([0.3, 0.32, 0.3], [0.3, 0.32, 0.3], [2, 2, 3]),
    "does not hold": told([0.8, 0.8, 0.8], [0.0, 0.0, 0.01], [0, 0, 0]),
}


@pytest.mark.parametrize(
    ("gained", "relations", "on"),
    [
        ([0.0, 0.0, 0.01], [0, 1, 0], "on the seed"),
        ([-0.1, 0.0, 0.2], [0, 0, 0], "on the seed"),
        ([0.2, 0.21, 0.2], [0, 1, 0], "on the seed"),
        ([0.2, 0.21, 0.2], [0, 0, 0], "on the head"),
    ],
)
def test_an_open_question_is_not_answered(gained, relations, on):
    figures = Figures()
    for row in told([0.8, 0.8, 0.8], gained, relations):
        figures.add(*row)
    verdict = judge(figures)
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


def test_an_untrained_model_has_no_roles(tmp_path):
    lab = tiny_lab(tmp_path)
    found = profile(lab.made(lab.point(0)).model(), lab.documents(), causal=False)
    assert having_roles(found) == sum(head.role != "unclear" for head in found) / 8
    assert not any(counts for _, counts in followed(found, fewest=1).values())


def test_heads_built_to_do_something():
    # Twelve heads, seven of which were given a job; one of them follows brackets wherever they are.
    found = profile(constructed_heads.decoder(), constructed_heads.documents(), causal=False)
    assert (
        having_roles(found) == sum(role != "unclear" for role, _ in constructed_heads.DECODER.values()) / 12 == 7 / 12
    )
    gain, counts = followed(found)["bracket"]
    assert gain > 0.8
    assert counts
    assert judge(on(constructed_heads.decoder(), constructed_heads.documents())).word == "holds"


def test_figures_of_the_lab(tmp_path):
    lab = tiny_lab(tmp_path)
    figures = measure(lab)
    assert judge(figures).word in WORDS
    gained = figures[f"{SHARE}, gained"].mean
    assert gained == pytest.approx(figures[SHARE, "trained"].mean - figures[SHARE, "untrained"].mean)


def test_on_a_given_model(tmp_path):
    lab = tiny_lab(tmp_path)
    assert judge(on(lab.made(lab.point(0)).model(), lab.documents())).word in WORDS


def test_on_an_attached_model():
    model = hw.attach(*build("gpt2"))
    assert judge(on(model, documents(24))).word in WORDS
