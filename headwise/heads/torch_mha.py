"""To and from `torch.nn.MultiheadAttention`, exact both ways. Masks convert in `headwise.kernels.torch_masks`."""

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.torch_compat import TorchAttention
from headwise.spec import AttentionSpec


def from_torch(theirs: nn.MultiheadAttention) -> MultiHeadAttention:
    """A layer of ours with the same weights. Ours is batch-first, whatever theirs was.

    >>> from_torch(nn.MultiheadAttention(8, 2)).spec.head_dim
    4
    """
    if not isinstance(theirs, nn.MultiheadAttention):
        raise HeadwiseError(f"from_torch takes a torch.nn.MultiheadAttention, got {type(theirs).__name__}.")
    if theirs.bias_k is not None:
        raise HeadwiseError(
            "add_bias_kv=True learns an extra key and value, which a plain layer of ours has not; build one with "
            "MultiHeadAttention.like_torch(…, add_bias_kv=True) and load_state_dict."
        )
    if theirs.kdim != theirs.vdim:
        raise HeadwiseError(
            f"kdim {theirs.kdim} and vdim {theirs.vdim} differ; ours reads keys and values from one source. Build one with "
            "MultiHeadAttention.like_torch(…, kdim=…, vdim=…) and load_state_dict."
        )
    biased = theirs.in_proj_bias is not None
    spec = AttentionSpec(
        width=theirs.embed_dim,
        heads=theirs.num_heads,
        kv_width=theirs.kdim or theirs.embed_dim,
        bias=biased,
        out_bias=biased,
        softmax="off_by_one" if theirs.add_zero_attn else "plain",  # an added zero key scores 0 and writes nothing
        dropout=theirs.dropout,
    )
    ours = MultiHeadAttention(spec).to(theirs.out_proj.weight)
    with torch.no_grad():
        for letter, weight in zip("qkv", _their_weights(theirs), strict=True):
            ours.read.weight(letter).copy_(weight.view_as(ours.read.weight(letter)))
        if theirs.in_proj_bias is not None:
            for letter, bias in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True):
                ours.read.bias(letter).copy_(bias.view_as(ours.read.bias(letter)))  # pyright: ignore
            ours.write.bias.copy_(theirs.out_proj.bias)  # pyright: ignore
        ours.write.weight.copy_(theirs.out_proj.weight)
    return ours.train(theirs.training)


def to_torch(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """A `torch.nn.MultiheadAttention` (batch_first=True) with the same weights, where it can hold them."""
    if isinstance(ours, TorchAttention):
        return _as_it_was(ours)
    spec = ours.spec
    beyond = {
        "grouped key/value heads": spec.kv_heads != spec.heads,
        "heads that were cut": spec.kept is not None,
        "heads with caches of their own": bool(spec.cache),
        "head_dim other than width / heads": spec.head_dim * spec.heads != spec.width,
        "value_dim other than head_dim": spec.value_dim != spec.head_dim,
        "a bias on q, k, v but not on the output, or the reverse": spec.bias != spec.out_bias,
        "a scale of its own": spec.scale not in (None, spec.head_dim**-0.5),
        "rotary positions": spec.rotary is not None,
        f"a bias by distance ({spec.position_bias})": spec.position_bias is not None,
        "a window": spec.window is not None,
        "a score cap": spec.softcap is not None,
        "a learned sink": spec.softmax == "sink",
        "input='slice'": spec.input == "slice",
        "gates": spec.gated,
        "head dropout": spec.head_dropout > 0,
    }
    for what, there in beyond.items():
        if there:
            raise HeadwiseError(
                f"nn.MultiheadAttention cannot hold {what}; keep the layer as it is, or build it without."
            )
    other_width = spec.kv_width if spec.kv_width != spec.width else None
    theirs = nn.MultiheadAttention(
        spec.width,
        spec.heads,
        dropout=spec.dropout,
        bias=spec.bias,
        kdim=other_width,
        vdim=other_width,
        add_zero_attn=spec.softmax == "off_by_one",
        batch_first=True,
    ).to(ours.write.weight)
    with torch.no_grad():
        for letter, weight in zip("qkv", _their_weights(theirs), strict=True):
            weight.copy_(ours.read.weight(letter).flatten(0, 1))
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.copy_(torch.cat([ours.read.bias(letter).flatten() for letter in "qkv"]))  # pyright: ignore
            theirs.out_proj.bias.copy_(ours.write.bias)  # pyright: ignore
        theirs.out_proj.weight.copy_(ours.write.weight)
    return theirs.train(ours.training)


def _as_it_was(ours: TorchAttention) -> nn.MultiheadAttention:
    """A layer that has torch's face already: the same constructor, the same state."""
    theirs = nn.MultiheadAttention(
        ours.embed_dim,
        ours.num_heads,
        ours.dropout,
        ours.spec.bias,
        ours.bias_k is not None,
        ours.add_zero_attn,
        ours.kdim,
        ours.vdim,
        ours.batch_first,
    ).to(ours.write.weight)
    theirs.load_state_dict(ours.state_dict())
    return theirs.train(ours.training)


def _their_weights(theirs: nn.MultiheadAttention) -> tuple[torch.Tensor, ...]:
    if theirs.in_proj_weight is not None:
        return theirs.in_proj_weight.chunk(3)
    return theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
