"""Attention in blocks of rows: everything a measure needs of a map, while no map is ever held whole.

A block is (B, h, R, C): some heads, some queries, the keys those can see. It is made after the fused call that gave the
model its output, is small enough to stay in the cache while all measures read it, and its memory is used again by the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import gram, output_norms
from headwise.kernels import Mask
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import ScoreParams, repeat_kv

BLOCK_ROWS = 64  # queries in a block
BLOCK_CELLS = 1 << 22  # scores in a block, about
MASKED_SCORE = -1e30  # the score of what is not seen: finite, so that 0 · score is 0
# keys that meet a block of rows at once while sights, and what is known of them, are made: see `BatchContext.row_visibility`
CHUNK_KEYS = 4096
MAX_CACHED_CELLS = 1 << 23  # cells of sights that are kept from layer to layer; more are made again


@dataclass(frozen=True, eq=False)
class VisibleBlock:
    """Some rows, and which keys they may see: the same for all heads, but for masks that tell heads apart."""

    rows: range  # queries, by their place in this call
    cols: range  # keys
    past: int  # keys before the first query: the query of row i stands at place i + past
    mask: Mask | None  # whose sight it is
    visible_keys: Tensor  # (1 or B, 1 or H, R): how many keys a row may see
    partial_cols: slice  # the columns in which some are not seen: of a causal block nothing but its last corner
    partial_mask: Tensor  # (1 or B, 1 or H, R, P): which of those are

    def allowed_mask(self, columns: slice = slice(None)) -> Tensor:
        """All of it, or some of its columns: (1 or B, 1 or H, R, C)."""
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
        """Whether each row sees one key, `keys` (B, R) or (B, 1) by their places; none is below 0: (B, 1 or H, R)."""
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
        """Sums over the keys each row sees, of `values` (B, S, c): (B, 1 or H, R, c)."""
        partial = slice(self.cols.start + self.partial_cols.start, self.cols.start + self.partial_cols.stop)
        left, right = values[:, self.cols.start : partial.start], values[:, partial.stop : self.cols.stop]
        always_visible = (left.sum(1) + right.sum(1))[:, None, None]  # (B, 1, 1, c): of the columns all rows see
        return self.partial_mask.to(values) @ values[:, None, partial] + always_visible

    @cached_property
    def sees_future_keys(self) -> bool:
        """Whether rows may see keys that come after them, as an encoder's do."""
        column = self.rows.start + self.past - self.cols.start  # the first query's column
        return len(self.cols) > column + 1 and bool(self.allowed_mask().triu(column + 1).any())


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of some heads. Weights are left unnormalised: e = exp(score − the row's largest), 0 where nothing is seen.

    `e` lives until the next block is made.
    """

    heads: slice
    visible: VisibleBlock
    e: Tensor  # (B, h, R, C)
    total: Tensor  # (B, h, R): Σ e, and the sink's share
    energy: Tensor  # (B, h, R): Σ e · (score − the largest)
    feature_sums: Tensor  # (B, h, R, f): Σ e · what was asked to be summed over the keys
    largest: Tensor  # (B, h, R): the largest e among the columns named to `iter_row_blocks`
    scratch: Tensor  # (B, h, R, C): memory that is free
    rows: range = field(init=False)
    cols: range = field(init=False)
    past: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "past"):
            object.__setattr__(self, name, getattr(self.visible, name))

    def normalize(self, summed: Tensor) -> Tensor:
        """Sums of e as shares of the row: (B, h, R, …); a row that sees nothing has none."""
        total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        return summed / total.reshape(*total.shape, *[1] * (summed.ndim - total.ndim))

    def unnormalized_weights_at_offsets(self, low: int, high: int) -> Tensor:
        """e, `low` to `high` − 1 places back from each query, the farthest first: (B, h, R, high − low).

        A view along the diagonals. Places outside the block read as 0.
        """
        e, R, C = self.e, len(self.rows), len(self.cols)
        start = self.rows.start + self.past - self.cols.start - (high - 1)  # the first row's first column
        end = start + R - 1 + high - low  # behind the last row's last column
        left, right = max(0, -start), max(0, end - C)
        if left or right:
            e = torch.nn.functional.pad(e, (left, right))
        b, h, r, _ = e.stride()
        sizes = (*e.shape[:2], R, high - low)
        return e.as_strided(sizes, (b, h, r + 1, 1), e.storage_offset() + start + left)


@dataclass(eq=False)
class VisibilityCache:
    """What was made for one layer and serves the next."""

    # by mask, rows, T and S
    blocks: dict[tuple[Mask | None, range, int, int], VisibleBlock] = field(default_factory=dict)
    cached_cells: int = 0

    def get_block(self, params: ScoreParams, rows: range, T: int, S: int, device: torch.device) -> VisibleBlock:
        """What some rows may see. A mask that is no corner of a block has as many cells as a map: few of those are kept."""
        key = (params.mask, rows, T, S)
        if key in self.blocks:
            return self.blocks[key]
        visible = _visible_block(params, rows, T, S, device)
        if self.cached_cells + visible.partial_mask.numel() <= MAX_CACHED_CELLS:
            self.blocks[key] = visible
            self.cached_cells += visible.partial_mask.numel()
        return visible


def visible_blocks(
    params: ScoreParams, T: int, S: int, device: torch.device, row_stride: int = 1, cache: VisibilityCache | None = None
) -> Iterator[VisibleBlock]:
    """What the rows of a call may see, block by block, or one block in so many. `cache` keeps it for the next layer."""
    for rows in row_block_ranges(T, row_stride):
        yield (cache or VisibilityCache()).get_block(params, rows, T, S, device)


def _visible_block(params: ScoreParams, rows: range, T: int, S: int, device: torch.device) -> VisibleBlock:
    cols = params.key_range(rows, T, S) or range(1)
    if params.mask is None or params.mask.is_full(T, S):
        visible, empty = torch.full((1, 1, len(rows)), len(cols), device=device), torch.ones(1, 1, len(rows), 0)
        return VisibleBlock(rows, cols, S - T, params.mask, visible, slice(0, 0), empty.bool().to(device))
    # the first and the last column in which something is
    mask, hidden_bounds = (params.mask, [cols.stop, cols.start - 1])
    visible = torch.zeros(1, 1, len(rows), dtype=torch.long, device=device)

    def mask_block(chunk: range) -> Tensor:
        return mask.block(rows, chunk, T, S, device).expand(-1, -1, len(rows), len(chunk))  # (1 or B, 1 or H, R, c)

    for chunk in column_chunks(cols):
        allowed = mask_block(chunk)
        visible = visible + allowed.sum(-1)
        columns = (~allowed).flatten(0, -2).any(0).nonzero()[:, 0]
        if len(columns):
            hidden_bounds = [min(hidden_bounds[0], chunk[int(columns[0])]), chunk[int(columns[-1])]]
    partial = range(hidden_bounds[0], hidden_bounds[1] + 1) or range(cols.start, cols.start)
    columns = slice(partial.start - cols.start, partial.stop - cols.start)
    return VisibleBlock(rows, cols, S - T, mask, visible, columns, mask_block(partial).clone())


def column_chunks(cols: range) -> Iterator[range]:
    """Columns a piece at a time.

    >>> list(column_chunks(range(2, 5000)))
    [range(2, 4098), range(4098, 5000)]
    """
    return (range(first, min(first + CHUNK_KEYS, cols.stop)) for first in range(cols.start, cols.stop, CHUNK_KEYS))


def row_block_ranges(T: int, row_stride: int = 1) -> Iterator[range]:
    """The blocks of rows a walk reads: all, or of each run of so many the one in its middle, as the first sees least.

    >>> list(row_block_ranges(130)), list(row_block_ranges(64 * 20, row_stride=16))
    ([range(0, 64), range(64, 128), range(128, 130)], [range(512, 576), range(1152, 1216)])
    """
    for first in range(0, T, BLOCK_ROWS * row_stride):
        blocks = -(-(min(first + BLOCK_ROWS * row_stride, T) - first) // BLOCK_ROWS)
        start = first + BLOCK_ROWS * (blocks // 2)
        yield range(start, min(start + BLOCK_ROWS, T))


def count_sampled_rows(T: int, row_stride: int = 1) -> int:
    """How many rows a walk reads."""
    return sum(map(len, row_block_ranges(T, row_stride)))


def iter_row_blocks(
    call: AttentionCall,
    key_features: Tensor,
    row_stride: int = 1,
    cache: VisibilityCache | None = None,
    inner_cols: range | None = None,
) -> Iterator[RowBlock]:
    """All blocks of a call, or one in so many; `key_features` (B or 1, H or 1, S, f) are summed over the keys, weighted by e.

    The first feature is 1 for every key. `cache` is where `visible_blocks` are kept. The largest weight is told of all
    columns, or of the `inner_cols`.
    """
    params, (B, H, T, _) = call.params, call.q.shape
    S = call.k.shape[2]
    if not (B and H and T and S):
        return
    queries = at_least_float32(call.q) * params.scale  # (B, H, T, d)
    keys, dtype = repeat_kv(call.k.to(queries), params.kv_of_head), queries.dtype  # (B, H, S, d)
    # (B, H, f, S): a product with few rows is the quicker one
    transposed = key_features.to(dtype).expand(B, H, S, -1).mT.contiguous()
    h = max(1, min(H, BLOCK_CELLS // (B * min(BLOCK_ROWS, T) * S)))
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
            torch.matmul(queries[:, heads, rows], keys[:, heads, cols].mT, out=scores)
            if params.softcap is not None:
                scores.div_(params.softcap).tanh_().mul_(params.softcap)
            if bias is not None:
                scores.add_(_select_heads(bias, heads)).clamp_(min=MASKED_SCORE)  # it may say −inf
            corner = scores[..., visible.partial_cols]
            if corner.shape[-1]:
                corner.add_(_select_heads(mask_bias, heads))
            inner_max, row_max = _row_max(scores, visible.cols, inner_cols)  # (B, h, R) each
            largest = (inner_max - row_max).exp_() * (inner_max > MASKED_SCORE / 2)
            scores.sub_(row_max[..., None])
            if corner.shape[-1]:
                corner.mul_(_select_heads(keep, heads))  # exp is many times slower where it underflows
            torch.exp(scores, out=e)
            if corner.shape[-1]:
                e[..., visible.partial_cols].mul_(_select_heads(keep, heads))
            if bias is not None:
                e.mul_((row_max > MASKED_SCORE / 2)[..., None])  # a row to which it forbids everything
            feature_sums = (transposed[:, heads, :, cols] @ e.mT).mT  # (B, h, R, f)
            energy = scores.mul_(e).sum(-1)  # (B, h, R)
            total = feature_sums[..., 0]
            if params.sink is not None:
                sink_score = params.sink[heads].to(row_max)[:, None] - row_max
                # more would be infinite; keys have nothing left as it is
                total = total + sink_score.clamp(max=80).exp()
            yield RowBlock(heads, visible, e, total, energy, feature_sums, largest, scratch=scores)


def _row_max(scores: Tensor, cols: range, inner_cols: range | None) -> tuple[Tensor, Tensor]:
    """The largest score of each row among the inner columns, and among all of them: (B, h, R) each."""
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
    """The length of what each head would write if it looked at one key alone, ‖v W_O[h]‖: (B, H, S). `output_gram`: W_O's
    gram.

    NaN, and so what is made of it, where W_O cannot be shown.
    """
    if output_gram is None:
        try:
            output_gram = gram(call.hook_point.W_O)
        except HeadwiseError:
            output_gram = nan_output_gram(call)
    return output_norms(repeat_kv(call.v, call.params.kv_of_head), output_gram)


def nan_output_gram(call: AttentionCall) -> Tensor:
    """What stands for W_O W_Oᵀ where W_O cannot be shown: NaN, (H, e, e)."""
    H, e = call.z.shape[1], call.z.shape[-1]
    return at_least_float32(call.z.new_full((H, e, e), torch.nan))


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """The part of some heads, where heads differ."""
    return x if x.shape[1] == 1 else x[:, heads]
