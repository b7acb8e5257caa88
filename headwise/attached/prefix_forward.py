"""Forward passes of an attached decoder that share the keys and values of a prefix (`headwise.model.prefix_forward`)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from headwise.attached.transformers_forward import forward_tokens
from headwise.model.prefix_forward import PrefixForward
from headwise.spec import ModelSpec


class PrefixCacheLayer(DynamicLayer):
    """Stores the tokens of the first call, the prefix. Later calls attend to the prefix and to their own tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the prefix and of this call: (B, K, P, ·), (n·B, K, T, ·) → (n·B, K, P + T, ·)."""
        if not self.is_initialized:
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        copies = len(key_states) // len(self.keys)
        keys, values = self.keys.repeat(copies, 1, 1, 1), self.values.repeat(copies, 1, 1, 1)
        return torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)


def make_prefix_forward(model: Any, spec: ModelSpec, prefix_ids: Tensor) -> PrefixForward | None:
    """Return forward passes that share a prefix, (B, P). None if layers of the model cache more than keys and values."""
    if spec.kind != "decoder" or spec.cache:
        return None
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    has_plain_layers = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    if not layers or not has_plain_layers or getattr(config, "num_kv_shared_layers", None):
        return None
    cache = Cache(layers=[PrefixCacheLayer() for _ in layers])
    forward = partial(forward_tokens, model, spec, hidden=True, cache=cache)
    forward(prefix_ids, None, None, None)
    return lambda ids, copies: forward(ids.repeat(copies, 1), None, None, None)
