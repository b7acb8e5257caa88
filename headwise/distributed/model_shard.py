"""A model split over processes: each holds complete heads of every layer, a part of each MLP and of the vocabulary.

The part of a process is a smaller model with its own spec (`local_spec`). Outputs of attention layers and MLPs are summed
over all processes, logits are gathered, and the loss is computed without gathering them. Norms, positions and output biases
are replicated. So every process computes the same residual stream, bit by bit, and a caller uses the part as the full model.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.cache import ModelCache, PerHeadCache
from headwise.distributed.head_partition import HeadPartition
from headwise.distributed.model_partition import RankPartition, partition_model
from headwise.distributed.process_group import ProcessGroupOps
from headwise.distributed.shard_axes import (
    check_not_quantized,
    named_slices_for_rank,
    rename_unquantized_to_plain_weight,
    shard_axis_of,
)
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import check_model
from headwise.model.chunked_cross_entropy import sum_over_chunks
from headwise.model.non_attention_layers import MLP
from headwise.model.transformer import Transformer
from headwise.spec import LayerAddress, ModelSpec
from headwise.spec.cache_policy import CachePolicies

HEADS_AXIS = "heads"  # mesh axis along which heads are split


def shard(model: Transformer, mesh: DeviceMesh) -> "ShardedTransformer":
    """Return the part of a model that this process holds: complete heads, a part of each MLP and of the vocabulary.

    Every process of the mesh must call `shard` with the same model. The result is called like the full model; all processes
    must make the same calls. The given model is not changed and can be deleted to free its memory.

    Args:
        model: The full model, a headwise model (not an attached one).
        mesh: Device mesh. A mesh with several axes needs one that is named "heads".

    Returns:
        The local part, which computes the outputs of the full model together with the other processes.

    Raises:
        UnsupportedModelError: If the model is a part already, or cannot be split over this number of processes.

    >>> import os, torch.distributed as dist
    >>> from headwise.spec import preset
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("heads",))
    >>> part = shard(Transformer(preset("nano")), mesh)
    >>> part(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])
    >>> dist.destroy_process_group()
    """
    check_model(model)
    if model.is_sharded:
        raise UnsupportedModelError("model: it is a part of a sharded model already. Shard the full model.")
    model.check_native("only headwise's own models can be sharded over processes")
    partitions, collectives = partitions_and_group_ops(mesh, model.spec)
    return shard_of(model, partitions, collectives)


def partitions_and_group_ops(mesh: DeviceMesh, spec: ModelSpec) -> tuple[tuple[RankPartition, ...], ProcessGroupOps]:
    """Return the partition of a model on a mesh, and its collectives. Raise if processes have different models."""
    collectives = head_collectives(mesh)
    partitions = partition_model(spec, collectives.size)
    check_same_across_processes(collectives, spec.to_json(), "model")
    return partitions, collectives


def head_collectives(mesh: DeviceMesh) -> ProcessGroupOps:
    """Return the collectives of the processes that share heads."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh: a DeviceMesh is needed. Got {mesh!r}. "
            'Use torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("heads",)).'
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return ProcessGroupOps(mesh.get_group())
    if HEADS_AXIS not in names:
        raise ArgumentError(
            f"mesh: with several axes, one must be named 'heads'. Got {', '.join(names) or 'axes without names'}. "
            "Set mesh_dim_names=('data', 'heads')."
        )
    return ProcessGroupOps(mesh.get_group(HEADS_AXIS))


def check_same_across_processes(collectives: ProcessGroupOps, value: str, name: str) -> None:
    """Raise if the processes have different values, because collectives would then wait forever."""
    digest = int.from_bytes(hashlib.sha256(value.encode()).digest()[:7], "big")
    signed_digest: Tensor = torch.tensor([digest, -digest])
    if collectives.size > 1 and int(collectives.all_reduce_max(signed_digest).sum()):
        raise ArgumentError(f"{name}: it differs between the processes. Pass the same {name} to all processes.")


