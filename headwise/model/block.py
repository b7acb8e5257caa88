"""The transformer block: attention, perhaps attention to a source, and an MLP, each adding to the stream."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from headwise.heads import Cache, HeadCache, MultiHeadAttention
from headwise.kernels import Angles, Mask, causal, padding_mask
from headwise.model.layers import MLP, make_norm
from headwise.model.model_cache import ModelCache
from headwise.spec import ModelSpec, SiteAddress


@dataclass(frozen=True, eq=False)
class Beside:
    """What travels beside the stream through all blocks of a stack."""

    causal: bool = False
    mask: Mask | None = None  # the caller's own, on top
    real: Tensor | None = None  # (B, S): which keys are real tokens
    angles: Angles | None = None
    gates: dict[SiteAddress, Tensor] = field(default_factory=dict)
    cache: ModelCache | None = None
    memory: Tensor | None = None  # (B, S, D): the encoded source
    memory_real: Tensor | None = None

    def mask_for(self, cache: Cache | None, T: int) -> Mask | None:
        """The mask of one self-attention layer; a sliding cache shows fewer keys than have been seen."""
        masks = [causal()] if self.causal else []
        if self.real is not None:
            masks.append(self.padded if cache is None else padding_mask(self.real[:, -cache.visible(T) :]))
        if self.mask is not None:
            masks.append(self.mask)
        return _all(masks)

    @cached_property
    def starts(self) -> Tensor | None:
        """Where the text of each row begins, (B,), behind its padding; None where there is no padding."""
        return None if self.real is None else (self.real.cumsum(1) == 0).sum(1)

    @cached_property
    def padded(self) -> Mask:
        """Real tokens only: one mask for all layers, so that what is worked out for it serves them all."""
        assert self.real is not None
        return padding_mask(self.real)


class Block(nn.Module):
    """One layer of a stack. `form` says where the norms stand.

    pre:       x + f(norm(x)), each sub-layer in turn        (https://arxiv.org/abs/2002.04745)
    post:      norm(x + f(x)), each sub-layer in turn        (https://arxiv.org/abs/1706.03762)
    parallel:  x + attention(norm(x)) + mlp(norm(x)), at once  (GPT-J, Wang and Komatsuzaki 2021)
    """

    def __init__(self, spec: ModelSpec, address: SiteAddress, backend: str = "auto", storage: str = "qkv") -> None:
        super().__init__()
        self.form = spec.form
        self.attention = MultiHeadAttention(
            spec.attention_at(address), backend=backend, storage=storage, address=address
        )
        self.norm_attention = make_norm(spec)
        self.cross: MultiHeadAttention | None = None
        if address.stack == "dec":
            across = SiteAddress("cross", address.layer)
            self.cross = MultiHeadAttention(spec.attention_at(across), backend=backend, storage=storage, address=across)
            self.norm_cross = make_norm(spec)
        self.mlp = MLP(spec)
        self.norm_mlp = make_norm(spec) if spec.form != "parallel" else None
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        read = self.reads(x)
        return self.finish(x, read, self.attend(read, beside), beside)

    def reads(self, x: Tensor) -> Tensor:
        """What attention reads of the stream: (B, T, D) → (B, T, D)"""
        return x if self.form == "post" else self.norm_attention(x)

    def attend(self, read: Tensor, beside: Beside) -> Tensor:
        """What attention writes: (B, T, D) → (B, T, D)"""
        here = self.attention.site.address
        cache = None if beside.cache is None else beside.cache.layers.get(here)
        mask = beside.mask_for(cache, read.shape[1])
        starts = beside.starts if isinstance(cache, HeadCache) or self.attention.spec.cache else None
        gate = beside.gates.get(here)
        out = self.attention(read, mask=mask, positions=beside.angles, gate=gate, cache=cache, starts=starts)
        return self._dropped(out)

    def finish(self, x: Tensor, read: Tensor, wrote: Tensor, beside: Beside) -> Tensor:
        """The rest of the block, row by row, so that any rows can be asked for alone: (B, T, D) three times → (B, T, D)"""
        if self.form == "pre":
            x = x + wrote
            if self.cross is not None:
                x = x + self._look_across(self.norm_cross(x), beside)
            return x + self._mlp(self.norm_mlp(x))  # pyright: ignore[reportOptionalCall]
        if self.form == "post":
            x = self.norm_attention(x + wrote)
            if self.cross is not None:
                x = self.norm_cross(x + self._look_across(x, beside))
            return self.norm_mlp(x + self._mlp(x))  # pyright: ignore[reportOptionalCall]
        out = x + wrote + self._mlp(read)
        return out if self.cross is None else out + self._look_across(self.norm_cross(x), beside)

    def _look_across(self, x: Tensor, beside: Beside) -> Tensor:
        assert self.cross is not None
        here = self.cross.site.address
        cache = None if beside.cache is None else beside.cache.layers.get(here)
        mask = None if beside.memory_real is None else padding_mask(beside.memory_real)
        out = self.cross(x, beside.memory, mask=mask, gate=beside.gates.get(here), cache=cache)
        return self._dropped(out)

    def _mlp(self, x: Tensor) -> Tensor:
        return self._dropped(self.mlp(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.dropout.training else x  # a call that does nothing is time too


def _all(masks: list[Mask]) -> Mask | None:
    if not masks:
        return None
    together = masks[0]
    for mask in masks[1:]:
        together = together & mask
    return together
