"""The synthetic language: endless English-like documents with gold relations, in which no fixed offset finds them."""

from headwise.text.synthetic.cloze_probes import ClozeProbe, cloze_probes
from headwise.text.synthetic.generator import SyntheticLanguage
from headwise.text.synthetic.max_offset_accuracy import MAX_OFFSET_FRACTIONS
from headwise.text.synthetic.relation_statistics import RelationOffsetSummary, describe_language
from headwise.text.synthetic.vocabulary import VOCABULARY, WORD_CLASSES

__all__ = [
    "MAX_OFFSET_FRACTIONS",
    "VOCABULARY",
    "WORD_CLASSES",
    "ClozeProbe",
    "RelationOffsetSummary",
    "SyntheticLanguage",
    "cloze_probes",
    "describe_language",
]
