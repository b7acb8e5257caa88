"""Compare an exported model, run in its engine, with the original model."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.exporters.llama_cpp_runner import EngineToken
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode

TIE_TOLERANCE = 1e-2  # nats; if two candidates are closer than this, rounding decides which one is chosen
MIN_COSINE = 0.999  # smallest cosine similarity at which two hidden states count as equal
# Tokens that llama.cpp treats as the end of a text because of their spelling, regardless of the file's metadata.
END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<eos>",
    "<EOT>", "<|return|>", "<|call|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
)  # fmt: skip


@dataclass(frozen=True)
class ParityReport:
    """Differences between a decoder and its export, measured on generated text.

    Attributes:
        prompts: Number of prompts.
        tokens: Number of generated tokens that were compared.
        values: Number of log-probabilities that were compared.
        max_difference: Largest absolute difference of a log-probability, in nats, among the top candidates.
        diverged: Number of prompts whose generated text differs.
        diverged_at_ties: Number of those prompts where the first differing candidates are within 0.01 nats.
    """

    prompts: int
    tokens: int
    values: int
    max_difference: float
    diverged: int
    diverged_at_ties: int

    @property
    def agrees(self) -> bool:
        """Whether the texts differ only at near-ties of two candidates."""
        return self.diverged == self.diverged_at_ties

    def __str__(self) -> str:
        compared = f"{self.prompts} prompts, {self.tokens} tokens: {self.values} log-probabilities"
        summary = f"{compared} within {self.max_difference:.1e}, "
        same_text = "the same text"
        return summary + (
            f"{self.diverged} texts diverge, {self.diverged_at_ties} at near-ties" if self.diverged else same_text
        )


@dataclass(frozen=True)
class EncoderParityReport:
    """Differences between an encoder and its export, measured on the hidden state of each token.

    Attributes:
        prompts: Number of texts.
        tokens: Number of tokens.
        values: Number of hidden-state values that were compared.
        max_difference: Largest absolute difference of a value.
        min_cosine: Smallest cosine similarity of a token's hidden states.
    """

    prompts: int
    tokens: int
    values: int
    max_difference: float
    min_cosine: float

    @property
    def agrees(self) -> bool:
        """Whether every cosine similarity is at least 0.999."""
        return self.min_cosine >= MIN_COSINE

    def __str__(self) -> str:
        return (
            f"{self.prompts} texts, {self.tokens} tokens: {self.values} values within {self.max_difference:.1e}, "
            f"cosines at least 1 − {max(1 - self.min_cosine, 0):.1e}"
        )


def end_token_ids(model: ModelProtocol) -> tuple[int, ...]:
    """Return the token ids that an engine must not generate, so that no text ends early."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return ()
    lookup = getattr(getattr(tokenizer, "backend", None), "token_to_id", lambda _: None)
    ids = {getattr(tokenizer, "special", {}).get("eos"), *map(lookup, END_TOKENS)}
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


def greedy_decode(
    prompt: Sequence[int],
    max_new_tokens: int,
    next_logits: Callable[[list[int]], Any],
    banned: Collection[int],
    top_k: int = 5,
) -> list[EngineToken]:
    """Decode greedily.

    Args:
        prompt: Token ids.
        max_new_tokens: Number of tokens to generate.
        next_logits: Takes new token ids, first the prompt and then one token at a time, and returns the next token's logits.
        banned: Token ids that are never generated.
        top_k: Number of candidates to store per token.
    """
    steps, new_ids = [], list(prompt)
    for _ in range(max_new_tokens):
        row = _to_array(next_logits(new_ids))
        log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        candidates = {int(i): float(log_probs[i]) for i in np.argsort(-log_probs)[:top_k]}
        log_probs[list(banned)] = -np.inf
        steps.append(EngineToken(int(log_probs.argmax()), candidates))
        new_ids = [steps[-1].id]
    return steps


def _to_array(values: Any) -> np.ndarray:
    """Return the output of an engine in float64. NumPy has no bfloat16."""
    return np.asarray(values.float().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)


def float32_copy(model: ModelProtocol) -> ModelProtocol:
    """Return a float32 copy of a model in half precision, and any other model itself."""
    if next(weight.dtype for weight in model.parameters() if weight.is_floating_point()).itemsize > 2:
        return model
    copied: Any = copy.deepcopy(model)
    getattr(copied, "model", copied).float()  # an attached model holds a model of transformers
    return copied


def as_cpu_model(model: Any) -> Any:
    """Return a copy of a model on the CPU, and a model on the CPU itself. A traced file keeps the device of its weights."""
    return model if model.device.type == "cpu" else copy.deepcopy(model).to("cpu")


@torch.no_grad()
def compare_generated(
    model: ModelProtocol, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[EngineToken]]
) -> ParityReport:
    """Compare the log-probabilities of the generated tokens with those of the model. End tokens are excluded."""
    max_difference, diverged, ties, tokens, values = 0.0, 0, 0, 0, 0
    banned = list(end_token_ids(model))
    with eval_mode(model):
        for prompt, steps in zip(prompts, answers, strict=True):
            ids = [*prompt, *(step.id for step in steps)]
            log_probs = _log_probabilities(model, ids)[len(prompt) - 1 : len(ids) - 1]  # (steps, V)
            for step, native in zip(steps, log_probs, strict=True):
                tokens += 1
                differences = [
                    abs(float(native[token]) - engine_value) for token, engine_value in step.top_log_probs.items()
                ]
                max_difference, values = max(max_difference, *differences, 0.0), values + len(differences)
                native[banned] = -torch.inf
                best = int(native.argmax())
                if best != step.id:
                    diverged += 1
                    ties += float(native[best] - native[step.id]) < TIE_TOLERANCE
                    break  # after this token the two texts differ
    return ParityReport(len(prompts), tokens, values, max_difference, diverged, ties)


@torch.no_grad()
def compare_hidden_states(
    model: ModelProtocol, prompts: Sequence[Sequence[int]], answers: Sequence[Any]
) -> EncoderParityReport:
    """Compare the hidden states of an engine, (T, D) per text, with those of the model."""
    max_difference, min_cosine, values = 0.0, 1.0, 0
    with eval_mode(model):
        for ids, answer in zip(prompts, answers, strict=True):
            native = to_float64(model(torch.tensor([list(ids)], device=model.device))[0]).cpu()
            engine = torch.as_tensor(_to_array(answer))
            max_difference = max(max_difference, float((native - engine).abs().max()))
            min_cosine = min(min_cosine, float(torch.cosine_similarity(native, engine, dim=-1).min()))
            values += native.numel()
    return EncoderParityReport(len(prompts), sum(map(len, prompts)), values, max_difference, min_cosine)


def _log_probabilities(model: ModelProtocol, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids], device=model.device))[0].float().log_softmax(-1).cpu()
