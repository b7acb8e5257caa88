"""Listening at the sites of a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from headwise.heads.hook_point import Site


@contextmanager
def listening(sites: Sequence[Site], see: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Listen at all sites: `see(seen, *arguments, first head)`, heads counted over all sites."""
    with ExitStack() as stack:
        first = 0
        for site in sites:
            stack.enter_context(site.listen(lambda seen, first=first: see(seen, *arguments, first)))
            first += len(site.head_ids)
        yield
