"""Every claim runs, small, from nothing; and what does not measure time gives the same figures twice."""

import pytest

import headwise as hw
from headwise.experiments.claim import WORDS
from headwise.experiments.experiment import LabSize
from headwise.experiments.registry import all_claims

TINY = LabSize(width=16, heads=4, steps=16, batch=4, documents=30)


@pytest.mark.slow
def test_every_claim_runs_and_is_the_same_again(tmp_path):
    made = hw.claims(size=TINY, cache=tmp_path / "one", processes=2)
    assert [result.claim.number for result in made] == [*range(1, 28)]
    assert all(result.verdict.word in WORDS for result in made)
    steady = [claim.name for claim in all_claims() if not claim.timed]
    again = hw.claims(steady, size=TINY, cache=tmp_path / "two", processes=1)
    first = {result.claim.name: result.to_dict() for result in made}
    for result in again:
        assert result.to_dict() == first[result.claim.name]
