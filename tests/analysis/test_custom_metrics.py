"""Measures and roles that somebody brings: as exact as ours, and wherever ours are."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.metric import Measure, Number, WeightAt, WeightOn
from headwise.analysis.metrics.retrieval import CUE, NEEDLE, Retrieval, make_needles
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.tasks import run_task
from headwise.analysis.recording.batching import Unit, make_batches
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Role
from headwise.errors import HeadwiseError
from headwise.kernels import causal
from headwise.text.documents import Document
from headwise.ui.report_data import make_book
from tests.analysis.constructed_heads import WORDS, decoder, documents
from tests.analysis.dense_reference import by_scores, distinct, unit

N = 13


def third(text: Unit) -> list[float]:
    """Every third token."""
    return [float(place % 3 == 0) for place in range(len(text.ids))]


def two_back(text: Unit) -> list[int]:
    return [place - 2 for place in range(len(text.ids))]


def looked(measure: Measure, scores: torch.Tensor, norms: torch.Tensor | None = None, **options: Any) -> Tally:
    tally = Tally(1)
    seen = by_scores(scores.double()[None, None], causal(), norms=norms)
    Runner(tally, [measure], **options).see(seen, distinct(len(scores)), 0)
    return tally


@pytest.mark.parametrize("detail", ["full", "light"])
def test_weight_on_marked_tokens(detail: str) -> None:
    """A causal head that looks at all it sees alike: row i has ⌊i/3⌋ marked tokens behind the first, of i + 1."""
    norms = torch.arange(1.0, N + 1)
    tally = looked(WeightOn("third", third), torch.zeros(N, N), norms, detail=detail)
    rows = [i for i in range(N) if i >= 3]  # the first token is marked, and no target
    share = np.mean([(i // 3) / (i + 1) for i in rows])
    heavy = np.mean([sum(j + 1 for j in range(3, i + 1, 3)) / sum(range(1, i + 2)) for i in rows])
    assert tally.mean("third") == pytest.approx([share])
    assert tally.mean("third null") == pytest.approx([share])
    assert tally.mean("third valued") == pytest.approx([heavy])
    assert tally.per_bucket("third")[1].sum() == len(rows)


@pytest.mark.parametrize("detail", ["full", "light"])
def test_weight_at_a_token_of_its_own(detail: str) -> None:
    """Score β two back, 0 elsewhere: e^β / (e^β + i) in row i; and of what is fetched, in proportion to lengths."""
    beta, scores = 1.7, torch.zeros(N, N)
    scores[torch.arange(2, N), torch.arange(N - 2)] = beta
    norms = torch.arange(1.0, N + 1)
    tally = looked(WeightAt("two back", two_back), scores, norms, detail=detail)
    rows = range(3, N)  # row 2 would look at the first token
    top = np.exp(beta)
    assert tally.mean("two back") == pytest.approx([np.mean([top / (top + i) for i in rows])])
    assert tally.mean("two back null") == pytest.approx([np.mean([1 / (i + 1) for i in rows])])
    heavy = [top * (i - 1) / (top * (i - 1) + sum(range(1, i + 2)) - (i - 1)) for i in rows]
    assert tally.mean("two back valued") == pytest.approx([np.mean(heavy)])


def test_the_largest_weight_is_shared_by_equals() -> None:
    """Hits: a head that looks everywhere alike has one in all it sees, one that looks two back in every other row, half."""
    hits = WeightAt("two back", two_back, hits=True)
    rows = range(3, N)
    assert looked(hits, torch.zeros(N, N)).mean("two back") == pytest.approx([np.mean([1 / (i + 1) for i in rows])])
    scores = torch.zeros(N, N)
    for i in range(N):
        scores[i, i - 2 if i % 2 and i > 1 else i] = 3.0
    tally = looked(hits, scores)
    assert tally.mean("two back") == pytest.approx([np.mean([i % 2 for i in rows])])
    assert tally.mean("two back valued") == pytest.approx(tally.mean("two back"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_makes_no_difference(side: str) -> None:
    model, texts = decoder(), [unit(0, range(2, 23)), unit(1, range(5, 16))]
    measures = [WeightOn("third", third), WeightAt("two back", two_back)]
    found = []
    for batches in (make_batches(texts, 4096, side), (one for text in texts for one in make_batches([text]))):
        tally = Tally(12)
        with torch.no_grad():
            Runner(tally, measures).read(model, batches)
        found.append(tally)
    for name in found[0].fields:
        assert found[0].mean(name) == pytest.approx(found[1].mean(name), abs=1e-6, nan_ok=True)


BACK = WeightAt("one back", lambda text: [place - 1 for place in range(len(text.ids))], hue=120, more="looks back")
LOOKS_BACK = Role("looks back", BACK.score, 0.3)


@pytest.fixture(scope="module")
def made() -> Profile:
    return profile(decoder(), documents(), measures=[BACK], roles=[LOOKS_BACK], causal=False)


def test_an_own_measure_is_the_same_as_ours(made: Profile) -> None:
    """One token back, brought by somebody: the numbers, the role, its cases and its heads are those of `previous token`."""
    for mine, ours in (
        ("one back", "aimed 1"),
        ("one back null", "aimed null 1"),
        ("one back valued", "aimed valued 1"),
    ):
        assert made.measure(mine) == pytest.approx(made.measure(ours), abs=1e-6)
    found = made.roles()
    assert found["looks back"] == found["previous token"]
    head = made[found["looks back"][0]]
    one, other = (next(s for s in head.roles if s.role == role) for role in ("looks back", "previous token"))
    assert (one.rung, one.score, one.null, one.rows) == pytest.approx((other.rung, other.score, other.null, other.rows))
    assert head.cases["looks back"] == head.cases["previous token"] != ()


def test_it_is_wherever_ours_are(made: Profile, tmp_path: Path) -> None:
    again = Profile.load(made.save(tmp_path / "made.npz"))
    assert again.numbers == made.numbers
    assert again.own == made.own == (LOOKS_BACK,)
    for one in (made, again):
        assert one.roles()["looks back"]
        assert one["0.0"].cases["looks back"] == made["0.0"].cases["looks back"]
        assert "one back" in one.table()[0]
        assert one.to_dict()["heads"][0]["measures"]["one back"] > 0.9
        book = make_book(one)
        assert book["heads"][0]["measures"]["one back"] > 0.9
        assert book["measures"]["one back"]["more"] == "looks back"
        assert "looks back" in book["heads"][0]["roles"]
        assert one.plot.depth(["one back"]).rows[0]["measure"] == "one back"
        assert any(support.role == "looks back" for head in one for support in head.roles)
        assert [row["head"] for row in one.plot.roles().rows] == [str(address) for address in one.addresses]


def test_halves_merge(made: Profile) -> None:
    texts, model = documents(), decoder()
    parts = [
        profile(model, some, measures=[BACK], roles=[LOOKS_BACK], causal=False) for some in (texts[:30], texts[30:])
    ]
    merged = parts[0].merge(parts[1])
    assert merged.measure("one back") == pytest.approx(made.measure("one back"), abs=1e-6)
    assert merged.roles() == made.roles()
    with pytest.raises(HeadwiseError, match="different measures or roles cannot be merged"):
        parts[0].merge(profile(model, texts[30:], causal=False))


def test_a_profile_stays_as_it_is(made: Profile) -> None:
    with pytest.raises(FrozenInstanceError):
        made.supports = ()  # pyright: ignore[reportAttributeAccessIssue]


class Odd(Measure):
    numbers = (Number("odd"),)

    def take(self, rows: Any) -> Any:
        return rows.total, rows.total


@pytest.mark.parametrize(
    ("measures", "roles", "said"),
    [
        ([WeightOn("digit", third)], [], "there is a measure 'digit' already"),
        ([BACK, BACK], [], "there is a measure 'one back' already"),
        ([WeightOn("short", lambda text: [1.0])], [], r"'short' gave \(1,\) numbers for a text of"),
        ([WeightAt("far", lambda text: [999] * len(text.ids))], [], "'far' aims at a token behind the end"),
        ([Odd()], [], "'odd' took"),
        ([], [LOOKS_BACK], "needs 'one back' to be measured"),
        ([Odd()], [Role("odd", Odd.numbers[0], 0.3)], "a null and a valued twin; 'odd' has none"),
        ([BACK], [Role("local", BACK.score, 0.3, None, "within 3")], "there is a role 'local' already"),
        ([BACK], [Role("mine", BACK.score, 1.3)], "a threshold between 0 and 1"),
    ],
)  # fmt: skip
def test_what_is_refused(measures: list[Measure], roles: list[Role], said: str) -> None:
    with pytest.raises(HeadwiseError, match=said):
        profile(decoder(), documents(3), measures=measures, roles=roles, causal=False)


# Retrieval.

THREE = [Document.of(WORDS[start : start + 20]) for start in (0, 20, 40)]  # no word is in two of them


def test_needles_stand_where_they_are_said_to() -> None:
    for needle in make_needles(decoder(), THREE, seed=3, texts=5):
        again, start = needle.again, needle.start
        assert needle.ids[start : start + NEEDLE] == needle.ids[again:] != needle.other[start : start + NEEDLE]
        assert (
            needle.other[:start] + needle.other[start + NEEDLE :] == needle.ids[:start] + needle.ids[start + NEEDLE :]
        )
        asked = {row: place for row, place in enumerate(needle.places) if place >= 0}
        assert all(needle.ids[row + 1] == needle.ids[place] for row, place in asked.items())
        assert len(asked) == NEEDLE - CUE


def test_the_head_that_copies_retrieves() -> None:
    """A model that repeats by one head: it looks at every token that is copied, and at none where another needle stands; a
    head that looks at the same token, or one back, at none."""
    model, tally = decoder(), Tally(12)
    with torch.no_grad():
        run_task(model, Retrieval(THREE), tally)
    names = [str(address) for site in model.sites() for address in site.addresses]
    score, null, valued = (tally.mean(name) for name in ("retrieval", "retrieval null", "retrieval valued"))
    assert score[names.index("1.0")] == valued[names.index("1.0")] == pytest.approx(1)
    assert null[names.index("1.0")] == pytest.approx(0, abs=1e-6)
    for other in ("0.0", "0.2"):
        assert score[names.index(other)] == pytest.approx(0, abs=1e-6)
    counts = tally.per_bucket("retrieval")[1][:, 0]
    assert 0 < counts.max() <= NEEDLE - CUE


def test_where_nothing_can_be_copied_nothing_is_said() -> None:
    blind = decoder()
    seen = profile(blind, documents(8), measures=[Retrieval(["1 2"])], causal=False)
    assert np.isnan(seen.measure("retrieval")).all()
