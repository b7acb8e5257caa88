"""Every rule can reach every verdict: synthetic figures go in, and the word that comes out is the one they were made for."""

from importlib import import_module

import pytest

from headwise.experiments.claim import VERDICTS
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.registry import all_claims


def make_statistics(rows):
    statistics = StatisticTable()
    for name, position, values in rows:
        statistics.add(name, position, values)
    return statistics


def with_wide_intervals(claim, rows):
    """Return figures whose judged intervals include every threshold."""
    judged = set(claim.judged(make_statistics(rows)))
    return [
        (name, position, [-1e3, 0.0, 1e3] if (name, position) in judged else values) for name, position, values in rows
    ]


def cases():
    for claim in all_claims():
        module = claim.measure.__module__.rsplit(".", 1)[-1]
        rows_by_word = import_module(f"tests.experiments.claims.test_{module}").CASES
        if "undecided" in claim.possible_verdicts and "undecided" not in rows_by_word:
            rows_by_word = {**rows_by_word, "undecided": with_wide_intervals(claim, rows_by_word["holds"])}
        words = dict.fromkeys((*claim.possible_verdicts, *rows_by_word))
        yield from (pytest.param(claim, word, rows_by_word.get(word), id=f"{claim.name}-{word}") for word in words)


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_claim_rule_reaches_every_verdict(claim, word, rows):
    assert rows, f"{claim.name} has no figures made to give {word!r}"
    assert word in claim.possible_verdicts
    statistics = make_statistics(rows)
    verdict = claim.judge(statistics.bonferroni(claim.judged(statistics)))
    assert verdict.word == word
    assert bool(verdict.detail) or word not in ("depends", "undecided")
    assert not verdict.detail.startswith("on the seed")  # undecided, which is not a factor


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_claim_rule_uses_only_corrected_intervals(claim, word, rows, monkeypatch):
    statistics = make_statistics(rows)
    requested, used = set(claim.judged(statistics)), []
    for name in ("is_interval_above", "is_interval_below"):
        original = getattr(Statistic, name)
        monkeypatch.setattr(
            Statistic,
            name,
            lambda statistic, threshold, original=original: (
                used.append(id(statistic)) or original(statistic, threshold)
            ),
        )
    corrected = statistics.bonferroni(requested)
    claim.judge(corrected)
    keys = {id(statistic): (name, position) for name, position, statistic in corrected}
    assert {keys[statistic_id] for statistic_id in used if corrected[keys[statistic_id]].low is not None} <= requested
    corrected_keys = [key for key in requested if key in keys.values() and corrected[key].low is not None]
    for key in corrected_keys:
        assert corrected[key].level == pytest.approx(1 - 0.05 / len(corrected_keys))


PRIMARY = [claim for claim in all_claims() if claim.primary is not None]


@pytest.mark.parametrize("claim", PRIMARY, ids=lambda claim: claim.name)
def test_primary_quantity_decides_by_its_own_interval(claim):
    primary = claim.primary
    step = 0.1 if 0.2 < primary.threshold < 0.8 else 0.01
    sign = 1 if primary.direction == "above" else -1
    for word, center in (("holds", sign * step), ("does not hold", -sign * step), ("undecided", 0.0)):
        values = [primary.threshold + center + noise * step for noise in (-0.1, 0.0, 0.1)]
        # t(2) at 97.5% is 4.303: half width 4.303 * 0.1 / √3 = 0.248 steps
        table = StatisticTable().add(primary.statistic, primary.condition, values)
        assert primary.judge(table).word == word
    assert f"{primary.threshold:g}" in primary.rule


def test_primary_quantities_exist_in_the_statistics_of_their_claims():
    for param in cases():
        claim, _, rows = param.values
        if claim.primary is not None and rows is not None and claim.name not in MEASURED_ONLY:
            assert claim.primary.key in make_statistics(rows)


# Primary quantities that the secondary rule does not use; tests of their modules measure them.
MEASURED_ONLY = {"loss-vs-head-count"}


def test_verdict_of_claim_is_that_of_primary_quantity():
    claim = next(claim for claim in PRIMARY if claim.name == "depth")
    statistics = make_statistics(
        [
            (claim.primary.statistic, "at the end", [0.0, 0.001, 0.002]),
            (claim.primary.statistic, "over training", [0, 9, 4]),
        ]
    )
    _, verdict = claim.correct_and_judge(statistics)
    assert verdict.word == "does not hold"
    assert "Secondary quantities: undecided" in verdict.detail


def test_claims_identities_cannot_hold():
    # Rank of a product, derivative of a sum, width · width however it is shared out: known before anything is measured.
    identities = {claim.name for claim in all_claims() if "true by construction" in claim.possible_verdicts}
    assert identities == {"parameters", "flops", "low-rank", "jacobians"}
    assert all("holds" not in claim.possible_verdicts for claim in all_claims() if claim.name in identities)
    assert {claim.name for claim in all_claims() if claim.identity} == {*identities, "output-mixing"}
    assert all(set(claim.possible_verdicts) <= set(VERDICTS) for claim in all_claims())


def test_claims_have_unique_numbers_and_names():
    claims = all_claims()
    assert [claim.number for claim in claims] == [*range(1, 28)]
    assert len({claim.name for claim in claims}) == len(claims)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.name)
def test_claim_texts_are_complete(claim):
    for text in (claim.statement, claim.counterevidence, claim.setup, claim.rule):
        assert text.endswith(".")
        assert 20 < len(text) < 900
    assert claim.plot.statistics
