"""Attention by distance: offsets one by one near the query, by powers of two farther away, and what is long range."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, WINDOW
from headwise.analysis.metrics.metric import Metric, MetricSpec, RoleTarget
from headwise.analysis.metrics.row_stats import DISTANCE_EDGES, FullDetailRowStats, RowStats

OFFSETS = tuple(range(WINDOW - 1, -WINDOW, -1))  # farthest back first, as the diagonals lie
_LOCAL_COLUMNS = [OFFSETS.index(offset) for offset in (3, 2, 1, -1, -2, -3)]


def _describe_offset(offset: int) -> str:
    return "itself" if offset == 0 else f"{abs(offset)} {'back' if offset > 0 else 'ahead'}"


# The mean weight at each offset: `offset 1` is one back, `offset -1` one ahead.
OFFSET_SPECS = {
    o: MetricSpec(f"offset {o}", f"weight {_describe_offset(o)}", positional=True, series="offset") for o in OFFSETS
}
# The same over rows whose target is not the first token (a sink would collect those), with what a uniform head would have,
# and the weight times the length of what it fetches, as a share of the row.
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
# Within three tokens of the query but at itself and at the first token.
LOCAL_SPECS = MetricSpec(
    "local", "weight within 3 tokens", positional=True, target=RoleTarget("within", 3)
).with_variants()
# Beyond the window, the first token and repeated tokens left out.
LONG_RANGE_SPECS = MetricSpec(
    "long range", f"weight {WINDOW} tokens away or more", positional=True, target=RoleTarget("beyond", WINDOW)
).with_variants()


class NearOffsetMetric(Metric):
    """The window: weight at each offset, and around the query."""

    metric_specs = (
        *OFFSET_SPECS.values(),
        *(three[kind] for kind in range(3) for three in _ELIGIBLE_VARIANTS.values()),
        *LOCAL_SPECS,
    )

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Sums and counts at each offset, and within three. e is 0 wherever there is no token to see."""
        present, eligible = _offset_targets(rows)  # (B, n, o)
        p = rows.normalize(rows.near)  # (B, H, n, o)
        value_weighted = rows.near * _window_value_norms(rows) * rows.inverse_value_weighted_total[..., None]
        on_first = (present - eligible)[:, None]  # (B, 1, n, o): 1 where the target is the first token
        early = on_first.any((0, 1, 3)).nonzero()[:, 0]  # only the first rows of a text have it in their window
        first_mask = on_first[:, :, early]
        uniform = (1 / rows.visible_keys.clamp(min=1)).to(p)  # (1 or B, 1 or H, n)
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
        # (B, 1, 1): rows with a target there
        local_counts = eligible[..., local_columns].any(-1).sum(1)[:, None, None].to(targets)
        sums = [_pad_offsets(values) for values in (offset, *variants)]
        counts = [_pad_offsets(values) for values in (row_counts, targets, targets, targets)]
        return torch.cat((*sums, local), -1), torch.cat((*counts, local_counts.expand(-1, -1, 3)), -1)


class ArgmaxOffsetMetric(Metric):
    """In how many rows each offset has the largest weight; a tie is shared out."""

    metric_specs = ARGMAX_SPECS
    needs_full_detail = True

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Hits at each offset."""
        hits = rows.near.floor() * rows.counted[:, None, :, None]  # the largest e is 1, and no other
        tied = hits.sum(-1, keepdim=True)  # (B, H, n, 1)
        if bool((tied > 1).any()):
            hits = hits / tied.clamp(min=1)
        return _pad_offsets(hits.sum(2)), _pad_offsets(_offset_targets(rows)[0].sum(1)[:, None])


class DistanceBinMetric(Metric):
    """Weight by powers of two beyond the window, over the rows that reach that far."""

    metric_specs = DISTANCE_SPECS
    needs_full_detail = True

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Sums in each bin, (B, H, bins), and rows, (B, 1, bins)."""
        assert isinstance(rows, FullDetailRowStats)
        far = rows.far_bins
        remainder = rows.feature_sum(ALL) - rows.near.sum(-1) - far.sum(-1)  # (B, H, n)
        has_remainder = rows.remainder_bin >= 0
        bin_index = rows.remainder_bin.clamp(min=0)[:, None]  # (n, 1)
        far = far.scatter_add(-1, bin_index.expand(*far.shape[:3], 1), (remainder * has_remainder)[..., None])
        back, ahead = _tokens_around(rows)
        edges = torch.tensor(DISTANCE_EDGES, device=far.device)
        reached = (torch.maximum(back, ahead) if rows.sees_future_keys else back)[..., None] >= edges  # (B, n, bins)
        return rows.normalize(far).sum(2), (reached & rows.counted[..., None]).sum(1)[:, None]


