"""Record what heads do: q, k, v and z of every call, and from them what each head wrote and where it looked, on demand.

Kept are copies, without their graphs, of the heads asked for alone. Keys that came with a cache are kept once, however many
steps look at them. Maps are never kept: rows of them are rebuilt from q and k when somebody asks.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from headwise.analysis.recording.recorded_tensors import LayerRecord, RecordedLayerCall, tensor_version
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import masked_scores, raw_scores, softmax_weights
from headwise.spec import Address, select

RECORDABLE = ("q", "k", "v", "z", "output", "map")
# which tensors each is made from
REQUIRED_TENSORS = {"q": "q", "k": "k", "v": "v", "z": "z", "output": "z", "map": "qk"}
BLOCK_ROWS = 128  # rows of a map rebuilt at once
Indices = int | slice | range | Sequence[int] | None
X = TypeVar("X")


class HasHookPoints(Protocol):
    """A model whose attention can be listened to."""

    def gathered_hook_points(self) -> list[HookPoint]:
        """Every place where attention happens, with all heads."""
        ...


@dataclass(frozen=True, eq=False)
class HeadCall:
    """One head during one call of the model. B is the batch, T the queries of this call, S the keys they could see."""

    address: Address
    _record: LayerRecord
    _call: RecordedLayerCall

    @property
    def q(self) -> Tensor:
        """(B, T, d), after positions."""
        return _require_recorded(self._call.q, "q")[:, self._recorded_index]

    @property
    def k(self) -> Tensor:
        """(B, S, d), after positions: all keys of then, those in a cache included."""
        return _require_recorded(self._call.k, "k").select_head(self._recorded_kv_index)

    @property
    def v(self) -> Tensor:
        """(B, S, e)"""
        return _require_recorded(self._call.v, "v").select_head(self._recorded_kv_index)

    @property
    def z(self) -> Tensor:
        """(B, T, e): what the head found, as it entered W_O, gates and edits included."""
        return _require_recorded(self._call.z, "z")[:, self._recorded_index]

    @property
    def output(self) -> Tensor:
        """(B, T, D): what the head added to the stream, z W_O[h]."""
        W_O = self._call.W_O
        if isinstance(W_O, HeadwiseError):
            raise W_O
        if tensor_version(W_O) != self._call.weights_version:
            raise HeadwiseError(
                f"W_O of {self.address} has changed since the call was recorded; take .output before the weights change."
            )
        return _require_recorded(self._call.z, "output")[:, self._recorded_index] @ W_O[self._index]

    def map(self, rows: Indices = None, cols: Indices = None) -> Tensor:
        """Who looked at whom, (B, R, C): all queries and keys, or those asked for. No other row is rebuilt.

        With a sink rows sum to less than 1: the rest is the sink's. Dropout on weights is left out. Weights are at
        least float32.
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
            scores = masked_scores(raw_scores(q_block, k[:, None], params), params, block, range(S), T, S)
            block_weights = softmax_weights(scores, params, params.may_have_empty_rows(T, S))[:, 0]  # (B, r, S)
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
class HeadRecording:
    """What was recorded of one head. With one call `.q`, `.map()` and the others are that call's; with several take one."""

    address: Address
    calls: tuple[HeadCall, ...]

    def call(self, index: int) -> HeadCall:
        """One call of several, from 0; −1 is the last."""
        if not -len(self.calls) <= index < len(self.calls):
            raise HeadwiseError(f"there is no call {index} of {self.address}; {len(self.calls)} were recorded.")
        return self.calls[index]

    @property
    def only_call(self) -> HeadCall:
        """The call, where there was just one."""
        if len(self.calls) != 1:
            raise HeadwiseError(
                f"{self.address} was called {len(self.calls)} times while it was recorded; say which: .call(0), .call(-1)."
            )
        return self.calls[0]

    @property
    def q(self) -> Tensor:
        """(B, T, d)"""
        return self.only_call.q

    @property
    def k(self) -> Tensor:
        """(B, S, d)"""
        return self.only_call.k

    @property
    def v(self) -> Tensor:
        """(B, S, e)"""
        return self.only_call.v

    @property
    def z(self) -> Tensor:
        """(B, T, e)"""
        return self.only_call.z

    @property
    def output(self) -> Tensor:
        """(B, T, D)"""
        return self.only_call.output

    def map(self, rows: Indices = None, cols: Indices = None) -> Tensor:
        """(B, R, C)"""
        return self.only_call.map(rows, cols)


class ModelRecording:
    """What `record` keeps, by head: recording["5.1"]."""

    def __init__(self, records: Iterable[LayerRecord], addresses: tuple[Address, ...]) -> None:
        self._records = {record.hook_point.address: record for record in records}
        self.addresses = addresses

    def __getitem__(self, head: str | Address) -> HeadRecording:
        address = Address.parse(head) if isinstance(head, str) else head
        if address not in self.addresses:
            listed = ", ".join(map(str, self.addresses[:8])) + (", …" if len(self.addresses) > 8 else "")
            raise HeadwiseError(f"{address} was not recorded; recorded are {listed}.")
        record = self._records[address.layer_address]
        if not record.calls:
            raise HeadwiseError(f"nothing was recorded of {address}; call the model inside the with block.")
        return HeadRecording(address, tuple(HeadCall(address, record, call) for call in record.calls))

    def __iter__(self) -> Iterator[HeadRecording]:
        return (self[address] for address in self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def nbytes(self) -> int:
        """Memory held."""
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
    """Keep q, k, v and z of some heads while the model is called; outputs stay bitwise what they are.

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
    """The heads a pattern names; `*` is all of them, in models of several stacks too."""
    return tuple(addresses) if isinstance(heads, str) and heads.strip() == "*" else select(heads, addresses)


def _required_tensors(tensors: str | Iterable[str]) -> frozenset[str]:
    names = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    for name in names:
        if name not in REQUIRED_TENSORS:
            raise HeadwiseError(f"{name!r} cannot be recorded; {suggest_names(str(name), RECORDABLE)}")
    if not names:
        raise HeadwiseError(f"nothing is to be recorded; name some of {', '.join(RECORDABLE)}.")
    return frozenset("".join(REQUIRED_TENSORS[name] for name in names))


def _require_recorded(tensor: X | None, name: str) -> X:
    if tensor is None:
        raise HeadwiseError(f'{name} was not recorded; ask for it: record(model, heads, tensors=("{name}",)).')
    return tensor


def _resolve_indices(indices: Indices, length: int, kind: str) -> list[int]:
    if indices is None:
        return list(range(length))
    if isinstance(indices, slice):
        return list(range(length))[indices]
    requested = [indices] if isinstance(indices, int) else [int(index) for index in indices]
    for index in requested:
        if not -length <= index < length:
            raise HeadwiseError(f"there is no {kind} {index}; this call has {length}.")
    return [index % length for index in requested]


def _contiguous_runs(indices: list[int]) -> Iterator[range]:
    """Neighbouring places together, not too many at once."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1 or i - start == BLOCK_ROWS:
            yield range(indices[start], indices[i - 1] + 1)
            start = i
