"""A folder in plain transformers, beside the model it came from."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.exporters.llama_cpp import EngineToken
from headwise.exporters.parity import write_greedily


def write_on(
    folder: Path, prompts: Sequence[Sequence[int]], tokens: int, never: Collection[int]
) -> list[list[EngineToken]]:
    """What it writes behind some prompts, with its own cache, always the likeliest token."""
    model = _load(folder, "AutoModelForCausalLM")

    def answer(prompt: Sequence[int]) -> list[EngineToken]:
        held: list[Any] = [None]

        def feed(ids: list[int]) -> Any:
            made = model(torch.tensor([ids]), past_key_values=held[0], use_cache=True)
            held[0] = made.past_key_values
            return made.logits[0, -1]

        return write_greedily(prompt, tokens, feed, never)

    with torch.no_grad():
        return [answer(prompt) for prompt in prompts]


def states(folder: Path, prompts: Sequence[Sequence[int]], logits: bool) -> list[Any]:
    """What an encoder makes of every token: logits, or its last states."""
    model = _load(folder, "AutoModelForMaskedLM" if logits else "AutoModel")
    with torch.no_grad():
        made = [model(torch.tensor([list(ids)])) for ids in prompts]
    return [(one.logits if logits else one.last_hidden_state)[0] for one in made]


def _load(folder: Path, name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise HeadwiseError("the folder is checked in transformers itself; pip install 'headwise[attach]'.") from None
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
