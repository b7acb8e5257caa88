"""What was written, run in its own engine beside the model it came from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.exporters.llama_cpp import EngineToken
from headwise.model import AnyModel, quiet

CLOSE = 1e-2  # nats between two candidates: which of them is chosen is then a matter of rounding
SAME_WAY = 0.999  # the cosine from which on two vectors of a token point the same way
# Tokens that llama.cpp takes for the end of a text by how they are written, whatever the file calls the end.
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<eos>",
    "<EOT>", "<|return|>", "<|call|>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
)  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """How far an engine's log-probabilities are from ours, and where its text parts from ours."""

    prompts: int
    tokens: int  # compared in all
    numbers: int  # log-probabilities compared
    largest: float  # difference of a log-probability among the likeliest tokens
    parted: int  # prompts whose text differs
    parted_close: int  # of those, where our two candidates lay within 1e-2

    @property
    def agrees(self) -> bool:
        """Whether all texts are the same but where two candidates were as good as equal."""
        return self.parted == self.parted_close

    def __str__(self) -> str:
        told = f"{self.prompts} prompts, {self.tokens} tokens: {self.numbers} log-probabilities within {self.largest:.1e}, "
        same = "the same text"
        return told + (f"{self.parted} texts part, {self.parted_close} at equal candidates" if self.parted else same)


@dataclass(frozen=True)
class CheckedStates:
    """How far an encoder's vectors are from ours, token by token."""

    prompts: int
    tokens: int
    numbers: int
    largest: float  # difference of a number
    cosine: float  # the smallest of a token's vector with ours

    @property
    def agrees(self) -> bool:
        """Whether every vector points the same way as ours: a cosine of at least .999."""
        return self.cosine >= SAME_WAY

    def __str__(self) -> str:
        return (
            f"{self.prompts} texts, {self.tokens} tokens: {self.numbers} numbers within {self.largest:.1e}, "
            f"cosines 1 − {max(1 - self.cosine, 0):.1e} and above"
        )


def barred(model: AnyModel) -> tuple[int, ...]:
    """The tokens an engine is told not to write, so that no text ends early."""
    words = model.tokenizer
    if words is None:
        return ()
    known = getattr(getattr(words, "backend", None), "token_to_id", lambda _: None)
    found = {getattr(words, "special", {}).get("eos"), *map(known, ENDS)}
    return tuple(sorted(one for one in found if one is not None))


def write_greedily(
    prompt: Sequence[int], tokens: int, feed: Callable[[list[int]], Any], never: Collection[int], top: int = 5
) -> list[EngineToken]:
    """Always the likeliest token. `feed` takes the prompt, then each token, and gives the row of logits behind it."""
    steps, given = [], list(prompt)
    for _ in range(tokens):
        row = np.asarray(feed(given), dtype=np.float64)
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        likely = {int(i): float(logs[i]) for i in np.argsort(-logs)[:top]}
        logs[list(never)] = -np.inf
        steps.append(EngineToken(int(logs.argmax()), likely))
        given = [steps[-1].id]
    return steps


@torch.no_grad()
def compare(model: AnyModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[EngineToken]]) -> Checked:
    """Our log-probabilities behind each prompt and what the engine wrote, beside its own. It was told never to end."""
    largest, parted, close, tokens, numbers = 0.0, 0, 0, 0, 0
    never = list(barred(model))
    with quiet(model):
        for prompt, steps in zip(prompts, answers, strict=True):
            ids = [*prompt, *(step.id for step in steps)]
            logs = _log_probabilities(model, ids)[len(prompt) - 1 : len(ids) - 1]  # (steps, V)
            for step, ours in zip(steps, logs, strict=True):
                tokens += 1
                apart = [abs(float(ours[token]) - theirs) for token, theirs in step.top.items()]
                largest, numbers = max(largest, *apart, 0.0), numbers + len(apart)
                ours[never] = -torch.inf
                best = int(ours.argmax())
                if best != step.id:
                    parted += 1
                    close += float(ours[best] - ours[step.id]) < CLOSE
                    break  # from here on they read different texts
    return Checked(len(prompts), tokens, numbers, largest, parted, close)


@torch.no_grad()
def compare_states(model: AnyModel, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> CheckedStates:
    """What an engine made of every token, (T, D) a text, beside what the model makes of it."""
    largest, cosine, numbers = 0.0, 1.0, 0
    with quiet(model):
        for ids, found in zip(prompts, answers, strict=True):
            ours = model(torch.tensor([list(ids)], device=model.device))[0].double().cpu()
            theirs = torch.as_tensor(np.asarray(found), dtype=torch.double)
            largest = max(largest, float((ours - theirs).abs().max()))
            cosine = min(cosine, float(torch.cosine_similarity(ours, theirs, dim=-1).min()))
            numbers += ours.numel()
    return CheckedStates(len(prompts), sum(map(len, prompts)), numbers, largest, cosine)


def _log_probabilities(model: AnyModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids], device=model.device))[0].float().log_softmax(-1).cpu()
