"""Attention weights in blocks of rows, so that metrics can use all weights without a full map in memory.

A block has shape (B, h, R, C): some heads, some queries, and the keys that they can see. Blocks are computed after the fused
attention call of the model. A block is small enough to stay in the CPU cache while all metrics read it, and the next block
reuses its memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import log, prod

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import gram, output_norms
from headwise.kernels import Mask
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import ScoreParams, repeat_kv

BLOCK_ROWS = 64  # queries per block
BLOCK_CELLS = 1 << 21  # approximate number of scores per block
LOG2_E = 1 / log(2)
MASKED_SCORE = -1e30  # score of masked keys; finite, so that 0 · score is 0
CHUNK_KEYS = 4096  # keys processed at once when visibility is computed, see `BatchContext.row_visibility`
MAX_CACHED_CELLS = 1 << 23  # mask entries that are cached for the next layer; others are computed again


@dataclass(frozen=True, eq=False)
class VisibleBlock:
    """Visible keys of a block of rows. Equal for all heads unless the mask differs by head.

    Attributes:
        rows: Queries of the call.
        cols: Keys.
        past: Number of keys before the first query. The query of row i is at position i + past.
        mask: The attention mask.
        visible_keys: Number of visible keys of each row, (1 or B, 1 or H, R).
        partial_cols: Columns that are hidden from at least one row. In a causal block these are only the last ones.
        partial_mask: Whether each row sees each of these columns, (1 or B, 1 or H, R, P).
    """

    rows: range
    cols: range
    past: int
    mask: Mask | None
    visible_keys: Tensor
    partial_cols: slice
    partial_mask: Tensor

    def allowed_mask(self, columns: slice = slice(None)) -> Tensor:
        """Return the mask of visible keys, for all or some columns, (1 or B, 1 or H, R, C)."""
        first, end, _ = columns.indices(len(self.cols))
        allowed = torch.ones(
            *self.partial_mask.shape[:3], end - first, dtype=torch.bool, device=self.partial_mask.device
        )
        low, high = max(first, self.partial_cols.start), min(end, self.partial_cols.stop)
        if low < high:
            allowed[..., low - first : high - first] = self.partial_mask[
                ..., low - self.partial_cols.start : high - self.partial_cols.start
            ]
        return allowed

    def sees_keys(self, keys: Tensor) -> Tensor:
        """Return whether each row sees one key, (B, 1 or H, R). `keys` are positions, (B, R) or (B, 1); negative positions
        are not visible."""
        column = (keys - self.cols.start).expand(-1, len(self.rows))  # (B, R)
        in_block = ((column >= 0) & (column < len(self.cols)))[:, None]  # (B, 1, R)
        if self.partial_cols.start == self.partial_cols.stop:
            return in_block
        inner = column - self.partial_cols.start
        in_partial = ((inner >= 0) & (inner < self.partial_mask.shape[-1]))[:, None]
        index = inner.clamp(0, self.partial_mask.shape[-1] - 1)[:, None, :, None]  # (B, 1, R, 1)
        partial_mask = self.partial_mask.expand(len(column), -1, -1, -1)
        return in_block & (
            ~in_partial | partial_mask.gather(-1, index.expand(-1, partial_mask.shape[1], -1, -1))[..., 0]
        )

    def visible_sums(self, values: Tensor) -> Tensor:
        """Sum `values` (B, S, c) over the visible keys of each row, (B, 1 or H, R, c)."""
        partial = slice(self.cols.start + self.partial_cols.start, self.cols.start + self.partial_cols.stop)
        left, right = values[:, self.cols.start : partial.start], values[:, partial.stop : self.cols.stop]
        always_visible = (left.sum(1) + right.sum(1))[:, None, None]  # (B, 1, 1, c): columns that all rows see
        return self.partial_mask.to(values) @ values[:, None, partial] + always_visible

    @cached_property
    def sees_future_keys(self) -> bool:
        """Whether rows can see later keys, as in an encoder."""
        column = self.rows.start + self.past - self.cols.start  # column of the first query
        return len(self.cols) > column + 1 and bool(self.allowed_mask().triu(column + 1).any())


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Unnormalized attention weights of some rows and heads: e = exp(score − largest score of the row), 0 at masked keys.

    `e` and `scratch` are valid until the next block is computed.

    Attributes:
        heads: Heads of the block.
        visible: Visible keys of the block.
        e: Unnormalized weights, (B, h, R, C).
        total: Σ e, plus the attention sink, (B, h, R).
        energy: Σ e · (score − largest score), (B, h, R).
        feature_sums: Σ e · feature over the keys, (B, h, R, f).
        largest: Largest e among `inner_cols` of `iter_row_blocks`, (B, h, R).
        scratch: Memory that may be overwritten, (B, h, R, C).
        rows: Queries of the call.
        cols: Keys.
        past: Number of keys before the first query.
    """

    heads: slice
    visible: VisibleBlock
    e: Tensor
    total: Tensor
    energy: Tensor
    feature_sums: Tensor
    largest: Tensor
    scratch: Tensor
    rows: range = field(init=False)
    cols: range = field(init=False)
    past: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "past"):
            object.__setattr__(self, name, getattr(self.visible, name))

    def normalize(self, summed: Tensor) -> Tensor:
        """Divide sums of e by the row total, (B, h, R, …). The result is 0 for a row without visible keys."""
        total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        return summed / total.reshape(*total.shape, *[1] * (summed.ndim - total.ndim))

    def unnormalized_weights_at_offsets(self, low: int, high: int) -> Tensor:
        """Return e at the offsets `low` to `high` − 1 back from each query, farthest first, (B, h, R, high − low).

        The result is a view along the diagonals. Positions outside the block are 0.
        """
        e, R, C = self.e, len(self.rows), len(self.cols)
        start = self.rows.start + self.past - self.cols.start - (high - 1)  # first column of the first row
        end = start + R - 1 + high - low  # column after the last column of the last row
        left, right = max(0, -start), max(0, end - C)
        if left or right:
            e = torch.nn.functional.pad(e, (left, right))
        b, h, r, _ = e.stride()
        sizes = (*e.shape[:2], R, high - low)
        return e.as_strided(sizes, (b, h, r + 1, 1), e.storage_offset() + start + left)


