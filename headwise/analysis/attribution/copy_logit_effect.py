"""Direct effect of a head on the logit of the token it attends to.

For each query position, take the token with the largest attention weight and follow the head's output through the final norm,
with its scale frozen, and the unembedding: how much does it raise that token's logit, relative to the mean change over the
vocabulary (direct logit attribution: https://transformer-circuits.pub/2021/framework)? A positive effect means that the
head raises the logit of the token it attends to, a negative effect that it lowers it. Effects through later layers are
not included.

Query positions whose largest weight is on the first token or on a special token are excluded: there the head is idle. The
interval is a bootstrap that resamples texts and, independently, token types (https://arxiv.org/abs/0712.1111). A corpus
repeats the same frequent tokens in all its texts, so resampling texts alone would report a head of random weights as certain.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.metrics.prompt_metric import require_lm_residual_stream
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.recording.batching import TokenBatch, forward_batch, make_batches, tokenizer_of
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, ResidualStream, eval_mode
from headwise.model.residual_stream import LinearizedNorm
from headwise.spec import Address

TEXTS = 256
TYPES = 256  # groups of token ids that the bootstrap resamples
DRAWS = 1000
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class CopyLogitEffect:
    """Mean direct effect of one head, in logits, with its 95% confidence interval.

    Attributes:
        mean: Logit of the attended token minus the mean logit over the vocabulary, as written by the head.
        low: Lower end of the interval.
        high: Upper end of the interval.
        queries: Number of query positions included.
        share: Fraction of all query positions that are included.
        texts: Number of texts with an included query position.
    """

    mean: float
    low: float
    high: float
    queries: int
    share: float
    texts: int

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def direct_effects(
    model: ModelProtocol,
    corpus: Any = None,
    heads: HeadPattern = "*",
    *,
    texts: int = TEXTS,
    max_length: int | None = None,
) -> dict[str, CopyLogitEffect]:
    """Measure how much each head raises the logit of the token it attends to most.

    Args:
        model: A decoder with a language-model output whose residual stream is a sum.
        corpus: Texts to measure on. None uses the default corpus of a profile.
        heads: Head pattern. "*" selects all heads.
        texts: Maximum number of texts.
        max_length: Maximum number of tokens per text, if the corpus is plain text.

    Returns:
        The effect of each head that attends to a token other than the first one in at least five texts.

    Raises:
        HeadwiseError: If the model has no unembedding or its residual stream is not a sum.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> effect = direct_effects(model, ["to be", "or not", "to be?", "that is", "the question"], "0.1")["0.1"]
    >>> effect.low <= effect.mean <= effect.high
    True
    """
    residual = require_lm_residual_stream(model, "a direct effect on logits")
    addresses = select_heads(heads, model.spec.head_addresses)
    samples = {address: _Samples() for address in addresses}
    recorder = _AttendedTokenLogitRecorder(model, residual)
    tokenized = TokenizedCorpus.of(model, corpus, max_length).first(texts)
    with eval_mode(model), torch.no_grad():
        for batch in make_batches(tokenized, BATCH_TOKENS, device=model.device):
            with recorder.record(batch, addresses):
                forward_batch(model, batch)
            for address in addresses:
                samples[address].add(batch, *recorder.effects(address))
    estimates = {str(address): samples[address].estimate() for address in addresses}
    return {address: effect for address, effect in estimates.items() if effect is not None}


class _AttendedTokenLogitRecorder:
    """Records every head's effect on the logit of the token it attends to most, in one forward pass.

    The scales of the norms after the head are known only after the pass, so effects are stored unscaled first.
    """

    def __init__(self, model: ModelProtocol, residual: ResidualStream) -> None:
        self.model, self.residual = model, residual
        weight = residual.vocabulary.weight.detach()
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) * residual.logit_scale
        self.unembedding = weight - weight.mean(0)  # (V, D)
        special = {i for i in tokenizer_of(model).special.values() if i is not None}
        self.special = torch.tensor(sorted(special), dtype=torch.long, device=model.device)

    @contextmanager
    def record(self, batch: TokenBatch, addresses: tuple[Address, ...]) -> Iterator[None]:
        """Record one forward pass over a batch."""
        self.batch = batch
        self.unscaled: dict[Address, Tensor] = {}  # (B, T)
        self.keys: dict[Address, Tensor] = {}  # (B, T)
        self.scales: dict[nn.Module, Tensor] = {}  # (B, T)
        norms = {
            step.post_norm.module: step.post_norm
            for step in self.residual.layers.values()
            if step.post_norm is not None
        }
        with ExitStack() as stack:
            for hook_point in self.model.gathered_hook_points():
                if set(hook_point.head_addresses) & set(addresses):
                    stack.enter_context(hook_point.listen(partial(self._on_call, addresses=set(addresses))))
            for module, norm in {**norms, self.residual.norm.module: self.residual.norm}.items():
                stack.callback(module.register_forward_pre_hook(partial(self._keep_scale, norm=norm)).remove)
            yield

    def effects(self, address: Address) -> tuple[Tensor, Tensor, Tensor]:
        """Return the effects, the attended tokens and the mask of included query positions: (B, T) each."""
        batch, key = self.batch, self.keys[address]
        scale, after = self.scales[self.residual.norm.module], self.residual.layers[address.layer].post_norm
        scale = scale if after is None else scale * self.scales[after.module].to(scale.device)
        token = batch.ids.gather(1, key)
        counts = batch.real_tokens & (key != batch.first_token_positions[:, None]) & ~torch.isin(token, self.special)
        return self.unscaled[address] * scale.to(key.device), token, counts

    def _on_call(self, call: AttentionCall, addresses: set[Address]) -> None:
        after = self.residual.layers[call.hook_point.address.layer].post_norm
        keys = call.maps().argmax(-1)  # (B, H, T)
        for head, address in enumerate(call.hook_point.head_addresses):
            if address in addresses:
                token = self.batch.ids.gather(1, keys[:, head])  # (B, T)
                output = (call.z[:, head] @ call.hook_point.W_O_for_listeners[head]).to(
                    self.unembedding.dtype
                )  # (B, T, D)
                output = output if after is None else after.center_and_apply_gain(output)
                self.unscaled[address] = to_float64(
                    self.residual.norm.center_and_apply_gain(output) * self.unembedding[token]
                ).sum(-1)
                self.keys[address] = keys[:, head]

    def _keep_scale(self, module: nn.Module, args: tuple[Tensor], norm: LinearizedNorm) -> None:
        self.scales[module] = norm.scale(args[0].reshape(*self.batch.ids.shape, -1))[..., 0]


class _Samples:
    """Effects of one head at single query positions, with text and token type."""

    def __init__(self) -> None:
        self.query_count = 0
        self.effects: list[np.ndarray] = []
        self.texts: list[np.ndarray] = []
        self.types: list[np.ndarray] = []

    def add(self, batch: TokenBatch, effects: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Add one batch: (B, T) each."""
        effects, tokens, counts = effects.cpu(), tokens.cpu(), counts.cpu()
        numbers = torch.tensor([sample.index for sample in batch.samples], device="cpu")[:, None].expand_as(tokens)
        self.query_count += sum(len(sample.ids) for sample in batch.samples)
        columns = (self.effects, effects), (self.texts, numbers), (self.types, tokens % TYPES)
        for column, values in columns:
            column.append(values[counts].numpy())

    def estimate(self) -> CopyLogitEffect | None:
        """Return mean and interval. None if too few texts have an included query position."""
        effects = np.concatenate(self.effects)
        texts, text = np.unique(np.concatenate(self.texts), return_inverse=True)
        types, type_ = np.unique(np.concatenate(self.types), return_inverse=True)
        if len(texts) < MIN_UNITS:
            return None
        cells, cell = (len(texts), len(types)), text * len(types) + type_
        sums = np.bincount(cell, effects, minlength=cells[0] * cells[1]).reshape(cells)
        counts = np.bincount(cell, minlength=cells[0] * cells[1]).reshape(cells)
        low, high = _interval(sums, counts)
        return CopyLogitEffect(
            float(effects.mean()), low, high, len(effects), len(effects) / self.query_count, len(texts)
        )


def _interval(sums: np.ndarray, counts: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, resampling texts and token types: (texts, types) each."""
    rng = np.random.default_rng(0)
    texts, types = (rng.multinomial(n, np.full(n, 1 / n), DRAWS).astype(float) for n in sums.shape)
    total, weight = (((texts @ values) * types).sum(1) for values in (sums, counts))  # (draws,)
    means = total[weight > 0] / weight[weight > 0]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
