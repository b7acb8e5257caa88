"""A model as pure functions of tensors that torch.export can trace: one for an encoder, two for a decoder.

Keys and values are inputs and outputs, one pair per layer with heads: (B, K, S, d) and (B, K, S, e).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cache import ModelCache, SharedKVCache
from headwise.errors import UnsupportedModelError
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer, eval_mode
from headwise.spec import LayerAddress, ModelSpec


class FunctionalCache(SharedKVCache):
    """KV cache that creates new tensors instead of writing in place."""

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None) -> None:
        super().__init__()
        self._k, self._v = k, v
        self.length = 0 if k is None else k.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values: (B, K, T, ·) → (B, K, S + T, ·)."""
        self._k = k if self._k is None else torch.cat((self._k, k), 2)
        self._v = v if self._v is None else torch.cat((self._v, v), 2)
        self.length = self._k.shape[2]
        return self._k, self._v

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values."""
        assert self._k is not None
        assert self._v is not None
        return self._k, self._v


class EncoderModule(nn.Module):
    """Encoder as a function: ids and attention_mask (B, T) → hidden states (B, T, D), or logits with an output head."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Run the encoder. `attention_mask` is True at real tokens."""
        return self.model(ids, attention_mask=attention_mask)


class PrefillModule(nn.Module):
    """Prefill step of a decoder: ids (B, T) → logits (B, T, V), and the keys and values of every layer with heads."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Compute a prompt from its first token."""
        layer_caches = _make_layer_caches(self.model.spec, {})
        logits = self.model(ids, cache=_make_model_cache(self.model.spec, layer_caches))
        return logits, *_cached_tensors(self.model.spec, layer_caches)


class DecodeStepModule(nn.Module):
    """Decode step: ids (B, T) and all earlier keys and values → logits (B, T, V), and all keys and values."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Compute the next tokens of a text."""
        layer_addresses = cached_layers(self.model.spec)
        kv_pairs = dict(zip(layer_addresses, zip(past[::2], past[1::2], strict=True), strict=True))
        layer_caches = _make_layer_caches(self.model.spec, kv_pairs)
        logits = self.model(ids, cache=_make_model_cache(self.model.spec, layer_caches))
        return logits, *_cached_tensors(self.model.spec, layer_caches)


def cached_layers(spec: ModelSpec) -> list[LayerAddress]:
    """Return the layers that cache keys and values, which are those with heads."""
    return [layer_address for layer_address in spec.layer_addresses if spec.attention_at(layer_address).head_ids]


def check_exportable(model: Any) -> None:
    """Raise an error if the model cannot be traced."""
    if model.spec.kind == "encoder-decoder":
        raise UnsupportedModelError(
            "an encoder-decoder cannot be exported to ONNX or torch.export. Use model.save(folder) instead."
        )
    if model.spec.cache:
        raise UnsupportedModelError(
            "per-head cache policies cannot be exported to ONNX or torch.export. Use model.save(folder)."
        )


def _make_layer_caches(
    spec: ModelSpec, kv_pairs: dict[LayerAddress, tuple[Tensor, Tensor]]
) -> dict[LayerAddress, FunctionalCache]:
    return {
        layer_address: FunctionalCache(*kv_pairs.get(layer_address, (None, None)))
        for layer_address in spec.layer_addresses
    }


def _make_model_cache(spec: ModelSpec, layer_caches: dict[LayerAddress, FunctionalCache]) -> ModelCache:
    cache = ModelCache(spec)
    for layer_address, layer_cache in layer_caches.items():
        cache.layers[layer_address] = layer_cache
        cache.length = max(cache.length, layer_cache.length)
    return cache


def _cached_tensors(spec: ModelSpec, layer_caches: dict[LayerAddress, FunctionalCache]) -> list[Tensor]:
    return [tensor for layer_address in cached_layers(spec) for tensor in layer_caches[layer_address].kv]


@contextmanager
def bypass_empty_layers(model: Transformer) -> Iterator[None]:
    """Replace layers without heads by their bias while the context is open: engines do not support tensors of size 0."""
    headless = [layer for layer in model.attention_layers() if not layer.spec.head_ids]
    for layer in headless:
        layer.forward = partial(_constant_output, layer)
    try:
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        for layer in headless:
            del layer.forward


def _constant_output(layer: MultiHeadAttention, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(x) if layer.b_O is None else torch.zeros_like(x) + layer.b_O


def export_graphs(model: Transformer) -> dict[str, tuple[Any, list[str], list[str]]]:
    """Trace the model for any batch size and length. Returns, by name, each program and its input and output names."""
    max_tokens = model.spec.context if model.spec.positions == "learned" else 1 << 20
    batch, tokens = torch.export.Dim("batch", min=1, max=1 << 16), torch.export.Dim("tokens", min=1, max=max_tokens)
    ids = torch.zeros(2, 3, dtype=torch.long, device=model.device)
    if model.spec.kind == "encoder":
        inputs = (ids, torch.ones_like(ids, dtype=torch.bool))
        shapes = {"ids": {0: batch, 1: tokens}, "attention_mask": {0: batch, 1: tokens}}
        program = torch.export.export(EncoderModule(model), inputs, dynamic_shapes=shapes, strict=False)
        return {"encoder": (program, ["ids", "attention_mask"], ["states" if model.output is None else "logits"])}
    layers = [layer_address.layer for layer_address in cached_layers(model.spec)]
    past = torch.export.Dim("past", min=1, max=max_tokens - 1)
    shapes = {"ids": {0: batch, 1: tokens}}
    prefill = torch.export.export(PrefillModule(model), (ids,), dynamic_shapes=shapes, strict=False)
    past_kv = PrefillModule(model)(ids)[1:]
    step_shapes = {"ids": {0: batch}, "past": tuple({0: batch, 2: past} for _ in past_kv)}
    step = torch.export.export(
        DecodeStepModule(model), (ids[:, :1], *past_kv), dynamic_shapes=step_shapes, strict=False
    )

    def kv_names(prefix: str) -> list[str]:
        return [f"{prefix}.{layer}.{part}" for layer in layers for part in ("key", "value")]

    return {
        "prefill": (prefill, ["ids"], ["logits", *kv_names("present")]),
        "step": (step, ["ids", *kv_names("past")], ["logits", *kv_names("present")]),
    }
