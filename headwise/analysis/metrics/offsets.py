"""Attention by distance: individual offsets near the query, bins by powers of two farther away, and long-range attention."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, WINDOW
from headwise.analysis.metrics.metric import Metric, MetricSpec, RoleTarget
from headwise.analysis.metrics.row_stats import DISTANCE_EDGES, RowStats

OFFSETS = tuple(range(WINDOW - 1, -WINDOW, -1))  # farthest back first, in the order of the diagonals
_LOCAL_COLUMNS = [OFFSETS.index(offset) for offset in (3, 2, 1, -1, -2, -3)]


def _describe_offset(offset: int) -> str:
    return "itself" if offset == 0 else f"{abs(offset)} {'back' if offset > 0 else 'ahead'}"


# The mean weight at each offset: `offset 1` is one back, `offset -1` one ahead.
OFFSET_SPECS = {
    o: MetricSpec(f"offset {o}", f"weight {_describe_offset(o)}", positional=True, series="offset") for o in OFFSETS
}
# Mean weight at each offset over the rows whose target is not the first token, which is often an attention sink, with its
# baseline and its value-weighted score.
_ELIGIBLE_VARIANTS = {
    o: MetricSpec(
        f"aimed {o}", f"weight {_describe_offset(o)}", displayed=False, positional=True, target=RoleTarget("offset", o)
    ).with_variants(f"aimed baseline {o}", f"aimed value-weighted {o}")
    for o in OFFSETS
}
ELIGIBLE_SPECS = {offset: three[0] for offset, three in _ELIGIBLE_VARIANTS.items()}
ARGMAX_SPECS = tuple(
    MetricSpec(f"argmax {o}", f"rows whose largest weight is {_describe_offset(o)}", positional=True, series="argmax")
    for o in OFFSETS
)
DISTANCE_SPECS = tuple(
    MetricSpec(
        f"distance {low}-{2 * low - 1}",
        f"weight {low} to {2 * low - 1} tokens away",
        positional=True,
        series="distance",
    )
    for low in DISTANCE_EDGES
)
# Weight within three tokens of the query, without the query itself and the first token.
LOCAL_SPECS = MetricSpec(
    "local", "weight within 3 tokens", positional=True, target=RoleTarget("within", 3)
).with_variants()
# Weight outside the window, without the first token and repeated tokens.
LONG_RANGE_SPECS = MetricSpec(
    "long range", f"weight {WINDOW} tokens away or more", positional=True, target=RoleTarget("beyond", WINDOW)
).with_variants()


class WeightPerOffsetMetric(Metric):
    """Weight at each offset of the window, and within three tokens of the query."""

    metric_specs = (
        *OFFSET_SPECS.values(),
        *(three[kind] for kind in range(3) for three in _ELIGIBLE_VARIANTS.values()),
        *LOCAL_SPECS,
    )

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute sums and counts at each offset and within three tokens. e is 0 at offsets without a visible token."""
        present, eligible, early = _offset_validity_masks(rows)  # (B, n, o) twice, and some rows
        p = rows.normalize(rows.near)  # (B, H, n, o)
        value_weighted = rows.near * _window_value_norms(rows) * rows.inverse_value_weighted_total[..., None]
        on_first = (present - eligible)[:, None]  # (B, 1, n, o): 1 if the target is the first token
        first_mask = on_first[:, :, early]
        uniform = (1 / rows.visible_keys.clamp(min=1).float()).to(p)  # (1 or B, 1 or H, n)
        baseline = (uniform.expand(len(p), -1, -1)[:, :, None] @ eligible[:, None])[:, :, 0]  # (B, 1 or H, o)
        offset = p.sum(2)  # (B, H, o)
        row_counts, targets = present.sum(1)[:, None], eligible.sum(1)[:, None]  # (B, 1, o)
        variants = (
            offset - (p[:, :, early] * first_mask).sum(2),
            baseline.expand_as(offset),
            value_weighted.sum(2) - (value_weighted[:, :, early] * first_mask).sum(2),
        )
        local_columns = [column for column in _LOCAL_COLUMNS if column < rows.near.shape[-1]]
        local = torch.stack([sums[..., local_columns].sum(-1) for sums in variants], -1)  # (B, H, 3)
        # (B, 1, 1): rows with a target within three tokens
        local_counts = eligible[..., local_columns].any(-1).sum(1)[:, None, None].to(targets)
        sums = [_pad_future_offsets(values) for values in (offset, *variants)]
        counts = [_pad_future_offsets(values) for values in (row_counts, targets, targets, targets)]
        return torch.cat((*sums, local), -1), torch.cat((*counts, local_counts.expand(-1, -1, 3)), -1)


