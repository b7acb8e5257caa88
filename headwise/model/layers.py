"""The parts around attention: norms and MLPs, and the two ends, embedding and output."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.quantized_weights import PackedLinear, PackedTable, PackedTied
from headwise.kernels import sinusoidal
from headwise.kernels.autotuned_linear import Linear, linear
from headwise.kernels.collectives import Together
from headwise.model.loss import IGNORE, linear_cross_entropy, split_cross_entropy
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
}


def make_norm(spec: ModelSpec) -> nn.Module:
    """LayerNorm, or RMSNorm (https://arxiv.org/abs/1910.07467)."""
    kind = nn.LayerNorm if spec.norm == "layer" else nn.RMSNorm
    return kind(spec.width, eps=spec.norm_eps)


class VocabularyRows:
    """Which rows of the vocabulary this process has, where others hold the rest."""

    def __init__(self, together: Together, borders: Sequence[tuple[int, int]]) -> None:
        self.together, self.sizes = together, [stop - start for start, stop in borders]
        self.start, self.stop = borders[together.rank]
        self.vocab = sum(self.sizes)

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some ids are rows of this process, and where; 0 for the others."""
        mine = (ids >= self.start) & (ids < self.stop)
        return mine, torch.where(mine, ids - self.start, 0)


class MLP(nn.Module):
    """Up, bend, down. With swiglu a second way up is the gate (https://arxiv.org/abs/2002.05202).

    Where several processes hold a part of the channels each, what they write is added up, and the bias once.
    """

    together: Together | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.bend = ACTIVATIONS[spec.activation]
        self.gate = _linear(spec, spec.width, spec.hidden) if spec.activation == "swiglu" else None
        self.up = _linear(spec, spec.width, spec.hidden)
        self.down = _linear(spec, spec.hidden, spec.width)
        self.down.writes_to_stream = True  # pyright: ignore[reportArgumentType]  # read by initialise

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        if self.together is None:
            return self.down(self._bent(x))
        written = self.together.sum(linear(self._bent(self.together.copy(x)), self.down.weight))
        return written if self.down.bias is None else written + self.down.bias

    def _bent(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.bend(self.up(x))
        return self.bend(self.gate(x)) * self.up(x)


def _linear(spec: ModelSpec, inputs: int, outputs: int) -> Linear | PackedLinear:
    bits, group = spec.bits_of("mlp")
    if bits == FULL:
        return Linear(inputs, outputs, spec.mlp_bias)
    return PackedLinear(inputs, outputs, spec.mlp_bias, bits, group, spec.activations)


class Embedding(nn.Module):
    """Tokens, positions and token types become one vector."""

    rows: VocabularyRows | None = None  # of the vocabulary, where others hold the rest

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        bits, group = spec.bits_of("vocabulary")
        packed = bits != FULL
        self.tokens = PackedTable(spec.vocab, spec.width, bits, group) if packed else _table(spec.vocab, spec.width)
        self.positions = _table(spec.context, spec.width) if spec.positions == "learned" else None
        self.types = _table(spec.token_types, spec.width) if spec.token_types else None
        self.norm = make_norm(spec) if spec.embed_norm else None
        self.dropout = nn.Dropout(spec.dropout)

    @property
    def like(self) -> Tensor:
        """No numbers, but the dtype and the device of all others."""
        tokens = self.tokens
        return (
            torch.empty(0, dtype=tokens.dtype, device=tokens.device)
            if isinstance(tokens, PackedTable)
            else tokens.weight
        )

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """(B, T), (1 or B, T) → (B, T, D)"""
        x = self.of_tokens(ids)  # (B, T, D)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise HeadwiseError("this model has no token types; leave token_types out.")
        if self.positions is not None:
            x = x + self.positions(positions)
        elif self.spec.positions == "sinusoidal":
            x = x + sinusoidal(positions, self.spec.width).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)

    def of_tokens(self, ids: Tensor) -> Tensor:
        """(…) → (…, D)"""
        rows = self.rows
        if rows is None:
            return self.tokens(ids)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows.vocab:
            raise IndexError("there is no such token")
        mine, places = rows.here(ids)
        return rows.together.sum(self.tokens(places).masked_fill(~mine[..., None], 0))


def _table(rows: int, width: int) -> nn.Embedding:
    """A table that begins empty; `heads.init` fills it, or a file does."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Output(nn.Module):
    """From the stream to the vocabulary. For masked tokens as BERT does it: one more layer, then the vocabulary."""

    rows: VocabularyRows | None = None  # of the vocabulary, where others hold the rest

    def __init__(self, spec: ModelSpec, tokens: nn.Embedding | PackedTable) -> None:
        super().__init__()
        masked, self.tied = spec.output == "mlm", spec.tied
        self.bend = ACTIVATIONS[spec.activation]
        self.transform = Linear(spec.width, spec.width) if masked else None
        self.norm = make_norm(spec) if masked else None
        bits, group = spec.bits_of("vocabulary")
        if bits == FULL:
            self.vocabulary = Linear(spec.width, spec.vocab, bias=masked)
            self.tie(tokens)
        elif spec.tied and isinstance(tokens, PackedTable):
            self.vocabulary = PackedTied(tokens, masked, spec.activations)
        else:
            self.vocabulary = PackedLinear(spec.width, spec.vocab, masked, bits, group, spec.activations)

    def tie(self, tokens: nn.Module) -> None:
        """Make the vocabulary's weight that of the embedding, where they are to be one; packed, they always are."""
        if self.tied and isinstance(tokens, nn.Embedding) and isinstance(self.vocabulary, Linear):
            self.vocabulary.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, V)"""
        if self.rows is None:
            return self.vocabulary(self.prepare(x))
        together = self.rows.together
        return together.gather(self.vocabulary(together.copy(self.prepare(x))), -1, self.rows.sizes)

    def prepare(self, x: Tensor) -> Tensor:
        """What comes before the vocabulary: (…, D) → (…, D)"""
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.bend(self.transform(x)))
        return x

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """Final states (N, D) and targets (N,) → the mean cross-entropy, or the sum divided by `total`; see model/loss."""
        if self.transform is not None:  # masked: few of many are asked for
            asked = targets != IGNORE
            hidden, targets = hidden[asked], targets[asked]  # (n, D), (n,)
        if self.rows is not None:
            return split_cross_entropy(self._here, self.rows, self.prepare(hidden), targets, total)
        return linear_cross_entropy(self.prepare(hidden), self.vocabulary.weight, self.vocabulary.bias, targets, total)

    def _here(self, x: Tensor) -> Tensor:
        """The logits of the rows that are here."""
        return self.vocabulary(x)


class Pooler(nn.Module):
    """The first token's vector, once more transformed: BERT's summary of a text."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = Linear(spec.width, spec.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, D)"""
        return torch.tanh(self.dense(hidden[:, 0]))