class ShardedTransformer(Transformer):
    """The part of a model that one process holds, used as the full model. All processes make the same calls.

    `spec` is the spec of the full model, `local_spec` that of the part. `hook_points()` shows the heads of this process, and
    `heads` contains the heads of all processes.
    """

    is_sharded = True

    def __init__(
        self,
        spec: ModelSpec,
        partitions: Sequence[RankPartition],
        collectives: ProcessGroupOps,
        *,
        backend: str = "auto",
        storage: str = "qkv",
        device: torch.device | str | None = None,
    ) -> None:
        if len(partitions) != collectives.size:
            raise ArgumentError(
                f"partitions: one per process is needed. Got {len(partitions)} partitions for {collectives.size} processes. "
                f"Use partition_model(spec, {collectives.size})."
            )
        local_spec = partitions[collectives.rank].local_spec(spec)
        super().__init__(local_spec, backend=backend, storage=storage, device=device)
        self.spec, self.local_spec, self.partitions, self.collectives = spec, local_spec, tuple(partitions), collectives
        for layer in self.attention_layers():
            address = layer.hook_point.address
            layer.set_partition(
                HeadPartition(
                    collectives,
                    spec.attention_at(address),
                    [partition.heads_by_layer[str(address)] for partition in partitions],
                )
            )
        for module in self.modules():
            if isinstance(module, MLP):
                module.collectives = collectives
        vocab_shard = VocabShard(collectives, [partition.vocab_range for partition in partitions])
        self.embed.vocab_shard = vocab_shard
        if self.output is not None:
            self.output.vocab_shard = vocab_shard

    @property
    def partition(self) -> RankPartition:
        """The part of this process."""
        return self.partitions[self.collectives.rank]

    def _make_cache(self, spec: ModelSpec, kind: str, size: int | None) -> ModelCache:
        """Return a cache for the local KV heads. The spec describes all heads."""
        local_spec = self.partition.local_spec(spec)
        model_cache = ModelCache(local_spec, kind, size)
        for layer_address in model_cache.layers:
            full_layer, local_layer = spec.attention_at(layer_address), local_spec.attention_at(layer_address)
            if full_layer.cache and layer_address.stack != "cross":  # also if no streaming head is local
                model_cache.layers[layer_address] = PerHeadCache(
                    local_layer,
                    local_layer.cache_policies,
                    size if kind == "static" else None,
                    all_policies=full_layer.cache_policies,
                )
        return model_cache

    def untrained(self, seed: int = 0) -> "ShardedTransformer":
        """Return a model of the same spec and partition with random weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            full_model = Transformer(self.spec)
        shard = shard_of(full_model, self.partitions, self.collectives).to(self.device)
        shard.tokenizer = self.tokenizer
        return shard

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
    ) -> Self:
        """Raise: only the full model can be pruned."""
        raise UnsupportedModelError(
            "model: a sharded model cannot be pruned. Prune the full model, then use hw.shard(model, mesh)."
        )

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Raise: only the full model can be exported."""
        raise UnsupportedModelError(
            "model: a sharded model cannot be exported. Save it, load the full model with hw.load and export that."
        )

    def residual_stream(self) -> Any:
        """Raise: logit attribution needs the full vocabulary."""
        raise UnsupportedModelError(
            "model: logit attribution needs the full vocabulary, and this process has a part of it. Use the full model."
        )

    def gathered_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the full model by name, gathered from all processes."""
        check_not_quantized(self.spec, "gathered")
        for name, piece in self.state_dict().items():
            axis = shard_axis_of(name, self.spec, self.partitions)
            yield name, piece if axis is None else axis.gather(piece, self.collectives)


class VocabShard:
    """The rows of the vocabulary that this process holds."""

    def __init__(self, collectives: ProcessGroupOps, ranges: Sequence[tuple[int, int]]) -> None:
        self.collectives, self.sizes = collectives, [stop - start for start, stop in ranges]
        self.start, self.stop = ranges[collectives.rank]
        self.vocab = sum(self.sizes)

    def embed(self, tokens: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Look up token ids: (…) → (…, D). `tokens` is the table of the local rows."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            raise IndexError(f"token ids must be from 0 to {self.vocab - 1}")
        is_local, local_ids = self._localize_ids(ids)
        return self.collectives.sum(tokens(local_ids).masked_fill(~is_local[..., None], 0))

    def logits(self, output: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the logits of all rows: (B, T, D) → (B, T, V). `output` computes those of the local rows."""
        return self.collectives.gather(output(self.collectives.copy_to_group(x)), -1, self.sizes)

    def cross_entropy(
        self, output: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, total: int | None
    ) -> Tensor:
        """Return the mean cross-entropy of (N, D) and targets (N,), or the sum divided by `total`.

        `output` computes the logits of the local rows. Each process sums exp(logit − largest logit of all rows) over its
        rows. The processes exchange these sums and the logit of the target, never the logits.
        """

        def nll(states: Tensor, chunk_targets: Tensor) -> Tensor:
            logits = output(self.collectives.copy_to_group(states))  # (n, v)
            logits = at_least_float32(logits)
            max_logits = self.collectives.all_reduce_max(logits.amax(1))  # (n,)
            is_local, local_ids = self._localize_ids(chunk_targets)
            target_logits = logits.gather(1, local_ids[:, None])[:, 0].masked_fill(~is_local, 0)
            exp_sums, target_logits = self.collectives.sum(
                torch.stack(((logits - max_logits[:, None]).exp().sum(1), target_logits))
            )
            return (exp_sums.log() + max_logits - target_logits).sum()

        return sum_over_chunks(nll, max(self.sizes), hidden, targets, total)

    def _localize_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ids are local rows, and their positions there; 0 for the others."""
        is_local = (ids >= self.start) & (ids < self.stop)
        return is_local, torch.where(is_local, ids - self.start, 0)


def shard_of(
    model: Transformer, partitions: Sequence[RankPartition], collectives: ProcessGroupOps
) -> ShardedTransformer:
    """Copy the part of a model that this process holds; the model stays unchanged."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        state |= named_slices_for_rank(name, tensor, model.spec, partitions, collectives.rank)
    storage = next((layer.qkv.storage for layer in model.attention_layers()), "qkv")
    shard = build_shard(model.spec, partitions, collectives, state, storage, copy=True)
    shard.to(model.embed.reference_tensor.dtype)
    for new, old in zip(shard.attention_layers(), model.attention_layers(), strict=True):
        new.backend = old.backend
    shard.tokenizer, shard.family, shard.plans = model.tokenizer, model.family, model.plans
    shard.checkpointing, shard.matmul_tuner = model.checkpointing, copy.copy(model.matmul_tuner)
    return shard.train(model.training)


def build_shard(
    spec: ModelSpec,
    partitions: Sequence[RankPartition],
    collectives: ProcessGroupOps,
    state: dict[str, Tensor],
    storage: str,
    *,
    copy: bool = False,
) -> ShardedTransformer:
    """Build a part of a model from tensors by name. With `copy`, it shares no memory with them."""
    shard = ShardedTransformer(spec, partitions, collectives, storage=storage, device="meta")
    state = rename_unquantized_to_plain_weight(state, shard.local_spec)
    empty = {name: like for name, like in shard.state_dict().items() if not like.numel() and name not in state}
    # Processes without quantized heads of a layer have empty tensors.
    state |= {name: torch.empty(like.shape, dtype=like.dtype) for name, like in empty.items()}
    if spec.tied:
        state.pop("output.vocabulary.weight", None)
    if copy:
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if spec.tied and shard.output is not None and "embed.tokens.weight" in state:
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    shard.load_state_dict(state, assign=True)
    return shard
