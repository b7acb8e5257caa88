"""Metrics on generated prompts with a known next token: attention of heads, their effect on logits, and model accuracy.

The direct effect of a head on the logit of a token is z W_O, multiplied with the gain of the final norm and with the
unembedding row of the token. The scale of the norm is left out. It is positive and the same for all tokens, so tokens can be
compared with each other but not summed.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.host_copy_queue import HostCopyQueue
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec, RoleTarget
from headwise.analysis.metrics.role_example_positions import ExamplePosition, ExampleStore
from headwise.analysis.metrics.row_blocks import value_output_norms
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.metrics.task_metric import TaskMetric, TaskMetricDetails, token_names
from headwise.analysis.recording.batching import forward_ids, tokenizer_of
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol, ResidualStream
from headwise.progress import Progress
from headwise.text import Tokenizer

MIN_SAMPLES = 2 * MIN_UNITS  # minimum number of samples of a role; half of them are used for selection
MAX_LOGITS = 1 << 23  # maximum number of logits in memory
MAX_EXAMPLES = 32  # maximum number of stored examples


@dataclass(frozen=True)
class ExpectedToken:
    """One target of a prompt.

    Attributes:
        row: Position at which the token is predicted.
        position: Position that a head with the role attends to.
        answer: The expected token.
        distractors: Tokens that the answer is compared with.
    """

    row: int
    position: int
    answer: int
    distractors: tuple[int, ...]


@dataclass(frozen=True)
class PromptWithTargets:
    """A tokenized prompt and its targets.

    Attributes:
        ids: Token ids.
        targets: The expected tokens.
        sample: Number of the sample if its first target may be shown as an example of the role, otherwise None.
    """

    ids: tuple[int, ...]
    targets: tuple[ExpectedToken, ...]
    sample: int | None = None


class HeadResponses(NamedTuple):
    """Responses of every head at every target.

    Attributes:
        weight: Attention weight on the position of the target, (targets, heads).
        value_weighted: Value-weighted share of that position, (targets, heads).
        logit_difference: Direct effect on the logit of the answer minus the mean over the distractors, (targets, heads).
        wins: Whether the effect on the answer is larger than on every distractor, (targets, heads).
        correct: Whether the model predicts the answer, (targets,).
        examples: Attention of every head at the first targets of some prompts.
    """

    weight: np.ndarray
    value_weighted: np.ndarray
    logit_difference: np.ndarray
    wins: np.ndarray
    correct: np.ndarray
    examples: ExampleStore


class PromptMetric(TaskMetric):
    """Base class of metrics on prompts, with a score, a baseline and a value-weighted score.

    It supports decoders whose logits are a sum over head outputs. For other models, and for models that fail the task, `run`
    returns the reason in `TaskResult.skip_reason`.

    Args:
        name: Unique name of the metric.
        label: Short description.
        high_means: Meaning of a high score, in a few words.
        corpus_label: Description of the prompts.
    """

    def __init__(self, name: str, label: str, high_means: str, corpus_label: str) -> None:
        target = RoleTarget("prompt", name)
        self.metric_specs = MetricSpec(
            name,
            label,
            high_means=high_means,
            corpus_label=corpus_label,
            merge=IDENTICAL,
            positional=True,
            target=target,
        ).with_variants()

    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Run the prompts and add up the scores. The result has the reason if the model cannot be tested."""
        accumulator.register_metrics(self.names)
        if progress is not None:
            progress(self.score_spec.corpus_label, 0, 1)
        try:
            totals, examples = self.measure(model, seed)
        except HeadwiseError as error:
            return TaskMetricDetails(skip_reason=str(error))
        finally:
            if progress is not None:
                progress(self.score_spec.corpus_label, 1, 1)
        sums = np.stack((totals.score, totals.baseline, totals.value_weighted), -1)  # (samples, heads, 3)
        for sample, count in enumerate(totals.counts):
            if count:
                accumulator.sums[self.names[0]][sample % BUCKETS] += sums[sample]
                accumulator.counts[self.names[0]][sample % BUCKETS] += count
        return TaskMetricDetails(examples=examples)

    @abstractmethod
    def measure(self, model: ModelProtocol, seed: int) -> tuple["SampleTotals", ExampleStore]:
        """Run the prompts. Return the sums of each sample and the examples.

        Raises:
            HeadwiseError: With the reason, if the model cannot be tested.
        """


class SampleTotals(NamedTuple):
    """Sums of a prompt metric over the targets of each sample.

    Attributes:
        score: Sums of the score, (samples, heads).
        baseline: Sums of the baseline, (samples, heads).
        value_weighted: Sums of the value-weighted score, (samples, heads).
        counts: Number of counted targets, (samples,).
    """

    score: np.ndarray
    baseline: np.ndarray
    value_weighted: np.ndarray
    counts: np.ndarray

    def require_enough_samples(self, description: str, reason: str) -> "SampleTotals":
        """Return self, or raise an error if the model solves too few samples.

        Args:
            description: Kind of samples, in the plural.
            reason: Verb phrase for solving a sample, such as "correctly completes".
        """
        measured = int((self.counts > 0).sum())
        if measured < MIN_SAMPLES:
            raise HeadwiseError(
                f"the model is too weak for this task: it {reason} {measured} of {len(self.counts)} {description}. At least "
                f"{MIN_SAMPLES} are needed to score heads."
            )
        return self


