"""Tokenizers, corpora, treebanks, the probe set and the synthetic language. Only `embed` needs torch."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.text.annotated_document import Document
    from headwise.text.build_tokenizers import make_tokenizer
    from headwise.text.corpus import Corpus
    from headwise.text.sentence_embeddings import embed
    from headwise.text.token_alignment import Alignment
    from headwise.text.tokenizer import Tokenizer

__all__ = ["Alignment", "Corpus", "Document", "Tokenizer", "embed", "make_tokenizer"]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "token_alignment": ["Alignment"],
        "build_tokenizers": ["make_tokenizer"],
        "corpus": ["Corpus"],
        "annotated_document": ["Document"],
        "tokenizer": ["Tokenizer"],
        "sentence_embeddings": ["embed"],
    },
)
