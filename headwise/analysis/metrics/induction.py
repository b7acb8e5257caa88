"""Induction and duplicate-token scores on repeated random tokens (induction: https://arxiv.org/abs/2209.11895).

A sequence R R of random tokens has no structure except the repetition. The baseline is the weight at the same offsets in
R R′, whose second half consists of other random tokens.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.metric import IDENTICAL, AttentionToPosition, MetricSpec, RoleTarget
from headwise.analysis.metrics.row_stats import RowStats
from headwise.analysis.metrics.task_metric import ControlledTextMetric, sample_from_ids
from headwise.analysis.metrics.token_classes import CLASSES, token_class_flags
from headwise.analysis.recording.batching import TextSample, tokenizer_of
from headwise.model import ModelProtocol

_BASE = MetricSpec("", positional=True, merge=IDENTICAL, corpus_label="random tokens said twice", hue=305)
INDUCTION = replace(
    _BASE, name="induction", label="weight on the token after the first copy", target=RoleTarget("repeat", 0)
).with_variants()
DUPLICATE = replace(
    _BASE, name="duplicate", label="weight on the first copy", target=RoleTarget("repeat", 1)
).with_variants()
METRIC_SPECS = (*INDUCTION, *DUPLICATE)
BATCH_SEQUENCES = 32  # sequences per batch


@dataclass(frozen=True, eq=False)
class RepeatedSequences:
    """Sequences of token ids.

    Attributes:
        repeated: Sequences R R, (N, T).
        control: Sequences R R′, (N, T).
        start: Number of tokens before R.
        length: Number of tokens of R.
    """

    repeated: Tensor
    control: Tensor
    start: int
    length: int

    @property
    def second_copy(self) -> slice:
        """Positions of the second copy."""
        return slice(self.start + self.length, self.start + 2 * self.length)


def make_repeated_sequences(
    model: ModelProtocol, sequences: int = 24, length: int = 32, seed: int = 0
) -> RepeatedSequences:
    """Make sequences of random ordinary tokens, without duplicates within R and with the BOS/EOS template of the tokenizer.

    The result is empty if the vocabulary or the context is too small to repeat two tokens.
    """
    tokenizer = tokenizer_of(model)
    flags = token_class_flags(tokenizer, model.spec.vocab)
    ordinary_ids = (flags[:, CLASSES.index(SPECIAL)] == 0).nonzero()[:, 0].numpy()
    ordinary_ids = ordinary_ids[ordinary_ids < len(tokenizer)]
    prefix, suffix = tokenizer.template_ids
    context = model.spec.max_input_tokens
    length = min(length, (context - len(prefix) - len(suffix)) // 2, len(ordinary_ids) // 2)
    if length < 2:
        empty = torch.zeros(0, len(prefix) + len(suffix), dtype=torch.long, device=model.device)
        return RepeatedSequences(empty, empty, len(prefix), 0)
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(ordinary_ids)[: 2 * length] for _ in range(sequences)])
    tokens = torch.from_numpy(tokens)  # (N, 2 m)
    template = [torch.tensor(ids, dtype=torch.long, device="cpu").expand(sequences, -1) for ids in (prefix, suffix)]
    copied = torch.cat((tokens[:, :length], tokens[:, :length]), 1)
    repeated, control = (torch.cat((template[0], half, template[1]), 1).to(model.device) for half in (copied, tokens))
    return RepeatedSequences(repeated, control, len(prefix), length)


class InductionMetric(ControlledTextMetric):
    """Weight from the second copy of a token on the token after its first copy (induction) and on its first copy (duplicate).

    Args:
        repeats: Sequences from `make_repeated_sequences`.
    """

    metric_specs = METRIC_SPECS

    def __init__(self, repeats: RepeatedSequences) -> None:
        self.repeats, self.batch_tokens = repeats, BATCH_SEQUENCES * max(1, repeats.repeated.shape[1])
        induction_offset, duplicate_offset = repeats.length - 1, repeats.length
        self.metrics = [
            AttentionToPosition(name, partial(self._target_positions, offset=offset), all_rows=True)
            for name, offset in (("induction", induction_offset), ("duplicate", duplicate_offset))
        ]
        self.key_targets = tuple(key_target for metric in self.metrics for key_target in metric.key_targets)

    def texts_and_controls(self, model: ModelProtocol, seed: int = 0) -> tuple[list[TextSample], list[TextSample]]:
        """Return the sequences R R and R R′."""
        tokenizer, sequences = tokenizer_of(model), (self.repeats.repeated, self.repeats.control)
        repeated, control = (
            [sample_from_ids(index, tuple(ids), tokenizer) for index, ids in enumerate(batch.tolist())]
            for batch in sequences
        )
        return repeated, control

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute score, baseline and value-weighted score of both metrics, (B, H, 6)."""
        sums, counts = zip(*(metric.compute(rows) for metric in self.metrics), strict=True)
        return torch.cat(sums, -1), torch.cat([count.expand(*count.shape[:2], 3) for count in counts], -1)

    def _target_positions(self, sample: TextSample, offset: int) -> list[int]:
        """Return the position `offset` tokens back for each token of the second copy, and -1 for other tokens."""
        second = range(self.repeats.second_copy.start, self.repeats.second_copy.stop)
        return [row - offset if row in second else -1 for row in range(len(sample.ids))]
