"""One way to look while a model reads: profiles, histories and single measures all listen like this."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from headwise.heads.site import Site
from headwise.look.measure.relations import Relations
from headwise.look.measure.repeats import Echo
from headwise.look.measure.surface import Surface
from headwise.look.record.units import Batch, read, run
from headwise.model import AnyModel


@contextmanager
def listening(sites: Sequence[Site], see: Callable[..., None], *arguments: Any, across: bool = True) -> Iterator[None]:
    """Listen at all sites, or at none where keys come from another text than queries: `see(seen, *arguments, first head)`."""
    with ExitStack() as stack:
        first = 0
        for site in sites:
            if across or site.address.stack != "cross":
                stack.enter_context(site.listen(lambda seen, first=first: see(seen, *arguments, first)))
            first += len(site.head_ids)
        yield


def read_texts(
    model: AnyModel, batches: Iterable[Batch], surface: Surface | None, relations: Relations | None = None
) -> None:
    """Read batches of texts, with any measures of rows and with relations listening."""
    sites = model.all_sites()
    for batch in batches:
        with ExitStack() as stack:
            if surface is not None:
                stack.enter_context(listening(sites, surface.see, batch))
            if relations is not None:
                relations.begin(batch)
                stack.enter_context(listening(sites, relations.see, batch, across=False))
            run(model, batch)


def read_repeats(model: AnyModel, batches: Iterable[tuple[slice, Tensor, bool]], echo: Echo) -> None:
    """Read repeated tokens."""
    sites = model.all_sites()
    for some, ids, repeated in batches:
        with listening(sites, echo.see, some, repeated, across=False):
            read(model, ids.to(model.device))
