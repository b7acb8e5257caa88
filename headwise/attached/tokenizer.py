"""A transformers tokenizer as one of ours."""

from typing import Any

from tokenizers import Tokenizer as Backend

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.tokenizer import SPECIAL_TOKEN_NAMES


def wrap_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Theirs, ours, or none: what is given, as a copy that pads and cuts nothing."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise HeadwiseError(
            f"{type(tokenizer).__name__} is not built on the tokenizers library, so words and tokens cannot be aligned; load "
            f"the fast tokenizer of this model."
        )
    backend_copy = Backend.from_str(backend.to_str())
    backend_copy.no_padding()
    backend_copy.no_truncation()
    return Tokenizer(backend_copy, {role: getattr(tokenizer, f"{role}_token_id", None) for role in SPECIAL_TOKEN_NAMES})
