"""What was written, run in its own engine beside the model it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.deploy.llama_cpp import Step
from headwise.model import AnyModel, quiet

CLOSE = 1e-2  # nats between two candidates: which of them is chosen is then a matter of rounding


@dataclass(frozen=True)
class Checked:
    """How far an engine's log-probabilities are from ours, and where its text parts from ours."""

    prompts: int
    tokens: int  # compared in all
    numbers: int  # log-probabilities compared
    largest: float  # difference of a log-probability among the likeliest tokens
    parted: int  # prompts whose text differs
    parted_close: int  # of those, where our two candidates lay within 1e-2
    speed: float | None = None  # the engine's tokens a second

    @property
    def agrees(self) -> bool:
        """Whether all texts are the same but where two candidates were as good as equal."""
        return self.parted == self.parted_close

    def __str__(self) -> str:
        told = f"{self.prompts} prompts, {self.tokens} tokens: {self.numbers} log-probabilities within {self.largest:.1e}, "
        told += (
            "the same text" if not self.parted else f"{self.parted} texts part, {self.parted_close} at equal candidates"
        )
        return told if self.speed is None else f"{told}; {self.speed:.0f} tokens a second"


@torch.no_grad()
def compare(
    model: AnyModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Step]], speed: float | None = None
) -> Checked:
    """Our log-probabilities behind each prompt and what the engine wrote, beside its own. It was told never to end."""
    largest, parted, close, tokens, numbers = 0.0, 0, 0, 0, 0
    end = None if model.tokenizer is None else model.tokenizer.special["eos"]
    with quiet(model):
        for prompt, steps in zip(prompts, answers, strict=True):
            ids = [*prompt, *(step.id for step in steps)]
            logs = _log_probabilities(model, ids)[len(prompt) - 1 : len(ids) - 1]  # (steps, V)
            for step, ours in zip(steps, logs, strict=True):
                tokens += 1
                apart = [abs(float(ours[token]) - theirs) for token, theirs in step.top.items()]
                largest, numbers = max(largest, *apart, 0.0), numbers + len(apart)
                if end is not None:
                    ours[end] = -torch.inf
                best = int(ours.argmax())
                if best != step.id:
                    parted += 1
                    close += float(ours[best] - ours[step.id]) < CLOSE
                    break  # from here on they read different texts
    return Checked(len(prompts), tokens, numbers, largest, parted, close, speed)


def _log_probabilities(model: AnyModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids], device=model.device))[0].float().log_softmax(-1).cpu()
