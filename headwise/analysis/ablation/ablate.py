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
    HeadOutputs,
    MeanActivations,
    as_head_outputs,
    gather_z_at_positions,
    mean_activations,
    mean_of_outputs,
    record_z,
    selected_hook_points,
    token_positions,
)
from headwise.analysis.recording.recording import HasHookPoints
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import Edit, HookPoint
from headwise.model.protocols import is_model
from headwise.spec import Address

__all__ = ["HeadOutputs", "MeanActivations", "ablated", "mean_activations", "mean_of_outputs", "patched", "record_z"]

AblationMethod = Literal["mean", "zero", "resample"]
ABLATION_METHODS = ("mean", "zero", "resample")
# z (B, H, T, e) → what stands in for some heads, broadcastable to (B, n, T, e)
ReplacementFunction = Callable[[Tensor], Tensor]


@contextmanager
def ablated(
    model: HasHookPoints,
    heads: HeadPattern,
    ablation: AblationMethod = "mean",
    *,
    corpus: Any = None,
    means: MeanActivations | None = None,
    other: Tensor | HeadOutputs | str | tuple[str, str] | None = None,
    attention_mask: Tensor | None = None,
    source_attention_mask: Tensor | None = None,
) -> Iterator[None]:
    """While open, these heads no longer say anything about their input.

    mean:      their mean over a `corpus` stands in: a text, a list of texts, a path, a Corpus; None: the embedded ones. It is
               taken when the context opens, which reads all of it; `means=mean_activations(model, corpus)` are taken once.
    zero:      nothing stands in
    resample:  what they give on `other`: a text, a pair (source, text), a run (`record_z`), or for each example of the batch
               the one it borrows from, (B,); None: the one before it. A shorter text is borrowed from its start again.

    `attention_mask` (B, T), as the model takes it, is needed where texts are padded and rows are told apart: means by
    position, and borrowing.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model, ids = Transformer(replace(preset("nano"), vocab=257)), torch.tensor([[72, 105, 33]])
    >>> model.tokenizer = byte_tokenizer()
    >>> with ablated(model, "5.1", corpus=["Hello, you!", "To be or not to be"]):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    >>> with ablated(model, "5.1", "zero"), ablated(model, "4.*", "resample", other="Ho!"):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    """
    mask_of_stack = {"enc": source_attention_mask}
    if corpus is not None and (ablation != "mean" or means is not None):
        raise HeadwiseError(
            "corpus= says which texts means are taken over; leave it out with means=…, and where ablation is not 'mean'."
        )
    if ablation == "mean" and means is None:
        means = _corpus_means(model, corpus, heads)
    if not isinstance(other, Tensor | HeadOutputs | None):
        other = as_head_outputs(model, other, heads)  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            query_mask = mask_of_stack.get(hook_point.address.stack, attention_mask)
            stack.enter_context(
                hook_point.replaced(
                    make_replacement_edit(
                        hook_point,
                        selected,
                        make_replacement_fn(hook_point, selected, ablation, means, other, query_mask),
                    )
                )
            )
        yield


@contextmanager
def patched(
    model: HasHookPoints,
    heads: HeadPattern,
    other: HeadOutputs | str | tuple[str, str] | Sequence[int] | Tensor,
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
    outputs = as_head_outputs(model, other, heads)  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            recorded = outputs.z_of_heads(selected)  # (B, n, T, e)
            stack.enter_context(hook_point.replaced(_patch_edit(hook_point, selected, recorded, positions)))
        yield


def _corpus_means(model: object, corpus: Any, heads: HeadPattern) -> MeanActivations:
    """The means of some heads over texts; a model without texts is told what to do."""
    if not is_model(model) or model.tokenizer is None:
        raise HeadwiseError(
            "mean ablation needs the means of heads over texts, and this model has no tokenizer to read them by; set "
            "model.tokenizer, or give means=mean_of_outputs(record_z(model, ids) for ids in …), "
            "from headwise.analysis.ablation.head_outputs."
        )
    return mean_activations(model, corpus, heads=heads)


def make_replacement_fn(
    hook_point: HookPoint,
    selected: tuple[Address, ...],
    ablation: str,
    means: MeanActivations | None = None,
    other: Tensor | HeadOutputs | None = None,
    attention_mask: Tensor | None = None,
) -> ReplacementFunction:
    """What stands in for some heads of one layer, as a function of the layer's z: (B, H, T, e) → like (B, n, T, e)."""
    if ablation == "zero":
        return lambda z: z.new_zeros(1, 1, 1, 1)
    if ablation == "mean":
        if means is None:
            raise HeadwiseError("mean ablation needs the means: means=mean_activations(model, corpus).")
        return lambda z: means.at_positions(selected, token_positions(z, attention_mask))
    if ablation != "resample":
        raise HeadwiseError(f"there is no ablation {ablation!r}; {suggest_names(ablation, ABLATION_METHODS)}")
    if isinstance(other, HeadOutputs):
        return lambda z: gather_z_at_positions(
            other.z_of_heads(selected),
            other.attention_masks[hook_point.address],
            token_positions(z, attention_mask),
            len(z),
        )
    index = [hook_point.head_index(address) for address in selected]
    return lambda z: _borrow_from_batch(z[:, index], _donor_rows(other, z), attention_mask)


def _donor_rows(other: Tensor | None, z: Tensor) -> Tensor:
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


def _borrow_from_batch(z: Tensor, donors: Tensor, attention_mask: Tensor | None) -> Tensor:
    return gather_z_at_positions(
        z[donors],
        None if attention_mask is None else attention_mask[donors],
        token_positions(z, attention_mask),
        len(z),
    )


def make_replacement_edit(
    hook_point: HookPoint, selected: tuple[Address, ...], replacement_fn: ReplacementFunction
) -> Edit:
    """The edit that puts what stands in for some heads of a layer in their place."""
    index = [hook_point.head_index(address) for address in selected]

    def edit(z: Tensor) -> Tensor:
        changed = z.clone()
        changed[:, index] = replacement_fn(z).to(z).expand(len(z), len(index), *z.shape[2:])
        return changed

    return edit


def _patch_edit(
    hook_point: HookPoint, selected: tuple[Address, ...], recorded: Tensor, positions: Sequence[int] | None
) -> Edit:
    index = [hook_point.head_index(address) for address in selected]

    def edit(z: Tensor) -> Tensor:
        B, _, T, e = z.shape
        if len(recorded) not in (1, B) or recorded.shape[2:] != (T, e):
            raise HeadwiseError(
                f"the run recorded {tuple(recorded.shape)} at {hook_point.address} but this call is {(B, len(index), T, e)}; "
                f"patch between texts of one length."
            )
        rows = range(T) if positions is None else positions
        invalid = [row for row in rows if not -T <= row < T]
        if invalid:
            raise HeadwiseError(f"there is no position {invalid[0]} among {T} tokens; use 0-{T - 1}, or count from -1.")
        columns = torch.tensor([row % T for row in rows], dtype=torch.long, device=z.device)
        heads = torch.tensor(index, device=z.device)[:, None]  # (n, 1)
        changed = z.clone()
        changed[:, heads, columns] = recorded[:, :, columns].to(z).expand(B, -1, -1, -1)
        return changed

    return edit
