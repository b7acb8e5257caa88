"""Memory and traffic of each process under each parallel strategy, computed from the spec. No torch.

An all-reduce of n bytes over p processes is counted as a ring: each process sends 2 (p − 1) / p · n bytes. An all-gather and
a reduce-scatter cost half of that (https://arxiv.org/abs/1802.05799).
"""

from collections.abc import Callable
from dataclasses import dataclass

from headwise.distributed.model_partition import partition_model
from headwise.errors import ArgumentError, HeadwiseError
from headwise.spec.attention import AttentionSpec
from headwise.spec.cache_policy import CachePolicy, kv_row_bytes
from headwise.spec.model import ModelSpec

FLOAT32_BYTES = 4  # training state is in float32
STATES_PER_PARAMETER = 4  # weight, gradient and the two moments of AdamW
LOSS_VALUES_PER_TOKEN = 3  # numbers per token that processes exchange if the vocabulary is split


@dataclass(frozen=True)
class ParallelStrategyCost:
    """Memory and traffic of the process with the most, under one parallel strategy.

    Attributes:
        name: heads, fsdp, ddp or fsdp+heads.
        processes: Number of processes.
        mesh_shape: Number of processes that share texts × number that share heads.
        weight_bytes: Bytes of the weights.
        cache_bytes: Bytes of the keys and values of the texts of this process.
        training_bytes: Bytes of weights, gradients and both optimizer moments, in float32.
        gathered_bytes: Bytes of the full weights that FSDP gathers temporarily in training: those of the largest block, and
            those outside of blocks.
        forward_traffic: Bytes sent in a forward pass of a batch, up to the final hidden states.
        step_traffic: Bytes sent in a training step, in float32.
        error: Reason why the strategy cannot be used. Empty if it can.
    """

    name: str
    processes: int
    mesh_shape: str
    weight_bytes: int = 0
    cache_bytes: int = 0
    training_bytes: int = 0
    gathered_bytes: int = 0
    forward_traffic: int = 0
    step_traffic: int = 0
    error: str = ""

    def __repr__(self) -> str:
        from headwise.ui.result_text import parallel_cost_text

        return parallel_cost_text(self)

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import parallel_cost_table

        return parallel_cost_table(self).as_html()


def layout(
    spec: ModelSpec,
    processes: int,
    context: int | None = None,
    *,
    batch_size: int = 1,
    element_bytes: int = 2,
    head_processes: int = 2,
) -> tuple[ParallelStrategyCost, ...]:
    """Estimate memory and traffic per process for each parallel strategy.

    Strategies are `heads` (complete heads per process), `fsdp` (a part of every weight, gathered block by block), `ddp` (the
    full model in every process) and `fsdp+heads` (both, on a two-dimensional mesh).

    Args:
        spec: Spec of the model.
        processes: Number of processes.
        context: Tokens per text. None: the context of the model. Sources of an encoder-decoder have the same length.
        batch_size: Texts per process, or per group of processes that share heads.
        element_bytes: Bytes per weight and cached number at inference. Training is counted in float32.
        head_processes: Number of processes that share heads in `fsdp+heads`.

    Returns:
        One cost per strategy, in bytes of the process with the most. A strategy that cannot be used has an `error`.

    Raises:
        ArgumentError: If an argument is not an integer of at least 1.

    >>> from headwise.spec.presets import preset
    >>> for cost in layout(preset("llama2-70b"), 8, 32768):
    ...     print(cost.name, cost.mesh_shape, *(n >> 30 for n in (cost.weight_bytes, cost.cache_bytes, cost.forward_traffic)))
    heads 1 × 8 16 1 140
    fsdp 8 × 1 16 10 112
    ddp 8 × 1 128 10 0
    fsdp+heads 4 × 2 16 5 128
    """
    context = spec.context if context is None else context
    arguments = {"processes": processes, "context": context, "batch_size": batch_size, "element_bytes": element_bytes}
    for name, value in {**arguments, "head_processes": head_processes}.items():
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{name}: must be an integer of at least 1. Got {value!r}. Use {name}=1, for example.")

    def grid() -> ParallelStrategyCost:
        if processes % head_processes or head_processes in (1, processes):
            raise ArgumentError(
                f"head_processes: {processes} processes cannot be split into several groups of {head_processes} that share "
                "heads. Use a divisor of the number of processes, greater than 1 and less than that number, or use the "
                "strategy 'heads' or 'fsdp' alone."
            )
        return _parallel_cost(
            "fsdp+heads", spec, processes // head_processes, head_processes, context, batch_size, element_bytes
        )

    def cost_of(name: str, data_processes: int, heads: int) -> Callable[[], ParallelStrategyCost]:
        return lambda: _parallel_cost(name, spec, data_processes, heads, context, batch_size, element_bytes)

    strategies = {
        "heads": cost_of("heads", 1, processes),
        "fsdp": cost_of("fsdp", processes, 1),
        "ddp": cost_of("ddp", processes, 1),
    }
    return tuple(_cost_or_error(name, processes, count) for name, count in {**strategies, "fsdp+heads": grid}.items())


