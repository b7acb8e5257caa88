"""Places in a document where the next word follows from a relation: what a model that learned the language must know."""

from typing import NamedTuple

from headwise.text.documents import Document
from headwise.text.synthetic.vocabulary import CLOSERS, IS, OPENERS, STATES, SURNAMES, WAS

KINDS = ("bracket", "surname", "agreement", "referent")
CHOICES = {"bracket": CLOSERS, "surname": SURNAMES, "agreement": (*IS, *WAS), "referent": tuple(STATES.values())}


class Quiz(NamedTuple):
    """The word at `place` is to be predicted from those before it; `choices` are the words that compete, it among them."""

    kind: str
    place: int
    choices: tuple[str, ...]


def quizzes(document: Document) -> list[Quiz]:
    """All the quizzes of a document of the little language, in the order of their places.

    bracket: which bracket or quote closes. surname: that of a person met before. agreement: the number of a verb behind
    another noun than its subject. referent: what is said of the noun a pronoun stands for.

    >>> from headwise.text.synthetic.generator import LittleLanguage
    >>> document = LittleLanguage(seed=0).document(0)
    >>> all(document.words[quiz.place] in quiz.choices for quiz in quizzes(document))
    True
    """
    found = []
    for name, source, target in document.relations:
        if name in ("bracket", "quote"):
            found.append(("bracket", source))
        elif name == "copy":
            found.append(("surname", source))
        elif name == "subject-verb" and _agrees_at_a_distance(document, source, target):
            found.append(("agreement", target))
        elif name == "pronoun-antecedent" and _says_a_state(document, source):
            found.append(("referent", source + 2))
    return sorted((Quiz(kind, place, CHOICES[kind]) for kind, place in found), key=lambda quiz: quiz.place)


def _agrees_at_a_distance(document: Document, subject: int, verb: int) -> bool:
    """A form of be, sure to come (behind "today …", or behind a relative clause), with other nouns before it."""
    words, classes = document.words, document.classes
    if words[verb] not in CHOICES["agreement"] or verb < subject:
        return False
    if not any(kind in ("noun", "name") for kind in classes[subject + 1 : verb]):
        return False
    start = max((i + 1 for i in range(subject) if words[i] in (".", "?")), default=0)
    return words[start] in OPENERS or words[verb - 1] == ","


def _says_a_state(document: Document, pronoun: int) -> bool:
    """It is soft."""
    return document.words[pronoun + 1] in IS and document.words[pronoun + 2] in CHOICES["referent"]
