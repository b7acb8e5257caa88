"""A transformers tokenizer as one of ours."""

from typing import Any

from tokenizers import Tokenizer as Backend

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.tokenizer import ROLES


def wrap_tokenizer(given: Any) -> Tokenizer | None:
    """Theirs, ours, or none: what is given, as a copy that pads and cuts nothing."""
    if given is None or isinstance(given, Tokenizer):
        return given
    backend = getattr(given, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise HeadwiseError(
            f"{type(given).__name__} is not built on the tokenizers library, so words and tokens cannot be aligned; load the "
            f"fast tokenizer of this model."
        )
    own = Backend.from_str(backend.to_str())
    own.no_padding()
    own.no_truncation()
    return Tokenizer(own, {role: getattr(given, f"{role}_token_id", None) for role in ROLES})
