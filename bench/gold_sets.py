"""Count the data of each role, for the tables of docs/gold-sets.md.

python -m bench.gold_sets                                   # the probe set, the synthetic language, roles without gold arcs
python -m bench.gold_sets --write docs/gold-sets.md         # update the tables of the page
python -m bench.gold_sets en_ewt-ud-test.conllu             # the gold arcs of a treebank, of GAP's .tsv or of .jsonl
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from headwise.analysis.metrics import (
    copy_suppression,
    far_attention,
    name_movers,
    query_focused_retrieval,
    retrieval,
    successor,
)
from headwise.analysis.metrics.directed_relations import CONTROL_RELATIONS
from headwise.analysis.recording.tokenized_corpus import DEFAULT_DOCUMENTS
from headwise.analysis.roles.profile_sums import NUM_REPEATED_SEQUENCES, REPEATED_LENGTH
from headwise.analysis.roles.roles import ROLE_OF_RELATION
from headwise.text.annotated_document import Document, Relation
from headwise.text.corpus import Corpus
from headwise.text.probe import probe_set

MOST_FREQUENT = 4  # words listed per end of the arcs
MARKER = "<!-- {} -->"
# relation: first word and second word of its arcs
ENDS = {
    "subject-verb": ("head word of a subject", "its verb"),
    "verb-object": ("head word of an object", "its verb"),
    "adjective-noun": ("adjective", "noun or pronoun it describes"),
    "determiner-noun": ("determiner", "its noun"),
    "pronoun-antecedent": ("personal pronoun", "noun it stands for"),
    "possessive": ("possessive pronoun", "noun that owns, never the owned one"),
    "cause-effect": ("predicate of the effect", "predicate of the cause"),
    "related": ("later word of a pair related in meaning", "earlier word of the pair"),
    "unrelated": ("the same word in the same sentence", "an unrelated word in place of the earlier one"),
    "bracket": ("closing bracket", "opening bracket of its pair"),
    "quote": ("closing quotation mark", "opening mark of its pair"),
    "if-then": ("if", "then that answers it"),
    "unconditional": ("if that asks whether, or as if", "then that says when"),
    "question-answer": ("question word; ? or the auxiliary of a yes-or-no question", "head word of the answer"),
    "copy": ("repeated surname", "its first mention"),
    "delimiter": ("end of a sentence, . or ?", "end of the sentence before"),
    "same phrase": ("earlier word of a phrase of at most 8 words", "later word of the phrase"),
    "same class": ("earlier of two words of one class", "later of the two"),
    "coref": ("pronoun", "last word of the name it stands for"),
}


@dataclass
class GoldSet:
    """The gold arcs of one relation in a set of documents."""

    relation: str
    texts: int = 0
    arcs: int = 0
    second_earlier: int = 0
    first_end: Counter[str] = field(default_factory=Counter)
    second_end: Counter[str] = field(default_factory=Counter)
    example: str = ""

    @property
    def second_later(self) -> int:
        """Number of arcs whose second word is after the first."""
        return self.arcs - self.second_earlier

    @property
    def role(self) -> str:
        """Return the role measured on these arcs. Controls do not have a role."""
        return "control" if self.relation in CONTROL_RELATIONS else ROLE_OF_RELATION.get(self.relation, self.relation)

    def add(self, document: Document, arcs: Sequence[Relation]) -> None:
        """Count the arcs of one document."""
        labels = document.classes or [word.lower() for word in document.words]
        self.texts += 1
        self.arcs += len(arcs)
        self.second_earlier += sum(arc.target < arc.source for arc in arcs)
        self.first_end.update(labels[arc.source] for arc in arcs)
        self.second_end.update(labels[arc.target] for arc in arcs)
        self.example = self.example or mark_ends(document, arcs[0])


def count_gold_sets(documents: Iterable[Document]) -> dict[str, GoldSet]:
    """Count the gold arcs of documents, and the pairs of words of one phrase and of one class.

    >>> bracket = count_gold_sets(probe_set("bracket"))["bracket"]
    >>> bracket.second_later, sorted(bracket.first_end)
    (0, [')', ']'])
    """
    sets: dict[str, GoldSet] = {}
    for document in documents:
        arcs: dict[str, list[Relation]] = {}
        for arc in (*document.relations, *_pairs(document)):
            arcs.setdefault(arc.name, []).append(arc)
        for name, of_name in arcs.items():
            sets.setdefault(name, GoldSet(name)).add(document, of_name)
    return sets


def mark_ends(document: Document, arc: Relation) -> str:
    """Return the words of an arc, with the first end in brackets and the second between asterisks."""
    first, last = sorted((arc.source, arc.target))
    marks = {arc.source: "[{}]", arc.target: "*{}*"}
    words = [marks.get(place, "{}").format(document.words[place]) for place in range(first, last + 1)]
    return " ".join(words if len(words) <= 8 else [*words[:4], "…", *words[-3:]])


def _pairs(document: Document) -> Iterable[Relation]:
    phrases = [range(first, end) for first, end in document.phrases if end - first <= 8]
    inside = {pair for phrase in phrases for pair in combinations(phrase, 2)}
    places: dict[str, list[int]] = {}
    for place, kind in enumerate(document.classes):
        places.setdefault(kind, []).append(place)
    same_class = {pair for of_kind in places.values() for pair in combinations(of_kind, 2)}
    return [
        Relation(name, *pair) for name, pairs in (("same phrase", inside), ("same class", same_class)) for pair in pairs
    ]


def arc_table(documents: Iterable[Document]) -> list[str]:
    """The table of the gold arcs of documents, in Markdown."""
    columns = (
        "relation", "role", "texts", "arcs", "second word earlier / later", "first word", "second word",
        "most frequent first", "most frequent second", "`[first] … *second*`",
    )  # fmt: skip
    rows = []
    for name, counts in sorted(count_gold_sets(documents).items()):
        first, second = ENDS.get(name, ("first word", "second word"))
        rows.append((
            name, counts.role, f"{counts.texts:,}", f"{counts.arcs:,}",
            f"{counts.second_earlier:,} / {counts.second_later:,}", first, second,
            _frequent(counts.first_end), _frequent(counts.second_end), f"`{counts.example}`",
        ))  # fmt: skip
    return _markdown(columns, rows)


def case_table() -> list[str]:
    """The table of the roles that are measured without gold arcs, in Markdown."""
    window = far_attention.WINDOW
    rows = (
        ("previous token, next token, self, fixed offset", "every token of the corpus whose target is not the first token",
         f"the token 1 back, 1 ahead, itself, or up to {window - 1} back or ahead"),
        ("local", "every token that has such a target", "tokens at most 3 away, without itself and the first token"),
        ("delimiter", "every token that sees one other than the first token",
         "tokens made of punctuation marks, and line breaks"),
        ("capitalised", "the same", "tokens that begin with a capital letter"),
        ("digit", "the same", "tokens made of digits"),
        ("long range", "every token that sees such a token",
         f"tokens {window} or more away, without the first token, tokens equal to the attending one and tokens after those"),
        ("induction",
         f"{NUM_REPEATED_SEQUENCES} sequences: {REPEATED_LENGTH} random tokens and the same {REPEATED_LENGTH} again; "
         "every token of the "
         "second copy", "the token after the first copy"),
        ("duplicate token", "the same", "the first copy"),
        ("name mover", f"{name_movers.PAIRS} pairs of sentences, from {len(name_movers.TEMPLATES)} templates and "
         f"{len(name_movers.NAMES)} "
         "names; the last token", "the name that is due, if the head writes more for it than for the other name"),
        ("copy suppression", f"{copy_suppression.TEXTS} beginnings of texts of {copy_suppression.LENGTH} tokens, read twice; "
         "the last "
         f"{copy_suppression.LENGTH - copy_suppression.CUE} predictions",
         "the token the model is about to repeat, if the head writes less for it than for the other tokens of the text"),
        ("successor", f"{sum(len(of_class) for of_class in successor.CLASSES)} days, months, numbers, ordinals and letters "
         "that a list ends with", "no attention is measured: the head writes most for the next of the class"),
        ("query focus", f"{query_focused_retrieval.PROMPTS} prompts of {query_focused_retrieval.DOCUMENTS} "
        f"documents and a question, from "
         f"{len(query_focused_retrieval.FACTS)} documents; every token of the question",
         "the tokens of the document the question is about"),
        ("far offset", f"{far_attention.TEXTS} texts of {far_attention.LENGTH} tokens",
         f"the token at the head's best offset of {window} or more"),
        ("fixed place", f"the same; tokens {window} or more away", "the head's best position"),
        ("retrieval", f"{retrieval.TEXTS} texts with a needle of {retrieval.NEEDLE} tokens; the tokens of the needle that "
         "the model itself copies", "the token that is being copied"),
    )  # fmt: skip
    return _markdown(("role", "attending tokens (cases)", "target"), rows)


def tables() -> dict[str, list[str]]:
    """Every table of the page, by its marker."""
    little = Corpus.synthetic("held-out", documents=DEFAULT_DOCUMENTS, seed=1)
    documents = [item for item in little.items() if isinstance(item, Document)]
    return {"probe set": arc_table(probe_set()), "synthetic language": arc_table(documents), "cases": case_table()}


def filled(page: str) -> str:
    """Return the page with all tables between its markers updated."""
    for name, lines in tables().items():
        marker = MARKER.format(name)
        before, _, after = page.split(marker)
        page = f"{before}{marker}\n\n" + "\n".join(lines) + f"\n\n{marker}{after}"
    return page


def _frequent(words: Counter[str]) -> str:
    listed = sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))
    listing = ", ".join(f"{word} {count:,}" for word, count in listed[:MOST_FREQUENT])
    return listing if len(listed) <= MOST_FREQUENT else f"{listing}, … ({len(listed):,} different)"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    """Print the tables, or write them to the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="documents with gold arcs; default: the sets included in Headwise")
    parser.add_argument("--write", type=Path, help="page whose tables are updated")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_text(filled(options.write.read_text()))
    elif options.file is not None:
        items = Corpus.of(options.file).items()
        print("\n".join(arc_table(item for item in items if isinstance(item, Document))))
    else:
        print("\n\n".join("\n".join(lines) for lines in tables().values()))


if __name__ == "__main__":
    main()
