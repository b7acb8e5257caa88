"""Prompts made here, whose next token is known: what heads look at where it is due, what they write for it, and whether the
model itself would say it.

What a head writes for a token is z W_O through the last norm's gain onto the token's row of the unembedding, up to the
norm's scale, which is positive and the same for all tokens; so tokens are compared with each other and never summed.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.hook_listeners import listen_at_hook_points
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec, RoleTarget
from headwise.analysis.metrics.role_examples import ExamplePosition, ExampleStore
from headwise.analysis.metrics.row_blocks import value_output_norms
from headwise.analysis.metrics.statistics import MIN_UNITS
from headwise.analysis.metrics.task_metric import TaskMetric, TaskResult, token_names
from headwise.analysis.recording.batching import forward_ids, tokenizer_of
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol, ResidualStream
from headwise.progress import Progress
from headwise.text import Tokenizer

MIN_SAMPLES = 2 * MIN_UNITS  # units a role needs, half of them for choosing
MAX_LOGITS = 1 << 23  # logits held at once
MAX_EXAMPLES = 32  # cases that are kept to be shown


@dataclass(frozen=True)
class ExpectedToken:
    """One place where a token is due: where it is foretold, at what a head should look, what should be said, and the tokens
    it is held against."""

    row: int
    position: int
    answer: int
    distractors: tuple[int, ...]


@dataclass(frozen=True)
class PromptWithTargets:
    """A text as a model reads it, and the tokens due in it."""

    ids: tuple[int, ...]
    targets: tuple[ExpectedToken, ...]
    sample: int | None = None  # of the statistics, where its first due is a case of the role: it may be shown


class HeadResponses(NamedTuple):
    """What every head does at every due, (dues, heads) each, and whether the model is right, (dues,)."""

    weight: np.ndarray  # on the place
    value_weighted: np.ndarray  # the share of what is fetched that comes from there
    logit_difference: np.ndarray  # what it writes for the answer, above the mean of its rivals
    wins: np.ndarray  # whether it writes more for the answer than for any of them
    correct: np.ndarray  # whether the model itself would say the answer
    examples: ExampleStore  # the same where a prompt's first due is a case of the role, to be shown


class PromptMetric(TaskMetric):
    """A measure on prompts: three numbers for each unit of the statistics and each head. Only for decoders whose logits are a
    sum over what heads write; `run` says in a sentence why others, or those too weak for the task, are not asked."""

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
    ) -> TaskResult:
        """Run the prompts and add up the scores. The result has the reason if the model cannot be tested."""
        accumulator.register_metrics(self.names)
        if progress is not None:
            progress(self.score_spec.corpus_label, 0, 1)
        try:
            totals, examples = self.measure(model, seed)
        except HeadwiseError as error:
            return TaskResult(skip_reason=str(error))
        finally:
            if progress is not None:
                progress(self.score_spec.corpus_label, 1, 1)
        sums = np.stack((totals.score, totals.baseline, totals.value_weighted), -1)  # (units, heads, 3)
        for sample, count in enumerate(totals.counts):
            if count:
                accumulator.sums[self.names[0]][sample % BUCKETS] += sums[sample]
                accumulator.counts[self.names[0]][sample % BUCKETS] += count
        return TaskResult(examples=examples)

    @abstractmethod
    def measure(self, model: ModelProtocol, seed: int) -> tuple["SampleTotals", ExampleStore]:
        """Sums over the cases of each unit, and those to be shown; a HeadwiseError says why there are none."""


class SampleTotals(NamedTuple):
    """What a measure on prompts gives: sums over the cases of each unit, (units, heads), and how many, (units,)."""

    score: np.ndarray
    baseline: np.ndarray
    value_weighted: np.ndarray
    counts: np.ndarray

    def require_enough_samples(self, description: str, reason: str) -> "SampleTotals":
        """The same if it is enough to judge by; else it says what the model is too weak for."""
        measured = int((self.counts > 0).sum())
        if measured < MIN_SAMPLES:
            raise HeadwiseError(
                f"too weak for it: of {len(self.counts)} {description} {reason} {measured}; {MIN_SAMPLES} are needed "
                f"to judge a head by."
            )
        return self


def require_lm_residual_stream(model: ModelProtocol, role: str) -> ResidualStream:
    """How the stream becomes logits; refused, in a sentence, where no head writes for a next token."""
    if model.spec.kind != "decoder" or model.output is None:
        raise HeadwiseError(f"{role} is about the next token of a text, which only a decoder with an output foretells.")
    return model.residual_stream()


def too_few_single_tokens_error(items: str, available: int, needed: int) -> HeadwiseError:
    """What is said where a tokenizer leaves too little to ask."""
    return HeadwiseError(
        f"of {items} only {available} are single tokens of this tokenizer, and {needed} are needed; those of several "
        f"are left out."
    )


def single_token_of_word(tokenizer: Tokenizer, text: str, word: str) -> int | None:
    """The token a word is behind a text, or None where it is several, unknown, or changes how the text is cut.

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
    """Let the model read prompts, those of one shape side by side without padding, and look where tokens are due. `name`: of
    the number they are for."""
    max_length = max((len(prompt.ids) for prompt in prompts), default=0)
    if max_length > model.spec.max_input_tokens:
        raise HeadwiseError(
            f"the prompts have up to {max_length} tokens, and this model has {model.spec.max_input_tokens} positions."
        )
    heads = sum(len(hook_point.head_ids) for hook_point in model.gathered_hook_points())
    starts = np.cumsum([0, *(len(prompt.targets) for prompt in prompts)])
    arrays = {
        kind: np.zeros((int(starts[-1]), heads)) for kind in ("weight", "value_weighted", "logit_difference", "wins")
    }
    correct = np.zeros(int(starts[-1]), dtype=bool)
    candidates = [index for index, prompt in enumerate(prompts) if prompt.sample is not None and prompt.targets]
    # whatever comes first
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
            for kind, array in arrays.items():
                for first_head, values in capture.results[kind].items():
                    array[slots, first_head : first_head + values.shape[1]] = (
                        values.permute(0, 2, 1).flatten(0, 1).double().cpu().numpy()
                    )
            for row, index in enumerate(example_ids):
                if index in batch_ids:
                    examples.arrays["recorded"][row] = 1
                    for first_head, maps in capture.maps.items():
                        head_maps = maps[batch_ids.index(index)].float().cpu().numpy()  # (H, S)
                        examples.arrays["maps"][row, first_head : first_head + len(head_maps), : head_maps.shape[1]] = (
                            head_maps
                        )
    return HeadResponses(**arrays, correct=correct, examples=examples)


