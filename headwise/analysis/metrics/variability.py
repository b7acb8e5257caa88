"""Variability: how much the attention of a head depends on the text, and not only on positions.

For texts of equal length, the weights at each position are compared with their mean over the texts: Σ|p − p̄| / 2Σp
(https://arxiv.org/abs/1906.04284). A head that attends to the same positions in every text scores 0. A head that attends to
different positions in each of N texts scores 1 − 1/N.
"""

from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.metric import LARGER, Metric, MetricSpec, RowBlockAccumulator
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.recording.batching import TextSample, make_batch, reachable_hook_points
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import float64_device, to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import LayerAddress

LENGTH, TEXTS = 16, 16  # tokens per text, and number of texts: sentences are short, and the metric must be cheap
VARIABILITY = MetricSpec(
    "variability", "dependence of weights on the text", high_means="depends on the text", merge=LARGER
)


@torch.no_grad()
def variability(
    model: ModelProtocol, corpus: Any = None, heads: HeadPattern = "*", *, length: int = LENGTH, texts: int = TEXTS
) -> dict[str, float]:
    """Compute the variability of heads, Σ|p − p̄| / 2Σp.

    Args:
        model: The model.
        corpus: A text, a list of texts, a path, a `Corpus` or a `TokenizedCorpus`. None selects the default corpus.
        heads: Addresses or a pattern such as `"5.1,3.*"`.
        length: Number of tokens of each text. Longer texts are truncated, shorter ones are left out.
        texts: Number of texts, at least 2.

    Returns:
        The variability of each head by address, from 0 to 1.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text import Tokenizer
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat"])
    >>> variability(model, ["the cat sat", "the cat sat"], "5.1", length=4)  # the same text twice
    {'5.1': 0.0}
    """
    if length < 1 or texts < 2:
        raise ArgumentError(
            f"variability compares texts with each other, so it needs texts >= 2 and length >= 1. Got texts={texts} and "
            f"length={length}."
        )
    addresses = tuple(
        address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses
    )
    selected, samples = (
        set(select_heads(heads, addresses)),
        select_long_samples(TokenizedCorpus.of(model, corpus), length, texts),
    )
    if len(samples) < 2:
        raise ArgumentError(
            f"corpus: {len(samples)} texts have at least {length} tokens, and two are needed. Give more texts or a smaller "
            f"length."
        )
    accumulator = Accumulator(len(addresses))
    with eval_mode(model):
        accumulate_variability(model, samples, accumulator, length)
    pairs = zip(addresses, accumulator.mean(VARIABILITY.name).tolist(), strict=True)
    return {str(address): value for address, value in pairs if address in selected}


def select_long_samples(samples: Iterable[TextSample], length: int = LENGTH, texts: int = TEXTS) -> list[TextSample]:
    """Return the first samples that have at least `length` tokens, at most `texts`."""
    return list(islice((sample for sample in samples if len(sample.ids) >= length), texts))


def accumulate_variability(
    model: ModelProtocol,
    samples: list[TextSample],
    accumulator: Accumulator,
    length: int = LENGTH,
    layers: Container[LayerAddress] | None = None,
) -> None:
    """Run the model on texts truncated to one length and add the variability. Fewer than two texts add nothing."""
    runner = MetricRunner(accumulator, [VariabilityMetric()], layers=layers)
    if len(samples) > 1:
        truncated = [replace(sample, ids=sample.ids[:length], source=()) for sample in samples]
        runner.run(model, [make_batch(truncated, device=model.device)])


class VariabilityMetric(Metric):
    """Variability of a batch of texts of equal length."""

    metric_specs = (VARIABILITY,)

    def make_accumulator(self, call: AttentionCallContext) -> "VariabilityAccumulator":
        """Return an accumulator for the blocks of one attention call."""
        return VariabilityAccumulator(call)


class VariabilityAccumulator(RowBlockAccumulator):
    """Σ|p − p̄| and 2Σp of each text and head, over the blocks of a call."""

    def __init__(self, call: AttentionCallContext) -> None:
        B, H = call.attention_call.q.shape[:2]
        device = float64_device(call.attention_call.q.device)
        self.deviation, self.weight = (torch.zeros(B, H, dtype=torch.float64, device=device) for _ in range(2))

    def add_block(self, block: RowBlock) -> None:
        """Add one block of rows, which has the same positions of every text."""
        p = block.normalize(block.e)  # (B, h, R, C)
        self.weight[:, block.heads] += to_float64(p.sum((2, 3)))
        self.deviation[:, block.heads] += to_float64(p - p.mean(0)).abs().sum((2, 3))

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Return Σ|p − p̄| and 2Σp, (B, H, 1) each."""
        return self.deviation[..., None], 2 * self.weight[..., None]
