"""Direct effect of a head on the logit of the token it attends to.

For each query position, take the token with the largest attention weight and follow the head's output through the final norm,
with its scale frozen, and the unembedding: how much does it raise that token's logit, relative to the mean change over the
vocabulary (direct logit attribution: https://transformer-circuits.pub/2021/framework)? A positive effect means that the head
writes for the token it attends to, a negative one that it writes against it. Effects through later layers are not included.

Query positions whose largest weight is on the first token or on a special token do not count: there the head is idle. The
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

from headwise.analysis.metrics.prompts import check_reads_words
from headwise.analysis.metrics.statistics import FEWEST
from headwise.analysis.recording.batching import Batch, make_batches, run, tokenizer_of
from headwise.analysis.recording.recording import pick
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, Wiring, quiet
from headwise.model.residual_stream import Norm
from headwise.spec import Address

TEXTS = 256
TYPES = 256  # groups of token ids that the bootstrap resamples
DRAWS = 1000
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class DirectEffect:
    """Mean direct effect of one head, in logits, with its 95% confidence interval.

    Attributes:
        mean: Logit of the attended token minus the mean logit over the vocabulary, as written by the head.
        low: Lower end of the interval.
        high: Upper end of the interval.
        queries: Number of query positions that count.
        share: Their fraction of all query positions.
        texts: Number of texts they come from.
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
    model: AnyModel, corpus: Any = None, heads: Pattern = "*", *, texts: int = TEXTS, max_length: int | None = None
) -> dict[str, DirectEffect]:
    """Measure how much each head raises the logit of the token it attends to most.

    Args:
        model: A decoder with a language-model output whose residual stream is a sum.
        corpus: Texts to measure on. Default: the texts of a profile.
        heads: Addresses of the heads to measure.
        texts: Maximum number of texts.
        max_length: Maximum number of tokens per text of plain text.

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
    wiring = check_reads_words(model, "a direct effect on logits")
    wanted = pick(heads, model.spec.addresses)
    samples = {address: _Samples() for address in wanted}
    recorder = _Recorder(model, wiring)
    units = Reading.of(model, corpus, max_length).first(texts)
    with quiet(model), torch.no_grad():
        for batch in make_batches(units, BATCH_TOKENS, device=model.device):
            with recorder.record(batch, wanted):
                run(model, batch)
            for address in wanted:
                samples[address].add(batch, *recorder.effects(address))
    estimates = {str(address): samples[address].estimate() for address in wanted}
    return {address: effect for address, effect in estimates.items() if effect is not None}


class _Recorder:
    """Records, in one forward pass, every head's effect on the logit of the token it attends to most.

    The scales of the norms on the way depend on the finished pass, so the effects are kept without them first.
    """

    def __init__(self, model: AnyModel, wiring: Wiring) -> None:
        self.model, self.wiring = model, wiring
        weight = wiring.vocabulary.weight.detach()
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) * wiring.scale
        self.unembedding = weight - weight.mean(0)  # (V, D)
        special = {i for i in tokenizer_of(model).special.values() if i is not None}
        self.special = torch.tensor(sorted(special), dtype=torch.long, device=model.device)

    @contextmanager
    def record(self, batch: Batch, wanted: tuple[Address, ...]) -> Iterator[None]:
        """Record one forward pass over a batch."""
        self.batch = batch
        self.unscaled: dict[Address, Tensor] = {}  # (B, T)
        self.keys: dict[Address, Tensor] = {}  # (B, T)
        self.scales: dict[nn.Module, Tensor] = {}  # (B, T)
        norms = {step.after.module: step.after for step in self.wiring.steps.values() if step.after is not None}
        with ExitStack() as stack:
            for site in self.model.all_sites():
                if set(site.addresses) & set(wanted):
                    stack.enter_context(site.listen(partial(self._see, wanted=set(wanted))))
            for module, norm in {**norms, self.wiring.norm.module: self.wiring.norm}.items():
                stack.callback(module.register_forward_pre_hook(partial(self._keep_scale, norm=norm)).remove)
            yield

    def effects(self, address: Address) -> tuple[Tensor, Tensor, Tensor]:
        """Effects, attended tokens, and which query positions count: (B, T) each."""
        batch, key = self.batch, self.keys[address]
        scale, after = self.scales[self.wiring.norm.module], self.wiring.steps[address.layer].after
        scale = scale if after is None else scale * self.scales[after.module]
        token = batch.ids.gather(1, key)
        counts = batch.real & (key != batch.first[:, None]) & ~torch.isin(token, self.special)
        return self.unscaled[address] * scale, token, counts

    def _see(self, seen: Seen, wanted: set[Address]) -> None:
        after = self.wiring.steps[seen.site.address.layer].after
        keys = seen.maps().argmax(-1)  # (B, H, T)
        for head, address in enumerate(seen.site.addresses):
            if address in wanted:
                token = self.batch.ids.gather(1, keys[:, head])  # (B, T)
                write = (seen.z[:, head] @ seen.site.W_O[head]).to(self.unembedding.dtype)  # (B, T, D)
                write = write if after is None else after.turn(write)
                self.unscaled[address] = (self.wiring.norm.turn(write) * self.unembedding[token]).sum(-1).double()
                self.keys[address] = keys[:, head]

    def _keep_scale(self, module: nn.Module, given: tuple[Tensor], norm: Norm) -> None:
        self.scales[module] = norm.scale(given[0].reshape(*self.batch.ids.shape, -1))[..., 0]


class _Samples:
    """Effects of one head at single query positions, with their text and token."""

    def __init__(self) -> None:
        self.seen = 0
        self.effects: list[np.ndarray] = []
        self.texts: list[np.ndarray] = []
        self.types: list[np.ndarray] = []

    def add(self, batch: Batch, effects: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Add one batch: (B, T) each."""
        numbers = torch.tensor([unit.number for unit in batch.units], device=tokens.device)[:, None].expand_as(tokens)
        self.seen += int(batch.real.sum())
        columns = (self.effects, effects), (self.texts, numbers), (self.types, tokens % TYPES)
        for column, values in columns:
            column.append(values[counts].cpu().numpy())

    def estimate(self) -> DirectEffect | None:
        """Mean and interval; None if too few texts have a query position that counts."""
        effects = np.concatenate(self.effects)
        texts, text = np.unique(np.concatenate(self.texts), return_inverse=True)
        types, type_ = np.unique(np.concatenate(self.types), return_inverse=True)
        if len(texts) < FEWEST:
            return None
        cells, cell = (len(texts), len(types)), text * len(types) + type_
        sums = np.bincount(cell, effects, minlength=cells[0] * cells[1]).reshape(cells)
        counts = np.bincount(cell, minlength=cells[0] * cells[1]).reshape(cells)
        low, high = _interval(sums, counts)
        return DirectEffect(float(effects.mean()), low, high, len(effects), len(effects) / self.seen, len(texts))


def _interval(sums: np.ndarray, counts: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean if texts and token types are both resampled: (texts, types) each."""
    rng = np.random.default_rng(0)
    texts, types = (rng.multinomial(n, np.full(n, 1 / n), DRAWS).astype(float) for n in sums.shape)
    total, weight = (((texts @ values) * types).sum(1) for values in (sums, counts))  # (draws,)
    drawn = total[weight > 0] / weight[weight > 0]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
