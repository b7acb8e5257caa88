"""Multi-head attention: Σ over heads of softmax(x W_Q (y W_K)ᵀ / √d + mask) · y W_V · W_O, plus a bias."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, close_names
from headwise.heads.dropout import HeadDropout
from headwise.heads.head import Heads
from headwise.heads.head_groups import CacheStep
from headwise.heads.hook_point import Site, gated
from headwise.heads.init import initialise
from headwise.heads.layer_cache import Cache, SlidingCache, SourceCache, WholeCache
from headwise.heads.layer_score_params import both, layer_terms
from headwise.heads.per_head_cache import HeadCache, as_kept
from headwise.heads.per_head_output import PerHead
from headwise.heads.projections import Read, make_write
from headwise.heads.tensor_parallel import LayerShare, WholeLayer, share_terms
from headwise.kernels import (
    BACKENDS,
    Angles,
    Bias,
    Choice,
    Mask,
    Terms,
    choose,
    maps,
    run,
    window,
)
from headwise.spec import AttentionSpec, Keeps, SiteAddress

if TYPE_CHECKING:
    from headwise.heads.torch_compat import TorchAttention


class MultiHeadAttention(nn.Module):
    """An attention layer whose heads can be opened. Takes an `AttentionSpec`, or its fields by name.

    >>> layer = MultiHeadAttention(width=512, heads=8)
    >>> layer(torch.randn(2, 10, 512)).shape
    torch.Size([2, 10, 512])
    >>> [tuple(head.W_Q.shape) for head in layer.heads][:2]
    [(512, 64), (512, 64)]
    """

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        heads: int | None = None,
        *,
        backend: str = "auto",
        storage: str = "qkv",
        address: SiteAddress = SiteAddress("", 0),  # noqa: B008 (frozen)
        **fields: Any,
    ) -> None:
        super().__init__()
        self.spec = spec = _as_spec(spec, heads, fields)
        self.backend = backend
        if backend != "auto" and backend not in BACKENDS:
            raise HeadwiseError(f"there is no backend {backend!r}; {close_names(backend, ['auto', *BACKENDS])}")
        if backend == "fused" and spec.softcap is not None:
            raise HeadwiseError("the fused kernel cannot cap scores; use backend='blockwise', 'batched' or 'auto'.")
        self.read = Read(spec, storage)
        self.write = make_write(spec)
        present = len(spec.head_ids)
        self.sink = nn.Parameter(torch.empty(present)) if spec.softmax == "sink" else None
        self.gate = nn.Parameter(torch.empty(present)) if spec.gated else None
        learns = spec.position_numbers
        self.position = nn.Parameter(torch.empty(present, learns)) if learns else None
        self.head_dropout = HeadDropout(spec.head_dropout, spec.head_dropout_schedule)
        self.site = Site(address, spec.head_ids, self.write, spec.window)
        self.share: LayerShare | None = None  # where other processes hold heads of this layer too
        self._everywhere: WholeLayer | None = None
        initialise(self)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *more: object,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        gate: Tensor | None = None,
        positions: Tensor | Angles | None = None,
        cache: Cache | None = None,
        starts: Tensor | None = None,
        **unknown: object,
    ) -> Tensor:
        """(B, T, D) → (B, T, D). `source` (B, S, ·) makes it cross-attention; `gate` (H,) or (B, H) scales heads.

        `starts` (B,) says where the text of each row begins, for heads that keep its first tokens; None: at the first.
        """
        if more or unknown:
            raise _other_call(len(more), unknown)
        z = self.attend(x, source, mask=mask, bias=bias, gate=gate, positions=positions, cache=cache, starts=starts)
        return self.write(z)  # (B, H, T, e) → (B, T, D)

    def attend(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        gate: Tensor | None = None,
        positions: Tensor | Angles | None = None,
        cache: Cache | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """What each head found, before W_O: z, (B, H, T, e)."""
        q, k, v, mask, bias = self._project(x, source, mask, bias, positions, cache)
        if isinstance(cache, HeadCache):
            return self._by_head(q, k, v, mask, bias, gate, cache, starts)
        spec = self._whole_spec
        keeps = spec.keeps if spec.cache else ()  # () is for all heads that keep everything
        return self._through(q, k, v, self._terms(q, k, v, mask, bias, keeps, starts), gate)

    def attention_weights(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Angles | None = None,
    ) -> Tensor:
        """Who looks at whom, head by head: (B, H, T, S). Rows sum to 1, but for a sink; dropout is left out.

        >>> layer = MultiHeadAttention(width=8, heads=2)
        >>> layer.attention_weights(torch.randn(3, 5, 8)).shape
        torch.Size([3, 2, 5, 5])
        """
        q, k, v, mask, bias = self._project(x, source, mask, bias, positions, None)
        return maps(q, k, self._terms(q, k, v, mask, bias, self._whole_spec.keeps))

    def per_head(
        self, x: Tensor, source: Tensor | None = None, *, mask: Mask | None = None, gate: Tensor | None = None
    ) -> PerHead:
        """The heads' outputs one by one: z, and what each writes; their sum plus b_O is the layer's output."""
        return PerHead(self.attend(x, source, mask=mask, gate=gate), self.write.slices, self.b_O)

    @staticmethod
    def like_torch(embed_dim: int, num_heads: int, *given: Any, **named: Any) -> "TorchAttention":
        """A layer that is built, called and saved as `torch.nn.MultiheadAttention` is; its arguments are torch's.

        >>> layer = MultiHeadAttention.like_torch(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> out, weights = layer(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 5]))
        """
        from headwise.heads.torch_compat import TorchAttention  # which is a MultiHeadAttention itself

        return TorchAttention(embed_dim, num_heads, *given, **named)

    def sites(self) -> list[Site]:
        """The one site, so that a layer alone can be recorded as a model is."""
        return [self.site]

    def all_sites(self) -> list[Site]:
        """The same with all heads, where processes share them."""
        return [self.everywhere.site]

    @property
    def heads(self) -> Heads:
        """The heads of this layer: iterate, or take one by its number."""
        return Heads((self,))

    @property
    def everywhere(self) -> "MultiHeadAttention | WholeLayer":
        """The layer with all its heads, whichever process holds them; of a whole one, itself."""
        return self if self._everywhere is None else self._everywhere

    def share_with(self, share: LayerShare) -> None:
        """From now on other processes hold the other heads of this layer."""
        self.share, self._everywhere = share, WholeLayer(self, share)
        self.write.together = share.together
        self.read.same_keys = partial(share.same_keys, sizes=self.read.sizes) if share.repeats_keys else None

    @property
    def _whole_spec(self) -> AttentionSpec:
        return self.spec if self.share is None else self.share.whole

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,)."""
        return self.write.bias

    def why(
        self,
        T: int = 512,
        S: int | None = None,
        *,
        B: int = 1,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
    ) -> Choice:
        """Which kernel a call of this size would run, why, and what would change it.

        >>> MultiHeadAttention(width=8, heads=2).why(T=16).backend
        'fused'
        """
        S = T if S is None else S
        if self.backend != "auto":
            return Choice(self.backend, "it was asked for", "Set layer.backend = 'auto' to let the call decide.")
        spec, H = self.spec, len(self.spec.head_ids)
        q = torch.empty(B, H, T, spec.head_dim, device="meta")
        k = torch.empty(B, len(spec.kv_ids), S, spec.head_dim, device="meta")
        return choose(self._terms(q, k, k, mask, bias), B, H, T, S)

    def _project(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        positions: Tensor | Angles | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Mask | None, Bias | Tensor | None]:
        """q, k and v, turned by their positions and with what a cache holds; and the mask and bias that go with them."""
        self._check_input(x, source)
        if self.share is not None:
            x = self.share.together.copy(x)
            if source is not None and cache is None:  # a cache knows its source by sight
                source = self.share.together.copy(source)
        angles = self._angles(x, source, positions, cache)
        if source is not None:
            q, k, v = self._cross(x, source, cache)
        else:
            q, k, v = self.read(x, angles=angles)  # (B, H, T, d) (B, K, T, d) (B, K, T, e)
            if isinstance(cache, SourceCache):
                raise HeadwiseError("a SourceCache is for cross-attention; self-attention takes one of the others.")
            if isinstance(cache, SlidingCache):
                mask = both(mask, window(cache.size))  # what it will have forgotten is not seen in a long prompt either
            if cache is None:
                if self.spec.cache:
                    k, v = as_kept(k, self.spec.keeps), as_kept(v, self.spec.keeps)
            elif isinstance(cache, WholeCache):
                if self.spec.cache:
                    raise HeadwiseError("heads of this layer keep different things; give it a HeadCache.")
                k, v = cache.extend(k, v)  # (B, K, S, ·)
        return q, k, v, mask, bias

    def _by_head(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        gate: Tensor | None,
        cache: HeadCache,
        starts: Tensor | None,
    ) -> Tensor:
        """Each head looks at what its cache holds: z, (B, H, T, e). Only who listens sees keys side by side."""
        cache.check_batch(k)
        S = cache.visible(k.shape[2])
        k, v = (x.detach() if x.requires_grad else x for x in (k, v))
        terms = self._terms(q, k, v, mask, bias, keys=S)
        seen = None
        if self.site.is_heard:
            seen = (*cache.laid_out(k, v, starts), self._terms(q, k, v, mask, bias, cache.everywhere, starts, S))
        narrow = None if self.spec.window is None else window(self.spec.window)
        z = cache.attend(q, k, v, CacheStep(cache.length, starts, terms, self.backend, narrow))
        return self._through(q, *(seen or (k, v, terms)), gate, z)

    def _through(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, gate: Tensor | None = None, z: Tensor | None = None
    ) -> Tensor:
        """The kernel (unless its z is there), gates, head dropout and the site: z, (B, H, T, e)."""
        share = self.share
        with nullcontext() if share is None else share.drawing(terms.dropout > 0, q.device):
            z = run(q, k, v, terms, self.backend) if z is None else z  # (B, H, T, e)
        if self.gate is not None:
            z = gated(z, self.gate)
        if gate is not None:
            z = gated(z, gate if share is None else share.own_gate(gate))
        if self.head_dropout.training:
            dropped = self.head_dropout.gate(z.shape[0], len(self._whole_spec.head_ids), z)  # (B, H)
            if dropped is not None:
                z = gated(z, dropped if share is None else share.own_gate(dropped))
        return self.site.passing(q, k, v, terms, z)

    def _terms(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        keeps: tuple[Keeps, ...] = (),
        starts: Tensor | None = None,
        keys: int | None = None,
    ) -> Terms:
        asked = (mask, bias, keeps, starts, keys)
        if self.share is not None:
            return share_terms(self, self.share, (q, k, v), asked)
        return layer_terms(self.spec, self.sink, self.position, (q, k, v), asked, self.training)

    def _cross(self, x: Tensor, source: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        if cache is None:
            return self.read(x, source)
        if not isinstance(cache, SourceCache):
            raise HeadwiseError(f"cross-attention keeps its source in a SourceCache, got {type(cache).__name__}.")
        if cache.held is not None and cache.source is not source:
            raise HeadwiseError("the cache holds the keys of another source; start a new SourceCache for a new source.")
        cache.source = source
        (q,) = self.read.project(x, "q")
        k, v = cache.held or cache.extend(*self.read.project(source, "kv"))  # pyright: ignore[reportCallIssue]
        return q, k, v

    def _angles(
        self, x: Tensor, source: Tensor | None, positions: Tensor | Angles | None, cache: Cache | None
    ) -> Angles | None:
        if self.spec.rotary is None:
            return None
        if source is not None:
            raise HeadwiseError(
                "rotary positions compare places in one sequence; cross-attention has two: use no rotary."
            )
        if isinstance(positions, Angles):
            return positions
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        return Angles.at(positions, self.spec.rotary, self.spec.head_dim, x.dtype)

    def _check_input(self, x: Tensor, source: Tensor | None) -> None:
        spec = self.spec
        if source is None and x.ndim == 3 and x.shape[-1] == spec.width == spec.kv_width:
            return
        for name, given, width in (("x", x, spec.width), ("source", source, spec.kv_width)):
            if given is not None and (given.ndim != 3 or given.shape[-1] != width):
                raise HeadwiseError(f"{name} must be (batch, tokens, {width}), got {tuple(given.shape)}.")
        if source is None and spec.kv_width != spec.width:
            raise HeadwiseError(f"this layer reads keys from a source of width {spec.kv_width}; pass layer(x, source).")

    def extra_repr(self) -> str:
        """Sizes, for print(layer)."""
        spec = self.spec
        return f"width={spec.width}, heads={len(spec.head_ids)}, kv_heads={len(spec.kv_ids)}, head_dim={spec.head_dim}"


# What torch's layer and those of transformers are called with, and what to write here.
TORCH_CALL = {
    "attention_mask": "mask=hw.padding_mask(attention_mask.bool()): padding is True where a token is real",
    "key_padding_mask": "mask=hw.padding_mask(~key_padding_mask)",
    "attn_mask": "mask=hw.Mask.of(~attn_mask), or bias=attn_mask[None, None] if it is added to scores",
    "is_causal": "mask=hw.causal()",
    "need_weights": "layer.attention_weights(x, mask=…), one map for each head",
    "average_attn_weights": "layer.attention_weights(x, mask=…), one map for each head",
    **dict.fromkeys(("query", "key", "value"), "layer(x) for self-attention, layer(x, source) for cross-attention"),
}


def _other_call(more: int, unknown: dict[str, object]) -> HeadwiseError:
    ours = ("source", "mask", "bias", "gate", "positions", "cache")
    told = [f"for {name}= write {TORCH_CALL[name]}" for name in unknown if name in TORCH_CALL]
    told += [f"there is no argument {name!r}; {close_names(name, ours)}" for name in unknown if name not in TORCH_CALL]
    if more:
        told.append(f"{more + 2} tensors were given: write {TORCH_CALL['query']}")
    return HeadwiseError(
        f"this layer is called as layer(x, source, mask=…): {'; '.join(told)}. For a layer that is called as "
        "torch.nn.MultiheadAttention is: hw.MultiHeadAttention.like_torch(embed_dim, num_heads)."
    )


# What other libraries call our settings.
ELSEWHERE = {
    **dict.fromkeys(("embed_dim", "d_model", "hidden_size", "dim"), "width"),
    **dict.fromkeys(("num_heads", "n_heads", "nhead", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("kdim", "vdim"), "kv_width"),
}


def _as_spec(spec: AttentionSpec | int | None, heads: int | None, fields: dict[str, Any]) -> AttentionSpec:
    if isinstance(spec, AttentionSpec):
        if fields or heads is not None:
            raise HeadwiseError(
                f"give a spec or its fields, not both: {', '.join(fields) or 'heads'} came beside a spec."
            )
        return spec
    fields = {**({} if spec is None else {"width": spec}), **({} if heads is None else {"heads": heads}), **fields}
    known = AttentionSpec.__dataclass_fields__
    for name in fields:
        if name not in known:
            advice = f"here it is {ELSEWHERE[name]}." if name in ELSEWHERE else close_names(name, known)
            raise HeadwiseError(f"an attention layer has no setting {name!r}; {advice}")
    for name in ("width", "heads"):
        if name not in fields:
            raise HeadwiseError(f"an attention layer needs {name}=…; e.g. MultiHeadAttention(width=512, heads=8).")
    return AttentionSpec(**fields)
