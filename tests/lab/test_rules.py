"""Every rule can reach every verdict: synthetic figures go in, and the word that comes out is the one they were made for."""

from importlib import import_module

import pytest

from headwise.lab.claim import WORDS
from headwise.lab.figure import Figures
from headwise.lab.registry import all_claims


def cases():
    for claim in all_claims():
        module = claim.measure.__module__.rsplit(".", 1)[-1]
        told = import_module(f"tests.lab.claims.test_{module}").CASES
        yield from (pytest.param(claim, word, told.get(word), id=f"{claim.name}-{word}") for word in WORDS)


@pytest.mark.parametrize(("claim", "word", "rows"), list(cases()))
def test_a_verdict_is_reached(claim, word, rows):
    assert rows, f"{claim.name} has no figures made to give {word!r}"
    figures = Figures()
    for name, at, values in rows:
        figures.add(name, at, values)
    verdict = claim.judge(figures)
    assert verdict.word == word
    assert bool(verdict.on) or word != "depends"


def test_claims_are_numbered_and_named_once():
    claims = all_claims()
    assert [claim.number for claim in claims] == list(range(1, 26))
    assert len({claim.name for claim in claims}) == len(claims)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.name)
def test_a_claim_says_all_it_must(claim):
    for told in (claim.says, claim.against, claim.setup, claim.rule):
        assert told.endswith(".")
        assert 20 < len(told) < 900
    assert claim.picture.figures
