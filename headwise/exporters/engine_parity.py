"""What was written, run in its own engine beside the model it came from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.exporters.llama_cpp import EngineToken
from headwise.model import ModelProtocol, eval_mode

TIE_TOLERANCE = 1e-2  # nats between two candidates: which of them is chosen is then a matter of rounding
MIN_COSINE = 0.999  # the cosine from which on two vectors of a token point the same way
# Tokens that llama.cpp takes for the end of a text by how they are written, whatever the file calls the end.
END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<eos>",
    "<EOT>", "<|return|>", "<|call|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
)  # fmt: skip


@dataclass(frozen=True)
class ParityReport:
    """How far an engine's log-probabilities are from ours, and where its text parts from ours."""

    prompts: int
    tokens: int  # compared in all
    values: int  # log-probabilities compared
    max_difference: float  # difference of a log-probability among the likeliest tokens
    diverged: int  # prompts whose text differs
    diverged_at_ties: int  # of those, where our two candidates lay within 1e-2

    @property
    def agrees(self) -> bool:
        """Whether all texts are the same but where two candidates were as good as equal."""
        return self.diverged == self.diverged_at_ties

    def __str__(self) -> str:
        compared = f"{self.prompts} prompts, {self.tokens} tokens: {self.values} log-probabilities"
        summary = f"{compared} within {self.max_difference:.1e}, "
        same_text = "the same text"
        return summary + (
            f"{self.diverged} texts part, {self.diverged_at_ties} at equal candidates" if self.diverged else same_text
        )


@dataclass(frozen=True)
class EncoderParityReport:
    """How far an encoder's vectors are from ours, token by token."""

    prompts: int
    tokens: int
    values: int
    max_difference: float  # difference of a number
    min_cosine: float  # the smallest of a token's vector with ours

    @property
    def agrees(self) -> bool:
        """Whether every vector points the same way as ours: a cosine of at least .999."""
        return self.min_cosine >= MIN_COSINE

    def __str__(self) -> str:
        return (
            f"{self.prompts} texts, {self.tokens} tokens: {self.values} numbers within {self.max_difference:.1e}, "
            f"cosines 1 − {max(1 - self.min_cosine, 0):.1e} and above"
        )


def end_token_ids(model: ModelProtocol) -> tuple[int, ...]:
    """The tokens an engine is told not to write, so that no text ends early."""
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
    """Always the likeliest token. `next_logits` takes the prompt, then each token, and gives the row of logits behind it."""
    steps, new_ids = [], list(prompt)
    for _ in range(max_new_tokens):
        row = np.asarray(next_logits(new_ids), dtype=np.float64)
        log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        candidates = {int(i): float(log_probs[i]) for i in np.argsort(-log_probs)[:top_k]}
        log_probs[list(banned)] = -np.inf
        steps.append(EngineToken(int(log_probs.argmax()), candidates))
        new_ids = [steps[-1].id]
    return steps


@torch.no_grad()
def compare_generated(
    model: ModelProtocol, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[EngineToken]]
) -> ParityReport:
    """Our log-probabilities behind each prompt and what the engine wrote, beside its own. It was told never to end."""
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
                    break  # from here on they read different texts
    return ParityReport(len(prompts), tokens, values, max_difference, diverged, ties)


@torch.no_grad()
def compare_hidden_states(
    model: ModelProtocol, prompts: Sequence[Sequence[int]], answers: Sequence[Any]
) -> EncoderParityReport:
    """What an engine made of every token, (T, D) a text, beside what the model makes of it."""
    max_difference, min_cosine, values = 0.0, 1.0, 0
    with eval_mode(model):
        for ids, answer in zip(prompts, answers, strict=True):
            native = model(torch.tensor([list(ids)], device=model.device))[0].double().cpu()
            engine = torch.as_tensor(np.asarray(answer), dtype=torch.double)
            max_difference = max(max_difference, float((native - engine).abs().max()))
            min_cosine = min(min_cosine, float(torch.cosine_similarity(native, engine, dim=-1).min()))
            values += native.numel()
    return EncoderParityReport(len(prompts), sum(map(len, prompts)), values, max_difference, min_cosine)


def _log_probabilities(model: ModelProtocol, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids], device=model.device))[0].float().log_softmax(-1).cpu()
