"""The parts around attention: norms and MLPs, and the two ends, embedding and output."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.packed import PackedLinear, PackedTable, PackedTied
from headwise.kernels import sinusoidal
from headwise.kernels.linear import Linear
from headwise.model.loss import IGNORE, linear_cross_entropy
from headwise.spec import ModelSpec
from headwise.spec.weights import FULL

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


class MLP(nn.Module):
    """Up, bend, down. With swiglu a second way up is the gate (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.bend = ACTIVATIONS[spec.activation]
        self.gate = _linear(spec, spec.width, spec.hidden) if spec.activation == "swiglu" else None
        self.up = _linear(spec, spec.width, spec.hidden)
        self.down = _linear(spec, spec.hidden, spec.width)
        self.down.writes_to_stream = True  # pyright: ignore[reportArgumentType]  # read by initialise

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        if self.gate is None:
            return self.down(self.bend(self.up(x)))
        return self.down(self.bend(self.gate(x)) * self.up(x))


def _linear(spec: ModelSpec, inputs: int, outputs: int) -> Linear | PackedLinear:
    bits, group = spec.bits_of("mlp")
    if bits == FULL:
        return Linear(inputs, outputs, spec.mlp_bias)
    return PackedLinear(inputs, outputs, spec.mlp_bias, bits, group, spec.activations)


class Embedding(nn.Module):
    """Tokens, positions and token types become one vector."""

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
        x = self.tokens(ids)  # (B, T, D)
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


def _table(rows: int, width: int) -> nn.Embedding:
    """A table that begins empty; `heads.init` fills it, or a file does."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Output(nn.Module):
    """From the stream to the vocabulary. For masked tokens as BERT does it: one more layer, then the vocabulary."""

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
        return self.vocabulary(self.prepare(x))

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
        return linear_cross_entropy(self.prepare(hidden), self.vocabulary.weight, self.vocabulary.bias, targets, total)


class Pooler(nn.Module):
    """The first token's vector, once more transformed: BERT's summary of a text."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = Linear(spec.width, spec.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, D)"""
        return torch.tanh(self.dense(hidden[:, 0]))
