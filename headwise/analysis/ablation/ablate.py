"""Ablation and patching: context managers that replace z (head output before W_O) of selected heads.

zero:      z is replaced with zeros, which equals pruning the head.
mean:      z is replaced with its mean over a corpus. Only the information about the current text is removed.
resample:  z is replaced with its value on another text (causal scrubbing; activation patching:
           https://arxiv.org/abs/2309.16042).

A head with constant output can matter under zero ablation and has no effect under mean or resample ablation. The
replacement happens before W_O: slicing the output of the layer would remove channels of the residual stream, not a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.analysis.ablation.decoder_parts import Part
from headwise.analysis.ablation.path_patching import path_patch_context
from headwise.analysis.ablation.recorded_head_outputs import (
    HeadOutputs,
    MeanActivations,
    as_head_outputs,
    as_token_ids,
    gather_z_at_positions,
    mean_activations,
    mean_of_outputs,
    position_ids_without_padding,
    record_z,
    selected_hook_points,
)
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.recording.recording import HasHookPoints
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import Edit, HookPoint
from headwise.model import ModelProtocol
from headwise.model.protocols import is_model
from headwise.spec import Address

__all__ = ["HeadOutputs", "MeanActivations", "ablated", "mean_activations", "mean_of_outputs", "patched", "record_z"]

AblationMethod = Literal["mean", "zero", "resample"]
ABLATION_METHODS = ("mean", "zero", "resample")
# z (B, H, T, e) → replacement for the selected heads, broadcastable to (B, n, T, e)
ReplacementFunction = Callable[[Tensor], Tensor]


@contextmanager
def ablated(
    model: HasHookPoints,
    heads: HeadPattern,
    ablation: AblationMethod = "mean",
    *,
    corpus: Any = None,
    means: MeanActivations | None = None,
    other: Tensor | HeadOutputs | str | tuple[Any, ...] | Mapping[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    source_attention_mask: Tensor | None = None,
) -> Iterator[None]:
    """Replace the output of heads while the context is open.

    Args:
        model: A headwise model or an attached model.
        heads: Head pattern, for example `"5.1"`, `"5.*"` or a list of addresses.
        ablation: Replacement for z of each head.
            "mean" uses the mean over a corpus, "zero" uses zeros, "resample" uses z of another text.
        corpus: Texts for the mean: a text, a list of texts, a path or a `Corpus`. None uses the embedded texts. The full
            corpus is run each time a context opens; pass `means` to compute the means only once. Only for "mean".
        means: Precomputed means, from `mean_activations(model, corpus)`. Only for "mean".
        other: Source of z for "resample": a text, a pair (source, text), a recorded run (`record_z`), or an integer
            tensor (B,) with the index of the donor example of each example in the batch. None uses the previous
            example of the batch. If the donor text is shorter, its rows are repeated from the start. For an attached torch
            module, a call such as a dict of keyword arguments replaces the text.
        attention_mask: (B, T), True at real tokens, as passed to the model. Required if texts are padded and the
            replacement depends on the position (means by position, resample).
        source_attention_mask: (B, S), attention mask of the source texts of an encoder-decoder.

    Yields:
        None. The model is unchanged after the context closes.

    Raises:
        ArgumentError: If `corpus` is combined with `means` or with another ablation than "mean", or if "mean" is used
            without `means` on a model that has no tokenizer.
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
        reason = "means= is given" if ablation == "mean" else f"ablation={ablation!r}"
        raise ArgumentError(
            f"corpus: used only to compute the means of mean ablation. Got corpus= and {reason}. Remove corpus=."
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
    heads: HeadPattern | None = None,
    other: HeadOutputs | str | tuple[Any, ...] | Sequence[int] | Tensor | Mapping[str, Any] | None = None,
    positions: Sequence[int] | None = None,
    *,
    path: Sequence[str | Part] | None = None,
) -> Iterator[None]:
    """Replace the output of heads, for all readers or for one, with their output on another text of the same length.

    With `heads`, activation patching: z of the heads is replaced for all later layers
    (https://arxiv.org/abs/2309.16042). With `path`, path patching: only the named parts of the path change, and everything
    between them keeps the output that it has without the context (https://arxiv.org/abs/2304.05969).

    Args:
        model: A headwise model or an attached model. `path` needs a decoder whose residual stream is a sum.
        heads: Head pattern, for example `"5.1"`. Cannot be combined with `path`.
        other: The other input: a text, token ids (T,) or (B, T), a pair (source, text), or a recorded run (`record_z`). For
            an attached torch module: a call, such as a dict of keyword arguments. With `path`: a text or token ids.
        positions: Token positions to patch. With `path`, positions at which the output of the sender is patched. Negative
            values count from the end. None patches all positions.
        path: Addresses of a sender, of any parts in between, and of a receiver: `("16.0", "18.6.k")`. The sender is a head
            `16.0`, a KV head `16.kv1` (its keys and values), `mlp.16` or `embedding`. The receiver is an input of a head
            `18.6.k` (also `.q` and `.v`; `18.6` for all three), the keys or values of a KV head for all its readers
            `18.kv2.k` (`18.kv2` for both), `mlp.18` or `logits`. The receiver reads its clean input plus the change of the
            sender's output, through its own norm and weights. Later parts run on its changed output.

    Yields:
        None. The model is unchanged after the context closes.

    Raises:
        ArgumentError: If the two inputs have different numbers of tokens, a position is out of range, or a part of the path
            does not exist or cannot send to the next.
        UnsupportedModelError: If `path` is used with a model whose residual stream is not a sum (encoders, post-norm).

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> ids = torch.tensor([model.tokenizer.encode("Ho!")])
    >>> with patched(model, "5.1", "Hi!", positions=[-1]):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    >>> with patched(model, path=("0.1", "5.1.k"), other="Hi!"):
    ...     model(ids).shape
    torch.Size([1, 3, 257])
    """
    if (heads is None) == (path is None) or other is None:
        raise ArgumentError(
            f"patched: needs other=, and either heads= or path=. Got heads={heads!r}, path={path!r} and "
            f"other={'None' if other is None else type(other).__name__}. Example: hw.patched(model, '5.1', other)."
        )
    if path is not None:
        if not is_model(model):
            raise ArgumentError("path: needs a model. Got a single layer. Use hw.patched(layer, heads, other).")
        with path_patch_context(model, path, _other_ids(model, other), positions):
            yield
        return
    assert heads is not None, "checked above"
    outputs = as_head_outputs(model, other, heads)  # pyright: ignore[reportArgumentType]
    with ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            recorded = outputs.z_of_heads(selected)  # (B, n, T, e)
            stack.enter_context(hook_point.replaced(_patch_edit(hook_point, selected, recorded, positions)))
        yield


