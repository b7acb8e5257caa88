"""Run an exported folder in plain transformers."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.errors import MissingDependencyError
from headwise.exporters.engine_parity import greedy_decode
from headwise.exporters.llama_cpp_runner import EngineToken


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, banned: Collection[int]
) -> list[list[EngineToken]]:
    """Continue prompts greedily, with transformers' KV cache."""
    model = _load_model(folder, "AutoModelForCausalLM")

    def generate_one(prompt: Sequence[int]) -> list[EngineToken]:
        cache: list[Any] = [None]

        def next_logits(ids: list[int]) -> Any:
            output = model(torch.tensor([ids]), past_key_values=cache[0], use_cache=True)
            cache[0] = output.past_key_values
            return output.logits[0, -1]

        return greedy_decode(prompt, max_new_tokens, next_logits, banned)

    with torch.no_grad():
        return [generate_one(prompt) for prompt in prompts]


def hidden_states(folder: Path, prompts: Sequence[Sequence[int]], logits: bool) -> list[Any]:
    """Return the logits or the last hidden states of an encoder, per token."""
    model = _load_model(folder, "AutoModelForMaskedLM" if logits else "AutoModel")
    with torch.no_grad():
        outputs = [model(torch.tensor([list(ids)])) for ids in prompts]
    return [(output.logits if logits else output.last_hidden_state)[0] for output in outputs]


def _load_model(folder: Path, name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            "transformers is required to check an exported folder. Run: pip install 'headwise[attach]'"
        ) from None
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
