"""Worker groups of more than two processes, started by the first test that needs one."""

from collections.abc import Iterator

import pytest

from tests.distributed.process_fixtures import WorkerGroup


@pytest.fixture(scope="package")
def several(two: WorkerGroup) -> Iterator[dict[int, WorkerGroup]]:
    others = {size: WorkerGroup(size) for size in (3, 4, 5)}
    yield {2: two, **others}
    for group in others.values():
        group.stop()
