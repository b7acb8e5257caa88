"""Row statistics from the fused attention kernel, without attention maps (`detail="light"`).

The kernel is called with other values than v. Entropy is lse − Σ p·score, and Σ p·score is q · SDPA(q, k, k). Feature sums
are SDPA(q, k, features). One call returns both. The weight at an offset is exp(score − lse), and Σ p² is
exp(lse at twice the scale − 2 lse).
"""

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.row_stats import RowStats, any_future_keys_visible, blockwise_row_stats
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.masks import CausalMask
from headwise.kernels.score_params import ScoreParams, repeat_kv

MAX_MASK_ENTRIES = 1 << 24  # maximum entries of a dense mask
_BLOCK_ROWS = 64  # rows per block in _window_weights


def fused_row_stats(call: AttentionCallContext) -> RowStats:
    """Compute the statistics of all rows with the fused kernel, or blockwise if the kernel does not support the call."""
    attention_call, batch_context, key_features = call.attention_call, call.batch_context, call.key_features
    q, k, params = (
        attention_call.q,
        repeat_kv(attention_call.k, attention_call.params.kv_of_head),
        attention_call.params,
    )
    (_, _, T, d), S = q.shape, k.shape[2]
    if not _is_supported(attention_call):
        return blockwise_row_stats(call)
    mask, empty, is_causal = _kernel_mask_and_empty_rows(params, q, S)
    scale = params.scale

    def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )

    padding = (0, key_features.shape[-1])  # the kernel needs keys as wide as values: pad q and k with zero channels
    queries, keys = (torch.nn.functional.pad(x, padding) for x in (q, k))  # (B, H, T, d + f) (B, H, S, d + f)
    outputs, lse = fused_attention(queries, keys, torch.cat((k, key_features), -1), scale)
    keys, features = outputs.split((d, key_features.shape[-1]), -1)  # (B, H, T, d) (B, H, T, f)
    _, double_lse = fused_attention(q, k, k, 2 * scale)  # (B, H, T)
    lse = lse.to(q)
    total = torch.ones_like(lse)
    if params.sink is not None:
        total = total + (params.sink.to(lse)[:, None] - lse).clamp(max=80).exp()
    if empty is not None:
        total = total.masked_fill(empty, 0.0)
    ahead = any_future_keys_visible(params, T, S, q.device, batch_context.visibility)
    visibility = batch_context.row_visibility(params, T, S)
    target_weights = {
        name: _at_target(q, k, lse, scale, visibility["sees"][name], target)
        for name, target in batch_context.key_targets.items()
    }
    return RowStats(
        attention_call, batch_context, call.output_gram, call.value_output_norms, **visibility, target_weights=target_weights,
        sees_future_keys=ahead, total=total, energy=scale * (q * keys).sum(-1) - lse, feature_sums=features,
        square=(double_lse.to(q) - 2 * lse).exp(), near=_window_weights(q, k, lse, scale, mask, ahead=ahead),
        distance_ahead=_distance_ahead(q, k, lse, scale, mask) if ahead else None,
    )  # fmt: skip


def _is_supported(call: AttentionCall) -> bool:
    """Whether the CPU flash kernel, the only one that returns lse, supports the call: float32 or float64, no bias, no
    softcap, a mask of supported size."""
    params, (_, H, T, _), S = call.params, call.q.shape, call.k.shape[2]
    plain = params.bias is None and params.softcap is None and call.q.device.type == "cpu" and S == T > 0
    available = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    small = _needs_no_mask(params, T, S) or T * S * params.num_mask_bias_planes() <= MAX_MASK_ENTRIES
    return plain and available and small and H > 0 and call.q.dtype in (torch.float32, torch.float64)


def _needs_no_mask(params: ScoreParams, T: int, S: int) -> bool:
    mask = params.mask
    return mask is None or mask.is_full(T, S) or (isinstance(mask, CausalMask) and mask.resolve_offset(T, S) == 0)