def forward_flops_per_token(spec: ModelSpec, context: int | None = None) -> int:
    """Return the operations (multiplications and additions) of a forward pass per token.

    Each multiplied weight counts two operations. Attention is counted over half of the text, in an encoder over all of it.

    >>> from headwise.spec.presets import preset
    >>> round(forward_flops_per_token(preset("llama2-70b"), 4096) / 1e9)
    143
    """
    tables = spec.vocab * spec.width * (1 if spec.tied or spec.output == "none" else 2)
    tables += spec.position_rows * spec.width
    visible_tokens = (spec.context if context is None else context) // (1 if spec.kind == "encoder" else 2)
    attention_macs = 0
    for layer_address in spec.layer_addresses:
        layer = spec.attention_at(layer_address)
        keys = visible_tokens if layer.window is None else min(visible_tokens, layer.window)
        attention_macs += len(layer.head_ids) * (layer.head_dim + layer.value_dim) * keys
    return 2 * (spec.num_parameters - tables + spec.vocab * spec.width * (spec.output != "none") + attention_macs)


def cache_bytes(spec: ModelSpec, length: int, element_bytes: int = 4) -> int:
    """Return the bytes of the cache of a text: the tokens of each KV head, at its bits. Cross-attention is not counted.

    >>> from headwise.spec import preset
    >>> cache_bytes(preset("smollm2-135m"), 1000), cache_bytes(preset("smollm2-135m").with_cache({"*": 8}), 1000)
    (46080000, 12960000)
    """
    cached_layers = [
        layer_address
        for layer_address in spec.layer_addresses
        if layer_address.stack in ("", "dec") and spec.kind != "encoder"
    ]
    layers = [spec.attention_at(layer_address) for layer_address in cached_layers]
    return sum(
        cache_bytes_per_kv_head(layer, policy, length, element_bytes)
        for layer in layers
        for policy in layer.cache_policies
    )


def cache_bytes_per_kv_head(layer: AttentionSpec, policy: CachePolicy, length: int, element_bytes: int = 4) -> int:
    """Return the bytes that one KV head caches of a text: the tokens of its policy, at most its window."""
    sizes, tokens = (layer.head_dim, layer.value_dim), policy.cached_tokens(length)
    if layer.window is not None and policy.cached_tokens(layer.window) == layer.window:
        tokens = min(length, layer.window - (not layer.cache))  # a per-head cache also holds the newest token
    return tokens * sum(kv_row_bytes(size, policy.bits, element_bytes) for size in sizes)


def _cost_or_error(name: str, processes: int, compute_cost: Callable[[], ParallelStrategyCost]) -> ParallelStrategyCost:
    try:
        return compute_cost()
    except HeadwiseError as error:
        return ParallelStrategyCost(name, processes, "", error=str(error))