def _corpus_means(model: object, corpus: Any, heads: HeadPattern) -> MeanActivations:
    """Compute the mean outputs of heads over a corpus."""
    if not is_model(model) or (model.tokenizer is None and not reads_calls(model)):
        raise ArgumentError(
            "ablation='mean': the model has no tokenizer, so the means over texts cannot be computed. Set model.tokenizer, "
            "or pass means=mean_of_outputs(record_z(model, ids) for ids in batches). "
            "Both functions are in headwise.analysis.ablation.recorded_head_outputs."
        )
    return mean_activations(model, corpus, heads=heads)


def _other_ids(model: ModelProtocol, other: Any) -> Tensor:
    """Return the token ids of the other run, (B, T)."""
    if isinstance(other, HeadOutputs | Mapping) or reads_calls(model):
        raise ArgumentError(
            f"other: with path=, it must be a text or token ids of shape (T,) or (B, T), because the run is recorded at the "
            f"sender of the path. Got {type(other).__name__}."
        )
    return as_token_ids(model, other)


def make_replacement_fn(
    hook_point: HookPoint,
    selected: tuple[Address, ...],
    ablation: str,
    means: MeanActivations | None = None,
    other: Tensor | HeadOutputs | None = None,
    attention_mask: Tensor | None = None,
) -> ReplacementFunction:
    """Return a function from z of a layer (B, H, T, e) to the replacement for the selected heads (B, n, T, e)."""
    if ablation == "zero":
        return lambda z: z.new_zeros(1, 1, 1, 1)
    if ablation == "mean":
        if means is None:
            raise ArgumentError("means: required for mean ablation. Pass means=mean_activations(model, corpus).")
        return lambda z: means.at_positions(selected, position_ids_without_padding(z, attention_mask))
    if ablation != "resample":
        raise ArgumentError(
            f"ablation={ablation!r}: unknown ablation method; {suggest_names(ablation, ABLATION_METHODS)}"
        )
    if isinstance(other, HeadOutputs):
        return lambda z: gather_z_at_positions(
            other.z_of_heads(selected),
            other.attention_masks[hook_point.address],
            position_ids_without_padding(z, attention_mask),
            len(z),
        )
    index = [hook_point.head_index(address) for address in selected]
    return lambda z: _borrow_from_batch(z[:, index], _donor_indices(other, z), attention_mask)


def _donor_indices(other: Tensor | None, z: Tensor) -> Tensor:
    """Return the index of the donor example of each example, (B,)."""
    B = len(z)
    if other is None:
        if B == 1:
            raise ArgumentError(
                "other: the batch has only one example, so resample ablation has nothing to resample from. "
                "Pass other=record_z(model, other_ids)."
            )
        return torch.arange(B, device=z.device).roll(1)
    fits = isinstance(other, Tensor) and other.shape == (B,) and not other.is_floating_point()
    if not fits or (B and not 0 <= int(other.min()) <= int(other.max()) < B):
        raise ArgumentError(
            f"other: must be an integer tensor of shape ({B},). For each example of the batch, it has the index "
            f"(0 to {B - 1}) of the example whose head outputs replace its own. Got {other!r}."
        )
    return other.to(z.device)


def _borrow_from_batch(z: Tensor, donors: Tensor, attention_mask: Tensor | None) -> Tensor:
    return gather_z_at_positions(
        z[donors],
        None if attention_mask is None else attention_mask[donors],
        position_ids_without_padding(z, attention_mask),
        len(z),
    )


def make_replacement_edit(
    hook_point: HookPoint, selected: tuple[Address, ...], replacement_fn: ReplacementFunction
) -> Edit:
    """Return the edit that replaces z of the selected heads of a layer."""
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
            raise ArgumentError(
                f"other: the recorded z of layer {hook_point.address} does not fit this call. "
                f"Got shape {tuple(recorded.shape)}, expected {(B, len(index), T, e)}. Use two texts with the same number of "
                f"tokens."
            )
        rows = range(T) if positions is None else positions
        invalid = [row for row in rows if not -T <= row < T]
        if invalid:
            raise ArgumentError(
                f"positions: out of range for {T} tokens. Got {invalid[0]}. Use 0 to {T - 1}, or -1 to {-T} from the end."
            )
        columns = torch.tensor([row % T for row in rows], dtype=torch.long, device=z.device)
        heads = torch.tensor(index, device=z.device)[:, None]  # (n, 1)
        changed = z.clone()
        changed[:, heads, columns] = recorded[:, :, columns].to(z).expand(B, -1, -1, -1)
        return changed

    return edit