def require_lm_residual_stream(model: ModelProtocol, role: str) -> ResidualStream:
    """Return the path from the residual stream to the logits. Raise an error if the model does not predict next tokens."""
    if model.spec.kind != "decoder" or model.output is None:
        received = f"an {model.spec.kind}" if model.spec.kind != "decoder" else "a decoder without an output layer"
        raise UnsupportedModelError(
            f"{role} needs next-token predictions, so only decoders with an output layer are supported. Got {received}."
        )
    return model.residual_stream()


def too_few_single_tokens_error(items: str, available: int, needed: int) -> HeadwiseError:
    """Make the error for a tokenizer that splits too many of the words of a task."""
    return UnsupportedModelError(
        f"tokenizer: only {available} of {items} are single tokens, and {needed} are needed. The other words are split into "
        f"several tokens, which this test cannot use. Use a model with a larger vocabulary."
    )


def single_token_of_word(tokenizer: Tokenizer, text: str, word: str) -> int | None:
    """Return the token of a word after a text. None if it is several tokens, unknown, or changes the tokens of the text.

    >>> from headwise.text.build_tokenizers import word_tokenizer
    >>> words = word_tokenizer(["the", "cat"])
    >>> single_token_of_word(words, "the", "cat"), single_token_of_word(words, "the", "dog")
    (1, None)
    """
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (text, f"{text} {word}"))
    if len(after) != len(before) + 1 or after[:-1] != before or after[-1] == tokenizer.special["unk"]:
        return None
    return after[-1]


