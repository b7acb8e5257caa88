"""Exact conversion to and from `torch.nn.MultiheadAttention`. `headwise.kernels.torch_mask_conversion` converts masks."""

import torch
from torch import nn

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.torch_mha_replacement import TorchAttention
from headwise.spec import AttentionSpec


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Convert a `torch.nn.MultiheadAttention` to a `MultiHeadAttention` with the same weights.

    Args:
        module: The layer to convert. It is not changed.

    Returns:
        A batch-first layer, also if `module` is not batch-first.

    Raises:
        UnsupportedModelError: The module has add_bias_kv=True, or kdim differs from vdim.

    >>> from_torch(nn.MultiheadAttention(8, 2)).spec.head_dim
    4
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(f"module: must be a torch.nn.MultiheadAttention. Got {type(module).__name__}.")
    if module.bias_k is not None:
        raise UnsupportedModelError(
            "module: add_bias_kv=True is not supported by from_torch. Use "
            "MultiHeadAttention.like_torch(…, add_bias_kv=True) and load_state_dict."
        )
    if module.kdim != module.vdim:
        raise UnsupportedModelError(
            f"module: kdim={module.kdim} differs from vdim={module.vdim}, which from_torch does not support. Use "
            "MultiHeadAttention.like_torch(…, kdim=…, vdim=…) and load_state_dict."
        )
    biased = module.in_proj_bias is not None
    spec = AttentionSpec(
        width=module.embed_dim,
        heads=module.num_heads,
        kv_width=module.kdim or module.embed_dim,
        bias=biased,
        out_bias=biased,
        softmax="off_by_one" if module.add_zero_attn else "plain",  # a zero key has score 0 and output 0
        dropout=module.dropout,
    )
    layer = MultiHeadAttention(spec).to(module.out_proj.weight)
    with torch.no_grad():
        for projection, weight in zip("qkv", _qkv_weights(module), strict=True):
            layer.qkv.weight_by_head(projection).copy_(weight.view_as(layer.qkv.weight_by_head(projection)))
        if module.in_proj_bias is not None:
            for projection, bias in zip("qkv", module.in_proj_bias.chunk(3), strict=True):
                layer.qkv.bias_by_head(projection).copy_(bias.view_as(layer.qkv.bias_by_head(projection)))  # pyright: ignore
            layer.output_projection.bias.copy_(module.out_proj.bias)  # pyright: ignore
        layer.output_projection.weight.copy_(module.out_proj.weight)
    return layer.train(module.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """Convert a layer to a `torch.nn.MultiheadAttention` (batch_first=True) with the same weights.

    Args:
        layer: The layer to convert. It is not changed.

    Returns:
        The torch layer.

    Raises:
        UnsupportedModelError: The layer has a part that `torch.nn.MultiheadAttention` does not have.

    >>> to_torch(MultiHeadAttention(width=8, heads=2)).num_heads
    2
    """
    if isinstance(layer, TorchAttention):
        return _rebuild_torch_layer(layer)
    spec = layer.spec
    unsupported = {
        "grouped KV heads": spec.kv_heads != spec.heads,
        "pruned heads": spec.kept_heads is not None,
        "cache policies per head": bool(spec.cache),
        "head_dim other than width / heads": spec.head_dim * spec.heads != spec.width,
        "value_dim other than head_dim": spec.value_dim != spec.head_dim,
        "a bias on q, k and v but not on the output, or the reverse": spec.bias != spec.out_bias,
        "a custom scale": spec.scale not in (None, spec.head_dim**-0.5),
        "rotary positions": spec.rotary is not None,
        f"a position bias ({spec.position_bias_field})": spec.position_bias_field is not None,
        "a window": spec.window is not None,
        "a softcap": spec.softcap is not None,
        "a learned sink": spec.softmax == "sink",
        "head_input='slice'": spec.head_input == "slice",
        "gates": spec.gated or spec.output_gate is not None,
        "a norm of queries and keys": spec.qk_norm is not None,
        "scaling of queries by position": spec.query_scaling is not None,
        "head dropout": spec.head_dropout > 0,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise UnsupportedModelError(
                f"layer: torch.nn.MultiheadAttention does not support {feature}. Build the layer without it, or keep the "
                f"headwise layer."
            )
    source_width = spec.kv_width if spec.kv_width != spec.width else None
    module = nn.MultiheadAttention(
        spec.width,
        spec.heads,
        dropout=spec.dropout,
        bias=spec.bias,
        kdim=source_width,
        vdim=source_width,
        add_zero_attn=spec.softmax == "off_by_one",
        batch_first=True,
    ).to(layer.output_projection.weight)
    with torch.no_grad():
        for projection, weight in zip("qkv", _qkv_weights(module), strict=True):
            weight.copy_(layer.qkv.weight_by_head(projection).flatten(0, 1))
        if module.in_proj_bias is not None:
            module.in_proj_bias.copy_(torch.cat([layer.qkv.bias_by_head(projection).flatten() for projection in "qkv"]))  # pyright: ignore
            module.out_proj.bias.copy_(layer.output_projection.bias)  # pyright: ignore
        module.out_proj.weight.copy_(layer.output_projection.weight)
    return module.train(layer.training)


def _rebuild_torch_layer(layer: TorchAttention) -> nn.MultiheadAttention:
    """Convert a `TorchAttention`, which has the same constructor arguments and state dict."""
    module = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        layer.spec.bias,
        layer.bias_k is not None,
        layer.add_zero_attn,
        layer.kdim,
        layer.vdim,
        layer.batch_first,
    ).to(layer.output_projection.weight)
    module.load_state_dict(layer.state_dict())
    return module.train(layer.training)


def _qkv_weights(module: nn.MultiheadAttention) -> tuple[torch.Tensor, ...]:
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3)
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
