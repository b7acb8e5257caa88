"""Relations in whole models that read letter by letter, and heads that only know an offset."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.relation_metrics import Question
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import Unit, make_batch, run
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.roles import make_cases
from headwise.heads.hook_point import Seen
from headwise.kernels import causal
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.documents import Document, Relation
from tests.analysis.dense_reference import by_scores
from tests.analysis.models import documents_of, reading
from tests.contract.layers import MODELS

ARCS = (
    (Relation("det", 0, 1), Relation("nsubj", 1, 2), Relation("advmod", 3, 2)),
    (Relation("det", 2, 3), Relation("nsubj", 0, 3), Relation("nsubj", 4, 5), Relation("acl", 5, 3)),
    (Relation("det", 0, 1),),
)
DOCUMENTS = [
    Document.of(text.split(), arcs)
    for text, arcs in zip(("the cat sat there", "it was a cat that sat", "a mat"), ARCS, strict=True)
]
KINDS = ("hits", "mass", "valued mass")


def word_map(p: np.ndarray, document: Document) -> np.ndarray:
    """From letters to words, (W, W): the sum over a word's letters, the mean over the letters of who looks."""
    starts = np.cumsum([0, *(len(word) + 1 for word in document.words)])
    places = [range(start, start + len(word)) for start, word in zip(starts, document.words, strict=False)]
    return np.array([[np.mean([sum(p[i, j] for j in to) for i in of]) for to in places] for of in places])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["decoder", "decoder, rotary", "encoder"])
