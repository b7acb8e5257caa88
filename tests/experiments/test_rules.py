"""Every rule can reach every verdict: synthetic figures go in, and the word that comes out is the one they were made for."""

from importlib import import_module

import pytest

from headwise.experiments.claim import WORDS
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.registry import all_claims


def cases():
    for claim in all_claims():
        module = claim.measure.__module__.rsplit(".", 1)[-1]
        told = import_module(f"tests.experiments.claims.test_{module}").CASES
        words = dict.fromkeys((*claim.words, *told))
        yield from (pytest.param(claim, word, told.get(word), id=f"{claim.name}-{word}") for word in words)


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_a_verdict_is_reached(claim, word, rows):
    assert rows, f"{claim.name} has no figures made to give {word!r}"
    assert word in claim.words
    _, verdict = claim.decide(made_of(rows))
    assert verdict.word == word
    assert bool(verdict.on) or word != "depends"


def made_of(rows):
    figures = Figures()
    for name, at, values in rows:
        figures.add(name, at, values)
    return figures


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_a_rule_looks_at_no_interval_it_does_not_correct_for(claim, word, rows, monkeypatch):
    figures = made_of(rows)
    asked, looked = set(claim.asks(figures)), []
    for name in ("above", "below"):
        plain = getattr(Figure, name)
        monkeypatch.setattr(
            Figure, name, lambda figure, bar, plain=plain: looked.append(id(figure)) or plain(figure, bar)
        )
    corrected, _ = claim.decide(figures)
    keys = {id(figure): (name, at) for name, at, figure in corrected}
    assert {keys[one] for one in looked if corrected[keys[one]].low is not None} <= asked
    wide = [key for key in asked if key in keys.values() and corrected[key].low is not None]
    for key in wide:
        assert corrected[key].level == pytest.approx(1 - 0.05 / len(wide))


def test_identities_are_no_findings():
    # Rank of a product, derivative of a sum, width · width however it is shared out: known before anything is measured.
    whole = {claim.name for claim in all_claims() if "true by construction" in claim.words}
    assert whole == {"parameters", "flops", "low-rank", "jacobians"}
    assert all("holds" not in claim.words for claim in all_claims() if claim.name in whole)
    assert {claim.name for claim in all_claims() if claim.identity} == {*whole, "mixing"}
    assert all(set(claim.words) <= set(WORDS) for claim in all_claims())


def test_claims_are_numbered_and_named_once():
    claims = all_claims()
    assert [claim.number for claim in claims] == [*range(1, 28)]
    assert len({claim.name for claim in claims}) == len(claims)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.name)
def test_a_claim_says_all_it_must(claim):
    for told in (claim.says, claim.against, claim.setup, claim.rule):
        assert told.endswith(".")
        assert 20 < len(told) < 900
    assert claim.picture.figures
