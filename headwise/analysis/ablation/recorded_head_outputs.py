"""Recorded z (head output before W_O) of a run, and its mean over a corpus. Ablation uses both as replacements."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.analysis.recording.batching import make_batch, make_batches, reachable_hook_points, tokenizer_of
from headwise.analysis.recording.model_calls import normalize_call_list, reads_calls, run_call
from headwise.analysis.recording.recording import HasHookPoints, select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address, LayerAddress, select

DEFAULT_MAX_LENGTH = 256  # tokens per chunk of plain text: enough for a mean, and keeps the sweep affordable
MeanGranularity = Literal["global", "position"]
HeadIdsByLayer = dict[LayerAddress, tuple[int, ...]]  # layer → indices of its selected heads


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """z of selected heads in one run of the model.

    Attributes:
        head_ids: Selected heads of each layer.
        z: Head outputs of each layer, (B, n, T, e).
        attention_masks: (B, T) for each layer, True at real tokens. None if all tokens are real.
    """

    head_ids: HeadIdsByLayer
    z: dict[LayerAddress, Tensor]
    attention_masks: dict[LayerAddress, Tensor | None]

    def z_of_heads(self, selected: tuple[Address, ...]) -> Tensor:
        """Return z of selected heads of one layer, (B, n, T, e)."""
        index = _find_heads(self.head_ids, selected, "in the recorded run")
        return self.z[selected[0].layer_address][:, index]


@dataclass(frozen=True, eq=False)
class MeanActivations:
    """Mean z of heads over a corpus, in float64.

    Attributes:
        granularity: "global" for one mean over all positions, "position" for one mean per position.
        head_ids: Heads of each layer.
        sums: Sum of z for each layer, (n, P, e). P is 1 for "global".
        counts: Number of summed rows for each layer, (P,).
    """

    granularity: MeanGranularity
    head_ids: HeadIdsByLayer
    sums: dict[LayerAddress, Tensor]
    counts: dict[LayerAddress, Tensor]

    def means_of_heads(self, selected: tuple[Address, ...]) -> Tensor:
        """Return the means of selected heads of one layer: (n, e), or (n, P, e) by position."""
        layer_address, index = selected[0].layer_address, _find_heads(self.head_ids, selected, "among the means")
        means = self.sums[layer_address][index] / self.counts[layer_address][:, None]  # (n, P, e)
        return means[:, 0] if self.granularity == "global" else means

    def __getitem__(self, head: Address | str) -> Tensor:
        """Return the mean of one head: (e,), or (P, e) by position."""
        return self.means_of_heads((Address.parse(head) if isinstance(head, str) else head,))[0]

    def at_positions(self, selected: tuple[Address, ...], positions: Tensor) -> Tensor:
        """Return the means at token positions (1 or B, T), broadcastable to (B, n, T, e)."""
        means = self.means_of_heads(selected)
        if self.granularity == "global":
            return means[None, :, None]  # (1, n, 1, e)
        if int(positions.max()) >= means.shape[1]:
            raise ArgumentError(
                f"means: computed for {means.shape[1]} positions, but the text is longer. "
                f"Got {int(positions.max()) + 1} tokens. Compute the means over longer texts, or with granularity='global'."
            )
        return means[:, positions.to(means.device)].transpose(0, 1)  # (1 or B, n, T, e)

    def merge(self, other: "MeanActivations") -> "MeanActivations":
        """Combine two means as if one pass had run over both corpora."""
        if (self.granularity, self.head_ids) != (other.granularity, other.head_ids):
            raise ArgumentError(
                "other: means with different heads or granularity cannot be merged. "
                f"Got granularity={self.granularity!r} with {sum(map(len, self.head_ids.values()))} heads, and "
                f"granularity={other.granularity!r} with {sum(map(len, other.head_ids.values()))} heads. "
                "Compute both with the same heads= and granularity=."
            )
        sums = {
            layer_address: _add_padded(self.sums[layer_address], other.sums[layer_address], dim=1)
            for layer_address in self.sums
        }
        counts = {
            layer_address: _add_padded(self.counts[layer_address], other.counts[layer_address], dim=0)
            for layer_address in self.counts
        }
        return MeanActivations(self.granularity, self.head_ids, sums, counts)


@torch.no_grad()
def record_z(
    model: ModelProtocol,
    ids: Tensor,
    heads: HeadPattern = "*",
    *,
    attention_mask: Tensor | None = None,
    source: Tensor | None = None,
    source_attention_mask: Tensor | None = None,
) -> HeadOutputs:
    """Run the model once and record z (head output before W_O) of selected heads.

    Args:
        model: The model to run.
        ids: Token ids, (B, T).
        heads: Head pattern. "*" selects all heads.
        attention_mask: (B, T), True at real tokens.
        source: Source token ids of an encoder-decoder, (B, S).
        source_attention_mask: (B, S), True at real tokens of the source.

    Returns:
        z of the selected heads, by layer.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> run = record_z(Transformer(preset("nano")), torch.tensor([[72, 105, 33]]), "5.1,5.2")
    >>> [(str(layer), tuple(z.shape)) for layer, z in run.z.items()]
    [('5', (1, 2, 3, 64))]
    """
    outputs = HeadOutputs({}, {}, {})
    with eval_mode(model), ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            outputs.head_ids[hook_point.address] = tuple(address.head for address in selected)
            outputs.attention_masks[hook_point.address] = (
                source_attention_mask if hook_point.address.stack == "enc" else attention_mask
            )
            stack.enter_context(
                hook_point.listen(_make_z_listener(outputs, [hook_point.head_index(address) for address in selected]))
            )
        model(
            ids, attention_mask=attention_mask, source=source, source_attention_mask=source_attention_mask, hidden=True
        )
    return outputs


@torch.no_grad()
def record_call(model: ModelProtocol, call: Any, heads: HeadPattern = "*") -> HeadOutputs:
    """Run one call of a torch module and record z of selected heads. Each layer may run once in a call."""
    outputs = HeadOutputs({}, {}, {})
    with eval_mode(model), ExitStack() as stack:
        for hook_point, selected in selected_hook_points(model, heads):
            outputs.head_ids[hook_point.address] = tuple(address.head for address in selected)
            outputs.attention_masks[hook_point.address] = None
            store = _make_z_listener(outputs, [hook_point.head_index(address) for address in selected])
            stack.enter_context(hook_point.listen(store))
        run_call(model, call)
    return outputs


def mean_activations(
    model: ModelProtocol,
    corpus: Any = None,
    granularity: MeanGranularity = "global",
    *,
    heads: HeadPattern = "*",
    max_length: int | None = None,
    batch_tokens: int = 2048,
) -> MeanActivations:
    """Compute the mean z of every head over a corpus. Padding is excluded.

    Args:
        model: The model to run.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the embedded probe set, or the synthetic language
            for models trained on it.
        granularity: "global" for one mean over all positions, "position" for one mean per position.
        heads: Head pattern. "*" selects all heads.
        max_length: Plain text is split into chunks of this many tokens. None is 256, or the model's context if shorter.
        batch_tokens: Maximum number of tokens per batch.

    Returns:
        Means by layer and head.
    """
    if reads_calls(model):
        outputs = (record_call(model, call, heads) for call in normalize_call_list(model, corpus))
        return mean_of_outputs(outputs, granularity)
    batches = make_batches(eval_corpus(model, corpus, max_length), batch_tokens, device=model.device)
    heads = select_heads(
        heads, [address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses]
    )
    return mean_of_outputs(
        (
            record_z(
                model,
                batch.ids,
                heads,
                attention_mask=None if batch.is_unpadded else batch.real_tokens,
                source=batch.source,
                source_attention_mask=batch.source_attention_mask,
            )
            for batch in batches
        ),
        granularity,
    )


def eval_corpus(model: ModelProtocol, corpus: Any, max_length: int | None = None) -> TokenizedCorpus:
    """Return the corpus on which ablation is evaluated. Plain text is split into chunks of 256 tokens by default."""
    return TokenizedCorpus.of(model, corpus, max_length, needs_targets=True, default_length=DEFAULT_MAX_LENGTH)


def as_head_outputs(model: ModelProtocol, inputs: Any, heads: HeadPattern = "*") -> HeadOutputs:
    """Run the model on a text, token ids (T,) or (B, T), or a pair (source, text), and record z. Recorded runs pass through.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano"), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> [(str(layer), tuple(z.shape)) for layer, z in as_head_outputs(model, "Hi!", "5.1").z.items()]
    [('5', (1, 1, 3, 64))]
    """
    if isinstance(inputs, HeadOutputs):
        return inputs
    if reads_calls(model):
        return record_call(model, inputs, heads)
    if isinstance(inputs, tuple) and len(inputs) == 2 and all(isinstance(part, str) for part in inputs):
        batch = make_batch(list(TokenizedCorpus.of(model, [inputs], needs_targets=True)), device=model.device)
        return record_z(model, batch.ids, heads, source=batch.source, source_attention_mask=batch.source_attention_mask)
    return record_z(model, as_token_ids(model, inputs), heads)


def as_token_ids(model: ModelProtocol, inputs: Any) -> Tensor:
    """Return the token ids (B, T) of a text or of ids (T,) or (B, T)."""
    ids = torch.as_tensor(
        tokenizer_of(model).encode(inputs) if isinstance(inputs, str) else inputs, device=model.device
    )
    ids = ids[None] if ids.ndim == 1 else ids  # (B, T)
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        raise ArgumentError(
            f"other: must be a text, token ids of shape (T,) or (B, T), a pair (source, text), or a recorded run. "
            f"Got {inputs!r:.80}."
        )
    return ids


def mean_of_outputs(outputs: Iterable[HeadOutputs], granularity: MeanGranularity = "global") -> MeanActivations:
    """Compute the mean z over recorded runs, for example of models with inputs other than text.

    Args:
        outputs: Recorded runs, from `record_z`. They are consumed one at a time.
        granularity: "global" for one mean over all positions, "position" for one mean per position.

    Returns:
        Means by layer and head.
    """
    if granularity not in ("global", "position"):
        raise ArgumentError(f"granularity: must be 'global' or 'position'. Got {granularity!r}.")
    total: MeanActivations | None = None
    for output in outputs:
        batch_means = _sum_outputs_over_tokens(output, granularity)
        total = batch_means if total is None else total.merge(batch_means)
    if total is None:
        raise ArgumentError("outputs: no runs to average. Pass at least one run of record_z.")
    return total


def selected_hook_points(model: HasHookPoints, heads: HeadPattern) -> Iterator[tuple[HookPoint, tuple[Address, ...]]]:
    """Yield each layer with selected heads, and those heads. "*" selects all heads of every stack."""
    hook_points = model.gathered_hook_points()
    available = tuple(address for hook_point in hook_points for address in hook_point.head_addresses)
    requested = set(available if isinstance(heads, str) and heads.strip() == "*" else select(heads, available))
    for hook_point in hook_points:
        selected = tuple(address for address in hook_point.head_addresses if address in requested)
        if selected:
            yield hook_point, selected


def position_ids_without_padding(z: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the position of each token, not counting padding: (1 or B, T)."""
    if attention_mask is None:
        return torch.arange(z.shape[2], device=z.device)[None]
    if attention_mask.shape != (len(z), z.shape[2]):
        raise ArgumentError(
            f"attention_mask: shape does not match the call. Got {tuple(attention_mask.shape)}, expected "
            f"{(len(z), z.shape[2])}. Pass the mask that the model receives, True at real tokens."
        )
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def gather_z_at_positions(z: Tensor, attention_mask: Tensor | None, positions: Tensor, batch_size: int) -> Tensor:
    """Gather rows of another run at token positions (1 or B, T), repeating shorter texts from the start: (B, n, T, e)."""
    if len(z) not in (1, batch_size):
        raise ArgumentError(
            f"other: the recorded run must have 1 text or {batch_size} texts, like this batch. Got {len(z)}. "
            f"Record a run with the same batch size, or with a single text."
        )
    first = torch.zeros(len(z), 1, dtype=torch.long, device=z.device)
    length = first + z.shape[2] if attention_mask is None else attention_mask.long().sum(1, keepdim=True)  # (B, 1)
    first = first if attention_mask is None else attention_mask.long().argmax(1, keepdim=True)
    rows = (first + positions.to(z.device) % length.clamp(min=1)).expand(batch_size, -1)  # (B, T)
    rows = rows[:, None, :, None].expand(-1, z.shape[1], -1, z.shape[3])  # (B, n, T, e)
    return z.expand(batch_size, *z.shape[1:]).gather(2, rows)


