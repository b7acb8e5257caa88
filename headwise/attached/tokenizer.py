"""Conversion of transformers tokenizers to ours."""

from typing import Any

from tokenizers import Tokenizer as Backend

from headwise.errors import ArgumentError
from headwise.text import Tokenizer
from headwise.text.tokenizer import SPECIAL_TOKEN_NAMES


def wrap_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return our tokenizer for one of transformers, a copy without padding and truncation. Ours and None pass unchanged."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"tokenizer: {type(tokenizer).__name__} is not based on the tokenizers library, so tokens cannot be aligned with "
            f"words. Load the fast tokenizer of this model (use_fast=True)."
        )
    backend_copy = Backend.from_str(backend.to_str())
    backend_copy.no_padding()
    backend_copy.no_truncation()
    return Tokenizer(backend_copy, {role: getattr(tokenizer, f"{role}_token_id", None) for role in SPECIAL_TOKEN_NAMES})
