"""Writing on from a text with somebody else's `generate`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer


def speak(
    model: Any,
    tokenizer: Tokenizer | None,
    prompt: str,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow a text, (1,) each; temperature 0 takes the best one every time."""
    if tokenizer is None:
        raise HeadwiseError("this model has no tokenizer, so it cannot read text; hw.attach(model, tokenizer).")
    if not model.can_generate():
        raise HeadwiseError(f"{type(model).__name__} does not generate; take a model with a language-model head.")
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)  # (1, T)
    pad = model.generation_config.pad_token_id
    how: dict[str, Any] = {
        "max_new_tokens": tokens,
        "do_sample": temperature > 0,
        "pad_token_id": 0 if pad is None else pad,
    }
    if temperature > 0:
        how |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **how)  # (1, T + new)
    start = 0 if model.config.is_encoder_decoder else ids.shape[1]
    yield from made[0, start:, None]
