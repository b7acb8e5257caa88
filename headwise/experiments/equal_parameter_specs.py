"""Heads or depth: the same number of parameters taken from a model in two ways."""

from collections.abc import Iterator
from dataclasses import replace

from headwise.errors import HeadwiseError
from headwise.experiments.experiment_context import ExperimentContext
from headwise.spec import ModelSpec

MAX_MISMATCH = 0.2  # how far the two may miss each other, as a share of a block
LAYERS = 6  # of the lab's deeper model
STEP_FRACTION = 0.6  # of the usual steps, since a layer costs as much as in the usual model


def reduce_layers_or_heads(spec: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """One block less, and as many parameters less by fewer heads in every layer, each head as wide as before.

    The second is the number of heads that comes closest; `.parameters` of both tell how close.

    >>> from headwise.spec import AttentionSpec
    >>> spec = ModelSpec(vocab=100, context=16, layers=6, attention=AttentionSpec(width=64, heads=8))
    >>> fewer_layers, fewer_heads = reduce_layers_or_heads(spec)
    >>> fewer_layers.layers, fewer_heads.attention.heads, fewer_heads.attention.head_dim
    (5, 4, 8)
    >>> spec.num_parameters - fewer_layers.num_parameters, spec.num_parameters - fewer_heads.num_parameters
    (49728, 49152)
    """
    _check_spec(spec)
    shallow = replace(spec, layers=spec.layers - 1)
    block = spec.num_parameters - shallow.num_parameters
    narrow = min(_fewer_heads(spec), key=lambda candidate: abs(candidate.num_parameters - shallow.num_parameters))
    mismatch = abs(narrow.num_parameters - shallow.num_parameters) / block
    if mismatch > MAX_MISMATCH:
        raise HeadwiseError(
            f"a block of this model has {block:,} parameters; the nearest that fewer heads save is "
            f"{spec.num_parameters - narrow.num_parameters:,}, with {narrow.attention.heads} of {spec.attention.heads} heads "
            f"left in each of {spec.layers} layers. "
            "Use more layers (from 6 layers on, half of the heads equal a block), or more heads."
        )
    return shallow, narrow


def make_deep_experiment(experiment: ExperimentContext) -> ExperimentContext:
    """The lab whose usual model has six layers and is trained for fewer steps: for what is asked of early and late layers."""
    return replace(
        experiment,
        size=replace(experiment.size, layers=LAYERS, steps=max(1, round(STEP_FRACTION * experiment.size.steps))),
    )


def _check_spec(spec: ModelSpec) -> None:
    if spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "an encoder-decoder has blocks of two kinds, and which is removed is not settled; give one stack."
        )
    if spec.kept_heads:
        raise HeadwiseError("some heads of this model are cut already; give the spec of the whole model.")
    if spec.layers < 2 or spec.attention.heads < 2:
        raise HeadwiseError(
            f"a model of {spec.layers} layers of {spec.attention.heads} heads has none to spare; both must be at least 2."
        )


def _fewer_heads(spec: ModelSpec) -> Iterator[ModelSpec]:
    """The same with every smaller number of heads that the layer allows: as many queries to a key as before."""
    attention = spec.attention
    group_size = attention.heads // attention.kv_heads
    for heads in range(1, attention.heads):
        kv_heads = 1 if attention.kv_heads == 1 else heads // group_size
        if attention.kv_heads > 1 and heads % group_size:
            continue
        if attention.head_input == "slice" and attention.width % heads:
            continue
        yield replace(spec, attention=replace(attention, heads=heads, kv_heads=kv_heads))
