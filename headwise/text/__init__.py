"""Tokenizers, corpora, treebanks, the probe set and the synthetic language. Only `embed` needs torch."""

from typing import TYPE_CHECKING

from headwise.lazy_import import lazy_names

if TYPE_CHECKING:
    from headwise.text.corpus import Corpus
    from headwise.text.sentence_embeddings import embed
    from headwise.text.token_alignment import Alignment
    from headwise.text.tokenizer import Tokenizer

__all__ = ["Alignment", "Corpus", "Tokenizer", "embed"]

__getattr__ = lazy_names(
    __name__,
    {
        "token_alignment": ["Alignment"],
        "corpus": ["Corpus"],
        "tokenizer": ["Tokenizer"],
        "sentence_embeddings": ["embed"],
    },
)
