"""Words come in. Names are loaded when first used: words need no torch, vectors do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.text.align import Alignment
    from headwise.text.corpus import Corpus
    from headwise.text.sentence_embeddings import embed
    from headwise.text.tokenizer import Tokenizer

__all__ = ["Alignment", "Corpus", "Tokenizer", "embed"]

_FILES = {"Alignment": "align", "Corpus": "corpus", "Tokenizer": "tokenizer", "embed": "vectors"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'headwise.text' has no attribute {name!r}")
    return getattr(import_module(f"headwise.text.{_FILES[name]}"), name)
