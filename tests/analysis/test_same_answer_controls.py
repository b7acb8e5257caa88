"""Controls of causal tests for relations: texts in which the same answer has another cause, and texts that only seem so."""

import pytest
import torch

from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.build_causal_trials import relation_trial
from headwise.text.annotated_document import Document, Relation
from tests.analysis.constructed_heads import blank_model
from tests.analysis.test_causal import add_closer_logits

Arcs = list[tuple[str, int, int]]
# relation: words and arcs of a control, and of a similar text that is not one; {0} is the answer, {1} the target of the role
CONTROL_TEXTS: dict[str, tuple[tuple[str, Arcs], tuple[str, Arcs]]] = {
    "if-then": (("w1x {1} w5x 6 {0}", [("unconditional", 4, 1)]), ("w1x {1} w7x 6 {0}", [])),  # by gold relation
    "copy": (("w1x w3x w5x 6 {0}", []), ("w1x {0} w7x 6 {0}", [])),  # first occurrence
    "subject-verb": (("w1x 6 {0} w3x w5x", [("subject-verb", 4, 3)]), ("w1x 6 {0} w7x w5x", [])),  # not in an arc
}


@torch.no_grad()
@pytest.mark.parametrize("relation", CONTROL_TEXTS)
def test_word_trial_controls_have_same_answer_without_relation(relation: str) -> None:
    model = add_closer_logits(blank_model(heads=2, layers=1))

    def documents_of(words: str, arcs: Arcs) -> list[Document]:
        partner = "b{}x" if relation == "copy" else "a{}x"
        return [
            Document.of(words.format(f"b{k}x", partner.format(k)).split(), [Relation(*arc) for arc in arcs])
            for k in range(6)
        ]

    control, trap = CONTROL_TEXTS[relation]
    role_documents = documents_of("w1x {1} w3x 5 {0}", [(relation, 4, 1)])
    samples = list(TokenizedCorpus.of(model, [*role_documents, *documents_of(*control), *documents_of(*trap)]))
    trial = relation_trial(model, samples[:6], samples[6:], relation, "later word")
    assert [row.sample.ids for row in trial.cases] == [sample.ids for sample in samples[:6]]
    assert [row.sample.ids for row in trial.controls] == [sample.ids for sample in samples[6:12]]
    assert all(
        [*row.targets.values()] == [*trial.controls[index].targets.values()] for index, row in enumerate(trial.cases)
    )
