"""Variability: how much of a head's attention depends on what is read, and not only on where it stands.

Texts of one length are read side by side, and at each place the weights are held against their mean over the texts:
Σ|p − p̄| / 2Σp (https://arxiv.org/abs/1906.04284). 0 is a head that looks at the same places whatever the text; N texts
that each send it to a place of its own give 1 − 1/N.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.metric import LARGER, BlockAccumulator, Metric, MetricSpec
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.recording.batching import TextSample, make_batch, reachable_hook_points
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode

LENGTH, TEXTS = 16, 16  # tokens of each text, and how many texts: sentences are short, and a look must be cheap
VARIABILITY = MetricSpec(
    "variability", "how far weights depend on the text", high_means="depends on what is read", merge=LARGER
)


@torch.no_grad()
def variability(
    model: ModelProtocol, corpus: Any = None, heads: HeadPattern = "*", *, length: int = LENGTH, texts: int = TEXTS
) -> dict[str, float]:
    """For each head Σ|p − p̄| / 2Σp over the first so many texts that have so many tokens, cut to that length.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text import Tokenizer
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat"])
    >>> variability(model, ["the cat sat", "the cat sat"], "5.1", length=4)  # the same text twice
    {'5.1': 0.0}
    """
    if length < 1 or texts < 2:
        raise HeadwiseError(f"texts are compared with each other: two of one token at least; got {texts} of {length}.")
    addresses = tuple(
        address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses
    )
    selected, samples = (
        set(select_heads(heads, addresses)),
        select_long_samples(TokenizedCorpus.of(model, corpus), length, texts),
    )
    if len(samples) < 2:
        raise HeadwiseError(
            f"{len(samples)} texts have {length} tokens, and two are needed; give more texts, or a shorter length."
        )
    accumulator = Accumulator(len(addresses))
    with eval_mode(model):
        measure_variability(model, samples, accumulator, length)
    pairs = zip(addresses, accumulator.mean(VARIABILITY.name).tolist(), strict=True)
    return {str(address): value for address, value in pairs if address in selected}


def select_long_samples(samples: Iterable[TextSample], length: int = LENGTH, texts: int = TEXTS) -> list[TextSample]:
    """The first so many units that are long enough."""
    return list(islice((sample for sample in samples if len(sample.ids) >= length), texts))


def measure_variability(
    model: ModelProtocol, samples: list[TextSample], accumulator: Accumulator, length: int = LENGTH
) -> None:
    """Read texts side by side, cut to one length, and count; of fewer than two nothing can be said."""
    runner = MetricRunner(accumulator, [VariabilityMetric()])
    if len(samples) > 1:
        truncated = [replace(sample, ids=sample.ids[:length], source=()) for sample in samples]
        runner.run(model, [make_batch(truncated, device=model.device)])


class VariabilityMetric(Metric):
    """For texts of one length, read as one batch; what each text adds goes into its own bucket."""

    metric_specs = (VARIABILITY,)

    def make_accumulator(self, call: AttentionCallContext) -> "VariabilityAccumulator":
        """One call at one site."""
        return VariabilityAccumulator(call)


class VariabilityAccumulator(BlockAccumulator):
    """Σ|p − p̄| and 2Σp of each text and head, over the blocks of a call."""

    def __init__(self, call: AttentionCallContext) -> None:
        B, H = call.attention_call.q.shape[:2]
        self.deviation, self.weight = (torch.zeros(B, H, dtype=torch.float64) for _ in range(2))

    def add_block(self, block: RowBlock) -> None:
        """One block of rows, the same places of every text."""
        p = block.normalize(block.e)  # (B, h, R, C)
        self.weight[:, block.heads] += p.sum((2, 3)).double().cpu()
        self.deviation[:, block.heads] += (p - p.mean(0)).abs().sum((2, 3)).double().cpu()

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """(B, H, 1) each."""
        return self.deviation[..., None], 2 * self.weight[..., None]
