"""Crews of two and of three, started by the first test that needs one."""

from collections.abc import Iterator

import pytest

from tests.team.crew import Crew


@pytest.fixture(scope="package")
def two() -> Iterator[Crew]:
    crew = Crew(2)
    yield crew
    crew.stop()


@pytest.fixture(scope="package")
def several() -> Iterator[dict[int, Crew]]:
    crews = {size: Crew(size) for size in (2, 3, 4, 5)}
    yield crews
    for crew in crews.values():
        crew.stop()
