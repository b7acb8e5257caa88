"""Controls of the last rung for relations: where the same answer comes another way, and what only looks so."""

import pytest
import torch

from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.causal_cases import word_trial
from headwise.text.documents import Document, Relation
from tests.analysis.constructed_heads import blank
from tests.analysis.test_causal import closers

Arcs = list[tuple[str, int, int]]
# relation: the words and arcs of a control, and of a trap that looks like one; {0} is the answer, {1} what the role looks at
OTHER_WAYS: dict[str, tuple[tuple[str, Arcs], tuple[str, Arcs]]] = {
    "if-then": (("w1x {1} w5x 6 {0}", [("unconditional", 4, 1)]), ("w1x {1} w7x 6 {0}", [])),  # gold tells when
    "copy": (("w1x w3x w5x 6 {0}", []), ("w1x {0} w7x 6 {0}", [])),  # said for the first time
    "subject-verb": (("w1x 6 {0} w3x w5x", [("subject-verb", 4, 3)]), ("w1x 6 {0} w7x w5x", [])),  # in no arc
}


@torch.no_grad()
@pytest.mark.parametrize("relation", OTHER_WAYS)
def test_where_the_same_answer_comes_another_way(relation: str) -> None:
    model = closers(blank(heads=2, layers=1))

    def documents_of(words: str, arcs: Arcs) -> list[Document]:
        partner = "b{}x" if relation == "copy" else "a{}x"
        return [
            Document.of(words.format(f"b{k}x", partner.format(k)).split(), [Relation(*arc) for arc in arcs])
            for k in range(6)
        ]

    control, trap = OTHER_WAYS[relation]
    asked = documents_of("w1x {1} w3x 5 {0}", [(relation, 4, 1)])
    units = list(Reading.of(model, [*asked, *documents_of(*control), *documents_of(*trap)]))
    trial = word_trial(model, units[:6], units[6:], relation, "later word")
    assert [row.unit.ids for row in trial.cases] == [unit.ids for unit in units[:6]]
    assert [row.unit.ids for row in trial.controls] == [unit.ids for unit in units[6:12]]
    assert all(
        [*row.wanted.values()] == [*trial.controls[number].wanted.values()] for number, row in enumerate(trial.cases)
    )
