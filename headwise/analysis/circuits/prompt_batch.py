"""Batches of encoded prompts, and the metric of each prompt from the final hidden states."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.circuits.circuit_task import EncodedPrompt, MetricFunction
from headwise.errors import ArgumentError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol

MAX_LOGITS = 2**25  # logits in memory
BATCH_OVERHEAD = 8  # cost of one more batch, in tokens
PADDING_ID = 0  # after the last token that is read, where a causal model cannot see it


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one forward pass, padded on the right. In a causal model padding does not change earlier tokens.

    Attributes:
        indices: Indices of the prompts in their split.
        prompts: The prompts.
        ids: Token ids, (R, T).
        corrupted_ids: Token ids of the corrupted prompts, (R, T).
        prefix_ids: First token ids of each row, (R, P), which the clean and the corrupted prompt share. `ids`,
            `corrupted_ids`, `real_tokens` and `reads` count from the token after it. P may be 0.
        real_tokens: True at real tokens, (R, T).
        reads: Row and position of each hidden state that is read.
        metric: Metric of the user, or None.
    """

    indices: tuple[int, ...]
    prompts: tuple[EncodedPrompt, ...]
    ids: Tensor
    corrupted_ids: Tensor
    prefix_ids: Tensor
    real_tokens: Tensor
    reads: tuple[tuple[int, int], ...]
    metric: MetricFunction | None

    def scores(self, model: ModelProtocol, hidden: Tensor) -> Tensor:
        """Return the metric of each prompt for S copies of the batch: (S·R, T, D) → (S, P) in float64."""
        rows, positions = (torch.tensor(column, device=hidden.device) for column in zip(*self.reads, strict=True))
        states = hidden.unflatten(0, (-1, len(self.ids)))[:, rows, positions]  # (S, reads, D)
        assert model.output is not None
        step = max(1, MAX_LOGITS // (model.spec.vocab * len(self.reads)))
        chunks = [self._score_logits(model.output(chunk)) for chunk in states.split(step)]
        return torch.cat(chunks)

    def _score_logits(self, logits: Tensor) -> Tensor:
        """Return the metrics from logits at the reads: (S, reads, V) → (S, P)."""
        if self.metric is not None:
            pairs = [prompt.pair for prompt in self.prompts]
            values = [self.metric(copy, pairs) for copy in to_float64(logits)]
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
                scores = to_float64(logits[:, read, tokens])  # (S, answers); the normalizer cancels in the difference
                read += 1
            else:
                totals = []
                for answer in prompt.answers:
                    tokens = torch.tensor(answer, device=logits.device)
                    log_probs = to_float64(logits[:, read : read + len(answer)]).log_softmax(-1)  # (S, tokens, V)
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


def make_prefix_batches(
    prompts: Sequence[EncodedPrompt], max_tokens: int, device: torch.device, metric: MetricFunction | None
) -> list[PromptBatch]:
    """Return batches whose clean and corrupted prompts share a prefix, with as few tokens after the prefixes as possible.

    The prefix of a batch is as long as the shortest one of its prompts.
    """
    order = sorted(range(len(prompts)), key=lambda i: (_shared_tokens(prompts[i]), _width(prompts[i]), i))
    costs, starts = [0.0], [0]  # of the first prompts: least cost, and start of the last batch
    for end in range(1, len(order) + 1):
        rows, width, options = 0, 0, []
        for start in range(end - 1, -1, -1):
            prompt = prompts[order[start]]
            rows, width = rows + len(prompt.clean_rows), max(width, _width(prompt))
            tokens = rows * (width - _shared_tokens(prompt))  # the first prompt of the batch has the shortest prefix
            if tokens > max_tokens and start < end - 1:
                break
            options.append((costs[start] + tokens + BATCH_OVERHEAD, start))
        cost, start = min(options)
        costs.append(cost)
        starts.append(start)
    batches, end = [], len(order)
    while end:
        start = starts[end]
        batches.append(_make_batch(prompts, order[start:end], device, metric, _shared_tokens(prompts[order[start]])))
        end = start
    return batches[::-1]


def without_prefix(batch: PromptBatch) -> PromptBatch:
    """Return a batch of the same prompts in which no tokens belong to a prefix."""
    return _make_batch(
        dict(zip(batch.indices, batch.prompts, strict=True)), list(batch.indices), batch.ids.device, batch.metric
    )


def _width(prompt: EncodedPrompt) -> int:
    return max(map(len, prompt.clean_rows))


def _shared_tokens(prompt: EncodedPrompt) -> int:
    """Return the number of first tokens that the clean and the corrupted prompt share, without the last token."""
    clean, corrupted = (rows[0][: prompt.num_tokens - 1] for rows in (prompt.clean_rows, prompt.corrupted_rows))
    differs = [a != b for a, b in zip(clean, corrupted, strict=True)]
    return differs.index(True) if True in differs else len(clean)


def _make_batch(
    prompts: Sequence[EncodedPrompt] | Mapping[int, EncodedPrompt], indices: list[int], device: torch.device,
    metric: MetricFunction | None, prefix: int = 0,
) -> PromptBatch:  # fmt: skip
    members = tuple(prompts[i] for i in indices)
    clean = [row for prompt in members for row in prompt.clean_rows]
    corrupted = [row for prompt in members for row in prompt.corrupted_rows]
    reads: list[tuple[int, int]] = []
    row = 0
    for prompt in members:
        first_read = prompt.num_tokens - 1 - prefix
        if metric is not None or prompt.is_single_token:
            reads.append((row, first_read))
            row += 1
            continue
        for answer in prompt.answers:
            reads += [(row, first_read + offset) for offset in range(len(answer))]
            row += 1
    width = max(map(len, clean)) - prefix
    lengths = torch.tensor([len(ids) - prefix for ids in clean], device="cpu")
    real_tokens = torch.arange(width, device="cpu") < lengths[:, None]
    ids, corrupted_ids = (_padded([row[prefix:] for row in rows], width).to(device) for rows in (clean, corrupted))
    prefix_ids = torch.tensor([row[:prefix] for row in clean], device="cpu").long().to(device)  # (R, P)
    return PromptBatch(
        tuple(indices), members, ids, corrupted_ids, prefix_ids, real_tokens.to(device), tuple(reads), metric
    )


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[PADDING_ID] * (width - len(row))] for row in rows], device="cpu")
