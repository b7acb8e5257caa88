"""A model spread over processes: each holds whole heads of every layer, a part of each MLP and of the vocabulary.

What a process holds is a smaller model, with a spec of its own (`local`). Its parts know that others hold the rest: what
attention and MLPs write is added up over all of them, logits are put together, the loss is split. Norms, positions and output
biases every process has. So each computes the same stream, bit by bit, and to a caller it is the whole model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import HeadCache
from headwise.heads.head import Pattern
from headwise.heads.tensor_parallel import LayerShare
from headwise.kernels.collectives import Together
from headwise.model.layers import MLP, VocabularyRows
from headwise.model.model_cache import ModelCache
from headwise.model.shard_axes import axis_of, check_whole, cut, unpacked_names
from headwise.model.transformer import Transformer
from headwise.spec import ModelSpec, SiteAddress
from headwise.spec.cache_policy import Treatments
from headwise.spec.partition import Share


class Shard(Transformer):
    """What one process holds of a model, called as the whole is. All processes make the same calls.

    `spec` is that of the whole model, `local` that of the part; `sites()` are of the heads that are here, `heads` are all.
    """

    is_shared = True

    def __init__(
        self,
        spec: ModelSpec,
        shares: Sequence[Share],
        together: Together,
        *,
        backend: str = "auto",
        storage: str = "qkv",
        device: torch.device | str | None = None,
    ) -> None:
        if len(shares) != together.size:
            raise HeadwiseError(f"{len(shares)} shares are for as many processes; there are {together.size}.")
        small = shares[together.rank].of(spec)
        super().__init__(small, backend=backend, storage=storage, device=device)
        self.spec, self.local, self.shares, self.together = spec, small, tuple(shares), together
        for layer in self.attention_layers():
            address = layer.site.address
            layer.share_with(
                LayerShare(together, spec.attention_at(address), [share.by_layer[str(address)] for share in shares])
            )
        for part in self.modules():
            if isinstance(part, MLP):
                part.together = together
        rows = VocabularyRows(together, [share.vocab for share in shares])
        self.embed.rows = rows
        if self.output is not None:
            self.output.rows = rows

    @property
    def share(self) -> Share:
        """What is here."""
        return self.shares[self.together.rank]

    def _make_cache(self, spec: ModelSpec, kind: str, size: int | None) -> ModelCache:
        """For the key heads that are here; what is asked is about all."""
        local = self.share.of(spec)
        made = ModelCache(local, kind, size)
        for site in made.layers:
            whole, here = spec.attention_at(site), local.attention_at(site)
            if whole.cache and site.stack != "cross":  # also where none of those heads is here
                made.layers[site] = cache = HeadCache(here, here.keeps, size if kind == "fixed" else None)
                cache.everywhere = whole.keeps
        return made

    def untrained(self, seed: int = 0) -> "Shard":
        """A model of the same spec, drawn anew and cut into the same shares."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            whole = Transformer(self.spec)
        made = part_of(whole, self.shares, self.together).to(self.device)
        made.tokenizer = self.tokenizer
        return made

    def without(
        self, heads: Pattern, folded: Mapping[SiteAddress, Tensor] | None = None, cache: Treatments | None = None
    ) -> Self:
        """Not of a part: heads are cut from a whole model, which is then shared out."""
        raise HeadwiseError("this process holds a part of the model; cut heads from the whole, then use hw.shard.")

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Not of a part."""
        raise HeadwiseError("this process holds a part of the model; save it, load the whole one and export that.")

    def wiring(self) -> Any:
        """Not of a part: who follows a logit through the model reads all of the vocabulary."""
        raise HeadwiseError("this process holds a part of the vocabulary; follow logits in the whole model.")

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the whole model by name, one after the other, put together from all processes."""
        check_whole(self.spec, "put together")
        for name, piece in self.state_dict().items():
            axis = axis_of(name, self.spec, self.shares)
            yield name, piece if axis is None else axis.whole(piece, self.together)


def part_of(model: Transformer, shares: Sequence[Share], together: Together) -> Shard:
    """What this process is to hold of a model that is there, copied; the model stays as it is."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        state |= cut(name, tensor, model.spec, shares, together.rank)
    storage = next((layer.read.storage for layer in model.attention_layers()), "qkv")
    made = build(model.spec, shares, together, state, storage, copied=True)
    made.to(model.embed.like.dtype)
    for new, old in zip(made.attention_layers(), model.attention_layers(), strict=True):
        new.backend = old.backend
    made.tokenizer, made.family, made.plans = model.tokenizer, model.family, model.plans
    made.checkpointing = model.checkpointing
    return made.train(model.training)


def build(
    spec: ModelSpec,
    shares: Sequence[Share],
    together: Together,
    state: dict[str, Tensor],
    storage: str,
    copied: bool = False,
) -> Shard:
    """A shard with these tensors, by their names in a state dict; `copied`: sharing no memory with them."""
    made = Shard(spec, shares, together, storage=storage, device="meta")
    state = unpacked_names(state, made.local)
    empty = {name: like for name, like in made.state_dict().items() if not like.numel() and name not in state}
    state |= {name: torch.empty(like.shape, dtype=like.dtype) for name, like in empty.items()}  # no packed head is here
    if spec.tied:
        state.pop("output.vocabulary.weight", None)
    if copied:
        state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if spec.tied and made.output is not None and "embed.tokens.weight" in state:
        state["output.vocabulary.weight"] = state["embed.tokens.weight"]
    made.load_state_dict(state, assign=True)
    return made
