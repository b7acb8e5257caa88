"""Depth versus heads: two smaller models with equal parameter counts, one with fewer layers and one with fewer heads."""

from collections.abc import Iterator
from dataclasses import replace

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.spec import ModelSpec

MAX_MISMATCH = 0.2  # largest difference between the two parameter counts, as a fraction of one block
LAYERS = 6  # layers of the deeper model
STEP_FRACTION = 0.6  # fraction of the default steps, because the deeper model costs more per step


def reduce_layers_or_heads(spec: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
    """Remove one block, or remove about as many parameters by reducing the heads of every layer at constant head_dim.

    The second spec has the head count whose parameter count is closest to the first. Compare `num_parameters` of both.

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
    narrow = min(
        _specs_with_fewer_heads(spec), key=lambda candidate: abs(candidate.num_parameters - shallow.num_parameters)
    )
    mismatch = abs(narrow.num_parameters - shallow.num_parameters) / block
    if mismatch > MAX_MISMATCH:
        raise ArgumentError(
            f"spec: fewer heads and one block less cannot remove about the same number of parameters. A block has {block:,}. "
            f"The closest head count, {narrow.attention.heads} instead of {spec.attention.heads} in each of {spec.layers} "
            f"layers, removes {spec.num_parameters - narrow.num_parameters:,}. "
            "Use more layers (with 6 or more, half of the heads equal about one block) or more heads."
        )
    return shallow, narrow


def make_deep_experiment(experiment: TrainedModelProvider) -> TrainedModelProvider:
    """Return the context with a six-layer default model and fewer steps, for experiments on early and late layers."""
    return replace(
        experiment,
        size=replace(experiment.size, layers=LAYERS, steps=max(1, round(STEP_FRACTION * experiment.size.steps))),
    )


def _check_spec(spec: ModelSpec) -> None:
    if spec.kind == "encoder-decoder":
        raise UnsupportedModelError(
            "spec: encoder-decoder models are not supported because they have two kinds of blocks. "
            "Use the spec of a decoder or of an encoder."
        )
    if spec.kept_heads:
        raise UnsupportedModelError(
            "spec: models with pruned heads are not supported. Use the spec of the model before pruning."
        )
    if spec.layers < 2 or spec.attention.heads < 2:
        raise ArgumentError(
            f"spec: layers and heads must both be at least 2. Got layers={spec.layers}, heads={spec.attention.heads}. "
            "Use a larger model."
        )


def _specs_with_fewer_heads(spec: ModelSpec) -> Iterator[ModelSpec]:
    """Yield the spec with every smaller head count that the layer allows, at a constant number of query heads per KV head."""
    attention = spec.attention
    group_size = attention.heads // attention.kv_heads
    for heads in range(1, attention.heads):
        kv_heads = 1 if attention.kv_heads == 1 else heads // group_size
        if attention.kv_heads > 1 and heads % group_size:
            continue
        if attention.head_input == "slice" and attention.width % heads:
            continue
        yield replace(spec, attention=replace(attention, heads=heads, kv_heads=kv_heads))
