"""Ablation and patching: while a context is open, some heads' z is taken away before W_O and something stands in its place.

zero:      nothing: what a cut head leaves behind
mean:      what the head gives on average over a corpus, so that only what it says about *this* text is gone
resample:  what the head gives on another text (causal scrubbing; activation patching: https://arxiv.org/abs/2309.16042)

A constant head is worth something by zero and nothing by mean or resample. Inside W_O, not behind it: slicing the output
of a layer would take away dimensions of the stream, not a head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import (
    Means,
    Run,
    chosen_sites,
    mean_activations,
    mean_of,
    places_of,
    record_z,
    run_on,
    take_rows,
)
from headwise.analysis.recording.recording import HasSites
from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Edit, Site
from headwise.model.protocols import is_model
from headwise.spec import Address

__all__ = ["Means", "Run", "ablated", "mean_activations", "mean_of", "patched", "record_z"]

How = Literal["mean", "zero", "resample"]
HOWS = ("mean", "zero", "resample")
Stand = Callable[[Tensor], Tensor]  # z (B, H, T, e) → what stands in for some heads, broadcastable to (B, n, T, e)


@contextmanager
def ablated(
    model: HasSites,
    heads: Pattern,
    how: How = "mean",
    *,
    on: Any = None,
    means: Means | None = None,
    other: Tensor | Run | str | tuple[str, str] | None = None,
    padding: Tensor | None = None,
    source_padding: Tensor | None = None,
) -> Iterator[None]:
    """While open, these heads no longer say anything about their input.

    mean:      their mean `on` some texts stands in: a text, a list of texts, a path, a Corpus; None: the embedded ones. It is
               taken when the context opens, which reads all of them; `means=mean_activations(model, on)` are taken once.
    zero:      nothing stands in
    resample:  what they give on `other`: a text, a pair (source, text), a run (`record_z`), or for each example of the batch
               the one it borrows from, (B,); None: the one before it. A shorter text is borrowed from its start again.

    `padding` (B, T), as the model takes it, is needed where texts are padded and rows are told apart: means by position, and
    borrowing.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model, ids = Transformer(replace(preset("nano"), vocab=257)), torch.tensor([[72, 105, 33]])
    >>> model.tokenizer = byte_tokenizer()
    >>> with ablated(model, "5.1", on=["Hello, you!", "To be or not to be"]):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    >>> with ablated(model, "5.1", "zero"), ablated(model, "4.*", "resample", other="Ho!"):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    """
    sides = {"enc": source_padding}
    if on is not None and (how != "mean" or means is not None):
        raise HeadwiseError(
            "on= says which texts means are taken over; leave it out with means=…, and where how is not 'mean'."
        )
    if how == "mean" and means is None:
        means = _means_on(model, on, heads)
    if not isinstance(other, Tensor | Run | None):
        other = run_on(model, other, heads)  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for site, chosen in chosen_sites(model, heads):
            real = sides.get(site.address.stack, padding)
            stack.enter_context(site.replaced(replacing(site, chosen, stand_in(site, chosen, how, means, other, real))))
        yield


@contextmanager
def patched(
    model: HasSites,
    heads: Pattern,
    other: Run | str | tuple[str, str] | Sequence[int] | Tensor,
    positions: Sequence[int] | None = None,
) -> Iterator[None]:
    """While open, these heads give what they give on another text of as many tokens: at all positions, or at those named.

    `other` is a text, token ids (T,) or (B, T), a pair (source, text), or a run that was kept (`record_z`).

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> with patched(model, "5.1", "Hi!", positions=[-1]):
    ...     model(torch.tensor([model.tokenizer.encode("Ho!")])).shape
    torch.Size([1, 3, 257])
    """
    run = run_on(model, other, heads)  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for site, chosen in chosen_sites(model, heads):
            there = run.of(chosen)  # (B, n, T, e)
            stack.enter_context(site.replaced(_patch(site, chosen, there, positions)))
        yield


def _means_on(model: object, on: Any, heads: Pattern) -> Means:
    """The means of some heads over texts; a model without texts is told what to do."""
    if not is_model(model) or model.tokenizer is None:
        raise HeadwiseError(
            "mean ablation needs the means of heads over texts, and this model has no tokenizer to read them by; set "
            "model.tokenizer, or give means=mean_of(record_z(model, ids) for ids in …), from headwise.analysis.ablation.head_outputs."
        )
    return mean_activations(model, on, heads=heads)


def stand_in(
    site: Site,
    chosen: tuple[Address, ...],
    how: str,
    means: Means | None = None,
    other: Tensor | Run | None = None,
    real: Tensor | None = None,
) -> Stand:
    """What stands in for some heads of one layer, as a function of the layer's z: (B, H, T, e) → like (B, n, T, e)."""
    if how == "zero":
        return lambda z: z.new_zeros(1, 1, 1, 1)
    if how == "mean":
        if means is None:
            raise HeadwiseError("mean ablation needs the means: means=mean_activations(model, on).")
        return lambda z: means.at(chosen, places_of(z, real))
    if how != "resample":
        raise HeadwiseError(f"there is no ablation {how!r}; {close_names(how, HOWS)}")
    if isinstance(other, Run):
        return lambda z: take_rows(other.of(chosen), other.real[site.address], places_of(z, real), len(z))
    index = [site.index(address) for address in chosen]
    return lambda z: _borrowed(z[:, index], _donors(other, z), real)


