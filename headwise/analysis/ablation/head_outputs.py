"""What heads gave: z of one run of the model, and its mean over many. The material that ablation puts in a head's place."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.analysis.recording.batching import make_batch, make_batches, read_sites, tokenizer_of
from headwise.analysis.recording.recording import HasSites, pick
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Seen, Site
from headwise.model import AnyModel, quiet
from headwise.spec import Address, SiteAddress, select

LONGEST = 256  # tokens of a unit of plain text: enough for a mean, and the sweep is dear
By = Literal["global", "position"]
Numbers = dict[SiteAddress, tuple[int, ...]]  # which heads of a layer, by number


@dataclass(frozen=True, eq=False)
class Run:
    """z of some heads in one run of the model, and which tokens were real (None: all)."""

    numbers: Numbers
    z: dict[SiteAddress, Tensor]  # (B, n, T, e) each
    real: dict[SiteAddress, Tensor | None]  # (B, T) each

    def of(self, chosen: tuple[Address, ...]) -> Tensor:
        """z of some heads of one layer, (B, n, T, e)."""
        index = _find(self.numbers, chosen, "in the recorded run")
        return self.z[chosen[0].site][:, index]


@dataclass(frozen=True, eq=False)
class Means:
    """The mean z of every head over a corpus, in float64: one for all positions (n, e), or one for each (n, P, e)."""

    by: By
    numbers: Numbers
    sums: dict[SiteAddress, Tensor]  # (n, P, e) each; P is 1 for one mean
    counts: dict[SiteAddress, Tensor]  # (P,) each: how many rows

    def of(self, chosen: tuple[Address, ...]) -> Tensor:
        """The means of some heads of one layer: (n, e), or (n, P, e) by position."""
        site, index = chosen[0].site, _find(self.numbers, chosen, "among the means")
        made = self.sums[site][index] / self.counts[site][:, None]  # (n, P, e)
        return made[:, 0] if self.by == "global" else made

    def __getitem__(self, head: Address | str) -> Tensor:
        """One head's mean: (e,), or (P, e) by position."""
        return self.of((Address.parse(head) if isinstance(head, str) else head,))[0]

    def at(self, chosen: tuple[Address, ...], places: Tensor) -> Tensor:
        """The means where tokens stand at these places, (1 or B, T): broadcastable to (B, n, T, e)."""
        made = self.of(chosen)
        if self.by == "global":
            return made[None, :, None]  # (1, n, 1, e)
        if int(places.max()) >= made.shape[1]:
            raise HeadwiseError(
                f"the text has {int(places.max()) + 1} tokens but means were taken for {made.shape[1]} positions; "
                f"take them over longer texts, or by='global'."
            )
        return made[:, places.to(made.device)].transpose(0, 1)  # (1 or B, n, T, e)

    def merge(self, other: "Means") -> "Means":
        """Both together, as if one pass had seen everything."""
        if (self.by, self.numbers) != (other.by, other.numbers):
            raise HeadwiseError("means of different heads, or taken differently, cannot be merged; take them alike.")
        sums = {site: _added(self.sums[site], other.sums[site], dim=1) for site in self.sums}
        counts = {site: _added(self.counts[site], other.counts[site], dim=0) for site in self.counts}
        return Means(self.by, self.numbers, sums, counts)


@torch.no_grad()
def record_z(
    model: AnyModel,
    ids: Tensor,
    heads: Pattern = "*",
    *,
    padding: Tensor | None = None,
    source: Tensor | None = None,
    source_padding: Tensor | None = None,
) -> Run:
    """Run the model once and keep z of some heads, as it enters W_O.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> run = record_z(Transformer(preset("nano")), torch.tensor([[72, 105, 33]]), "5.1,5.2")
    >>> [(str(site), tuple(z.shape)) for site, z in run.z.items()]
    [('5', (1, 2, 3, 64))]
    """
    run = Run({}, {}, {})
    with quiet(model), ExitStack() as stack:
        for site, chosen in chosen_sites(model, heads):
            run.numbers[site.address] = tuple(address.head for address in chosen)
            run.real[site.address] = source_padding if site.address.stack == "enc" else padding
            stack.enter_context(site.listen(_keep(run, [site.index(address) for address in chosen])))
        model(ids, padding=padding, source=source, source_padding=source_padding, hidden=True)
    return run


def mean_activations(
    model: AnyModel,
    on: Any = None,
    by: By = "global",
    *,
    heads: Pattern = "*",
    longest: int | None = None,
    tokens: int = 2048,
) -> Means:
    """The mean z of every head over texts, one for all positions or one for each; padding never counts.

    `on` is a text, a list of texts, a path or a Corpus; None: the embedded probe set, or the little language for its models.
    `longest` cuts plain text into units of so many tokens (None: 256, or the model's context), `tokens` is how many are
    read at once.
    """
    batches = make_batches(read_on(model, on, longest), tokens, device=model.device)
    heads = pick(heads, [address for site in read_sites(model, heads) for address in site.addresses])
    return mean_of(
        (
            record_z(
                model,
                batch.ids,
                heads,
                padding=None if batch.whole else batch.real,
                source=batch.source,
                source_padding=batch.source_padding,
            )
            for batch in batches
        ),
        by,
    )