def test_words_of_several_tokens(kind: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "left":
        monkeypatch.setattr(row_blocks, "ROWS", 5)
        monkeypatch.setattr(row_blocks, "CELLS", 300)
    model = reading(MODELS[kind]).float()
    is_causal = model.spec.kind == "decoder"
    units = list(Reading.of(model, DOCUMENTS))
    assert [len(unit.ids) for unit in units] == [len(d.text) for d in DOCUMENTS], "a token is a letter"
    batch, tally = make_batch(units, side), Tally(4)
    relations = Relations.of(tally, documents_of(units), is_causal)
    want = {f"{question} {what}": np.zeros(4) for question in relations.questions for what in KINDS}
    arcs = dict.fromkeys(relations.questions, 0)

    def both(seen: Seen) -> None:
        Runner(relations.tally, [relations]).see(seen, batch, 0)
        p = seen.maps().double()
        lengths = torch.einsum("bhse,hed->bhsd", seen.v[:, list(seen.terms.groups)], seen.site.W_O).norm(dim=-1)
        heavy = p * lengths[:, :, None]
        heavy = heavy / heavy.sum(-1, keepdim=True).clamp(min=1e-30)
        for row, document in enumerate(DOCUMENTS):
            here = slice(int(batch.first[row]), None)
            for h in range(4):
                plain, valued = (word_map(x[row, h, here, here].numpy(), document) for x in (p, heavy))
                best = np.where(np.eye(len(plain)), -1, plain).argmax(-1)
                for arc in document.relations:
                    for way, s, t in ((">", arc.source, arc.target), ("<", arc.target, arc.source)):
                        if t == 0 or (is_causal and t > s):  # where heads rest; what cannot be seen
                            continue
                        question = Question(arc.name, way)
                        arcs[question] += h == 0
                        for what, value in zip(KINDS, (best[s] == t, plain[s, t], valued[s, t]), strict=True):
                            want[f"{question} {what}"][h] += value

    with torch.no_grad(), model.sites()[1].listen(both):
        run(model, batch)
    for name, sums in want.items():
        np.testing.assert_allclose(tally.per_bucket(name)[0].sum(0), sums, atol=1e-5, err_msg=name)
    for question, number in arcs.items():
        assert tally.per_bucket(f"{question} hits")[1].sum(0).tolist() == [number] * 4, question
    assert relations.arcs.sum(0).tolist() == list(arcs.values())


def documents_at_random(seed: int, number: int, words: int = 11) -> list[Document]:
    """Arcs from words to one of the two before, and a phrase somewhere."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        arcs = [Relation("arc", i, i - int(draw.integers(1, 3))) for i in range(2, words) if draw.random() < 0.7]
        start = int(draw.integers(1, words - 3))
        text = tuple(f"w{draw.integers(0, 50)}" for _ in range(words))
        kinds = tuple("NV"[k] for k in draw.integers(0, 2, words))
        made.append(Document(" ".join(text), text, tuple(arcs), kinds, ((start, start + 3),)))
    return made


def listened(documents: list[Document], scores: Tensor, is_causal: bool = True) -> Relations:
    """One head with these scores, (n, n), reads documents of n words, a token each."""
    tokenizer = word_tokenizer([f"w{i}" for i in range(50)])
    units = [
        Unit(number, number, tuple(tokenizer.encode(d.text)), d, partial(tokenizer.align, d.text, d.words))
        for number, d in enumerate(documents)
    ]
    relations = Relations.of(Tally(1), documents_of(units), is_causal)
    for unit in units:
        batch = make_batch([unit])
        Runner(relations.tally, [relations]).see(
            by_scores(scores[None, None], causal() if is_causal else None), batch, 0
        )
    return relations


def back(n: int, offset: int) -> Tensor:
    """So many places back and nowhere else; a row without such a key looks at itself."""
    scores = 90.0 * torch.eye(n).roll(-offset, 1).tril()
    scores[:offset, :offset] += 90.0 * torch.eye(offset)
    return scores


@pytest.mark.parametrize("is_causal", [True, False])
def test_one_word_back_hits_the_arcs_that_lie_there(is_causal: bool) -> None:
    documents = documents_at_random(0, 30)
    relations = listened(documents, back(11, 1), is_causal)
    share = np.mean([arc.source - arc.target == 1 for d in documents for arc in d.relations if arc.target != 0])
    assert float(relations.tally.mean("arc > hits")[0]) == pytest.approx(share)
    assert float(relations.tally.mean("arc > mass")[0]) == pytest.approx(share, abs=1e-6)
    if is_causal:
        assert relations.tally.per_bucket("arc < hits")[1].sum() == 0, "what comes later is not seen"
    for question in relations.questions:
        matched, others = (relations.tally.per_bucket(f"{question} {kind}")[0].sum() for kind in ("matched", "others"))
        assert matched == pytest.approx(others, abs=1e-4), f"excess of {question}"


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_no_offset_is_a_relation(offset: int) -> None:
    relations = listened(documents_at_random(1, 60), back(11, offset))
    for case in make_cases(relations.tally, relations):
        gains = np.nan_to_num([case.gain(half)[0] for half in (0, 1)])
        assert min(gains) < case.role.threshold, f"{case.role.name} {case.role.detail}"


@pytest.mark.parametrize("offset", [1, 2])
def test_pairs_without_others_to_compare_with_say_nothing(offset: int) -> None:
    """Where all pairs at a distance are in one phrase, there is no null, so there is no excess."""
    words = tuple(f"w{i}" for i in range(7))
    relations = listened([Document(" ".join(words), words, (), ("N",) * 7, ((0, 7),))] * 20, back(7, offset))
    for case in make_cases(relations.tally, relations):
        gain = float(case.gain(1)[0])
        assert np.isnan(gain) or gain == pytest.approx(0, abs=1e-6), case.role.name


def test_models_of_double_precision() -> None:
    model = reading(MODELS["decoder"]).float()
    units = list(Reading.of(model, DOCUMENTS))
    batch, made = make_batch(units), []
    for precision in (torch.float32, torch.float64):
        relations = Relations.of(Tally(4), documents_of(units), True)
        with (
            torch.no_grad(),
            model.to(precision).sites()[0].listen(lambda seen, r=relations: Runner(r.tally, [r]).see(seen, batch, 0)),
        ):
            run(model, batch)
        made.append(relations.tally.mean("nsubj < mass"))
    assert made[0] == pytest.approx(made[1], abs=1e-5)
