"""Cloze probes: positions in a document at which the next word follows from a relation."""

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
    """A position whose word should be predicted from the words before it.

    Attributes:
        kind: One of PROBE_KINDS.
        position: Index of the word.
        choices: Candidate words, including the correct one.
    """

    kind: str
    position: int
    choices: tuple[str, ...]


def cloze_probes(document: Document) -> list[ClozeProbe]:
    """Return the cloze probes of a document of the synthetic language, by position.

    bracket: the matching closing bracket or quote. surname: the surname of a person mentioned before. agreement: the number
    of a verb with another noun between it and its subject. referent: the adjective that fits the antecedent of a pronoun.

    >>> from headwise.text.synthetic.generator import SyntheticLanguage
    >>> document = SyntheticLanguage(seed=0).document(0)
    >>> all(document.words[probe.position] in probe.choices for probe in cloze_probes(document))
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
    """Return whether the verb is a form of be that must follow (after "today …" or a relative clause), after other nouns."""
    words, classes = document.words, document.classes
    if words[verb] not in PROBE_CHOICES["agreement"] or verb < subject:
        return False
    if not any(kind in ("noun", "name") for kind in classes[subject + 1 : verb]):
        return False
    start = max((i + 1 for i in range(subject) if words[i] in (".", "?")), default=0)
    return words[start] in TIME_ADVERBS or words[verb - 1] == ","


def _is_state_clause(document: Document, pronoun: int) -> bool:
    """Return whether the clause is of the form "it is soft"."""
    return document.words[pronoun + 1] in IS and document.words[pronoun + 2] in PROBE_CHOICES["referent"]