def _kernel_mask_and_empty_rows(params: ScoreParams, q: Tensor, S: int) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the mask for the kernel: an additive mask or None, the empty rows, and the causal flag.

    Rows without a visible key are unmasked and returned in a mask, (1 or B, 1 or H, T).
    """
    T = q.shape[2]
    if params.mask is None or params.mask.is_full(T, S):
        return None, None, False
    if _needs_no_mask(params, T, S):
        return None, None, True
    allowed = params.mask.dense(T, S, q.device).expand(-1, -1, T, -1)
    empty = ~allowed.any(-1)
    hidden = ~allowed & ~empty[..., None]
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf), empty, False


def _distance_ahead(q: Tensor, k: Tensor, lse: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Return Σ exp(score − lse) (j − i) over the keys j after each query i, (B, H, T).

    The sequence is reversed, so that later keys come first and the causal flag hides the others without a mask.
    """
    T, device = q.shape[2], q.device
    positions = torch.arange(T, device=device).flip(0).to(q)
    values = torch.zeros_like(k)
    values[..., 0] = positions[:, None].T
    flipped_mask = None
    if mask is not None:
        hidden = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
        flipped_mask = mask.flip(-1, -2).masked_fill(hidden, -torch.inf)
    # the key at the query position is included; its distance is 0
    outputs, lse_ahead = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.flip(2), k.flip(2), values, 0.0, mask is None, attn_mask=flipped_mask, scale=scale
    )
    steps = (outputs[..., 0] - positions).clamp(min=0) * (lse_ahead.to(q) - lse.flip(2)).exp()
    return steps.flip(2).nan_to_num()  # NaN: the row sees no later key


def _at_target(q: Tensor, k: Tensor, lse: Tensor, scale: float, sees: Tensor, target: Tensor) -> Tensor:
    """Return exp(score − lse) at one key per row, (B, H, T). `target` (B, T) is the key; the result is 0 if `sees`
    (B, 1 or H, T) is False."""
    index = target.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, k.shape[3])  # (B, H, T, d)
    scores = scale * (q * k.gather(2, index)).sum(-1)
    return torch.where(sees, (scores - lse).exp(), 0.0)


def _window_weights(q: Tensor, k: Tensor, lse: Tensor, scale: float, mask: Tensor | None, *, ahead: bool) -> Tensor:
    """Return exp(score − lse) at each offset of the window, farthest back first, (B, H, T, o). 0 if no key is visible.

    Each block of rows is multiplied with the keys around it; the diagonals of the product are the offsets.
    """
    T, size = q.shape[2], 2 * WINDOW - 1 if ahead else WINDOW
    padding = -T % _BLOCK_ROWS
    nearby_keys = torch.nn.functional.pad(k, (0, 0, WINDOW - 1, padding + size - WINDOW))
    nearby_keys = nearby_keys.unfold(2, _BLOCK_ROWS + size - 1, _BLOCK_ROWS)  # (B, H, N, d, keys around)
    # (B, H, N, rows, d)
    queries = torch.nn.functional.pad(q, (0, 0, 0, padding)).unflatten(2, (-1, _BLOCK_ROWS)) * scale
    scores = (queries @ nearby_keys).contiguous()  # (B, H, N, rows, keys around)
    *outer, row, column = scores.stride()
    scores = scores.as_strided((*scores.shape[:4], size), (*outer, row + 1, column)).flatten(2, 3)[:, :, :T]
    target = torch.arange(T, device=q.device)[:, None] - torch.arange(
        WINDOW - 1, WINDOW - 1 - size, -1, device=q.device
    )
    inside = (target >= 0) & (target < T)  # (T, o)
    if mask is not None:
        scores = scores + mask.gather(-1, target.clamp(0, T - 1).expand(*mask.shape[:2], -1, -1))
    return torch.where(inside, (scores - lse[..., None]).exp(), 0.0)
