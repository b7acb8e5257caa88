"""Record q, k, v and z of heads while a model runs. Head outputs and attention maps are computed from them on demand.

A recording stores detached copies of the selected heads only. Cached keys and values are stored once, not once per decoding
step. Attention maps are not stored: the requested rows are recomputed from q and k.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from headwise.analysis.recording.recorded_tensors import LayerRecord, RecordedLayerCall, tensor_version
from headwise.errors import ArgumentError, HeadwiseError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import add_bias_and_mask, raw_scores, softmax_weights
from headwise.spec import Address, select

RECORDABLE = ("q", "k", "v", "z", "output", "map")
# the stored tensors that each result is computed from, one letter each
REQUIRED_TENSORS = {"q": "q", "k": "k", "v": "v", "z": "z", "output": "z", "map": "qk"}
BLOCK_ROWS = 128  # rows of a map that are recomputed at once
Indices = int | slice | range | Sequence[int] | None
X = TypeVar("X")


class HasHookPoints(Protocol):
    """A model with attention hook points."""

    def gathered_hook_points(self) -> list[HookPoint]:
        """Return one hook point per attention layer, with all heads."""
        ...


@dataclass(frozen=True, eq=False)
class HeadCall:
    """Activations of one head in one call of the model.

    Shapes: B is the batch size, T the number of queries of the call, S the number of keys (cached keys included), d the key
    dimension, e the value dimension, D the width of the residual stream.

    Attributes:
        address: Address of the head.
    """

    address: Address
    _record: LayerRecord
    _call: RecordedLayerCall

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_call_repr

        return head_call_repr(self)

    @property
    def q(self) -> Tensor:
        """Queries after position embeddings such as rotary, (B, T, d)."""
        return _require_recorded(self._call.q, "q")[:, self._recorded_index]

    @property
    def k(self) -> Tensor:
        """Keys after position embeddings such as rotary, cached keys included, (B, S, d)."""
        return _require_recorded(self._call.k, "k").select_head(self._recorded_kv_index)

    @property
    def v(self) -> Tensor:
        """Values, cached values included, (B, S, e)."""
        return _require_recorded(self._call.v, "v").select_head(self._recorded_kv_index)

    @property
    def z(self) -> Tensor:
        """Head output before W_O, after gates and edits, (B, T, e)."""
        return _require_recorded(self._call.z, "z")[:, self._recorded_index]

    @property
    def token_gate(self) -> Tensor | None:
        """Output gate of the tokens, a factor of z, (B, T, 1 or e). None without a gate, or if z was not recorded."""
        gate = self._call.token_gate
        return None if gate is None else gate[:, self._recorded_index]

    @property
    def output(self) -> Tensor:
        """Output of the head to the residual stream, z W_O[h], (B, T, D)."""
        W_O = self._call.W_O
        if isinstance(W_O, HeadwiseError):
            raise W_O
        if tensor_version(W_O) != self._call.weights_version:
            raise HeadwiseError(
                f"W_O of head {self.address} has changed since the call was recorded, so .output cannot be computed. Read "
                f".output before the weights change, or record again."
            )
        return _require_recorded(self._call.z, "output")[:, self._recorded_index] @ W_O[self._index]

    def map(self, rows: Indices = None, cols: Indices = None) -> Tensor:
        """Compute attention weights, (B, R, C). Only the requested rows are computed.

        Args:
            rows: Query positions: an index, a slice, a list, or None for all.
            cols: Key positions: an index, a slice, a list, or None for all.

        Returns:
            Attention weights, at least float32, without attention dropout. Rows sum to less than 1 if the head has an
            attention sink.
        """
        q = at_least_float32(_require_recorded(self._call.q, "map")[:, self._recorded_index])  # (B, T, d)
        k = _require_recorded(self._call.k, "map").select_head(self._recorded_kv_index).to(q)
        T, S = self._call.sizes
        row_indices, col_indices = _resolve_indices(rows, T, "query"), _resolve_indices(cols, S, "key")
        group = self._call.params.kv_of_head[self._index]
        params = self._call.params.for_heads(range(self._index, self._index + 1), range(group, group + 1))
        attention = q.new_zeros(q.shape[0], len(row_indices), len(col_indices))  # (B, R, C)
        filled = 0
        for block in _contiguous_runs(row_indices):
            q_block = q[:, None, block.start : block.stop]  # (B, 1, r, d)
            scores = add_bias_and_mask(raw_scores(q_block, k[:, None], params), params, block, range(S), T, S)
            block_weights = softmax_weights(scores, params, may_have_empty_rows=params.may_have_empty_rows(T, S))[
                :, 0
            ]  # (B, r, S)
            attention[:, filled : filled + len(block)] = (
                block_weights if cols is None else block_weights[:, :, col_indices]
            )
            filled += len(block)
        return attention

    @property
    def _index(self) -> int:
        return self._record.hook_point.head_index(self.address)

    @property
    def _recorded_index(self) -> int:
        return self._record.heads.index(self._index)

    @property
    def _recorded_kv_index(self) -> int:
        groups = self._call.params.kv_of_head
        return self._record.recorded_kv_heads(groups).index(groups[self._index])


@dataclass(frozen=True, eq=False)
class SingleHeadRecording:
    """Recording of one head.

    If the model was called once, `.q`, `.k`, `.v`, `.z`, `.output` and `.map()` belong to that call. If it was called
    several times, select a call with `.call(index)`.

    Attributes:
        address: Address of the head.
        calls: One entry per call of the model, in order.
    """

    address: Address
    calls: tuple[HeadCall, ...]

    def __repr__(self) -> str:
        from headwise.ui.result_text import recorded_calls_table

        return recorded_calls_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import recorded_calls_table

        return recorded_calls_table(self).as_html()

    def call(self, index: int) -> HeadCall:
        """Return one call. The first has index 0, the last -1."""
        if not -len(self.calls) <= index < len(self.calls):
            raise ArgumentError(
                f"index={index}: {len(self.calls)} calls of head {self.address} were recorded. Use an index from 0 to "
                f"{len(self.calls) - 1}, or -1 for the last call."
            )
        return self.calls[index]

    @property
    def only_call(self) -> HeadCall:
        """The recorded call, if there is exactly one."""
        if len(self.calls) != 1:
            raise HeadwiseError(
                f"{len(self.calls)} calls of head {self.address} were recorded. Select one: .call(0) for the first, "
                f".call(-1) for the last."
            )
        return self.calls[0]

    @property
    def q(self) -> Tensor:
        """Queries, (B, T, d)."""
        return self.only_call.q

    @property
    def k(self) -> Tensor:
        """Keys, (B, S, d)."""
        return self.only_call.k

    @property
    def v(self) -> Tensor:
        """Values, (B, S, e)."""
        return self.only_call.v

    @property
    def z(self) -> Tensor:
        """Head output before W_O, (B, T, e)."""
        return self.only_call.z

    @property
    def token_gate(self) -> Tensor | None:
        """Output gate of the tokens, a factor of z, (B, T, 1 or e), or None."""
        return self.only_call.token_gate

    @property
    def output(self) -> Tensor:
        """Output of the head to the residual stream, (B, T, D)."""
        return self.only_call.output

    def map(self, rows: Indices = None, cols: Indices = None) -> Tensor:
        """Compute attention weights, (B, R, C). See `HeadCall.map`."""
        return self.only_call.map(rows, cols)


class ModelRecording:
    """Recordings of the selected heads: `recording["5.1"]` is the `SingleHeadRecording` of head 5.1.

    Iteration yields one `SingleHeadRecording` per head; `len` is the number of heads.

    Attributes:
        addresses: Addresses of the recorded heads.
    """

    def __init__(self, records: Iterable[LayerRecord], addresses: tuple[Address, ...]) -> None:
        self._records = {record.hook_point.address: record for record in records}
        self.addresses = addresses

    def __repr__(self) -> str:
        from headwise.ui.result_text import recording_table

        return recording_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import recording_table

        return recording_table(self).as_html()

    def __getitem__(self, head: str | Address) -> SingleHeadRecording:
        address = Address.parse(head) if isinstance(head, str) else head
        if address not in self.addresses:
            listed = ", ".join(map(str, self.addresses[:8])) + (", …" if len(self.addresses) > 8 else "")
            raise ArgumentError(
                f"head {address} was not recorded. Recorded heads: {listed}. Add it to `heads` of hw.record."
            )
        record = self._records[address.layer_address]
        if not record.calls:
            raise HeadwiseError(
                f"head {address}: nothing was recorded, because the model was not called. Call the model inside the "
                f"`with` block."
            )
        return SingleHeadRecording(address, tuple(HeadCall(address, record, call) for call in record.calls))

    def __iter__(self) -> Iterator[SingleHeadRecording]:
        return (self[address] for address in self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def nbytes(self) -> int:
        """Memory of the recorded tensors in bytes."""
        tensors_by_id: dict[int, Tensor] = {}
        for record in self._records.values():
            for call in record.calls:
                tensors = [
                    call.q,
                    call.z,
                    *(buffer_slice.storage.buffer for buffer_slice in (call.k, call.v) if buffer_slice is not None),
                ]
                tensors_by_id |= {id(x): x for x in tensors if x is not None}
        return sum(x.numel() * x.element_size() for x in tensors_by_id.values())


@contextmanager
def record(
    model: HasHookPoints, heads: HeadPattern = "*", tensors: str | Iterable[str] = RECORDABLE
) -> Iterator[ModelRecording]:
    """Record q, k, v and z of heads while the model is called. The outputs of the model do not change.

    Args:
        model: A `Transformer` or an attached model.
        heads: Addresses or a pattern: `"5.1"`, `"3.*"`, `"5.1,3.*"`. The default `"*"` selects all heads.
        tensors: Any of `"q"`, `"k"`, `"v"`, `"z"`, `"output"` (output of the head to the residual stream) and `"map"`
            (attention weights). Fewer tensors need less memory. Default: all.

    Yields:
        A `ModelRecording` with the activations of each head by address. It stays valid after the `with` block.

    Raises:
        HeadwiseError: If the pattern selects no head of the model or a tensor name is unknown.

    >>> import torch
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> with record(model, "5.1,3.*") as recording:
    ...     logits = model(torch.tensor([[72, 105, 33]]))
    >>> recording["5.1"].z.shape, recording["5.1"].map(rows=[2]).shape
    (torch.Size([1, 3, 64]), torch.Size([1, 1, 3]))
    """
    tensor_names = _required_tensors(tensors)
    hook_points = model.gathered_hook_points()
    selected = select_heads(heads, [address for hook_point in hook_points for address in hook_point.head_addresses])
    heads_by_hook_point = {
        hook_point: tuple(i for i, a in enumerate(hook_point.head_addresses) if a in set(selected))
        for hook_point in hook_points
    }
    records = [
        LayerRecord(hook_point, head_indices, tensor_names)
        for hook_point, head_indices in heads_by_hook_point.items()
        if head_indices
    ]
    with ExitStack() as stack:
        for layer_record in records:
            stack.enter_context(layer_record.hook_point.listen(layer_record.on_call))
        yield ModelRecording(records, selected)


def select_heads(heads: HeadPattern | Iterable[str], addresses: Iterable[Address]) -> tuple[Address, ...]:
    """Return the addresses that match a pattern. `*` matches all heads of all stacks."""
    return tuple(addresses) if isinstance(heads, str) and heads.strip() == "*" else select(heads, addresses)


def _required_tensors(tensors: str | Iterable[str]) -> frozenset[str]:
    names = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    for name in names:
        if name not in REQUIRED_TENSORS:
            raise ArgumentError(f"tensors: {name!r} cannot be recorded; {suggest_names(str(name), RECORDABLE)}")
    if not names:
        raise ArgumentError(f"tensors: the list is empty. Name at least one of {', '.join(RECORDABLE)}.")
    return frozenset("".join(REQUIRED_TENSORS[name] for name in names))


def _require_recorded(tensor: X | None, name: str) -> X:
    if tensor is None:
        raise HeadwiseError(
            f'{name} was not recorded. Add it to `tensors`: hw.record(model, heads, tensors=("{name}",)).'
        )
    return tensor


def _resolve_indices(indices: Indices, length: int, kind: str) -> list[int]:
    if indices is None:
        return list(range(length))
    if isinstance(indices, slice):
        return list(range(length))[indices]
    requested = [indices] if isinstance(indices, int) else [int(index) for index in indices]
    for index in requested:
        if not -length <= index < length:
            raise ArgumentError(
                f"{kind} index {index} is out of range. The call has {length} {'queries' if kind == 'query' else 'keys'}; "
                f"use an index from {-length} to {length - 1}."
            )
    return [index % length for index in requested]


def _contiguous_runs(indices: list[int]) -> Iterator[range]:
    """Group consecutive indices into ranges of at most BLOCK_ROWS."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1 or i - start == BLOCK_ROWS:
            yield range(indices[start], indices[i - 1] + 1)
            start = i