@dataclass(eq=False)
class VisibilityCache:
    """Visible blocks that are reused by the next layer."""

    # by mask, rows, T and S
    blocks: dict[tuple[Mask | None, range, int, int], VisibleBlock] = field(default_factory=dict)
    cached_cells: int = 0

    def get_block(self, params: ScoreParams, rows: range, T: int, S: int, device: torch.device) -> VisibleBlock:
        """Return the visible keys of some rows. Masks that are not causal can be as large as a map, so the cache is limited
        to MAX_CACHED_CELLS entries."""
        key = (params.mask, rows, T, S)
        if key in self.blocks:
            return self.blocks[key]
        visible = _build_visible_block(params, rows, T, S, device)
        if self.cached_cells + visible.partial_mask.numel() <= MAX_CACHED_CELLS:
            self.blocks[key] = visible
            self.cached_cells += visible.partial_mask.numel()
        return visible


def visible_blocks(
    params: ScoreParams, T: int, S: int, device: torch.device, row_stride: int = 1, cache: VisibilityCache | None = None
) -> Iterator[VisibleBlock]:
    """Iterate over the visible keys of a call in blocks of rows, every block or one out of `row_stride`. `cache` stores
    them for the next layer."""
    for rows in strided_row_blocks(T, row_stride):
        yield (cache or VisibilityCache()).get_block(params, rows, T, S, device)