class ArgmaxOffsetMetric(Metric):
    """Fraction of rows with the largest weight at each offset. Ties are divided equally."""

    metric_specs = ARGMAX_SPECS

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the hits at each offset."""
        hits = rows.near.floor() * rows.counted[:, None, :, None]  # only the largest e of a row is 1
        tied = hits.sum(-1, keepdim=True)  # (B, H, n, 1)
        hits.div_(tied.clamp_(min=1))
        return _pad_future_offsets(hits.sum(2)), _pad_future_offsets(_offset_validity_masks(rows)[0].sum(1)[:, None])


class DistanceBinMetric(Metric):
    """Weight in distance bins outside the window, by powers of two, over the rows that have tokens that far away."""

    metric_specs = DISTANCE_SPECS

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the sums of each bin, (B, H, bins), and the number of rows, (B, 1, bins)."""
        far = rows.far_bins
        remainder = rows.feature_sum(ALL) - rows.near.sum(-1) - far.sum(-1)  # (B, H, n)
        has_remainder = rows.remainder_bin >= 0
        bin_index = rows.remainder_bin.clamp(min=0)[:, None]  # (n, 1)
        far = far.scatter_add(-1, bin_index.expand(*far.shape[:3], 1), (remainder * has_remainder)[..., None])
        back, ahead = _count_tokens_before_after(rows)
        edges = torch.tensor(DISTANCE_EDGES, device=far.device)
        reached = (torch.maximum(back, ahead) if rows.sees_future_keys else back)[..., None] >= edges  # (B, n, bins)
        return rows.normalize(far).sum(2), (reached & rows.counted[..., None]).sum(1)[:, None]


class LongRangeMetric(Metric):
    """Weight outside the window, without the first token and repeated tokens."""

    metric_specs = LONG_RANGE_SPECS

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the weight, the baseline and the value-weighted score, (B, H, 3)."""
        back, ahead = _count_tokens_before_after(rows)
        norms, first = rows.value_output_norms, rows.batch_context.batch.first_token_positions
        far_first = ((back >= WINDOW) & rows.counted).to(norms)[
            :, None
        ]  # (B, 1, n): the first token is outside the window
        e_first = rows.feature_sum(FIRST) * far_first
        norm_first = norms.gather(-1, first[:, None, None].expand(-1, norms.shape[1], -1))  # (B, H, 1)
        near = (rows.near * _window_value_norms(rows)).sum(-1)
        value_weighted = 1 - (near + e_first * norm_first + rows.repeat_weights[1]) * rows.inverse_value_weighted_total
        weight = rows.normalize(rows.feature_sum(ALL) - rows.near.sum(-1) - e_first - rows.repeat_weights[0])
        visible, inside = rows.visible_keys.to(norms), _offset_validity_masks(rows)[0].sum(-1)[:, None]
        targets = visible - inside - far_first * rows.sees_first - rows.repeat_counts
        baseline = targets / visible.clamp(min=1)
        far = ((back > WINDOW) | ((ahead >= WINDOW) & rows.sees_future_keys))[:, None]
        # (B, 1 or H, n): rows with a far target; in some rows all far tokens are repeated
        counts = (rows.counted[:, None] & far & (targets > 0)).to(norms)
        sums = [
            (values.clamp(min=0) * counts).sum(2) for values in (weight, baseline.expand_as(weight), value_weighted)
        ]
        return torch.stack(sums, -1), counts.sum(2)[..., None]


def _pad_future_offsets(values: Tensor) -> Tensor:
    """Pad the window of a causal head with zeros for the offsets ahead, which are never counted."""
    return torch.nn.functional.pad(values, (0, len(OFFSETS) - values.shape[-1]))


def _offset_validity_masks(rows: RowStats) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of the offsets at which a row has a token, and a token other than the first, (B, n, o) each, and the rows
    whose window contains the first token."""
    call = rows.attention_call
    key = (rows.sees_future_keys, len(rows.positions), call.q.shape[2], call.k.shape[2])
    targets = rows.batch_context.offset_targets(rows.positions, rows.counted, OFFSETS[: rows.near.shape[-1]], key)
    return targets.present.to(rows.near), targets.eligible.to(rows.near), targets.rows_near_first


def _window_value_norms(rows: RowStats) -> Tensor:
    """Return the norms of the value outputs of the keys in the window, (B, H, n, o). A view if all rows are present."""
    norms = rows.value_output_norms
    B, H, S = norms.shape
    o = rows.near.shape[-1]
    padded = torch.nn.functional.pad(norms, (WINDOW - 1, WINDOW))  # column j is at index j + WINDOW − 1
    if len(rows.positions) == S:
        return padded.as_strided((B, H, S, o), (*padded.stride()[:2], 1, 1))
    return padded[..., rows.positions[:, None] + torch.arange(o, device=norms.device)]


def _count_tokens_before_after(rows: RowStats) -> tuple[Tensor, Tensor]:
    """Return the number of tokens of the text before and after each row, (B, n) each."""
    back = rows.positions - rows.batch_context.batch.first_token_positions[:, None]
    return back, rows.batch_context.batch.real_tokens.sum(1)[:, None] - 1 - back
