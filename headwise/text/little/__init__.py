"""The little language: endless English-like documents with gold relations, in which no fixed offset finds them."""

from headwise.text.little.describe import Description, describe
from headwise.text.little.generator import LittleLanguage
from headwise.text.little.limits import OFFSETS
from headwise.text.little.quizzes import Quiz, quizzes
from headwise.text.little.vocabulary import CLASSES, VOCABULARY

__all__ = ["CLASSES", "OFFSETS", "VOCABULARY", "Description", "LittleLanguage", "Quiz", "describe", "quizzes"]
