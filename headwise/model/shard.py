"""A model spread over processes: each holds whole heads of every layer, a part of each MLP and of the vocabulary.

What a process holds is a smaller model, with a spec of its own (`local_spec`). Its parts know that others hold the rest: what
attention and MLPs write is added up over all of them, logits are put together, the loss is split. Norms, positions and output
biases every process has. So each computes the same stream, bit by bit, and to a caller it is the whole model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import PerHeadCache
from headwise.heads.head import HeadPattern
from headwise.heads.tensor_parallel import HeadPartition
from headwise.kernels.collectives import ProcessGroupOps
from headwise.model.layers import MLP, VocabShard
from headwise.model.model_cache import ModelCache
from headwise.model.shard_axes import check_not_quantized, rename_unquantized, shard_axis_of, slice_for_rank
from headwise.model.transformer import Transformer
from headwise.spec import LayerAddress, ModelSpec
from headwise.spec.cache_policy import CachePolicies
from headwise.spec.rank_partition import RankPartition


class ShardedTransformer(Transformer):
    """What one process holds of a model, called as the whole is. All processes make the same calls.

    `spec` is that of the whole model, `local_spec` that of the part; `hook_points()` are of the heads that are here,
    `heads` are all.
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
            raise HeadwiseError(f"{len(partitions)} shares are for as many processes; there are {collectives.size}.")
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
        """What is here."""
        return self.partitions[self.collectives.rank]

    def _make_cache(self, spec: ModelSpec, kind: str, size: int | None) -> ModelCache:
        """For the key heads that are here; what is asked is about all."""
        local_spec = self.partition.local_spec(spec)
        model_cache = ModelCache(local_spec, kind, size)
        for layer_address in model_cache.layers:
            full_layer, local_layer = spec.attention_at(layer_address), local_spec.attention_at(layer_address)
            if full_layer.cache and layer_address.stack != "cross":  # also where none of those heads is here
                model_cache.layers[layer_address] = cache = PerHeadCache(
                    local_layer, local_layer.cache_policies, size if kind == "static" else None
                )
                cache.all_policies = full_layer.cache_policies
        return model_cache

    def untrained(self, seed: int = 0) -> "ShardedTransformer":
        """A model of the same spec, drawn anew and cut into the same shares."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            full_model = Transformer(self.spec)
        shard = shard_of(full_model, self.partitions, self.collectives).to(self.device)
        shard.tokenizer = self.tokenizer
        return shard

    def without(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
    ) -> Self:
        """Not of a part: heads are cut from a whole model, which is then shared out."""
        raise HeadwiseError("this process holds a part of the model; cut heads from the whole, then use hw.shard.")

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Not of a part."""
        raise HeadwiseError("this process holds a part of the model; save it, load the whole one and export that.")

    def residual_stream(self) -> Any:
        """Not of a part: who follows a logit through the model reads all of the vocabulary."""
        raise HeadwiseError("this process holds a part of the vocabulary; follow logits in the whole model.")

    def gathered_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the whole model by name, one after the other, put together from all processes."""
        check_not_quantized(self.spec, "put together")
        for name, piece in self.state_dict().items():
            axis = shard_axis_of(name, self.spec, self.partitions)
            yield name, piece if axis is None else axis.gather(piece, self.collectives)


def shard_of(
    model: Transformer, partitions: Sequence[RankPartition], collectives: ProcessGroupOps
) -> ShardedTransformer:
    """What this process is to hold of a model that is there, copied; the model stays as it is."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        state |= slice_for_rank(name, tensor, model.spec, partitions, collectives.rank)
    storage = next((layer.qkv.storage for layer in model.attention_layers()), "qkv")
    shard = build_shard(model.spec, partitions, collectives, state, storage, copy=True)
    shard.to(model.embed.reference_tensor.dtype)
    for new, old in zip(shard.attention_layers(), model.attention_layers(), strict=True):
        new.backend = old.backend
    shard.tokenizer, shard.family, shard.plans = model.tokenizer, model.family, model.plans
    shard.checkpointing = model.checkpointing
    return shard.train(model.training)


def build_shard(
    spec: ModelSpec,
    partitions: Sequence[RankPartition],
    collectives: ProcessGroupOps,
    state: dict[str, Tensor],
    storage: str,
    copy: bool = False,
) -> ShardedTransformer:
    """A shard with these tensors, by their names in a state dict; `copy`: sharing no memory with them."""
    shard = ShardedTransformer(spec, partitions, collectives, storage=storage, device="meta")
    state = rename_unquantized(state, shard.local_spec)
    empty = {name: like for name, like in shard.state_dict().items() if not like.numel() and name not in state}
    state |= {name: torch.empty(like.shape, dtype=like.dtype) for name, like in empty.items()}  # no packed head is here
    if spec.tied:
        state.pop("output.vocabulary.weight", None)
    if copy:
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if spec.tied and shard.output is not None and "embed.tokens.weight" in state:
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    shard.load_state_dict(state, assign=True)
    return shard
