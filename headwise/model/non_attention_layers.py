"""Parts of a model besides attention: norms, MLPs, embedding and output layers."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads.collectives_protocol import CollectivesProtocol
from headwise.heads.quantized_layers import (
    QuantizedEmbedding,
    QuantizedLinear,
    TiedQuantizedLinear,
    try_joint_quantized_linear,
)
from headwise.kernels import sinusoidal
from headwise.kernels.matmul_tuner import Linear, linear
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model.chunked_cross_entropy import IGNORE_INDEX, chunked_cross_entropy, linear_cross_entropy
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
}


def make_norm(spec: ModelSpec, width: int = 0) -> nn.Module:
    """Create the norm of a spec: LayerNorm, or RMSNorm (https://arxiv.org/abs/1910.07467). Default: the model's width."""
    kinds: dict[str, Callable[..., nn.Module]] = {
        "layer": nn.LayerNorm,
        "layer_no_bias": partial(nn.LayerNorm, bias=False),
        "rms": nn.RMSNorm,
        "rms_plus_one": OffsetRMSNorm,
    }
    kind = kinds[spec.norm]
    return kind(width or spec.width, eps=spec.norm_eps)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm whose gain is 1 + weight, as in Gemma. The sum is computed in at least float32."""

    weight_offset = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each token: (…, D) → (…, D)."""
        wide = at_least_float32(x)
        normed = F.rms_norm(wide, tuple(self.normalized_shape), eps=self.eps)
        return (normed * (1.0 + at_least_float32(self.weight))).to(x.dtype)


class VocabShardProtocol(Protocol):
    """Vocabulary rows of this process, if the vocabulary is sharded. `headwise.distributed` implements it."""

    def embed(self, tokens: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Look up token ids: (…) → (…, D). `tokens` is the table of the local rows."""
        ...

    def logits(self, output: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the logits of all rows: (B, T, D) → (B, T, V). `output` computes those of the local rows."""
        ...

    def cross_entropy(
        self, output: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, total: int | None
    ) -> Tensor:
        """Return the mean cross-entropy of (N, D) and targets (N,), or the sum divided by `total`."""
        ...


class MLP(nn.Module):
    """Up projection, activation, down projection. Gated MLPs have a second up projection (https://arxiv.org/abs/2002.05202).

    If the channels are split over several processes, their outputs are summed before the bias is added.
    """

    collectives: CollectivesProtocol | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = _linear(spec, spec.width, spec.mlp_width) if spec.has_gated_mlp else None
        self.up = _linear(spec, spec.width, spec.mlp_width)
        self.down = _linear(spec, spec.mlp_width, spec.width)
        self.down.writes_to_residual = True  # pyright: ignore[reportArgumentType]  # read by initialize

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each token: (B, T, D) → (B, T, D)."""
        if self.collectives is None:
            return self.down(self._activate(x))
        summed = self.collectives.sum(linear(self._activate(self.collectives.copy_to_group(x)), self.down.weight))
        return summed if self.down.bias is None else summed + self.down.bias

    @property
    def joint_weights(self) -> tuple[QuantizedLinear, QuantizedLinear] | None:
        """Gate and up projections if both are quantized and without bias, so that one product can compute both."""
        gate, up = self.gate, self.up
        if not isinstance(gate, QuantizedLinear) or not isinstance(up, QuantizedLinear):
            return None
        return (gate, up) if gate.bias is None and up.bias is None and gate.rows == up.rows else None

    def _activate(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.activation(self.up(x))
        weights = self.joint_weights
        joint = None if weights is None else try_joint_quantized_linear(weights, x)
        if joint is not None:
            gate, up = joint.chunk(2, -1)
            return self.activation(gate) * up
        return self.activation(self.gate(x)) * self.up(x)


def _linear(spec: ModelSpec, inputs: int, outputs: int) -> Linear | QuantizedLinear:
    bits, group_size = spec.bits_and_group_size("mlp")
    if bits == FULL_PRECISION:
        return Linear(inputs, outputs, spec.mlp_bias)
    return QuantizedLinear(inputs, outputs, spec.mlp_bias, bits, group_size, spec.activation_bits)


class Embedding(nn.Module):
    """Sum of token, position and token type embeddings."""

    vocab_shard: VocabShardProtocol | None = None  # set if other processes hold rows of the vocabulary

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        bits, group_size = spec.bits_and_group_size("vocabulary")
        is_quantized, width = bits != FULL_PRECISION, spec.embed_width or spec.width
        self.tokens = (
            QuantizedEmbedding(spec.vocab, width, bits, group_size) if is_quantized else _table(spec.vocab, width)
        )
        self.positions = _table(spec.position_rows, width) if spec.position_rows else None
        self.types = _table(spec.token_types, width) if spec.token_types else None
        self.norm = make_norm(spec, width) if spec.embed_norm else None
        self.projection = Linear(width, spec.width) if spec.embed_width else None  # ALBERT's narrow embeddings
        self.dropout = nn.Dropout(spec.dropout)

    @property
    def reference_tensor(self) -> Tensor:
        """A tensor with the dtype and device of the model."""
        tokens = self.tokens
        return (
            torch.empty(0, dtype=tokens.dtype, device=tokens.device)
            if isinstance(tokens, QuantizedEmbedding)
            else tokens.weight
        )

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed token ids at these positions: (B, T), (1 or B, T) → (B, T, D)."""
        x = self.embed_tokens(ids)  # (B, T, D)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        elif types is not None:
            raise ArgumentError("token_types: this model does not have token types. Omit token_types.")
        if self.positions is not None:
            offset = self.spec.position_offset
            x = x + self.positions(positions + offset if offset else positions)
        elif self.spec.positions == "sinusoidal":
            x = x + sinusoidal(positions, self.spec.embed_width or self.spec.width).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.projection is None else self.projection(x)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Look up token embeddings: (…) → (…, D)."""
        return self.tokens(ids) if self.vocab_shard is None else self.vocab_shard.embed(self.tokens, ids)


def _table(rows: int, width: int) -> nn.Embedding:
    """Create an uninitialized embedding table, to be filled by `heads.initialize` or from a file."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class LMHead(nn.Module):
    """Output layer from the residual stream to the vocabulary. With output="mlm", BERT's transform layer comes first."""

    vocab_shard: VocabShardProtocol | None = None  # set if other processes hold rows of the vocabulary

    def __init__(self, spec: ModelSpec, tokens: nn.Embedding | QuantizedEmbedding) -> None:
        super().__init__()
        masked, self.tied, self.scale = spec.output == "mlm", spec.tied, spec.logit_scale
        self.softcap, self.vocab = spec.logit_softcap, spec.vocab
        self.activation = ACTIVATIONS[spec.output_activation or spec.activation]
        width = spec.embed_width or spec.width
        self.transform = Linear(spec.width, width, spec.transform_bias) if masked else None
        self.norm = make_norm(spec, width) if masked else None
        bits, group_size = spec.bits_and_group_size("vocabulary")
        if bits == FULL_PRECISION:
            self.vocabulary = Linear(width, spec.vocab, bias=masked)
            self.tie_weight(tokens)
        elif spec.tied and isinstance(tokens, QuantizedEmbedding):
            self.vocabulary = TiedQuantizedLinear(tokens, masked, spec.activation_bits)
        else:
            self.vocabulary = QuantizedLinear(spec.width, spec.vocab, masked, bits, group_size, spec.activation_bits)

    def tie_weight(self, tokens: nn.Module) -> None:
        """Share the weight of the token embedding, if the spec ties them. Quantized weights are always shared."""
        if self.tied and isinstance(tokens, nn.Embedding) and isinstance(self.vocabulary, Linear):
            self.vocabulary.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: (B, T, D) → (B, T, V)."""
        x = self.pre_vocab_transform(x)
        return self._logits(x) if self.vocab_shard is None else self.vocab_shard.logits(self._logits, x)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits of the rows of the vocabulary in this process, capped if the model has a cap."""
        logits = self.vocabulary(x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def pre_vocab_transform(self, x: Tensor) -> Tensor:
        """Apply the transform layer of masked language models and the logit scale, if there are any: (…, D) → (…, D)."""
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        return x if self.scale == 1.0 else x * self.scale

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """Return the mean cross-entropy of hidden states (N, D) and targets (N,), or the sum divided by `total`."""
        if self.transform is not None:  # in masked language models few tokens are targets
            is_target = targets != IGNORE_INDEX
            hidden, targets = hidden[is_target], targets[is_target]  # (n, D), (n,)
        hidden = self.pre_vocab_transform(hidden)
        if self.vocab_shard is not None:
            return self.vocab_shard.cross_entropy(self._logits, hidden, targets, total)
        if self.softcap is not None:
            return chunked_cross_entropy(self._logits, self.vocab, hidden, targets, total)
        return linear_cross_entropy(hidden, self.vocabulary.weight, self.vocabulary.bias, targets, total)


class Pooler(nn.Module):
    """BERT's pooler: a transformed hidden state of the first token."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dense = Linear(spec.width, spec.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Pool hidden states: (B, T, D) → (B, D)."""
        return torch.tanh(self.dense(hidden[:, 0]))
