"""What a model reads while it is looked at: texts as units, units in batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import Site
from headwise.heads.head import Pattern
from headwise.model import AnyModel, quiet
from headwise.spec import SiteAddress, select
from headwise.text import Tokenizer
from headwise.text.align import Alignment
from headwise.text.corpus import Pair
from headwise.text.documents import Document


@dataclass(frozen=True, eq=False)
class Unit:
    """One text as a model reads it: the unit of the statistics. Long texts are cut into several.

    Of a pair `ids` are the text behind the token a decoder starts from, and `source` is what the encoder reads.
    """

    number: int  # where it stands in the corpus
    bucket: int  # where its sums go, by its text
    ids: tuple[int, ...]
    document: Document | None  # None: a piece of plain text
    _align: Callable[[], Alignment]
    source: tuple[int, ...] = ()
    text: str = ""  # what it covers; of a pair what is to be written
    source_text: str = ""  # of a pair
    picture: Any = None  # the picture, where tokens are patches (picture.py)

    @property
    def size(self) -> int:
        """Tokens that it takes in a batch."""
        return max(len(self.ids), len(self.source))

    @property
    def item(self) -> "Document | Pair | str":
        """What a corpus would hold to give this unit again."""
        return self.document or (Pair(self.source_text, self.text) if self.source else self.text)

    @cached_property
    def alignment(self) -> Alignment:
        """Its tokens and words."""
        return self._align()

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Its tokens as a person would write them."""
        aligned = self.alignment
        spans = zip(aligned.spans, aligned.tokens, strict=True)
        return tuple(aligned.text[start:end].strip() or token for (start, end), token in spans)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some units side by side, padded."""

    units: tuple[Unit, ...]
    ids: Tensor  # (B, T)
    real: Tensor  # (B, T): True at tokens, False at padding
    source: Tensor | None = None  # (B, S), of pairs
    source_real: Tensor | None = None  # (B, S)
    pixels: Tensor | None = None  # (B, C, height, width), of pictures

    @cached_property
    def first(self) -> Tensor:
        """Where each row's first token stands, (B,)."""
        return self.real.long().argmax(1)

    @property
    def whole(self) -> bool:
        """Whether there is no padding at all."""
        return bool(self.real.all())

    @property
    def source_padding(self) -> Tensor | None:
        """Which tokens of the sources are real, where there is padding among them."""
        return None if self.source_real is None or bool(self.source_real.all()) else self.source_real


def make_batches(
    units: Iterable[Unit], tokens: int = 4096, side: str = "right", device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Units in their order, as many as fit into so many tokens; sorted within a handful, so that little is padding."""
    waiting: list[Unit] = []
    held = 0

    def flush() -> Iterator[Batch]:
        waiting.sort(key=lambda unit: unit.size)
        some: list[Unit] = []
        for unit in waiting:
            if some and (len(some) + 1) * unit.size > tokens:
                yield make_batch(some, side, device)
                some = []
            some.append(unit)
        if some:
            yield make_batch(some, side, device)
        waiting.clear()

    for unit in units:
        waiting.append(unit)
        held += unit.size
        if held > 8 * tokens:
            yield from flush()
            held = 0
    yield from flush()


def make_batch(units: list[Unit], side: str = "right", device: torch.device | str = "cpu") -> Batch:
    """Units of any lengths, padded on one side; sources on the right."""
    ids, real = _stacked([unit.ids for unit in units], side)
    made = Batch(tuple(units), ids.to(device), real.to(device))
    if units[0].picture is not None:
        return replace(made, pixels=torch.stack([unit.picture.pixels for unit in units]).to(device))
    if not units[0].source:
        return made
    sources, there = _stacked([unit.source for unit in units])
    return replace(made, source=sources.to(device), source_real=there.to(device))


def run(model: AnyModel, batch: Batch, hidden: bool = True) -> Any:
    """One forward pass over a batch; padding is named only where there is some, so that the plain path stays plain. Of
    pictures the model's own output comes back."""
    if batch.pixels is not None:
        own: Any = model
        return own(pixel_values=batch.pixels.to(next(iter(model.parameters())).dtype))
    return read(model, batch.ids, None if batch.whole else batch.real, hidden)


def read(model: AnyModel, ids: Tensor, padding: Tensor | None = None, hidden: bool = True) -> Tensor:
    """One forward pass over texts, (B, T); an encoder-decoder reads each as its source and as its target."""
    both = {"source": ids, "source_padding": padding} if model.spec.kind == "encoder-decoder" else {}
    return model(ids, padding=padding, hidden=hidden, **both)


def tokenizer_of(model: AnyModel) -> Tokenizer:
    """The model's tokenizer, or an error that says what to do."""
    if model.pictures is not None:
        raise HeadwiseError(
            "this model reads pictures, not text; hw.attend, hw.profile and hw.record look at them, what is asked on texts "
            "cannot be asked of it."
        )
    if not isinstance(model.tokenizer, Tokenizer):
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; set model.tokenizer.")
    return model.tokenizer


def read_sites(model: AnyModel, heads: Pattern = "*") -> list[Site]:
    """Where attention happens when a model reads texts, or pictures: of several towers those that token ids alone reach.

    Found out by a call of a few tokens; a pattern that names heads of other towers is refused.
    """
    sites = model.all_sites()
    if not model.spec.stacks or model.pictures is not None:
        return sites
    called: set[SiteAddress] = set()
    with quiet(model), torch.no_grad(), ExitStack() as listening:
        for site in sites:
            listening.enter_context(site.listen(lambda seen: called.add(seen.site.address)))
        model(torch.tensor([tokenizer_of(model).encode("one two three")], device=model.device), hidden=True)
    if not (isinstance(heads, str) and heads.strip() == "*"):
        unread = [one for one in select(heads, model.spec.addresses) if one.site not in called]
        if unread:
            reached = ", ".join(f"{stack or '*'}.*" for stack in dict.fromkeys(one.stack for one in called))
            raise HeadwiseError(
                f"a text alone does not reach head {unread[0]}: its tower reads something else. Heads it reaches: {reached}; "
                f"for others call the model inside hw.record, or give hw.importance your own calls; name heads to cut."
            )
    return [site for site in sites if site.address in called]


def _stacked(rows: Sequence[tuple[int, ...]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Ids of any lengths, padded on one side, and where they are real: (B, T) each."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[number, place], real[number, place] = torch.tensor(row), True
    return ids, real
