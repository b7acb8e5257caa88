"""Every claim runs at a small size, and claims that do not measure time are reproducible."""

import pytest

from headwise.experiments.claim import VERDICTS
from headwise.experiments.registry import all_claims
from headwise.experiments.run_claims import claims
from headwise.experiments.trained_model_provider import ExperimentSize

TINY = ExperimentSize(width=16, heads=4, steps=16, batch_size=4, documents=30)


@pytest.mark.slow
def test_claims_all_run_and_repeat_exactly(tmp_path):
    results = claims(size=TINY, cache=tmp_path / "one", processes=2)
    assert [result.claim.number for result in results] == [*range(1, 28)]
    assert all(result.verdict.word in VERDICTS for result in results)
    untimed = [claim.name for claim in all_claims() if not claim.timed]
    repeated = claims(untimed, size=TINY, cache=tmp_path / "two", processes=1)
    first = {result.claim.name: result.to_dict() for result in results}
    for result in repeated:
        assert result.to_dict() == first[result.claim.name]
