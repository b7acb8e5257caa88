"""The little language: endless English-like documents with gold relations, in which no fixed offset finds them."""

from headwise.text.synthetic.cloze_probes import Quiz, quizzes
from headwise.text.synthetic.describe import Description, describe
from headwise.text.synthetic.generator import LittleLanguage
from headwise.text.synthetic.offset_limits import OFFSETS
from headwise.text.synthetic.vocabulary import CLASSES, VOCABULARY

__all__ = ["CLASSES", "OFFSETS", "VOCABULARY", "Description", "LittleLanguage", "Quiz", "describe", "quizzes"]