def _parallel_cost(
    name: str,
    spec: ModelSpec,
    data_processes: int,
    head_processes: int,
    context: int,
    batch_size: int,
    element_bytes: int,
) -> ParallelStrategyCost:
    """Return the cost of the process with the most."""
    local_specs = [partition.local_spec(spec) for partition in partition_model(spec, head_processes)]
    largest_spec, weights = (
        max(local_specs, key=lambda local_spec: local_spec.num_parameters),
        max(local_spec.weight_bytes(element_bytes) for local_spec in local_specs),
    )
    weight_shards = data_processes if name.startswith("fsdp") else 1
    training_weights, blocks = (
        FLOAT32_BYTES * largest_spec.num_parameters,
        [FLOAT32_BYTES * size for size in _block_parameters(largest_spec)],
    )
    # Weights outside of blocks are gathered at the start of a step and kept until its end.
    unblocked_weights = training_weights - sum(blocks)
    forward_values, backward_values = _reduced_values(spec, local_specs, context * batch_size)
    if name == "ddp":
        forward, step = 0, _all_reduce_bytes(training_weights, data_processes)
    else:
        forward = (
            _all_reduce_bytes(element_bytes * forward_values, head_processes)
            + _all_reduce_bytes(weights, weight_shards) // 2
        )
        step = (
            _all_reduce_bytes(FLOAT32_BYTES * (forward_values + backward_values), head_processes)
            + _all_reduce_bytes(3 * training_weights - unblocked_weights, weight_shards) // 2
        )
    return ParallelStrategyCost(
        name, data_processes * head_processes, f"{data_processes} × {head_processes}", -(-weights // weight_shards),
        batch_size * max(_cache_bytes_per_text(local_spec, context, element_bytes) for local_spec in local_specs),
        STATES_PER_PARAMETER * -(-training_weights // weight_shards),
        unblocked_weights + max(blocks, default=0) if weight_shards > 1 else 0, forward, step,
    )  # fmt: skip


def _all_reduce_bytes(nbytes: int, processes: int) -> int:
    return 2 * (processes - 1) * nbytes // processes


def _reduced_values(spec: ModelSpec, local_specs: list[ModelSpec], tokens: int) -> tuple[int, int]:
    """Return how many numbers are summed over the processes that share heads, in the forward and the backward pass."""
    residual_values, stack_count = tokens * spec.width, 1 + (spec.kind == "encoder-decoder")
    residual_writes = len(spec.layer_addresses) + spec.layers + spec.encoder_layers  # attention layers and MLPs
    # Cross-attention also sends gradients of the source.
    cross_layers = sum(layer_address.stack == "cross" for layer_address in spec.layer_addresses)
    has_logits = spec.output != "none"
    backward_values = (
        residual_values * (residual_writes + cross_layers + has_logits) + LOSS_VALUES_PER_TOKEN * tokens * has_logits
    )
    for layer_address in spec.layer_addresses:
        full_spec, held_kv_heads = (
            spec.attention_at(layer_address),
            sum(len(local_spec.attention_at(layer_address).kv_head_ids) for local_spec in local_specs),
        )
        if held_kv_heads > len(full_spec.kv_head_ids):  # gradients of replicated KV heads are summed
            inputs = full_spec.kv_width // (full_spec.heads if full_spec.head_input == "slice" else 1) + full_spec.bias
            backward_values += len(full_spec.kv_head_ids) * (full_spec.head_dim + full_spec.value_dim) * inputs
    return residual_values * (residual_writes + stack_count), backward_values


def _block_parameters(spec: ModelSpec) -> list[int]:
    """Return the number of parameters of each block."""
    norm = spec.width * (2 if spec.norm == "layer" else 1)
    up, down = spec.mlp_width * (spec.width + spec.mlp_bias), spec.width * (spec.mlp_width + spec.mlp_bias)
    mlp = (
        up * (2 if spec.has_gated_mlp else 1) + down + norm * {"parallel": 0, "sandwich": 3}.get(spec.norm_placement, 1)
    )
    sizes: dict[tuple[bool, int], int] = {}
    for layer_address in spec.layer_addresses:
        key = (layer_address.stack == "enc", layer_address.layer)
        sizes[key] = sizes.get(key, mlp) + spec.attention_at(layer_address).num_parameters + norm
    return list(sizes.values())


def _cache_bytes_per_text(spec: ModelSpec, context: int, element_bytes: int) -> int:
    """Return the bytes of the keys and values of one text and its source."""
    cross_layers = [
        spec.attention_at(layer_address) for layer_address in spec.layer_addresses if layer_address.stack == "cross"
    ]
    kv_channels = sum(len(layer.kv_head_ids) * (layer.head_dim + layer.value_dim) for layer in cross_layers)
    return cache_bytes(spec, context, element_bytes) + kv_channels * context * element_bytes
