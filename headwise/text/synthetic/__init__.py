"""The synthetic language: an infinite sequence of English-like documents with gold relations at varying offsets."""

from headwise.text.synthetic.cloze_probes import ClozeProbe, cloze_probes
from headwise.text.synthetic.fixed_offset_accuracy_limits import FIXED_OFFSET_ACCURACY_LIMITS
from headwise.text.synthetic.generator import SyntheticLanguage
from headwise.text.synthetic.synthetic_relation_summary import SyntheticRelationSummary, describe_language
from headwise.text.synthetic.vocabulary import VOCABULARY, WORD_CLASSES

__all__ = [
    "FIXED_OFFSET_ACCURACY_LIMITS",
    "VOCABULARY",
    "WORD_CLASSES",
    "ClozeProbe",
    "SyntheticLanguage",
    "SyntheticRelationSummary",
    "cloze_probes",
    "describe_language",
]
