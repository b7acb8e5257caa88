"""Places in a document where the next word follows from a relation: what a model that learned the language must know."""

from typing import NamedTuple

from headwise.text.annotated_document import Document
from headwise.text.synthetic.vocabulary import CLOSING_BRACKETS, IS, STATE_ADJECTIVES, SURNAMES, TIME_ADVERBS, WAS

PROBE_KINDS = ("bracket", "surname", "agreement", "referent")
PROBE_CHOICES = {
    "bracket": CLOSING_BRACKETS,
    "surname": SURNAMES,
    "agreement": (*IS, *WAS),
    "referent": tuple(STATE_ADJECTIVES.values()),
}


class ClozeProbe(NamedTuple):
    """The word at `position` is to be predicted from those before it; `choices` are the words that compete, it among them."""

    kind: str
    position: int
    choices: tuple[str, ...]


def cloze_probes(document: Document) -> list[ClozeProbe]:
    """All the quizzes of a document of the synthetic language, in the order of their places.

    bracket: which bracket or quote closes. surname: that of a person met before. agreement: the number of a verb behind
    another noun than its subject. referent: what is said of the noun a pronoun stands for.

    >>> from headwise.text.synthetic.generator import SyntheticLanguage
    >>> document = SyntheticLanguage(seed=0).document(0)
    >>> all(document.words[quiz.position] in quiz.choices for quiz in cloze_probes(document))
    True
    """
    matches = []
    for name, source, target in document.relations:
        if name in ("bracket", "quote"):
            matches.append(("bracket", source))
        elif name == "copy":
            matches.append(("surname", source))
        elif name == "subject-verb" and _is_distant_agreement(document, source, target):
            matches.append(("agreement", target))
        elif name == "pronoun-antecedent" and _is_state_clause(document, source):
            matches.append(("referent", source + 2))
    return sorted(
        (ClozeProbe(kind, position, PROBE_CHOICES[kind]) for kind, position in matches),
        key=lambda probe: probe.position,
    )


def _is_distant_agreement(document: Document, subject: int, verb: int) -> bool:
    """A form of be, sure to come (behind "today …", or behind a relative clause), with other nouns before it."""
    words, classes = document.words, document.classes
    if words[verb] not in PROBE_CHOICES["agreement"] or verb < subject:
        return False
    if not any(kind in ("noun", "name") for kind in classes[subject + 1 : verb]):
        return False
    start = max((i + 1 for i in range(subject) if words[i] in (".", "?")), default=0)
    return words[start] in TIME_ADVERBS or words[verb - 1] == ","


def _is_state_clause(document: Document, pronoun: int) -> bool:
    """It is soft."""
    return document.words[pronoun + 1] in IS and document.words[pronoun + 2] in PROBE_CHOICES["referent"]