def run_prompts(
    model: ModelProtocol,
    prompts: Sequence[PromptWithTargets],
    residual: ResidualStream,
    name: str = "",
    batch_tokens: int = 1024,
) -> HeadResponses:
    """Run prompts and collect the responses of all heads. Prompts with the same shape form a batch without padding.

    Args:
        model: The model.
        prompts: The prompts.
        residual: Path from the residual stream to the logits.
        name: Name of the metric, stored in the examples.
        batch_tokens: Maximum number of tokens of a batch.
    """
    max_length = max((len(prompt.ids) for prompt in prompts), default=0)
    if max_length > model.spec.max_input_tokens:
        raise ArgumentError(
            f"prompts: the longest has {max_length} tokens, more than the context of the model "
            f"({model.spec.max_input_tokens} positions). Use a model with a longer context."
        )
    heads = sum(len(hook_point.head_ids) for hook_point in model.gathered_hook_points())
    starts = np.cumsum([0, *(len(prompt.targets) for prompt in prompts)])
    arrays = {
        kind: np.zeros((int(starts[-1]), heads)) for kind in ("weight", "value_weighted", "logit_difference", "wins")
    }
    correct = np.zeros(int(starts[-1]), dtype=bool)
    candidates = [index for index, prompt in enumerate(prompts) if prompt.sample is not None and prompt.targets]
    # a random sample of the candidates
    example_ids = sorted(np.random.default_rng(len(candidates)).permutation(candidates)[:MAX_EXAMPLES].tolist())
    examples = _blank_examples(model, name, [prompts[index] for index in example_ids], heads)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault((len(prompt.ids), tuple(target.row for target in prompt.targets)), []).append(index)
    for (length, rows), indices in groups.items():
        step = max(1, min(batch_tokens // length, MAX_LOGITS // (max(1, len(rows)) * model.spec.vocab)))
        for first in range(0, len(indices) if rows else 0, step):
            batch_ids = indices[first : first + step]
            capture = _PromptCapture([prompts[i] for i in batch_ids], rows, residual, model.device)
            with listen_at_hook_points(model.gathered_hook_points(), capture.on_call):
                states = forward_ids(model, capture.ids)  # (B, T, D)
            assert model.output is not None
            predictions = model.output(states[:, list(rows)]).argmax(-1)  # (B, R)
            slots = [int(starts[i]) + r for i in batch_ids for r in range(len(rows))]
            correct[slots] = (predictions == capture.answer).flatten().cpu().numpy()
            copies = HostCopyQueue()
            for kind, array in arrays.items():
                for first_head, values in capture.results[kind].items():
                    copies.copy_then_call([values], partial(_store_responses, array, slots, first_head))
            for row, index in enumerate(example_ids):
                if index in batch_ids:
                    examples.arrays["recorded"][row] = 1
                    for first_head, maps in capture.maps.items():
                        head_maps = maps[batch_ids.index(index)].float()  # (H, S)
                        copies.copy_then_call(
                            [head_maps], partial(_store_map, examples.arrays["maps"][row], first_head)
                        )
            copies.flush()
    return HeadResponses(**arrays, correct=correct, examples=examples)


def _store_responses(array: np.ndarray, slots: list[int], first_head: int, values: Tensor) -> None:
    """Write the responses of a hook point's heads, (B, H, R), into the rows of their targets."""
    array[slots, first_head : first_head + values.shape[1]] = values.double().permute(0, 2, 1).flatten(0, 1).numpy()


def _store_map(maps: np.ndarray, first_head: int, head_maps: Tensor) -> None:
    """Write the attention of a hook point's heads at one target, (H, S)."""
    maps[first_head : first_head + len(head_maps), : head_maps.shape[1]] = head_maps.numpy()


def _blank_examples(model: ModelProtocol, name: str, prompts: Sequence[PromptWithTargets], heads: int) -> ExampleStore:
    """Create an example store for the first targets of some prompts, without attention weights yet."""
    positions = []
    for prompt in prompts:
        sample, target = prompt.sample or 0, prompt.targets[0]
        names = token_names(tokenizer_of(model), prompt.ids)
        positions.append(ExamplePosition(name, sample, sample % BUCKETS, sample, target.row, names, (target.position,)))
    return ExampleStore(heads, rows=tuple(positions))


class _PromptCapture:
    """Responses of heads to a batch of prompts, (B, H, R) each, keyed by the first head of each hook point."""

    def __init__(
        self,
        prompts: Sequence[PromptWithTargets],
        rows: tuple[int, ...],
        residual: ResidualStream,
        device: torch.device | str,
    ) -> None:
        targets = [prompt.targets for prompt in prompts]
        self.rows, self.residual = rows, residual
        self.ids = torch.tensor([prompt.ids for prompt in prompts], device=device)  # (B, T)
        # (B, R)
        self.answer = torch.tensor(
            [[target.answer for target in prompt_targets] for prompt_targets in targets], device=device
        )
        # (B, R)
        self.position = torch.tensor(
            [[target.position for target in prompt_targets] for prompt_targets in targets], device=device
        )
        max_distractors = max(len(target.distractors) for prompt_targets in targets for target in prompt_targets)
        distractors = [
            [[*target.distractors, *[-1] * (max_distractors - len(target.distractors))] for target in prompt_targets]
            for prompt_targets in targets
        ]
        distractor_ids = torch.tensor(distractors, device=device)  # (B, R, K), -1: none
        self.has_distractor = distractor_ids >= 0
        self.tokens, index = torch.cat((self.answer[..., None], distractor_ids.clamp(min=0)), -1).unique(
            return_inverse=True
        )
        self.index = index  # (B, R, 1 + K): index of each token in self.tokens
        self.results: dict[str, dict[int, Tensor]] = {
            name: {} for name in ("weight", "value_weighted", "logit_difference", "wins")
        }
        self.maps: dict[int, Tensor] = {}  # attention at the first target, (B, H, S)

    def on_call(self, call: AttentionCall, first_head: int) -> None:
        """Compute the responses of one attention call."""
        if not call.q.shape[1]:
            return
        maps = call.map_rows(self.rows)  # (B, H, R, S)
        self.maps[first_head] = maps[:, :, 0]
        position_index = self.position[:, None, :, None].expand(-1, maps.shape[1], -1, -1)
        value_weighted = maps * value_output_norms(call)[:, :, None]
        # (B, H, R)
        weight, at_position = (weights.gather(-1, position_index)[..., 0] for weights in (maps, value_weighted))
        z = at_least_float32(call.z[:, :, list(self.rows)])  # (B, H, R, e)
        token_scores = torch.einsum(
            "bhre,hec->bhrc", z, z_to_logits_matrix(self.residual, call.hook_point, self.tokens)
        )
        # (B, H, R, 1 + K)
        token_scores = token_scores.gather(-1, self.index[:, None].expand(-1, maps.shape[1], -1, -1))
        answer, distractors, has_distractor = token_scores[..., 0], token_scores[..., 1:], self.has_distractor[:, None]
        logit_difference = answer - (distractors * has_distractor).sum(-1) / has_distractor.sum(-1).clamp(min=1)
        wins = answer > distractors.masked_fill(~has_distractor, -torch.inf).amax(-1)
        results = {
            "weight": weight,
            "value_weighted": at_position / value_weighted.sum(-1).clamp(min=1e-30),
            "logit_difference": logit_difference,
            "wins": wins,
        }
        for name, value in results.items():
            self.results[name][first_head] = value


def z_to_logits_matrix(residual: ResidualStream, hook_point: HookPoint, tokens: Tensor) -> Tensor:
    """Return the matrix from z to the logits of some tokens, without the scale of the norms, (H, e, tokens). At least
    float32."""
    step, W_O = residual.layers[hook_point.address.layer], at_least_float32(hook_point.W_O_for_listeners)  # (H, e, D)
    W_O = W_O if step.post_norm is None else step.post_norm.center_and_apply_gain(W_O)
    return (
        residual.norm.center_and_apply_gain(W_O) @ residual.vocabulary.weight[tokens].mT.to(W_O) * residual.logit_scale
    )
