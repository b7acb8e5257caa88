"""What decides the scores of a layer, from its spec and from the call."""

from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.per_head_cache import not_forgotten
from headwise.kernels import POSITION_BIASES, Bias, Causal, Mask, Terms, make_terms, plain_terms, window
from headwise.spec import AttentionSpec, Keeps

CallTerms = tuple[Mask | None, Bias | Tensor | None, tuple[Keeps, ...], Tensor | None, int | None]


def layer_terms(
    spec: AttentionSpec,
    sink: Tensor | None,
    position: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    given: CallTerms,
    training: bool,
) -> Terms:
    """The terms of a call with these q, k and v; `given` is its mask, bias, what key heads keep, starts and keys."""
    (q, k, v), (mask, bias, keeps, starts, keys) = tensors, given
    bare = bias is None and not keeps and (mask is None or isinstance(mask, Causal))
    fits = q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] and k.shape[:3] == v.shape[:3]  # else refused below
    if bare and fits and spec.is_plain and not (training and spec.dropout):
        return plain_terms(spec.head_dim, spec.scale, spec.kv_of_head, mask, spec.softcap)
    if spec.window is not None:
        mask = both(mask, window(spec.window))
    if keeps:
        left = not_forgotten(keeps, spec.kv_of_head, k.shape[2] if keys is None else keys, starts)
        mask = mask if left is None else both(mask, left)
    if spec.position_bias is not None:
        if bias is not None:
            raise HeadwiseError("a layer with a bias by distance takes no other bias; leave one of them out.")
        learned = q.new_empty(q.shape[1], 0) if position is None else position  # (H, n)
        bias = POSITION_BIASES[spec.position_bias].of_layer(learned, spec.heads, spec.head_ids)
    return make_terms(
        q,
        k,
        v,
        mask=mask,
        scale=spec.scale,
        bias=bias,
        softcap=spec.softcap,
        sink=0.0 if spec.softmax == "off_by_one" else sink,
        groups=spec.kv_of_head,
        dropout=spec.dropout if training else 0.0,
        keys=keys,
    )


def both(mask: Mask | None, other: Mask) -> Mask:
    """A mask on top of one that may be there."""
    if mask is None:
        return other
    if not isinstance(mask, Mask):
        raise HeadwiseError(f"mask must be a Mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor).")
    return mask & other
