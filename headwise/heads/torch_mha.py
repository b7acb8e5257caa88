"""To and from `torch.nn.MultiheadAttention`, exact both ways. Masks convert in `headwise.kernels.torch_masks`."""

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.torch_mha_replacement import TorchAttention
from headwise.spec import AttentionSpec


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer of ours with the same weights. Ours is batch-first, whatever theirs was.

    >>> from_torch(nn.MultiheadAttention(8, 2)).spec.head_dim
    4
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise HeadwiseError(f"from_torch takes a torch.nn.MultiheadAttention, got {type(module).__name__}.")
    if module.bias_k is not None:
        raise HeadwiseError(
            "add_bias_kv=True learns an extra key and value, which a plain layer of ours has not; build one with "
            "MultiHeadAttention.like_torch(…, add_bias_kv=True) and load_state_dict."
        )
    if module.kdim != module.vdim:
        raise HeadwiseError(
            f"kdim {module.kdim} and vdim {module.vdim} differ; ours reads keys and values from one source. Build one with "
            "MultiHeadAttention.like_torch(…, kdim=…, vdim=…) and load_state_dict."
        )
    biased = module.in_proj_bias is not None
    spec = AttentionSpec(
        width=module.embed_dim,
        heads=module.num_heads,
        kv_width=module.kdim or module.embed_dim,
        bias=biased,
        out_bias=biased,
        softmax="off_by_one" if module.add_zero_attn else "plain",  # an added zero key scores 0 and writes nothing
        dropout=module.dropout,
    )
    layer = MultiHeadAttention(spec).to(module.out_proj.weight)
    with torch.no_grad():
        for projection, weight in zip("qkv", _torch_weights(module), strict=True):
            layer.qkv.weight_by_head(projection).copy_(weight.view_as(layer.qkv.weight_by_head(projection)))
        if module.in_proj_bias is not None:
            for projection, bias in zip("qkv", module.in_proj_bias.chunk(3), strict=True):
                layer.qkv.bias_by_head(projection).copy_(bias.view_as(layer.qkv.bias_by_head(projection)))  # pyright: ignore
            layer.output_projection.bias.copy_(module.out_proj.bias)  # pyright: ignore
        layer.output_projection.weight.copy_(module.out_proj.weight)
    return layer.train(module.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """A `torch.nn.MultiheadAttention` (batch_first=True) with the same weights, where it can hold them."""
    if isinstance(layer, TorchAttention):
        return _rebuild_torch_layer(layer)
    spec = layer.spec
    unsupported = {
        "grouped key/value heads": spec.kv_heads != spec.heads,
        "heads that were cut": spec.kept_heads is not None,
        "heads with caches of their own": bool(spec.cache),
        "head_dim other than width / heads": spec.head_dim * spec.heads != spec.width,
        "value_dim other than head_dim": spec.value_dim != spec.head_dim,
        "a bias on q, k, v but not on the output, or the reverse": spec.bias != spec.out_bias,
        "a scale of its own": spec.scale not in (None, spec.head_dim**-0.5),
        "rotary positions": spec.rotary is not None,
        f"a bias by distance ({spec.position_bias_field})": spec.position_bias_field is not None,
        "a window": spec.window is not None,
        "a score cap": spec.softcap is not None,
        "a learned sink": spec.softmax == "sink",
        "head_input='slice'": spec.head_input == "slice",
        "gates": spec.gated,
        "head dropout": spec.head_dropout > 0,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise HeadwiseError(
                f"nn.MultiheadAttention cannot hold {feature}; keep the layer as it is, or build it without."
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
        for projection, weight in zip("qkv", _torch_weights(module), strict=True):
            weight.copy_(layer.qkv.weight_by_head(projection).flatten(0, 1))
        if module.in_proj_bias is not None:
            module.in_proj_bias.copy_(torch.cat([layer.qkv.bias_by_head(projection).flatten() for projection in "qkv"]))  # pyright: ignore
            module.out_proj.bias.copy_(layer.output_projection.bias)  # pyright: ignore
        module.out_proj.weight.copy_(layer.output_projection.weight)
    return module.train(layer.training)


def _rebuild_torch_layer(layer: TorchAttention) -> nn.MultiheadAttention:
    """A layer that has torch's face already: the same constructor, the same state."""
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


def _torch_weights(module: nn.MultiheadAttention) -> tuple[torch.Tensor, ...]:
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3)
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
