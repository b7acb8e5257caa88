"""What decides the scores of a layer, from its spec and from the call."""

from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.per_head_cache import streaming_mask
from headwise.kernels import (
    POSITION_BIASES,
    Bias,
    CausalMask,
    Mask,
    ScoreParams,
    default_score_params,
    make_score_params,
    window,
)
from headwise.spec import AttentionSpec, CachePolicy

ScoreRequest = tuple[Mask | None, Bias | Tensor | None, tuple[CachePolicy, ...], Tensor | None, int | None]


def layer_score_params(
    spec: AttentionSpec,
    sink: Tensor | None,
    position_bias: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    request: ScoreRequest,
    training: bool,
) -> ScoreParams:
    """The score params of a call with these q, k and v; `request` is its mask, bias, cache policies, row starts and keys."""
    (q, k, v), (mask, bias, policies, row_starts, num_keys) = tensors, request
    is_simple = bias is None and not policies and (mask is None or isinstance(mask, CausalMask))
    fits = q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] and k.shape[:3] == v.shape[:3]  # else refused below
    if is_simple and fits and spec.has_plain_scores and not (training and spec.dropout):
        return default_score_params(spec.head_dim, spec.scale, spec.kv_of_head, mask, spec.softcap)
    if spec.window is not None:
        mask = and_masks(mask, window(spec.window))
    if policies:
        sink_window = streaming_mask(
            policies, spec.kv_of_head, k.shape[2] if num_keys is None else num_keys, row_starts
        )
        mask = mask if sink_window is None else and_masks(mask, sink_window)
    if spec.position_bias_field is not None:
        if bias is not None:
            raise HeadwiseError("a layer with a bias by distance takes no other bias; leave one of them out.")
        bias_parameters = q.new_empty(q.shape[1], 0) if position_bias is None else position_bias  # (H, n)
        bias = POSITION_BIASES[spec.position_bias_field].from_layer(bias_parameters, spec.heads, spec.head_ids)
    return make_score_params(
        q,
        k,
        v,
        mask=mask,
        scale=spec.scale,
        bias=bias,
        softcap=spec.softcap,
        sink=0.0 if spec.softmax == "off_by_one" else sink,
        kv_of_head=spec.kv_of_head,
        dropout=spec.dropout if training else 0.0,
        num_keys=num_keys,
    )


def and_masks(mask: Mask | None, other: Mask) -> Mask:
    """A mask on top of one that may be there."""
    if mask is None:
        return other
    if not isinstance(mask, Mask):
        raise HeadwiseError(f"mask must be a Mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor).")
    return mask & other