def _build_visible_block(params: ScoreParams, rows: range, T: int, S: int, device: torch.device) -> VisibleBlock:
    cols = params.key_range(rows, T, S) or range(1)
    if params.mask is None or params.mask.is_full(T, S):
        visible, empty = (
            torch.full((1, 1, len(rows)), len(cols), device=device),
            torch.ones(1, 1, len(rows), 0, device="cpu", dtype=torch.float32),
        )
        return VisibleBlock(rows, cols, S - T, params.mask, visible, slice(0, 0), empty.bool().to(device))
    mask = params.mask
    visible, hidden_columns = torch.zeros(1, 1, len(rows), dtype=torch.long, device=device), []

    def mask_block(chunk: range) -> Tensor:
        return mask.block(rows, chunk, T, S, device).expand(-1, -1, len(rows), len(chunk))  # (1 or B, 1 or H, R, c)

    for chunk in column_chunks(cols):
        allowed = mask_block(chunk)
        visible = visible + allowed.sum(-1)
        hidden_columns.append((~allowed).flatten(0, -2).any(0))  # (c,)
    hidden = torch.cat(hidden_columns).cpu().nonzero()[:, 0].tolist() or [0, -1]
    columns = slice(hidden[0], hidden[-1] + 1)  # from the first to the last column with a hidden entry
    partial = range(cols.start + columns.start, cols.start + columns.stop)
    return VisibleBlock(rows, cols, S - T, mask, visible, columns, mask_block(partial).clone())


def column_chunks(cols: range) -> Iterator[range]:
    """Split a range of columns into chunks of CHUNK_KEYS.

    >>> list(column_chunks(range(2, 5000)))
    [range(2, 4098), range(4098, 5000)]
    """
    return (range(first, min(first + CHUNK_KEYS, cols.stop)) for first in range(cols.start, cols.stop, CHUNK_KEYS))


