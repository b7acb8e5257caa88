"""Relations, word by word: against plain loops over dense maps, with split words, both directions, any padding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.row_blocks import walk
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Batch, Unit, make_batch
from headwise.analysis.recording.text_buckets import BUCKETS
from headwise.analysis.roles.roles import make_cases
from headwise.heads.hook_point import Seen
from headwise.kernels import Mask, causal, padding_mask
from headwise.text import Tokenizer
from headwise.text.documents import Document, Relation
from tests.analysis.dense_reference import by_scores
from tests.analysis.models import documents_of

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "head",
    "##s",
    "##ing",
    "attend",
    "look",
    "back",
    "a",
    "b",
    "c",
    "d",
]
WORDS = ("heads", "attending", "look", "back", "looks", "a", "b", "c", "d", "headsing")
FRAMED = Tokenizer.from_wordpiece(PIECES)  # [CLS] … [SEP]


def bare(text: str) -> list[int]:
    return FRAMED.encode(text, special=False)


def make_units(framed: bool, count: int = 9, seed: int = 0, longest: int = 12) -> list[Unit]:
    """Random words, split and whole, with random arcs, classes and phrases."""
    draw, made = np.random.default_rng(seed), []
    for number in range(count):
        n = int(draw.integers(4, longest))
        words = [WORDS[i] for i in draw.integers(0, len(WORDS), n)]
        pairs = {(int(s), int(t)) for s, t in draw.integers(0, n, (n, 2)) if s != t}
        arcs = [Relation(("det", "subject of")[(s + t) % 2], s, t) for s, t in sorted(pairs)]
        document = Document(
            " ".join(words), tuple(words), tuple(arcs), tuple("NV"[i % 2] for i in range(n)), ((0, 3), (1, n))
        )
        made.append(unit_of(3 * number + 1, document, framed))
    return made


def unit_of(number: int, document: Document, framed: bool = False) -> Unit:
    ids = FRAMED.encode(document.text, special=framed)
    return Unit(number, number, tuple(ids), document, partial(FRAMED.align, document.text, document.words, framed))


def call(batch: Batch, is_causal: bool, heads: int = 3, scores: Tensor | None = None) -> Seen:
    """Random scores for a batch, with the mask a model would have."""
    B, T = batch.ids.shape
    draws = torch.Generator().manual_seed(T)
    made = 2 * torch.randn(B, heads, T, T, generator=draws).double() if scores is None else scores
    mask: Mask = padding_mask(batch.real)
    norms = torch.rand(T, generator=draws) + 0.5
    return by_scores(made, causal() & mask if is_causal else mask, norms=norms)


def listened(batches: list[Batch], is_causal: bool, heads: int = 3) -> tuple[Relations, list[Seen]]:
    units = [unit for batch in batches for unit in batch.units]
    relations = Relations.of(Tally(heads), documents_of(units), is_causal)
    seen = [call(batch, is_causal, heads) for batch in batches]
    for batch, one in zip(batches, seen, strict=True):
        Runner(relations.tally, [relations]).see(one, batch, 0)
    return relations, seen


def word_map(unit: Unit, p: np.ndarray) -> np.ndarray:
    """To a word: the sum over its columns. From it: the mean over its rows. (H, T, T) → (H, W, W)"""
    places = unit.alignment.tokens_of_word
    made = np.zeros((len(p), len(places), len(places)))
    for i, sources in enumerate(places):
        for j, targets in enumerate(places):
            made[:, i, j] = np.mean([[sum(p[h, s, t] for t in targets) for s in sources] for h in range(len(p))], 1)
    return made


def asked(unit: Unit, question: str, is_causal: bool) -> Iterator[tuple[int, int]]:
    """The pairs a question is about: visible ones, none that points at the word the text begins with."""
    name, way = question.rsplit(" ", 1)
    document = unit.document
    assert document is not None
    W, first = len(document.words), unit.alignment.words_of_token[0]
    if name == "same class":
        pairs = {(i, j) for i in range(W) for j in range(i + 1, W) if document.classes[i] == document.classes[j]}
    elif name == "same phrase":
        pairs = {(i, j) for a, b in document.phrases if b - a <= 8 for i in range(a, b) for j in range(i + 1, b)}
    else:
        pairs = {(arc.source, arc.target) for arc in document.relations if arc.name == name}
    for s, t in pairs:
        s, t = (s, t) if way == ">" else (t, s)
        if t not in first and s != t and (t < s or not is_causal):
            yield s, t


def unit_maps(batches: list[Batch], seen: list[Seen], valued: bool = False) -> Iterator[tuple[Unit, np.ndarray]]:
    for batch, one in zip(batches, seen, strict=True):
        p = one.maps().numpy()
        if valued:
            p = p * one.v[..., 0].numpy()[:, :, None]
            p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
        for row, unit in enumerate(batch.units):
            start = int(batch.first[row])
            here = slice(start, start + len(unit.ids))
            yield unit, word_map(unit, p[row][:, here, here])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("framed", [True, False])
def test_hits_and_mass(side: str, is_causal: bool, framed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "left":
        monkeypatch.setattr(row_blocks, "ROWS", 5)
        monkeypatch.setattr(row_blocks, "CELLS", 300)
    units = make_units(framed)
    batches = [make_batch(units[:4], side), make_batch(units[4:], side)]
    relations, seen = listened(batches, is_causal)
    assert set(relations.questions) == {
        f"{n} {w}" for n in ("det", "subject of", "same phrase", "same class") for w in "><"
    }
    for question in relations.questions:
        for kind, valued in (("", False), ("valued ", True)):
            hits, mass, rows_of = np.zeros(3), np.zeros(3), 0
            for unit, words in unit_maps(batches, seen, valued):
                rows_of += len({s for s, _ in asked(unit, question, is_causal)})
                for s, t in asked(unit, question, is_causal):
                    others = np.delete(words[:, s], s, 1)
                    hits += np.delete(np.arange(words.shape[1]), s)[others.argmax(1)] == t
                    mass += words[:, s, t]
            got_hits, counts = relations.tally.per_bucket(f"{question} {kind}hits")
            got_mass, _ = relations.tally.per_bucket(f"{question} {kind}mass")
            np.testing.assert_array_equal(counts.sum(0), rows_of, err_msg=question)
            np.testing.assert_array_equal(got_hits.sum(0), hits, err_msg=question)
            np.testing.assert_allclose(got_mass.sum(0), mass, rtol=1e-5, atol=1e-5, err_msg=question)


def test_split_words_of_a_uniform_encoder() -> None:
    """Attention to a word of k tokens is k/n, and a row sums to what words have in all."""
    unit = make_units(framed=False, count=1, seed=4, longest=13)[0]
    batch = make_batch([unit])
    relations = Relations.of(Tally(1), documents_of([unit]), causal=False)
    n, runner = len(unit.ids), Runner(relations.tally, [relations])
    one = Call(by_scores(torch.zeros(1, 1, n, n).double()), runner.scene(batch), 0, runner._gram)
    found = relations.at(one)
    for block in walk(one.seen, one.inputs):
        found.see(block)
    plain = found.plain
    sizes = np.array([len(places) for places in unit.alignment.tokens_of_word])
    np.testing.assert_allclose(plain[0][0], np.tile(sizes / n, (len(sizes), 1)), atol=1e-6)
    assert max(sizes) > 1


def sight(source: int, words: int, is_causal: bool) -> int:
    """Rows that see about as many words: by powers of two."""
    return int(np.log2(max(1, source if is_causal else words - 1)))


def other_pairs(
    unit: Unit, words: np.ndarray, question: str, is_causal: bool
) -> dict[tuple[int, int], list[np.ndarray]]:
    """The weight on pairs of a text that are no arcs, by offset and by how much their rows see."""
    W, first, arcs = words.shape[1], unit.alignment.words_of_token[0], set(asked(unit, question, is_causal))
    made: dict[tuple[int, int], list[np.ndarray]] = {}
    for s in range(W):
        for t in range(s if is_causal else W):
            if s != t and t not in first and (s, t) not in arcs:
                made.setdefault((t - s, sight(s, W, is_causal)), []).append(words[:, s, t])
    return made


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("framed", [True, False])
def test_what_other_pairs_get(is_causal: bool, framed: bool) -> None:
    """Each arc beside the pairs of its text at the same offset whose rows see about as much. Rows with an arc that has none
    beside it are left out: from the weight, from what it is held against, and from the count."""
    units = make_units(framed, count=14, seed=2)
    batches = [make_batch(units[:5], "left"), make_batch(units[5:])]
    relations, seen = listened(batches, is_causal)
    maps = list(unit_maps(batches, seen))
    dropped = 0
    for number, question in enumerate(relations.questions):
        others, matched, fit, rows = np.zeros((BUCKETS, 3)), np.zeros((BUCKETS, 3)), np.zeros(BUCKETS), 0
        for unit, words in maps:
            beside = other_pairs(unit, words, question, is_causal)
            arcs = list(asked(unit, question, is_causal))
            for source in {s for s, _ in arcs}:
                targets = [t for s, t in arcs if s == source]
                found = [beside.get((t - source, sight(source, words.shape[1], is_causal))) for t in targets]
                rows += 1
                if None in found:
                    dropped += 1
                    continue
                fit[unit.bucket] += 1
                others[unit.bucket] += sum(np.mean(one, 0) for one in found if one is not None)
                matched[unit.bucket] += sum(words[:, source, t] for t in targets)
        for kind, want in (("others", others), ("matched", matched)):
            got, counts = relations.tally.per_bucket(f"{question} {kind}")
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{question} {kind}")
            np.testing.assert_array_equal(counts, np.tile(fit[:, None], 3), err_msg=question)
        if rows:
            assert relations.coverage()[number] == pytest.approx(fit.sum() / rows), question
    assert dropped > 20


def previous_word(units: list[Unit], is_causal: bool) -> Relations:
    """A hard head from each word to the one before, words being single tokens."""
    relations = Relations.of(Tally(1), documents_of(units), is_causal)
    for unit in units:
        batch, n = make_batch([unit]), len(unit.ids)
        scores = 200.0 * torch.eye(n).roll(-1, 1).tril().double()
        scores[0, 0] = 200.0  # it has nobody before it
        Runner(relations.tally, [relations]).see(call(batch, is_causal, 1, scores[None, None]), batch, 0)
    return relations


def single_tokens(arcs: list[list[tuple[int, int]]], n: int = 9) -> list[Unit]:
    words = ("a", "b", "c", "d", "look", "back", "head", "attend", "a")[:n]
    return [unit_of(i, Document.of(words, [Relation("det", s, t) for s, t in some])) for i, some in enumerate(arcs)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_previous_word_head_is_no_syntax(is_causal: bool) -> None:
    arcs = [[(2, 1), (5, 4), (7, 2), (3, 6)], [(8, 7), (6, 2), (4, 3)], [(3, 1), (5, 4)], [(2, 5)]]
    relations = previous_word(single_tokens(arcs), is_causal)
    flat = [(s, t) for some in arcs for s, t in some if t < s or not is_causal]
    share = np.mean([t == s - 1 for s, t in flat])
    assert relations.tally.mean("det > hits") == pytest.approx([share])
    coverage = (
        6 / 8 if is_causal else 1
    )  # 8 alone sees 8 words; 2 → 0 is a look at the first word, so 3 → 1 is alone too
    assert relations.coverage()[relations.questions.index("det >")] == coverage
    (mass, counts), (others, _) = (relations.tally.per_bucket(f"det > {kind}") for kind in ("matched", "others"))
    assert mass.sum() == pytest.approx(others.sum(), abs=1e-9), "no excess at all"
    assert counts.sum() == coverage * len(flat)


def test_strata_without_other_pairs_are_left_out() -> None:
    """Every pair of neighbours is an arc: there is nothing to compare a previous-word head with, so it has no excess."""
    everywhere = [[(i, i - 1) for i in range(1, 9)] + [(6, 2)], [(i, i - 1) for i in range(1, 9)] + [(8, 3)]] * 6
    relations = previous_word(single_tokens(everywhere), is_causal=True)
    coverage = relations.coverage()[relations.questions.index("det >")]
    assert coverage == 0, "words 6 and 8 look at a neighbour too, so that no row can be compared"
    for case in make_cases(relations.tally, relations, "det"):
        if case.role.detail == ">":
            assert case.mean(0) == pytest.approx([0]), "without excess weight a head follows nothing"


def test_what_cannot_be_compared_is_left_out_and_does_not_dilute() -> None:
    """Seven of eight rows have nothing beside them; the eighth has, and its excess is told whole, not an eighth of it."""
    arcs = [(i, i - 1) for i in range(2, 9)] + [(1, 5)]  # every neighbour but the first word, where heads rest
    relations = Relations.of(Tally(1), documents_of(units := single_tokens([arcs] * 12)), causal=False)
    for unit in units:
        batch, n = make_batch([unit]), len(unit.ids)
        scores = torch.zeros(n, n).double()
        scores[1, 5] = 200.0
        Runner(relations.tally, [relations]).see(call(batch, False, 1, scores[None, None]), batch, 0)
    matched, others = (relations.tally.mean(f"det > {kind}")[0] for kind in ("matched", "others"))
    assert matched == pytest.approx(1)
    assert others == pytest.approx(1 / 9), "0 → 4, 2 → 6, 3 → 7 and 4 → 8 look everywhere alike"
    assert relations.coverage()[relations.questions.index("det >")] == pytest.approx(1 / 8)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_a_perfect_head_scores_one_however_many_targets(targets: int) -> None:
    """It shares its weight out over all of them, or looks at one."""
    arcs = [(8, t) for t in (2, 4, 5)[:targets]]
    for spread_out in (True, False):
        relations = Relations.of(Tally(1), documents_of(units := single_tokens([arcs] * 12)), causal=True)
        for unit in units:
            batch, n = make_batch([unit]), len(unit.ids)
            scores = torch.zeros(n, n).double()
            scores[8, [t for _, t in arcs][: None if spread_out else 1]] = 200.0
            Runner(relations.tally, [relations]).see(call(batch, True, 1, scores[None, None]), batch, 0)
        for kind in ("hits", "mass", "valued hits", "valued mass"):
            assert relations.tally.mean(f"det > {kind}") == pytest.approx([1]), kind


def test_pairs_of_words_of_one_class_need_others_too() -> None:
    """All words are of one class: a head of any kind has nothing to show, for no pair is of two classes."""
    words = ("a", "b", "c", "d", "look", "back")
    units = [unit_of(i, Document.of(words, classes=["N"] * 6)) for i in range(12)]
    relations = previous_word(units, is_causal=True)
    case = next(c for c in make_cases(relations.tally, relations) if c.role.name == "part of speech")
    assert not np.nan_to_num(case.gain(1)) > 0


def test_the_best_offset_is_fitted_on_the_half_for_choosing() -> None:
    """Even numbers choose: there −1 is best; odd ones report, where −3 would have been better."""
    arcs = [[(4, 3), (5, 4), (8, 5)] if i % 2 == 0 else [(4, 1), (5, 2), (8, 7)] for i in range(20)]
    relations = previous_word(single_tokens(arcs), is_causal=True)
    case = next(c for c in make_cases(relations.tally, relations, "det") if c.role.detail == ">")
    assert case.null(0) == pytest.approx([2 / 3])
    assert case.null(1) == pytest.approx([1 / 3]), "the share of −1, not of −3"


def test_arcs_by_offset() -> None:
    units = make_units(framed=True, count=20, seed=7)
    relations, _ = listened([make_batch(units)], is_causal=False)
    number = relations.questions.index("det >")
    want = Counter(t - s for unit in units for s, t in asked(unit, "det >", False))
    got = relations.offsets[:, number].sum(0)
    assert got.tolist() == [want[offset] for offset in range(-5, 6)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_head_that_looks_at_no_word_hits_none(is_causal: bool) -> None:
    """All weight on [CLS]: words get nothing, and nothing is no hit, not even on the word that comes first."""
    units = [unit_of(i, Document.of("abcd", [Relation("det", 2, 0), Relation("det", 3, 0)]), True) for i in range(3)]
    batch = make_batch(units)
    relations = Relations.of(Tally(1), documents_of(units), is_causal)
    scores = torch.zeros(3, 1, 6, 6).double()
    scores[..., 0] = 2000.0
    Runner(relations.tally, [relations]).see(call(batch, is_causal, 1, scores), batch, 0)
    assert relations.tally.mean("det > mass") == pytest.approx([0])
    assert relations.tally.mean("det > hits") == pytest.approx([0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_batch_is_as_its_texts_one_by_one(side: str, is_causal: bool) -> None:
    """Some of its texts have no relations, and rows of padding may hold anything, NaN too."""
    units = [replace(unit, document=None) if place % 3 == 1 else unit for place, unit in enumerate(make_units(True))]
    batch = make_batch(units, side)
    B, T = batch.ids.shape
    scores = torch.randn(B, 3, T, T, generator=torch.Generator().manual_seed(5)).double()
    torn = scores.masked_fill(~batch.real[:, None, :, None], torch.nan)
    together, apart = (Relations.of(Tally(3), documents_of(units), is_causal) for _ in range(2))
    Runner(together.tally, [together]).see(call(batch, is_causal, scores=torn), batch, 0)
    for row, unit in enumerate(units):
        here = slice(int(batch.first[row]), int(batch.first[row]) + len(unit.ids))
        alone, whole = make_batch([unit]), call(batch, is_causal, scores=scores)
        mask = causal() if is_causal else None
        seen = by_scores(scores[row : row + 1, :, here, here], mask, norms=whole.v[row, 0, here, 0])
        Runner(apart.tally, [apart]).see(seen, alone, 0)
    assert together.arcs.sum() > 0
    bare = make_batch([unit for unit in units if unit.document is None], side)  # a batch in which nothing is asked
    Runner(together.tally, [together]).see(call(bare, is_causal), bare, 0)
    for name, array in together.arrays().items():
        np.testing.assert_array_equal(array, apart.arrays()[name])
    for number in together.numbers:
        for mine, theirs in zip(
            together.tally.per_bucket(number.name), apart.tally.per_bucket(number.name), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