def _donors(other: Tensor | None, z: Tensor) -> Tensor:
    """Which example each one borrows from, (B,)."""
    B = len(z)
    if other is None:
        if B == 1:
            raise HeadwiseError("a batch of one has no other example; give other=record_z(model, other_ids).")
        return torch.arange(B, device=z.device).roll(1)
    fits = isinstance(other, Tensor) and other.shape == (B,) and not other.is_floating_point()
    if not fits or (B and not 0 <= int(other.min()) <= int(other.max()) < B):
        raise HeadwiseError(f"other says for each of {B} examples which one it borrows from, 0-{B - 1}; got {other!r}.")
    return other.to(z.device)


def _borrowed(z: Tensor, donors: Tensor, real: Tensor | None) -> Tensor:
    return take_rows(z[donors], None if real is None else real[donors], places_of(z, real), len(z))


def replacing(site: Site, chosen: tuple[Address, ...], stand: Stand) -> Edit:
    """The edit that puts what stands in for some heads of a layer in their place."""
    index = [site.index(address) for address in chosen]

    def edit(z: Tensor) -> Tensor:
        changed = z.clone()
        changed[:, index] = stand(z).to(z).expand(len(z), len(index), *z.shape[2:])
        return changed

    return edit


def _patch(site: Site, chosen: tuple[Address, ...], there: Tensor, positions: Sequence[int] | None) -> Edit:
    index = [site.index(address) for address in chosen]

    def edit(z: Tensor) -> Tensor:
        B, _, T, e = z.shape
        if len(there) not in (1, B) or there.shape[2:] != (T, e):
            raise HeadwiseError(
                f"the run recorded {tuple(there.shape)} at {site.address} but this call is {(B, len(index), T, e)}; "
                f"patch between texts of one length."
            )
        rows = range(T) if positions is None else positions
        wrong = [row for row in rows if not -T <= row < T]
        if wrong:
            raise HeadwiseError(f"there is no position {wrong[0]} among {T} tokens; use 0-{T - 1}, or count from -1.")
        columns = torch.tensor([row % T for row in rows], dtype=torch.long, device=z.device)
        heads = torch.tensor(index, device=z.device)[:, None]  # (n, 1)
        changed = z.clone()
        changed[:, heads, columns] = there[:, :, columns].to(z).expand(B, -1, -1, -1)
        return changed

    return edit
