"""The probe set: hand-written English sentences with gold relations, for models that know English.

The sentences are in the text files of this folder, one file per relation, which start with a definition of the relation.
Distances vary in every relation: no fixed offset finds more than half of its arcs. No arc starts or ends at the first word
of a sentence, which is an attention sink of many heads.
"""

from functools import cache
from importlib.resources import files

from headwise.errors import ArgumentError, suggest_names
from headwise.text.annotated_document import Document
from headwise.text.probe.markup import RELATION_BY_TAG, parse_file

__all__ = ["RELATIONS", "probe_set"]

RELATIONS = tuple(RELATION_BY_TAG.values())


def probe_set(*relations: str) -> tuple[Document, ...]:
    """Return the probe sentences, or only those with an arc of the named relations, with only these arcs.

    Each `unrelated` control is next to its `related` sentence, in alternating order.

    >>> probe_set("possessive")[0].text
    'The students gave the teacher their essays on the last day.'
    >>> sorted({arc.name for d in probe_set("related", "unrelated") for arc in d.relations})
    ['related', 'unrelated']
    """
    for name in relations:
        if name not in RELATIONS:
            raise ArgumentError(
                f"relations: no such relation in the probe set. Got {name!r}; {suggest_names(name, RELATIONS)}"
            )
    if not relations:
        return _all_documents()
    selected = []
    for document in _all_documents():
        arcs = tuple(arc for arc in document.relations if arc.name in relations)
        if arcs:
            selected.append(Document(document.text, document.words, arcs))
    return tuple(selected)


@cache
def _all_documents() -> tuple[Document, ...]:
    folder = files("headwise.text.probe")
    texts = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name)
    return tuple(document for entry in texts for document in parse_file(entry.read_text("utf-8"), entry.name))
