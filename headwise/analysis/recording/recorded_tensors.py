"""Storage of a recording: copies of the selected heads, with keys and values stored once for all decoding steps."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.score_params import ScoreParams


class GrowingBuffer:
    """Append-only buffer for the keys or values of one sequence."""

    def __init__(self, initial: Tensor) -> None:
        self.buffer, self.length = initial.clone(), initial.shape[2]  # (B, K, capacity, d)

    def find_or_append(self, full: Tensor, new_length: int) -> range | None:
        """Return the columns that contain `full`. Append its last `new_length` columns if they are new.

        Returns None if `full` belongs to another sequence. A dynamic cache passes all previous keys, a sliding cache the
        last ones, cross-attention the same keys at every step. The values are compared, because a cache may have been
        reordered or reset between two steps.
        """
        B, K, S, d = full.shape
        if (B, K, d) != (*self.buffer.shape[:2], self.buffer.shape[3]) or self.buffer.dtype != full.dtype:
            return None
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return None  # torch forbids writing to an inference tensor outside inference mode
        if self.length == S and torch.equal(full, self.buffer[:, :, :S]):
            return range(S)
        past_length = S - new_length
        if not 0 < past_length <= self.length:
            return None
        start = self.length - past_length
        if not torch.equal(full[:, :, :past_length], self.buffer[:, :, start : self.length]):
            return None
        if self.length + new_length > self.buffer.shape[2]:
            # Double the capacity, so that the cost of a step does not depend on the number of previous steps.
            capacity = max(2 * self.buffer.shape[2], self.length + new_length)
            larger = full.new_empty(B, K, capacity, d)
            larger[:, :, : self.length] = self.buffer[:, :, : self.length]
            self.buffer = larger
        self.buffer[:, :, self.length : self.length + new_length] = full[:, :, past_length:]
        self.length += new_length
        return range(start, self.length)


@dataclass(frozen=True, eq=False)
class BufferSlice:
    """A range of columns of a buffer, which may have grown since."""

    storage: GrowingBuffer
    cols: range

    def select_head(self, head: int) -> Tensor:
        """Return one KV head, (B, S, ·)."""
        return self.storage.buffer[:, head, self.cols.start : self.cols.stop]


@dataclass(frozen=True, eq=False)
class RecordedLayerCall:
    """Recorded tensors of one call of one layer, for the selected heads."""

    sizes: tuple[int, int]  # T, S
    params: ScoreParams  # of all heads of the layer
    W_O: Tensor | HeadwiseError  # (H, e, D): the weights themselves, not a copy; or the reason why they cannot be read
    weights_version: int | None  # version counter of W_O at the time of the call
    q: Tensor | None  # (B, h, T, d)
    k: BufferSlice | None  # (B, k, S, d)
    v: BufferSlice | None  # (B, k, S, e)
    z: Tensor | None  # (B, h, T, e)
    token_gate: Tensor | None  # (B, h, T, 1 or e), recorded with z


@dataclass(eq=False)
class LayerRecord:
    """All calls of one layer."""

    hook_point: HookPoint
    heads: tuple[int, ...]  # indices on the head axis
    tensor_names: frozenset[str]
    calls: list[RecordedLayerCall] = field(default_factory=list)
    _buffers: dict[str, GrowingBuffer] = field(default_factory=dict)

    def on_call(self, call: AttentionCall) -> None:
        """Store the selected tensors and heads of one call."""
        T, S = call.q.shape[2], call.k.shape[2]
        with torch.no_grad():
            q = self._copy_heads(call.q, "q")
            z = self._copy_heads(call.z, "z")
            gate = None if call.token_gate is None else self._copy_heads(call.token_gate, "z")
            k, v = self._store_kv(call.k, "k", call, T), self._store_kv(call.v, "v", call, T)
        try:
            W_O = call.hook_point.W_O_for_listeners.detach()
        except HeadwiseError as error:  # only head outputs need W_O
            W_O = error
        params, version = _copy_params(call.params), tensor_version(W_O)
        self.calls.append(RecordedLayerCall((T, S), params, W_O, version, q, k, v, z, gate))

    def _copy_heads(self, x: Tensor, tensor_name: str) -> Tensor | None:
        if tensor_name not in self.tensor_names:
            return None
        return x.detach().index_select(1, torch.tensor(self.heads, device=x.device))  # a copy: (B, h, T, ·)

    def _store_kv(self, x: Tensor, tensor_name: str, call: AttentionCall, T: int) -> BufferSlice | None:
        if tensor_name not in self.tensor_names:
            return None
        kv_indices = self.recorded_kv_heads(call.params.kv_of_head)
        x = x.detach()
        x = x if len(kv_indices) == x.shape[1] else x.index_select(1, torch.tensor(kv_indices, device=x.device))
        buffer = self._buffers.get(tensor_name)
        cols = None if buffer is None else buffer.find_or_append(x, T)
        if buffer is None or cols is None:
            buffer = self._buffers[tensor_name] = GrowingBuffer(x)
            cols = range(x.shape[2])
        return BufferSlice(buffer, cols)

    def recorded_kv_heads(self, kv_of_head: tuple[int, ...]) -> tuple[int, ...]:
        """Return the indices of the KV heads that the selected heads use."""
        return tuple(sorted({kv_of_head[head] for head in self.heads}))


def _copy_params(params: ScoreParams) -> ScoreParams:
    """Copy the learned tensors, which may change after the call."""
    bias = None if params.bias is None else params.bias.detached_copy()
    return replace(params, bias=bias, sink=None if params.sink is None else params.sink.detach().clone())


def tensor_version(weight: Tensor | HeadwiseError) -> int | None:
    """Return the version counter of torch, which increases with each in-place write. None for an inference tensor."""
    return None if isinstance(weight, HeadwiseError) or weight.is_inference() else weight._version