def _blank_examples(model: ModelProtocol, name: str, prompts: Sequence[PromptWithTargets], heads: int) -> ExampleStore:
    """The first dues of some prompts, before anybody looked."""
    positions = []
    for prompt in prompts:
        sample, target = prompt.sample or 0, prompt.targets[0]
        names = token_names(tokenizer_of(model), prompt.ids)
        positions.append(ExamplePosition(name, sample, sample % BUCKETS, sample, target.row, names, (target.position,)))
    return ExampleStore(heads, rows=tuple(positions))


class _PromptCapture:
    """What the sites show while prompts of one shape are read: by the first head of a site, (B, H, R) each."""

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
        self.index = index  # (B, R, 1 + K): where each stands among the words
        self.results: dict[str, dict[int, Tensor]] = {
            name: {} for name in ("weight", "value_weighted", "logit_difference", "wins")
        }
        self.maps: dict[int, Tensor] = {}  # of the first due, (B, H, S)

    def on_call(self, call: AttentionCall, first_head: int) -> None:
        """One call."""
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
    """From z to what is written for some tokens, up to the scale of norms on the way: (H, e, words); at least float32."""
    step, W_O = residual.layers[hook_point.address.layer], at_least_float32(hook_point.W_O)  # (H, e, D)
    W_O = W_O if step.post_norm is None else step.post_norm.center_and_apply_gain(W_O)
    return (
        residual.norm.center_and_apply_gain(W_O) @ residual.vocabulary.weight[tokens].mT.to(W_O) * residual.logit_scale
    )
