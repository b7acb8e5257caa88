"""The light way to look: what the fused kernel gives when it is asked for other values than v.

entropy = lse − Σ p·score, and Σ p·score is q · SDPA(q, k, k); sums over keys are SDPA(q, k, features): one call gives both. A
listed offset is exp(score − lse); Σ p² is exp(lse at twice the scale − 2 lse).
"""

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.row_stats import Rows, fill_rows, looks_ahead
from headwise.heads.hook_point import Seen
from headwise.kernels.masks import Causal
from headwise.kernels.score_params import Terms, spread

MASK = 1 << 24  # entries of a mask that is handed over whole
_STEP = 64  # rows that meet the keys around them at once


def glance(call: Call) -> Rows:
    """Every row of a call, from a few calls of the fused kernel; where that kernel cannot do it, by walking."""
    seen, scene, inputs = call.seen, call.scene, call.inputs
    q, k, terms = seen.q, spread(seen.k, seen.terms.groups), seen.terms
    (_, _, T, d), S = q.shape, k.shape[2]
    if not _fits(seen):
        return fill_rows(call)
    mask, empty, is_causal = _mask(terms, q, S)
    scale = terms.scale

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )

    wide = (0, inputs.shape[-1])  # values as wide as keys, so keys and queries get channels of zeros
    queries, keys = (torch.nn.functional.pad(x, wide) for x in (q, k))  # (B, H, T, d + f) (B, H, S, d + f)
    found, lse = attend(queries, keys, torch.cat((k, inputs), -1), scale)
    keys, features = found.split((d, inputs.shape[-1]), -1)  # (B, H, T, d) (B, H, T, f)
    _, twice = attend(q, k, k, 2 * scale)  # (B, H, T)
    lse = lse.to(q)
    total = torch.ones_like(lse)
    if terms.sink is not None:
        total = total + (terms.sink.to(lse)[:, None] - lse).clamp(max=80).exp()
    if empty is not None:
        total = total.masked_fill(empty, 0.0)
    ahead = looks_ahead(terms, T, S, q.device)
    about = scene.about(terms, T, S)
    aimed = {name: _at(q, k, lse, scale, about["sees"][name], target) for name, target in scene.aims.items()}
    return Rows(
        seen, scene, call.gram, call.norms, **about, aimed=aimed, ahead=ahead, total=total,
        energy=scale * (q * keys).sum(-1) - lse, features=features, square=(twice.to(q) - 2 * lse).exp(),
        near=_window(q, k, lse, scale, mask, ahead), beyond=_beyond(q, k, lse, scale, mask) if ahead else None,
    )  # fmt: skip


def _fits(seen: Seen) -> bool:
    """Whether the CPU's flash kernel can be asked, which alone says lse: float32, no bias, no cap, a mask it can take."""
    terms, (_, H, T, _), S = seen.terms, seen.q.shape, seen.k.shape[2]
    plain = terms.bias is None and terms.softcap is None and seen.q.device.type == "cpu" and S == T > 0
    there = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    small = _is_plain(terms, T, S) or T * S * terms.planes() <= MASK
    return plain and there and small and H > 0 and seen.q.dtype in (torch.float32, torch.float64)


def _is_plain(terms: Terms, T: int, S: int) -> bool:
    mask = terms.mask
    return mask is None or mask.is_full(T, S) or (isinstance(mask, Causal) and mask.places(T, S) == 0)


def _mask(terms: Terms, q: Tensor, S: int) -> tuple[Tensor | None, Tensor | None, bool]:
    """As the kernel takes it: nothing, its own causal flag, or numbers to be added. A row that sees nothing is let see
    all, and named: (1 or B, 1 or H, T)."""
    T = q.shape[2]
    if terms.mask is None or terms.mask.is_full(T, S):
        return None, None, False
    if _is_plain(terms, T, S):
        return None, None, True
    allowed = terms.mask.dense(T, S, q.device).expand(-1, -1, T, -1)
    empty = ~allowed.any(-1)
    hidden = ~allowed & ~empty[..., None]
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf), empty, False


def _beyond(q: Tensor, k: Tensor, lse: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Σ exp(score − lse) (j − i) over the keys that come after each query, (B, H, T): what the kernel gives where nothing
    else is seen. Turned round, what comes after is what came before, which it can hide without a mask."""
    T, device = q.shape[2], q.device
    places = torch.arange(T, device=device).flip(0).to(q)
    values = torch.zeros_like(k)
    values[..., 0] = places[:, None].T
    turned = None
    if mask is not None:
        hidden = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
        turned = mask.flip(-1, -2).masked_fill(hidden, -torch.inf)
    found, part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.flip(2), k.flip(2), values, 0.0, mask is None, attn_mask=turned, scale=scale
    )  # itself included, which is 0 away
    steps = (found[..., 0] - places).clamp(min=0) * (part.to(q) - lse.flip(2)).exp()
    return steps.flip(2).nan_to_num()  # a row that sees nothing there


def _at(q: Tensor, k: Tensor, lse: Tensor, scale: float, sees: Tensor, target: Tensor) -> Tensor:
    """exp(score − lse) at one key of each row, `target` (B, T), 0 where it is not seen, `sees` (B, 1 or H, T): (B, H, T)."""
    place = target.clamp(min=0)[:, None, :, None].expand(-1, q.shape[1], -1, k.shape[3])  # (B, H, T, d)
    scores = scale * (q * k.gather(2, place)).sum(-1)
    return torch.where(sees, (scores - lse).exp(), 0.0)


def _window(q: Tensor, k: Tensor, lse: Tensor, scale: float, mask: Tensor | None, ahead: bool) -> Tensor:
    """exp(score − lse) at each offset of the window, farthest back first, 0 where nothing is seen: (B, H, T, o).

    A block of rows meets the keys around it in one small product; its diagonals are the offsets.
    """
    T, size = q.shape[2], 2 * WINDOW - 1 if ahead else WINDOW
    more = -T % _STEP
    around = torch.nn.functional.pad(k, (0, 0, WINDOW - 1, more + size - WINDOW))
    around = around.unfold(2, _STEP + size - 1, _STEP)  # (B, H, N, d, keys around)
    queries = torch.nn.functional.pad(q, (0, 0, 0, more)).unflatten(2, (-1, _STEP)) * scale  # (B, H, N, rows, d)
    scores = (queries @ around).contiguous()  # (B, H, N, rows, keys around)
    *outer, row, column = scores.stride()
    scores = scores.as_strided((*scores.shape[:4], size), (*outer, row + 1, column)).flatten(2, 3)[:, :, :T]
    target = torch.arange(T, device=q.device)[:, None] - torch.arange(
        WINDOW - 1, WINDOW - 1 - size, -1, device=q.device
    )
    inside = (target >= 0) & (target < T)  # (T, o)
    if mask is not None:
        scores = scores + mask.gather(-1, target.clamp(0, T - 1).expand(*mask.shape[:2], -1, -1))
    return torch.where(inside, (scores - lse[..., None]).exp(), 0.0)
