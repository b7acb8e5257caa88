from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.compression.prune import prune
from headwise.errors import HeadwiseError
from headwise.experiments import pretrained_model
from headwise.experiments.claim import WORDS
from headwise.experiments.claims import early_late
from headwise.experiments.claims.early_late import CLAIM, GAP, THIRDS, Thirds, judge, measure, on, thirds
from headwise.experiments.depth import deep
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer, make_tokenizer
from headwise.text.documents import Document, Relation
from tests.experiments.tiny import tiny_lab

SAID = ("local early", "syntactic early", "long range late", "semantic late")


def gaps(*values):
    return [(GAP, f"{said} (trained)", value) for said, value in zip(SAID, values, strict=True)]


CASES = {
    "holds": gaps([0.2, 0.21, 0.2], [0.1, 0.11, 0.1], [0.2, 0.21, 0.2], [0.1, 0.11, 0.1]),
    "does not hold": gaps([0.2, 0.21, 0.2], [0.0, 0.01, 0.0], [-0.2, -0.21, -0.2], [-0.1, -0.11, -0.1]),
    "depends": gaps([0.2, 0.21, 0.2], [0.1, 0.11, 0.1], [0.0, 0.01, 0.0], [-0.1, -0.11, -0.1]),
}


def test_the_verdict_names_what_is_shown():
    figures = Figures()
    for name, at, values in CASES["depends"]:
        figures.add(name, at, values)
    shown, missed = judge(figures).on.split("not so")
    assert "local early" in shown
    assert "semantic late" in missed


SHOWN, MISSED, OPEN = [0.2, 0.21, 0.2], [0.0, 0.01, 0.0], [-0.1, 0.1, 0.2]


@pytest.mark.parametrize(
    ("values", "word", "on"),
    [
        ((SHOWN, OPEN, OPEN, OPEN), "depends", "on the seed, or the text; shown: local early (trained); open: syn"),
        ((MISSED, MISSED, OPEN, OPEN), "depends", "on what is meant, and where; not so: local early"),
        ((MISSED, MISSED, MISSED, OPEN), "does not hold", "open: semantic late"),
        ((MISSED, MISSED, MISSED, MISSED), "does not hold", ""),
    ],
)
def test_an_open_question_is_not_answered(values, word, on):
    figures = Figures()
    for row in gaps(*values):
        figures.add(*row)
    verdict = judge(figures)
    assert verdict.word == word
    assert verdict.on.startswith(on)


def test_what_is_said_to_be_long_range_is_what_is_measured(lab):
    # Uniform heads over n tokens: row i has i/(i+1) off the first token, and i − 32 of its i + 1 keys, the first left out,
    # lie 32 or more back.
    tokenizer = byte_tokenizer()
    model = Transformer(replace(_spec(lab, layers=3), vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    n = 90
    text = "".join(map(chr, range(33, 33 + n)))  # all different: what was seen before is not counted as long range
    far, awake = (sum(f(i) for i in range(n)) for f in (lambda i: max(0, i - 32) / (i + 1), lambda i: i / (i + 1)))
    found = thirds(model, [text, text[::-1]])["long range"].values
    assert found == pytest.approx([far / awake] * 3, rel=1e-4)
    assert "and 32 or more away" in CLAIM.setup


def test_a_damaged_bundle_is_not_an_absent_one(tmp_path, monkeypatch):
    # A folder that can be imported, and has nothing in it.
    monkeypatch.setitem(
        pretrained_model.BUNDLES, pretrained_model.BUNDLE, ("damaged==0", "damaged_bundle", "model.gguf")
    )
    assert early_late.installed() is None
    assert CLAIM.also() == ""
    (tmp_path / "damaged_bundle").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert CLAIM.also() == pretrained_model.BUNDLE
    with pytest.raises(HeadwiseError):
        early_late.installed()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return tiny_lab(tmp_path_factory.mktemp("lab"))


def test_uniform_heads_differ_in_nothing(lab):
    # Keys of zero: every head looks everywhere alike, in every layer; none follows a relation better than an offset.
    model = Transformer(_spec(lab, layers=3))
    model.tokenizer = make_tokenizer("word", lab.documents())
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    for name, found in thirds(model, lab.documents()).items():
        assert np.ptp(found.values) < 1e-5, name


def test_a_window_makes_the_first_layers_local(lab):
    model = Transformer(_spec(lab, layers=3, windows=(3, None, None)))  # a query of layer 0 sees 0, 1 and 2 back
    model.tokenizer = make_tokenizer("word", lab.documents())
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    found = thirds(model, lab.documents())
    local, far = found["local"], found["long range"]
    # Two of three tokens seen are not the query's own; of the second and third of a text fewer, when its first is left out.
    assert local.values[0] == pytest.approx(2 / 3, abs=0.02)
    assert far.values[0] == pytest.approx(0, abs=1e-6)
    assert local.gap(0, 2).mean == pytest.approx(local.values[0] - local.values[2])
    assert local.gap(0, 2).above(0.3)
    assert far.gap(0, 2).below(0)


def test_small_models_are_measured_and_judged(lab, monkeypatch):
    monkeypatch.setattr(early_late, "installed", lambda: None)
    figures = measure(lab)
    for name in CLAIM.picture.figures:
        assert list(figures.at(name)) == [f"trained: {third}" for third in THIRDS]
    assert [str(at) for at in figures.at(GAP)] == [f"{said} (trained)" for said in SAID]
    first, last = (figures["local", f"trained: {THIRDS[part]}"].mean for part in (0, 2))
    assert figures[GAP, "local early (trained)"].mean == pytest.approx(first - last)
    assert judge(figures).word in WORDS


def test_a_given_model_and_what_it_must_be(lab):
    model = lab.made(deep(lab).point(0)).model()
    figures = on(model, lab.documents())
    assert len(figures.at(GAP)) == 4
    assert judge(figures).word in WORDS
    with pytest.raises(HeadwiseError, match="three layers"):
        thirds(lab.made(lab.point(0)).model())
    with pytest.raises(HeadwiseError, match="no heads left"):
        thirds(prune(model, heads="0-1.*", by="random", fold=False), lab.documents())
    with pytest.raises(HeadwiseError, match="longer texts"):
        thirds(model, [Document.of(["the", "dog", "sees"], [Relation("determiner-noun", 0, 1)])])


def test_of_one_text_there_is_no_interval():
    found = Thirds(np.array([[1.0, 2.0, 3.0]]), np.array([[4.0, 4.0, 4.0]]))
    assert found.values == [0.25, 0.5, 0.75]
    assert found.gap(2, 0) == Figure.over(0.5)


def test_short_documents_are_laid_end_to_end():
    model = Transformer(ModelSpec(300, 256, 3, AttentionSpec(width=8, heads=2)))
    model.tokenizer = byte_tokenizer()
    texts, related = early_late._reading(model)
    assert len(texts) == early_late.TEXTS
    assert len(related) == 668
    halves = [{arc.name for document in related[half::2] for arc in document.relations} for half in (0, 1)]
    assert halves[0] == halves[1] >= {"related", "unrelated"}
    assert min(len(text.split()) for text in texts) > 100


def _spec(lab, **more):
    vocab = len(make_tokenizer("word", lab.documents()))
    size = lab.size
    return ModelSpec(
        **{"vocab": vocab, "context": 128, "attention": AttentionSpec(width=size.width, heads=size.heads), **more}
    )
