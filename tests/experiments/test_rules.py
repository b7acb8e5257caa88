"""Every rule can reach every verdict: synthetic figures go in, and the word that comes out is the one they were made for."""

from importlib import import_module

import pytest

from headwise.experiments.claim import VERDICTS
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.registry import all_claims


def cases():
    for claim in all_claims():
        module = claim.measure.__module__.rsplit(".", 1)[-1]
        rows_by_word = import_module(f"tests.experiments.claims.test_{module}").CASES
        words = dict.fromkeys((*claim.possible_verdicts, *rows_by_word))
        yield from (pytest.param(claim, word, rows_by_word.get(word), id=f"{claim.name}-{word}") for word in words)


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_claim_rule_reaches_every_verdict(claim, word, rows):
    assert rows, f"{claim.name} has no figures made to give {word!r}"
    assert word in claim.possible_verdicts
    _, verdict = claim.correct_and_judge(make_statistics(rows))
    assert verdict.word == word
    assert bool(verdict.detail) or word != "depends"


def make_statistics(rows):
    statistics = StatisticTable()
    for name, position, values in rows:
        statistics.add(name, position, values)
    return statistics


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
    corrected, _ = claim.correct_and_judge(statistics)
    keys = {id(statistic): (name, position) for name, position, statistic in corrected}
    assert {keys[statistic_id] for statistic_id in used if corrected[keys[statistic_id]].low is not None} <= requested
    corrected_keys = [key for key in requested if key in keys.values() and corrected[key].low is not None]
    for key in corrected_keys:
        assert corrected[key].level == pytest.approx(1 - 0.05 / len(corrected_keys))


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
