"""Heads or depth: the same number of parameters taken from a model in two ways."""

from collections.abc import Iterator
from dataclasses import replace

from headwise.errors import HeadwiseError
from headwise.experiments.experiment import Lab
from headwise.spec import ModelSpec

OFF = 0.2  # how far the two may miss each other, as a share of a block
LAYERS = 6  # of the lab's deeper model
PART = 0.6  # of the usual steps, since a layer costs as much as in the usual model


def same_cut(spec: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """One block less, and as many parameters less by fewer heads in every layer, each head as wide as before.

    The second is the number of heads that comes closest; `.parameters` of both tell how close.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=100, context=16, layers=6, attention=AttentionSpec(width=64, heads=8))
    >>> fewer_layers, fewer_heads = same_cut(spec)
    >>> fewer_layers.layers, fewer_heads.attention.heads, fewer_heads.attention.head_dim
    (5, 4, 8)
    >>> spec.parameters - fewer_layers.parameters, spec.parameters - fewer_heads.parameters  # 12·64² + 9·64, 12·64²
    (49728, 49152)
    """
    _check(spec)
    shallow = replace(spec, layers=spec.layers - 1)
    block = spec.parameters - shallow.parameters
    narrow = min(_fewer_heads(spec), key=lambda one: abs(one.parameters - shallow.parameters))
    miss = abs(narrow.parameters - shallow.parameters) / block
    if miss > OFF:
        raise HeadwiseError(
            f"a block of this model has {block:,} parameters; the nearest that fewer heads save is "
            f"{spec.parameters - narrow.parameters:,}, with {narrow.attention.heads} of {spec.attention.heads} heads left in "
            f"each of {spec.layers} layers. Give it more layers (from 6 on half of the heads weigh a block), or more heads."
        )
    return shallow, narrow


def deep(lab: Lab) -> Lab:
    """The lab whose usual model has six layers and is trained for fewer steps: for what is asked of early and late layers."""
    return replace(lab, size=replace(lab.size, layers=LAYERS, steps=max(1, round(PART * lab.size.steps))))


def _check(spec: ModelSpec) -> None:
    if spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "an encoder-decoder has blocks of two kinds, and which is removed is not settled; give one stack."
        )
    if spec.kept:
        raise HeadwiseError("some heads of this model are cut already; give the spec of the whole model.")
    if spec.layers < 2 or spec.attention.heads < 2:
        raise HeadwiseError(
            f"a model of {spec.layers} layers of {spec.attention.heads} heads has none to spare; both must be at least 2."
        )


def _fewer_heads(spec: ModelSpec) -> Iterator[ModelSpec]:
    """The same with every smaller number of heads that the layer allows: as many queries to a key as before."""
    old = spec.attention
    group = old.heads // old.kv_heads
    for heads in range(1, old.heads):
        shared = 1 if old.kv_heads == 1 else heads // group
        if old.kv_heads > 1 and heads % group:
            continue
        if old.input == "slice" and old.width % heads:
            continue
        yield replace(spec, attention=replace(old, heads=heads, kv_heads=shared))
