"""A model as plain functions of tensors, which torch.export can trace: one for an encoder, two for a decoder.

Keys and values come in and go out as tensors, a pair for each layer that has heads: (B, K, S, d) and (B, K, S, e).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.heads.layer_cache import WholeCache
from headwise.model import Transformer, quiet
from headwise.model.model_cache import ModelCache
from headwise.spec import ModelSpec, SiteAddress


class Joined(WholeCache):
    """A cache that makes new tensors instead of writing into old ones."""

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None) -> None:
        super().__init__()
        self._k, self._v = k, v
        self.length = 0 if k is None else k.shape[2]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, T, ·) → (B, K, S + T, ·)"""
        self._k = k if self._k is None else torch.cat((self._k, k), 2)
        self._v = v if self._v is None else torch.cat((self._v, v), 2)
        self.length = self._k.shape[2]
        return self._k, self._v

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """All keys, all values."""
        assert self._k is not None
        assert self._v is not None
        return self._k, self._v


class Encoder(nn.Module):
    """ids and padding (B, T) → states (B, T, D), or logits where there is an output."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """`padding` is True at real tokens."""
        return self.model(ids, padding=padding)


class Prefill(nn.Module):
    """ids (B, T) → logits (B, T, V), and the keys and values of every layer with heads."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """A prompt, from its first token."""
        cache = _cache(self.model.spec, {})
        logits = self.model(ids, cache=cache)
        return logits, *_held(self.model.spec, cache)


class Next(nn.Module):
    """ids (B, T) and all keys and values before them → logits (B, T, V), and all keys and values."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Some more tokens of the same text."""
        sites = cached_sites(self.model.spec)
        pairs = dict(zip(sites, zip(past[::2], past[1::2], strict=True), strict=True))
        cache = _cache(self.model.spec, pairs)
        logits = self.model(ids, cache=cache)
        return logits, *_held(self.model.spec, cache)


def cached_sites(spec: ModelSpec) -> list[SiteAddress]:
    """The layers that keep keys: those that have heads."""
    return [site for site in spec.sites if spec.attention_at(site).head_ids]


def check_traceable(model: Any) -> None:
    """Refuse what has no such functions."""
    model.check_own("only headwise's own models are written this way")
    if model.spec.kind == "encoder-decoder":
        raise HeadwiseError("an encoder-decoder is not written this way; export it to transformers.")
    if model.spec.cache:
        raise HeadwiseError("heads that keep caches of their own cannot be said in a graph; use model.save(folder).")


def _cache(spec: ModelSpec, pairs: dict[SiteAddress, tuple[Tensor, Tensor]]) -> ModelCache:
    made = ModelCache(spec)
    for site in spec.sites:
        made.layers[site] = Joined(*pairs.get(site, (None, None)))
        made.length = max(made.length, made.layers[site].length)
    return made


def _held(spec: ModelSpec, cache: ModelCache) -> list[Tensor]:
    found: list[Tensor] = []
    for site in cached_sites(spec):
        one = cache.layers[site]
        assert isinstance(one, Joined)
        found += one.held
    return found


@contextmanager
def traceable(model: Transformer) -> Iterator[None]:
    """While open, layers without heads write their bias and compute nothing: engines refuse tensors of size 0."""
    emptied = [layer for layer in model.attention_layers() if not layer.spec.head_ids]
    for layer in emptied:
        layer.forward = partial(_constant, layer)
    try:
        with quiet(model), torch.no_grad():
            yield
    finally:
        for layer in emptied:
            del layer.forward


def _constant(layer: MultiHeadAttention, x: Tensor, *more: Any, **named: Any) -> Tensor:
    return torch.zeros_like(x) if layer.b_O is None else torch.zeros_like(x) + layer.b_O


def traced(model: Transformer) -> dict[str, tuple[Any, list[str], list[str]]]:
    """The model's functions by name, each traced with any batch and length; the names of what goes in and what comes out."""
    most = model.spec.context if model.spec.positions == "learned" else 1 << 20
    batch, tokens = torch.export.Dim("batch", min=1, max=1 << 16), torch.export.Dim("tokens", min=1, max=most)
    ids = torch.zeros(2, 3, dtype=torch.long, device=model.device)
    if model.spec.kind == "encoder":
        given = (ids, torch.ones_like(ids, dtype=torch.bool))
        shapes = {"ids": {0: batch, 1: tokens}, "padding": {0: batch, 1: tokens}}
        made = torch.export.export(Encoder(model), given, dynamic_shapes=shapes, strict=False)
        return {"encoder": (made, ["ids", "padding"], ["states" if model.output is None else "logits"])}
    layers = [site.layer for site in cached_sites(model.spec)]
    past = torch.export.Dim("past", min=1, max=most - 1)
    shapes = {"ids": {0: batch, 1: tokens}}
    prefill = torch.export.export(Prefill(model), (ids,), dynamic_shapes=shapes, strict=False)
    held = Prefill(model)(ids)[1:]
    one = {"ids": {0: batch}, "past": tuple({0: batch, 2: past} for _ in held)}
    step = torch.export.export(Next(model), (ids[:, :1], *held), dynamic_shapes=one, strict=False)

    def names(what: str) -> list[str]:
        return [f"{what}.{layer}.{part}" for layer in layers for part in ("key", "value")]

    return {
        "prefill": (prefill, ["ids"], ["logits", *names("present")]),
        "step": (step, ["ids", *names("past")], ["logits", *names("present")]),
    }
