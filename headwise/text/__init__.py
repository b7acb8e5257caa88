"""Room 5: words come in."""

from headwise.text.align import Alignment
from headwise.text.embed import embed
from headwise.text.tokenizer import Tokenizer

__all__ = ["Alignment", "Tokenizer", "embed"]
