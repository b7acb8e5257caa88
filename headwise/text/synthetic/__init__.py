"""The synthetic language: an infinite sequence of English-like documents with gold relations at varying offsets."""

from headwise.text.synthetic.cloze_probes import ClozeProbe, cloze_probes
from headwise.text.synthetic.generator import SyntheticLanguage
from headwise.text.synthetic.max_allowed_fixed_offset_accuracy import FIXED_OFFSET_ACCURACY_LIMITS
from headwise.text.synthetic.relation_offset_summary import SyntheticRelationSummary, describe_language
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