def _make_z_listener(outputs: HeadOutputs, index: list[int]) -> Callable[[AttentionCall], None]:
    def listener(call: AttentionCall) -> None:
        outputs.z[call.hook_point.address] = call.z[:, index].detach()

    return listener


def _sum_outputs_over_tokens(outputs: HeadOutputs, granularity: MeanGranularity) -> MeanActivations:
    sums, counts = {}, {}
    for layer_address, z in outputs.z.items():
        attention_mask, z = outputs.attention_masks[layer_address], to_float64(z)  # (B, n, T, e)
        attention_mask = None if attention_mask is None else attention_mask.to(z.device)
        rows = torch.ones(len(z), z.shape[2], device=z.device) if attention_mask is None else attention_mask
        positions = position_ids_without_padding(z, attention_mask).expand(len(z), -1)[rows.bool()]  # (rows,)
        positions = positions if granularity == "position" else torch.zeros_like(positions)
        flat = z.transpose(1, 2)[rows.bool()]  # (rows, n, e)
        P = int(positions.max()) + 1
        # (n, P, e)
        sums[layer_address] = flat.new_zeros(P, *flat.shape[1:]).index_add_(0, positions, flat).transpose(0, 1)
        counts[layer_address] = to_float64(torch.bincount(positions, minlength=P))
    return MeanActivations(granularity, dict(outputs.head_ids), sums, counts)


def _find_heads(head_ids: HeadIdsByLayer, selected: tuple[Address, ...], where: str) -> list[int]:
    recorded = head_ids.get(selected[0].layer_address, ())
    for address in selected:
        if address.head not in recorded:
            raise ArgumentError(
                f"heads: head {address} is not {where}. Record again with heads='*' or heads='{address}'."
            )
    return [recorded.index(address.head) for address in selected]


def _add_padded(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Add two tensors, the shorter one padded with zeros along `dim`."""
    long, short = (a, b) if a.shape[dim] >= b.shape[dim] else (b, a)
    total = long.clone()
    total.narrow(dim, 0, short.shape[dim]).add_(short)
    return total
