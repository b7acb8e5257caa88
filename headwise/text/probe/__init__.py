"""The probe set: hand-written English sentences with gold relations, for models that know English.

The sentences stand in the text files beside this one, a file per relation, each headed by what the relation means.
Every relation is varied in distance: no fixed offset finds more than half of its arcs. No arc starts or ends at the
first word of a sentence, where many heads rest whatever the words.
"""

from functools import cache
from importlib.resources import files

from headwise.errors import HeadwiseError, suggest_names
from headwise.text.annotated_document import Document
from headwise.text.probe.markup import RELATION_BY_TAG, parse_file

__all__ = ["RELATIONS", "probe_set"]

RELATIONS = tuple(RELATION_BY_TAG.values())


def probe_set(*relations: str) -> tuple[Document, ...]:
    """Every probe sentence; or those that hold any of the relations named, with the arcs of these alone.

    Each `unrelated` control stands beside its `related` sentence, behind it and before it by turns.

    >>> probe_set("possessive")[0].text
    'The students gave the teacher their essays on the last day.'
    >>> sorted({arc.name for d in probe_set("related", "unrelated") for arc in d.relations})
    ['related', 'unrelated']
    """
    for name in relations:
        if name not in RELATIONS:
            raise HeadwiseError(f"no relation {name!r} in the probe set; {suggest_names(name, RELATIONS)}")
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
