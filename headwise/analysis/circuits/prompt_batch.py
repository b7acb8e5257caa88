"""Batches of encoded prompts, and the metric of each prompt from the final hidden states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.circuits.circuit_task import EncodedPrompt, MetricFunction
from headwise.errors import ArgumentError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol

MAX_LOGITS = 2**25  # logits in memory
PADDING_ID = 0  # after the last token that is read, where a causal model cannot see it


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one forward pass, padded on the right. In a causal model padding does not change earlier tokens.

    Attributes:
        indices: Indices of the prompts in their split.
        prompts: The prompts.
        ids: Token ids, (R, T).
        corrupted_ids: Token ids of the corrupted prompts, (R, T).
        real_tokens: True at real tokens, (R, T).
        reads: Row and position of each hidden state that is read.
        metric: Metric of the user, or None.
    """

    indices: tuple[int, ...]
    prompts: tuple[EncodedPrompt, ...]
    ids: Tensor
    corrupted_ids: Tensor
    real_tokens: Tensor
    reads: tuple[tuple[int, int], ...]
    metric: MetricFunction | None

    def scores(self, model: ModelProtocol, hidden: Tensor) -> Tensor:
        """Return the metric of each prompt for S copies of the batch: (S·R, T, D) → (S, P) in float64."""
        rows, positions = (torch.tensor(column, device=hidden.device) for column in zip(*self.reads, strict=True))
        states = hidden.unflatten(0, (-1, len(self.ids)))[:, rows, positions]  # (S, reads, D)
        assert model.output is not None
        step = max(1, MAX_LOGITS // (model.spec.vocab * len(self.reads)))
        chunks = [self._score_logits(to_float64(model.output(chunk))) for chunk in states.split(step)]
        return torch.cat(chunks)

    def _score_logits(self, logits: Tensor) -> Tensor:
        """Return the metrics from logits at the reads: (S, reads, V) → (S, P)."""
        if self.metric is not None:
            pairs = [prompt.pair for prompt in self.prompts]
            values = [self.metric(copy, pairs) for copy in logits]
            for value in values:
                if not isinstance(value, Tensor) or value.shape != (len(pairs),):
                    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise ArgumentError(
                        f"metric: must return a tensor of shape ({len(pairs)},), one per prompt. Got {shape}."
                    )
            return to_float64(torch.stack(values))
        results, read = [], 0
        for prompt in self.prompts:
            if prompt.is_single_token:
                tokens = torch.tensor([answer[0] for answer in prompt.answers], device=logits.device)
                scores = logits[:, read, tokens]  # (S, answers); the normalizer cancels in the difference
                read += 1
            else:
                totals = []
                for answer in prompt.answers:
                    tokens = torch.tensor(answer, device=logits.device)
                    log_probs = logits[:, read : read + len(answer)].log_softmax(-1)  # (S, tokens, V)
                    totals.append(log_probs.gather(-1, tokens[None, :, None].expand(len(logits), -1, 1)).sum((1, 2)))
                    read += len(answer)
                scores = torch.stack(totals, 1)  # (S, answers)
            right, wrong = scores[:, : prompt.num_right], scores[:, prompt.num_right :]
            results.append(right.logsumexp(-1) - wrong.logsumexp(-1))
        return torch.stack(results, 1)


def make_prompt_batches(
    prompts: Sequence[EncodedPrompt], max_tokens: int, device: torch.device, metric: MetricFunction | None
) -> Iterator[PromptBatch]:
    """Yield batches of at most `max_tokens` tokens, padding included. Prompts of similar length are together."""
    order = sorted(range(len(prompts)), key=lambda i: (_width(prompts[i]), i))
    batch: list[int] = []
    for i in order:
        rows = sum(len(prompts[j].clean_rows) for j in (*batch, i))
        if batch and rows * _width(prompts[i]) > max_tokens:
            yield _make_batch(prompts, batch, device, metric)
            batch = []
        batch.append(i)
    if batch:
        yield _make_batch(prompts, batch, device, metric)


def _width(prompt: EncodedPrompt) -> int:
    return max(map(len, prompt.clean_rows))


def _make_batch(
    prompts: Sequence[EncodedPrompt], indices: list[int], device: torch.device, metric: MetricFunction | None
) -> PromptBatch:
    members = tuple(prompts[i] for i in indices)
    clean = [row for prompt in members for row in prompt.clean_rows]
    corrupted = [row for prompt in members for row in prompt.corrupted_rows]
    reads: list[tuple[int, int]] = []
    row = 0
    for prompt in members:
        if metric is not None or prompt.is_single_token:
            reads.append((row, prompt.num_tokens - 1))
            row += 1
            continue
        for answer in prompt.answers:
            reads += [(row, prompt.num_tokens - 1 + offset) for offset in range(len(answer))]
            row += 1
    width = max(map(len, clean))
    lengths = torch.tensor([len(ids) for ids in clean], device="cpu")
    real_tokens = torch.arange(width, device="cpu") < lengths[:, None]
    return PromptBatch(
        tuple(indices), members, _padded(clean, width).to(device), _padded(corrupted, width).to(device),
        real_tokens.to(device), tuple(reads), metric,
    )  # fmt: skip


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[PADDING_ID] * (width - len(row))] for row in rows], device="cpu")