class LongRangeMetric(Metric):
    """What is left of each row when the near, the first token and repeated tokens are taken away."""

    metric_specs = LONG_RANGE_SPECS
    needs_full_detail = True

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """The weight, a uniform head's, the value-weighted one: (B, H, 3)."""
        assert isinstance(rows, FullDetailRowStats)
        back, ahead = _tokens_around(rows)
        norms, first = rows.value_output_norms, rows.batch_context.batch.first_token_positions
        far_first = ((back >= WINDOW) & rows.counted).to(norms)[:, None]  # (B, 1, n): the first is not among the near
        e_first = rows.feature_sum(FIRST) * far_first
        norm_first = norms.gather(-1, first[:, None, None].expand(-1, norms.shape[1], -1))  # (B, H, 1)
        near = (rows.near * _window_value_norms(rows)).sum(-1)
        value_weighted = 1 - (near + e_first * norm_first + rows.repeat_weights[1]) * rows.inverse_value_weighted_total
        weight = rows.normalize(rows.feature_sum(ALL) - rows.near.sum(-1) - e_first - rows.repeat_weights[0])
        visible, inside = rows.visible_keys.to(norms), _offset_targets(rows)[0].sum(-1)[:, None]
        targets = visible - inside - far_first * rows.sees_first - rows.repeat_counts
        baseline = targets / visible.clamp(min=1)
        far = ((back > WINDOW) | ((ahead >= WINDOW) & rows.sees_future_keys))[:, None]
        # (B, 1 or H, n): rows that have something far to look at; of some, all that is far is repeated
        counts = (rows.counted[:, None] & far & (targets > 0)).to(norms)
        sums = [
            (values.clamp(min=0) * counts).sum(2) for values in (weight, baseline.expand_as(weight), value_weighted)
        ]
        return torch.stack(sums, -1), counts.sum(2)[..., None]


def _pad_offsets(values: Tensor) -> Tensor:
    """The window of a causal head has no offsets ahead: zeros, never counted."""
    return torch.nn.functional.pad(values, (0, len(OFFSETS) - values.shape[-1]))


def _offset_targets(rows: RowStats) -> tuple[Tensor, Tensor]:
    """Which offsets of each row lead to a token, and which of those not to the first: (B, n, o) of 0 and 1."""
    present, eligible = rows.batch_context.valid_offsets(
        rows.positions, rows.counted, OFFSETS[: rows.near.shape[-1]], rows.sees_future_keys
    )
    return present.to(rows.near), eligible.to(rows.near)


def _window_value_norms(rows: RowStats) -> Tensor:
    """The length of what each key of the window writes: (B, H, n, o), a view where all rows are there."""
    norms = rows.value_output_norms
    B, H, S = norms.shape
    o = rows.near.shape[-1]
    padded = torch.nn.functional.pad(norms, (WINDOW - 1, WINDOW))  # column j stands at j + WINDOW − 1
    if len(rows.positions) == S:
        return padded.as_strided((B, H, S, o), (*padded.stride()[:2], 1, 1))
    return padded[..., rows.positions[:, None] + torch.arange(o, device=norms.device)]


def _tokens_around(rows: RowStats) -> tuple[Tensor, Tensor]:
    """How many tokens of its text stand before each row, and how many behind: (B, n)."""
    back = rows.positions - rows.batch_context.batch.first_token_positions[:, None]
    return back, rows.batch_context.batch.real_tokens.sum(1)[:, None] - 1 - back
