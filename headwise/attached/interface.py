"""The function that transformers calls for every attention: the same SDPA as before, and then the site.

It stands under SDPA's own name while any model is attached, so that no configuration is touched: models that ask for the name
find it, and `set_attn_implementation("sdpa")` changes nothing. Where nobody looks, it adds one look into a dictionary. Where
somebody does, what the call was made of is told as `Terms`; whatever it carries that SDPA would drop is refused, so that no
number is ever wrong.
"""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import MARK, Layer, LayerMark, layer_of
from headwise.attached.masks import lowest
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import is_repeated
from headwise.kernels.bias import Given
from headwise.kernels.masks import Causal, Mask
from headwise.kernels.score_params import Terms, spread

NAME = "sdpa"
ACTIVE: set[Any] = set()  # the attachments there are now
# What may come with a call: it is heeded here as there. Whatever else the function that runs never mentions changes nothing.
HEEDED = {"dropout", "scaling", "is_causal", "position_bias"}
REFUSED = {
    "s_aux": "learned sinks",
    "softcap": "capped scores",
    "output_attentions": "maps, which the fused path never makes; use hw.attend or hw.record",
    "head_mask": "a mask of heads; use theirs.heads[…].silenced() or .scaled(…)",
    "cache": "a paged cache",
}


def register(attachment: Any) -> None:
    """Put our function in SDPA's place, for as long as there is an attachment."""
    from transformers import AttentionInterface

    ACTIVE.add(attachment)
    AttentionInterface.register(NAME, attend)


def unregister(attachment: Any) -> None:
    """Put SDPA back if no attachment is left."""
    from transformers import AttentionInterface

    ACTIVE.discard(attachment)
    if not ACTIVE:
        AttentionInterface.register(NAME, _sdpa())


def mark(layer: Layer, run: Callable[..., Any] | None) -> None:
    """Let calls of a layer's module reach the layer; `run` is the attention function of the module, None for SDPA."""
    layer.words = _words(_sdpa() if run is None else run)
    layer.module.__dict__[MARK] = LayerMark(layer)


def unmark(layer: Layer) -> None:
    """Let calls of a layer's module pass by the layer."""
    layer.module.__dict__.pop(MARK, None)


def is_replaced() -> bool:
    """Whether somebody else has put a function in SDPA's place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[NAME] not in (attend, _sdpa())


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, T, H, e), and no maps."""
    layer = layer_of(module)
    if layer is None:  # a model that is not attached
        return _sdpa()(module, query, key, value, attention_mask, **kwargs)
    _refuse(layer, kwargs, _sdpa())
    own = _own_keys(layer, query, key)
    keys, values = (key, value) if own is None else (spread(key, own), spread(value, own))
    out, maps = _sdpa()(module, query, keys, values, attention_mask, **kwargs)  # (B, T, H, e)
    return pass_site(layer, query, key, value, lambda: _terms(layer, query, key, attention_mask, kwargs), out), maps


def attend_eager(
    run: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The eager function `run` of a modeling file, and then the site: (B, H, T, d) … → (B, T, H, e), and its maps."""
    layer = layer_of(module)
    if layer is None or layer.found.way != "eager":
        return run(module, query, key, value, attention_mask, **kwargs)
    _refuse(layer, kwargs, run, HEEDED | {"softcap", "s_aux"})
    own = _own_keys(layer, query, key)
    keys, values = (key, value) if own is None else (spread(key, own), spread(value, own))
    out, maps = run(module, query, keys, values, attention_mask, **kwargs)

    def terms() -> Terms:
        told = _terms(layer, query, key, attention_mask, kwargs | {"is_causal": False})  # its mask says all
        sink = getattr(module, "sinks", kwargs.get("s_aux"))
        sink = sink.detach().flatten() if isinstance(sink, Tensor) else None
        return replace(told, softcap=kwargs.get("softcap"), sink=sink)

    return pass_site(layer, query, key, value, terms, out), maps


def pass_site(layer: Layer, q: Tensor, k: Tensor, v: Tensor, terms: Callable[[], Terms], out: Tensor) -> Tensor:
    """Show a call to whoever asks: the trial of a layer, or its site. (B, T, H, e) → (B, T, H, e)"""
    if layer.trial is not None:
        return layer.trial.attention(q, k, v, out, terms)
    if not torch.compiler.is_compiling() and in_backward() and not is_repeated():
        layer.check_repeated(q)  # a checkpoint of somebody's own is run again: unheard, and as it was
        return out
    if not layer.site.is_open:
        return out
    return layer.passing(q, k, v, terms, out)


def in_backward() -> bool:
    """Whether gradients are being computed now: then a forward pass is one that a checkpoint repeats."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _refuse(layer: Layer, kwargs: dict[str, Any], run: Callable[..., Any], heeded: Collection[str] = HEEDED) -> None:
    """Refuse an argument that decides about scores and is not heeded here; `run` is the function it is for."""
    for name, given in kwargs.items():
        if name in heeded or given is None or given is False:
            continue
        if name not in REFUSED and layer.words is not None and name not in layer.words:
            continue
        what = REFUSED.get(name, f"an argument {name!r} of {run.__name__} that is not known here")
        raise HeadwiseError(
            f"the call at {layer.found.name} carries {what}; it was refused rather than computed wrongly."
        )


@cache
def _words(run: Callable[..., Any]) -> frozenset[str] | None:
    """The words in the source of a function; None if its source cannot be read."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(run)))
    except (OSError, TypeError):
        return None


def _own_keys(layer: Layer, query: Tensor, key: Tensor) -> tuple[int, ...] | None:
    """Which key each head reads, where cutting has left groups of different sizes, which transformers cannot share out."""
    groups = layer.spec.kv_of_head
    H, K = query.shape[1], key.shape[1]
    return groups if layer.uneven and len(groups) == H and len(layer.spec.kv_ids) == K else None


@torch.no_grad()  # what is told saves nothing for a backward pass, so that a checkpoint may repeat a call unheard
def _terms(layer: Layer, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Terms:
    """What decided the scores of this call."""
    (H, T, d), (K, S) = query.shape[1:], key.shape[1:3]
    groups = tuple(range(H)) if K == H else layer.spec.kv_of_head
    if len(groups) != H or len(layer.spec.head_ids) != H or (groups and max(groups) >= K):
        raise HeadwiseError(
            f"{layer.found.name} was called with {H} heads and {K} key/value heads; it should have "
            f"{len(layer.spec.head_ids)} and {len(layer.spec.kv_ids)}."
        )
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    causal = getattr(layer.module, "is_causal", True) if causal is None else causal
    bias: Tensor | None = kwargs.get("position_bias")
    if mask is None:
        told: Mask | None = Causal(0) if causal and T > 1 else None  # SDPA's own flag counts from the upper left
    elif mask.dtype == torch.bool:
        told = layer.masks.of(mask, T, S)
    else:
        told = layer.masks.of(mask, T, S)
        more = mask.masked_fill(mask <= lowest(mask) / 2, 0)
        bias = (more if bias is None else bias + more) if bool(more.any()) or bias is not None else None
    if bias is not None and bias.ndim != 4:
        raise HeadwiseError(f"the position bias at {layer.found.name} is {tuple(bias.shape)}; expected four axes.")
    return Terms(d**-0.5 if scale is None else float(scale), groups, told, None if bias is None else Given(bias))