def read_on(model: AnyModel, on: Any, longest: int | None = None) -> Reading:
    """Texts, or pairs, that change and ablation are measured on: units of plain text have at most 256 tokens, unless said."""
    return Reading.of(model, on, longest, answers=True, usual=LONGEST)


def run_on(model: AnyModel, given: Any, heads: Pattern = "*") -> Run:
    """z of some heads where the model reads a text, token ids (T,) or (B, T), or a pair (source, text); a run stays.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> [(str(site), tuple(z.shape)) for site, z in run_on(model, "Hi!", "5.1").z.items()]
    [('5', (1, 1, 3, 64))]
    """
    if isinstance(given, Run):
        return given
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given):
        batch = make_batch(list(Reading.of(model, [given], answers=True)), device=model.device)
        return record_z(model, batch.ids, heads, source=batch.source, source_padding=batch.source_padding)
    ids = torch.as_tensor(tokenizer_of(model).encode(given) if isinstance(given, str) else given, device=model.device)
    ids = ids[None] if ids.ndim == 1 else ids  # (B, T)
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        raise HeadwiseError(
            f"another run is a text, token ids (T,) or (B, T), or a pair (source, text); got {given!r:.80}."
        )
    return record_z(model, ids, heads)


def mean_of(runs: Iterable[Run], by: By = "global") -> Means:
    """The mean over runs, one after the other; for models that need more than a text, and for any set of inputs."""
    if by not in ("global", "position"):
        raise HeadwiseError(f"means are taken by 'global' or by 'position'; got {by!r}.")
    total: Means | None = None
    for run in runs:
        here = _summed(run, by)
        total = here if total is None else total.merge(here)
    if total is None:
        raise HeadwiseError("there is nothing to take a mean over; give at least one run.")
    return total


def chosen_sites(model: HasSites, heads: Pattern) -> Iterator[tuple[Site, tuple[Address, ...]]]:
    """The layers in which a pattern names heads, and those heads; "*" is all, in every stack."""
    sites = model.all_sites()
    there = tuple(address for site in sites for address in site.addresses)
    wanted = set(there if isinstance(heads, str) and heads.strip() == "*" else select(heads, there))
    for site in sites:
        chosen = tuple(address for address in site.addresses if address in wanted)
        if chosen:
            yield site, chosen


def places_of(z: Tensor, real: Tensor | None) -> Tensor:
    """Where the tokens of a call stand, padding not counted: (1 or B, T)."""
    if real is None:
        return torch.arange(z.shape[2], device=z.device)[None]
    if real.shape != (len(z), z.shape[2]):
        raise HeadwiseError(
            f"padding is {tuple(real.shape)} but the call is {(len(z), z.shape[2])}; True at real tokens."
        )
    return (real.long().cumsum(1) - 1).clamp(min=0)


def take_rows(z: Tensor, real: Tensor | None, places: Tensor, batch: int) -> Tensor:
    """Rows of another run for tokens at these places, (1 or B, T); a shorter text begins again: (B, n, T, e)."""
    if len(z) not in (1, batch):
        raise HeadwiseError(f"the other run has {len(z)} texts and this one {batch}; give as many, or a single one.")
    first = torch.zeros(len(z), 1, dtype=torch.long, device=z.device)
    length = first + z.shape[2] if real is None else real.long().sum(1, keepdim=True)  # (B, 1)
    first = first if real is None else real.long().argmax(1, keepdim=True)
    rows = (first + places.to(z.device) % length.clamp(min=1)).expand(batch, -1)  # (B, T)
    return z.expand(batch, *z.shape[1:]).gather(
        2, rows[:, None, :, None].expand(-1, z.shape[1], -1, z.shape[3])
    )  # (B, n, T, e)


def _keep(run: Run, index: list[int]) -> Callable[[Seen], None]:
    def listener(seen: Seen) -> None:
        run.z[seen.site.address] = seen.z[:, index].detach()

    return listener


def _summed(run: Run, by: By) -> Means:
    sums, counts = {}, {}
    for site, z in run.z.items():
        real, z = run.real[site], z.double()  # (B, n, T, e)
        rows = torch.ones(len(z), z.shape[2], device=z.device) if real is None else real
        places = places_of(z, real).expand(len(z), -1)[rows.bool()]  # (rows,)
        places = places if by == "position" else torch.zeros_like(places)
        flat = z.transpose(1, 2)[rows.bool()]  # (rows, n, e)
        P = int(places.max()) + 1
        sums[site] = flat.new_zeros(P, *flat.shape[1:]).index_add_(0, places, flat).transpose(0, 1)  # (n, P, e)
        counts[site] = torch.bincount(places, minlength=P).double()
    return Means(by, dict(run.numbers), sums, counts)


def _find(numbers: Numbers, chosen: tuple[Address, ...], where: str) -> list[int]:
    there = numbers.get(chosen[0].site, ())
    for address in chosen:
        if address.head not in there:
            raise HeadwiseError(f"head {address} is not {where}; take it in with heads='*' or its address.")
    return [there.index(address.head) for address in chosen]


def _added(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """A sum of two, the shorter one filled up with zeros."""
    long, short = (a, b) if a.shape[dim] >= b.shape[dim] else (b, a)
    total = long.clone()
    total.narrow(dim, 0, short.shape[dim]).add_(short)
    return total