def strided_row_blocks(T: int, row_stride: int = 1) -> Iterator[range]:
    """Iterate over blocks of rows: every block, or the middle one of each group of `row_stride` blocks.

    The middle block represents its group better than the first, which sees the fewest keys.

    >>> list(strided_row_blocks(130)), list(strided_row_blocks(64 * 20, row_stride=16))
    ([range(0, 64), range(64, 128), range(128, 130)], [range(512, 576), range(1152, 1216)])
    """
    for first in range(0, T, BLOCK_ROWS * row_stride):
        blocks = -(-(min(first + BLOCK_ROWS * row_stride, T) - first) // BLOCK_ROWS)
        start = first + BLOCK_ROWS * (blocks // 2)
        yield range(start, min(start + BLOCK_ROWS, T))


def count_sampled_rows(T: int, row_stride: int = 1) -> int:
    """Return the number of rows in the blocks of `strided_row_blocks`."""
    return sum(map(len, strided_row_blocks(T, row_stride)))


def iter_row_blocks(
    call: AttentionCall,
    key_features: Tensor,
    row_stride: int = 1,
    cache: VisibilityCache | None = None,
    inner_cols: range | None = None,
) -> Iterator[RowBlock]:
    """Compute the attention weights of a call in blocks of rows.

    Args:
        call: The attention call.
        key_features: Features that are summed over the keys with weight e, (B or 1, H or 1, S, f). The first feature must
            be 1 for every key.
        row_stride: Compute every block (1), or one block out of `row_stride`.
        cache: Cache of the visible keys.
        inner_cols: Columns for `RowBlock.largest`. None selects all columns.
    """
    params, (B, H, T, _) = call.params, call.q.shape
    S = call.k.shape[2]
    if not (B and H and T and S):
        return
    queries = at_least_float32(call.q)  # (B, H, T, d)
    keys, dtype = repeat_kv(call.k.to(queries), params.kv_of_head), queries.dtype  # (B, H, S, d)
    # (B, H, f, S): a matrix product with few rows is faster
    transposed = key_features.to(dtype).expand(B, H, S, -1).mT.contiguous()
    h = _heads_per_block(H, B * min(BLOCK_ROWS, T) * S)
    buffers = queries.new_empty(2, B * h * min(BLOCK_ROWS, T) * S)
    for visible in visible_blocks(params, T, S, queries.device, row_stride, cache):
        rows, cols = (slice(r.start, r.stop) for r in (visible.rows, visible.cols))
        bias = params.bias_block(visible.rows, visible.cols, T, S)
        keep = visible.partial_mask.to(dtype)  # (1 or B, 1 or H, R, P)
        mask_bias = (1 - keep) * MASKED_SCORE
        for first in range(0, H, h):
            heads = slice(first, min(first + h, H))
            shape = (B, heads.stop - first, len(visible.rows), len(visible.cols))
            scores, e = (buffer[: prod(shape)].view(shape) for buffer in buffers)
            torch.matmul(queries[:, heads, rows] * params.scale, keys[:, heads, cols].mT, out=scores)
            if params.softcap is not None:
                scores.div_(params.softcap).tanh_().mul_(params.softcap)
            if bias is not None:
                scores.add_(_select_heads(bias, heads)).clamp_(min=MASKED_SCORE)  # the bias may be −inf
            corner = scores[..., visible.partial_cols]
            if corner.shape[-1]:
                corner.add_(_select_heads(mask_bias, heads))
            inner_max, row_max = _row_max(scores, visible.cols, inner_cols)  # (B, h, R) each
            largest = (inner_max - row_max).mul_(LOG2_E).exp2_() * (inner_max > MASKED_SCORE / 2)
            scores.sub_(row_max[..., None]).mul_(LOG2_E)
            if corner.shape[-1]:
                corner.mul_(_select_heads(keep, heads))  # powers are much slower if they underflow
            torch.exp2(scores, out=e)  # on a CPU in a quarter of the time of exp
            if corner.shape[-1]:
                e[..., visible.partial_cols].mul_(_select_heads(keep, heads))
            if bias is not None:
                e.mul_((row_max > MASKED_SCORE / 2)[..., None])  # the bias may mask all keys of a row
            feature_sums = (transposed[:, heads, :, cols] @ e.mT).mT  # (B, h, R, f)
            energy = scores.mul_(e).sum(-1).div_(LOG2_E)  # (B, h, R)
            total = feature_sums[..., 0]
            if params.sink is not None:
                sink_score = params.sink[heads].to(row_max)[:, None] - row_max
                # clamp to avoid overflow; the weights of the keys are 0 at this point already
                total = total + sink_score.clamp(max=80).exp()
            yield RowBlock(heads, visible, e, total, energy, feature_sums, largest, scratch=scores)


def _heads_per_block(H: int, cells_per_head: int) -> int:
    """Return the number of heads of each block, for blocks of at most BLOCK_CELLS and almost equal size.

    >>> _heads_per_block(12, BLOCK_CELLS // 8)
    6
    """
    num_blocks = -(-H // max(1, min(H, BLOCK_CELLS // cells_per_head)))
    return -(-H // num_blocks)


def _row_max(scores: Tensor, cols: range, inner_cols: range | None) -> tuple[Tensor, Tensor]:
    """Return the largest score of each row among the inner columns and among all columns, (B, h, R) each."""
    if inner_cols is None:
        inner_cols = cols
    low, high = (min(max(end - cols.start, 0), len(cols)) for end in (inner_cols.start, inner_cols.stop))
    slices = [scores[..., low:high], scores[..., :low], scores[..., high:]]
    empty = scores.new_full(scores.shape[:-1], MASKED_SCORE)
    inner_max, *others = (chunk.amax(-1) if chunk.shape[-1] else empty for chunk in slices)
    return inner_max, torch.maximum(inner_max, torch.maximum(*others)) if any(
        chunk.shape[-1] for chunk in slices[1:]
    ) else inner_max


def value_output_norms(call: AttentionCall, output_gram: Tensor | None = None) -> Tensor:
    """Return the norm of the value output of each key, ‖v W_O[h]‖, (B, H, S). NaN if W_O cannot be read.

    Args:
        call: The attention call.
        output_gram: W_O W_Oᵀ, (H, e, e). None computes it.
    """
    if output_gram is None:
        try:
            output_gram = gram(call.hook_point.W_O_for_listeners)
        except HeadwiseError:
            output_gram = nan_output_gram(call)
    return output_norms(repeat_kv(call.v, call.params.kv_of_head), output_gram)


def nan_output_gram(call: AttentionCall) -> Tensor:
    """Return NaN in the shape of W_O W_Oᵀ, (H, e, e), for a W_O that cannot be read."""
    H, e = call.z.shape[1], call.z.shape[-1]
    return at_least_float32(call.z.new_full((H, e, e), torch.nan))


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """Select heads, unless the tensor is shared by all heads."""
    return x if x.shape[1] == 1 else x[:, heads]
