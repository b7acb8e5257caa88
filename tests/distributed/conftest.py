"""Crews of other sizes than two, started by the first test that needs one."""

from collections.abc import Iterator

import pytest

from tests.distributed.process_fixtures import Crew


@pytest.fixture(scope="package")
def several(two: Crew) -> Iterator[dict[int, Crew]]:
    others = {size: Crew(size) for size in (3, 4, 5)}
    yield {2: two, **others}
    for crew in others.values():
        crew.stop()
