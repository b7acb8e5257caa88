"""Tokens that belong to several words: what heads built by hand give, counted by hand."""

from functools import partial

import pytest
import torch

import headwise as hw
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.word_arcs import NEAREST
from headwise.analysis.recording.attention_maps import Parts
from headwise.analysis.recording.batching import Unit, make_batch, make_batches
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.merge import merge_relations
from headwise.kernels import causal
from headwise.text import Alignment
from headwise.text.documents import Document, Relation
from headwise.text.probe import probe_set
from tests.analysis.dense_reference import by_scores
from tests.analysis.models import documents_of
from tests.parity.real import smollm2_folder

# words: x " a , " y      tokens: x | " | a | ," | y
QUOTE = Document('x "a," y', ("x", '"', "a", ",", '"', "y"), (Relation("quote", 4, 1), Relation("beside", 4, 3)))
QUOTED = Alignment.of(QUOTE.text, range(5), ["x", '"', "a", ',"', "y"], [(0, 1), (2, 3), (3, 4), (4, 6), (7, 8)])
# words: x do n't y       tokens: x | don | 't | y
NEGATED = Document("x don't y", ("x", "do", "n't", "y"), (Relation("not", 1, 2),))
NEGATION = Alignment.of(
    NEGATED.text, range(4), ["x", "don", "'t", "y"], [(0, 1), (2, 5), (5, 7), (8, 9)], NEGATED.words
)


def asked(document: Document, alignment: Alignment, p: list[list[float]], is_causal: bool = False) -> Relations:
    """One head with the weights p, row by row."""
    unit = Unit(3, 3, alignment.ids, document, partial(lambda: alignment))
    relations = Relations.of(Tally(1), documents_of([unit]), is_causal)
    batch = make_batch([unit])
    scores = torch.tensor(p).double().clamp(min=1e-30).log()[None, None]  # (1, 1, T, T)
    Runner(relations.tally, [relations]).see(by_scores(scores, causal() if is_causal else None), batch, 0)
    return relations


def told(relations: Relations, question: str) -> tuple[float, float, float]:
    """Hits, weight and how many arcs were asked."""
    hits, arcs = relations.tally.per_bucket(f"{question} hits")
    return float(hits.sum()), float(relations.tally.per_bucket(f"{question} mass")[0].sum()), float(arcs.sum())


def looking(n: int, **rows: list[float]) -> list[list[float]]:
    """Rows given by their number, r3; the others rest on the first token."""
    return [rows.get(f"r{i}", [1.0] + [0.0] * (n - 1)) for i in range(n)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_second_word_of_a_token_looks(is_causal: bool) -> None:
    seen = asked(QUOTE, QUOTED, looking(5, r3=[0, 1.0, 0, 0, 0]), is_causal)
    assert told(seen, "quote >") == pytest.approx((1, 1, 1))


def test_the_second_word_of_a_token_is_looked_at() -> None:
    """The comma has the same weight, being the same token: it is no rival."""
    seen = asked(QUOTE, QUOTED, looking(5, r1=[0, 0, 0.1, 0.9, 0]))
    assert told(seen, "quote <") == pytest.approx((1, 0.9, 1))
    there = dict(zip(NEAREST, seen.offsets[3, seen.questions.index("quote <")], strict=True))
    assert {offset for offset, hits in there.items() if hits} == {2, 3}  # nor can an offset tell the two apart


def test_what_a_word_gives_itself_is_no_look_at_another() -> None:
    """From `,"` .6 stays there; that is no weight on the comma, so the opening quote has the most."""
    seen = asked(QUOTE, QUOTED, looking(5, r3=[0, 0.4, 0, 0.6, 0]))
    assert told(seen, "quote >") == pytest.approx((1, 0.4, 1))


def test_words_of_one_token_are_not_asked_about() -> None:
    seen = asked(QUOTE, QUOTED, looking(5, r3=[0, 0, 0, 1.0, 0]))
    assert told(seen, "beside >")[2] == told(seen, "beside <")[2] == 0
    number = seen.questions.index("beside >")
    assert (seen.arcs[:, number].sum(), seen.left_out[:, number].sum()) == (0, 1)
    assert seen.left_out[:, seen.questions.index("quote >")].sum() == 0
    both = merge_relations(Tally(1), [(seen.tally, seen), (seen.tally, seen)])
    assert both is not None
    assert both.left_out[3, number] == 2


def test_pairs_that_are_counted() -> None:
    """Six words, so thirty pairs; five end at the first word, two lie in one token."""
    arcs = asked(QUOTE, QUOTED, looking(5))._of_batch
    assert arcs is not None
    assert len(arcs.pairs.text) == 30 - 5 - 2


def test_words_that_share_one_of_their_tokens() -> None:
    """`do` is all in `don`, which is also of `n't`: the one may be asked about the other, but not the other way round."""
    seen = asked(NEGATED, NEGATION, looking(4, r1=[0, 0.7, 0.1, 0.2]))
    assert told(seen, "not >") == pytest.approx((0, 0.1, 1))  # .7 is on itself, and y has .2
    assert seen.left_out[3].tolist() == [0, 1]
    seen = asked(NEGATED, NEGATION, looking(4, r1=[0, 0.7, 0.2, 0.1]))
    assert told(seen, "not >") == pytest.approx((1, 0.2, 1))


def test_a_word_without_a_token_is_left_out() -> None:
    bare = Alignment.of("x y", [0], ["x"], [(0, 1)])
    seen = asked(Document.of(["x", "y"], [Relation("det", 0, 1)]), bare, [[1.0]])
    assert seen.arcs.sum() == 0
    assert seen.left_out.sum(0).tolist() == [1, 0]  # the other way round it is the first word that is pointed at


def test_one_sentence_shows_words_of_one_token_as_one() -> None:
    parts = Parts.of(QUOTED, words=True)
    assert (parts.labels, parts.tokens) == (("x", '"', "a", ',"', "y"), ((0,), (1,), (2,), (3,), (4,)))
    assert parts.sums(torch.zeros(1)).sum(1).tolist() == [1.0] * 5


def test_quotes_of_the_probe_set() -> None:
    """SmolLM2 writes 36 of the 65 closing quotes in one token with the mark before them: no arc of theirs is lost."""
    model = hw.load(smollm2_folder())
    units = list(Reading.of(model, probe_set("quote")))
    asked = [(unit.alignment, arc) for unit in units if unit.document for arc in unit.document.relations]
    assert sum(found.words_of_token[found.tokens_of_word[arc.source][0]][0] != arc.source for found, arc in asked) == 36
    relations = Relations.of(Tally(1), documents_of(units), causal=True)
    for batch in make_batches(units):
        relations.begin(batch)
    number = relations.questions.index("quote >")
    assert (relations.arcs[:, number].sum(), relations.left_out.sum()) == (65, 0)
