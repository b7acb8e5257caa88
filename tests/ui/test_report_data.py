"""The book holds what the profile, the recording and the attribution hold; a byte is never farther off than it says."""

import json
import zlib
from base64 import b64decode

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.ov_analysis import value_weighted, write_share
from headwise.analysis.metrics.top_contexts import Context
from headwise.analysis.recording.attention_maps import attend
from headwise.analysis.recording.recording import record
from headwise.analysis.roles.best_heads import best_heads
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Verdict
from headwise.experiments.claims.parameters import CLAIM
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.run import Result
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from headwise.ui import sentence_view as kept
from headwise.ui.claims_view import claims_book, tell
from headwise.ui.report_data import _context, make_book, make_sentence, page_files
from headwise.ui.sentence_view import as_bytes


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    spec = ModelSpec(vocab=300, context=512, layers=3, attention=AttentionSpec(width=20, heads=4, head_dim=5))
    made = hw.Transformer(spec.without("1.2"))
    made.tokenizer = byte_tokenizer()
    with torch.no_grad():
        for head in made.heads:
            head.W_Q.mul_(6)  # peaked maps
    return made


@pytest.fixture(scope="module")
def profile(model):
    documents = list(Corpus.probe().items())[:120]
    return hw.profile(model, documents, causal=False)


def numbers(text):
    return np.frombuffer(zlib.decompress(b64decode(text)), "u1")


def pairs(text):
    low, high = np.split(numbers(text).astype(int), 2)
    return low + 256 * high


def test_a_byte_is_off_by_at_most_the_root_of_the_weight_over_255():
    p = np.linspace(0, 1, 100_001)
    off = np.abs((as_bytes(p) / 255.0) ** 2 - p)
    assert (off <= np.sqrt(p) / 255 + 1 / (2 * 255) ** 2 + 1e-12).all()  # (√p ± 1/510)² − p
    assert off.max() < 1 / 255


def test_maps_and_lengths_are_those_of_the_heads(model):
    text = "It was soft, so it sat."
    made = make_sentence(model, text)
    n, heads = len(made["tokens"]), made["heads"]
    assert heads == [str(a) for a in model.spec.addresses]
    assert "1.2" not in heads  # cut heads leave a gap
    maps = (numbers(made["maps"]).reshape(len(heads), n, n) / 255.0) ** 2
    for place, head in enumerate(heads):
        exact = attend(model, text, head, words=False).map().numpy()
        assert np.abs(maps[place] - exact).max() < 1 / 255
    lengths = pairs(made["norms"]["data"]).reshape(len(heads), n) / 65535 * np.array(made["norms"]["top"])[:, None]
    with torch.no_grad(), record(model, "2.3", what="v") as recording:
        model(torch.tensor([model.tokenizer.encode(text)]))
        exact = (recording["2.3"].v[0] @ model.heads["2.3"].W_O).norm(dim=-1).numpy()
    assert np.allclose(lengths[heads.index("2.3")], exact, rtol=1e-3, atol=1e-4 * exact.max())


def test_what_the_page_weighs_by_value_is_what_is_measured(model):
    text = "It was soft, so it sat."
    made = make_sentence(model, text, heads="2.3")
    n = len(made["tokens"])
    p = (numbers(made["maps"]).reshape(n, n) / 255.0) ** 2
    weighed = p * (pairs(made["norms"]["data"]) / 65535 * made["norms"]["top"][0])
    weighed /= weighed.sum(1, keepdims=True)  # as sight.js does
    exact = value_weighted(model, text, "2.3", words=False).weighted.numpy()
    assert np.abs(weighed - exact).max() < 0.01


def test_shares_are_those_of_the_write(model):
    text = "It was soft, so it sat."
    made = make_sentence(model, text)
    shares = numbers(made["shares"]).reshape(len(made["heads"]), -1) / 255.0
    exact = write_share(model, [text])
    for place, head in enumerate(made["heads"]):
        assert abs(shares[place].mean() - exact[head].norm_share) < 1 / 255


def test_large_sights_keep_thumbnails_and_the_strongest(model, monkeypatch):
    text = "The cat sat on the mat because it was soft, and it slept."
    whole = make_sentence(model, text)
    monkeypatch.setattr(kept, "WHOLE", 0)
    made = make_sentence(model, text)
    n, H, k = len(made["tokens"]), len(made["heads"]), made["per_row"]
    maps = numbers(whole["maps"]).reshape(H, n, n)
    thumbs = numbers(made["thumbs"]).reshape(H, made["thumb"], made["thumb"])
    assert (thumbs.max((1, 2)) == maps.max((1, 2))).all()
    weights, columns = numbers(made["weights"]).reshape(H, n, k), pairs(made["columns"]).reshape(H, n, k)
    expected = -np.sort(-maps.astype(int), -1)[..., :k]
    loud = expected >= 255 * np.sqrt(kept.FAINT) + 1
    assert loud.any()
    assert (weights[loud] == expected[loud]).all()
    assert (np.take_along_axis(maps, columns.astype(int), -1)[loud] == expected[loud]).all()
    assert (weights[expected <= 255 * np.sqrt(kept.FAINT) - 1] == 0).all()


def test_the_next_word_and_what_heads_add_to_it(model):
    made = make_sentence(model, "It was so")["next"]
    with torch.no_grad():
        logits = model(torch.tensor([model.tokenizer.encode("It was so")]))[0, -1].double()
    p = torch.softmax(logits, -1)
    assert made["likely"][0][1] == pytest.approx(float(p.max()), rel=1e-5)
    assert len(made["likely"]) == 10
    assert made["logit"] == pytest.approx(float(logits.max()), abs=1e-4)
    assert sum(made["shares"].values()) + sum(made["rest"].values()) == pytest.approx(made["logit"], abs=1e-4)


def test_long_texts_are_cut_and_empty_ones_refused(model):
    made = make_sentence(model, "so it sat " * 30, most_tokens=40)
    assert len(made["tokens"]) == 40
    assert made["cut_from"] == len(model.tokenizer.encode("so it sat " * 30))
    with pytest.raises(HeadwiseError, match="no text"):
        make_sentence(model, "  ")


def test_the_book_says_what_the_profile_says(model, profile):
    book = make_book(profile, model, name="small", sentences=["It sat."])
    assert json.loads(json.dumps(book, allow_nan=False)) == book
    assert [len(layer["heads"]) for layer in book["model"]["layers"]] == [4, 3, 4]
    for told, head in zip(book["heads"], profile, strict=True):
        assert told["address"] == str(head.address)
        assert (told["role"], told["rung"], told["score"], told["null"]) == (
            head.role,
            head.rung,
            head.score,
            head.null,
        )
        assert told["measures"]["entropy"] == pytest.approx(head.measures["entropy"], rel=1e-5)
        assert dict(map(tuple, told["offsets"]))[1] == pytest.approx(head.measures["offset 1"], rel=1e-5, abs=1e-12)
        assert [one["weight"] for one in told["hardest"]] == [one.weight for one in head.hardest[:5]]
        assert [one["role"] for one in told["cases"]] == told["roles"] == [one.role for one in head.roles]
        assert len(told["nearest"]) == 5
        assert told["address"] not in dict(told["nearest"])
    best = {row.relation: row for row in best_heads(profile, 20)}
    assert set(best) == {row["relation"] for row in book["relations"]["rows"]}
    for row in book["relations"]["rows"]:  # the best head's cell is what is reported of it
        cell = row["scores"][book["relations"]["heads"].index(row["head"])]
        assert cell == pytest.approx(best[row["relation"]].accuracy, rel=1e-5)


def test_without_the_model_less_is_told_but_nothing_else(profile):
    book = make_book(profile)
    assert all(head["writes"] is None and head["nearest"] == [] for head in book["heads"])
    with pytest.raises(HeadwiseError, match="its model is needed"):
        make_book(profile, sentences=["It sat."])


def test_claims_are_told_once_whether_as_results_or_told_before(profile):
    figures = Figures().add("parameters", 1, 64).add("most over fewest", "plain", 1)
    result = Result(CLAIM, figures, Verdict("holds"), (0,))
    book = make_book(profile, claims=[result, *tell([result])])
    assert book["claims"] == tell([result]) * 2
    assert set(book) == set(claims_book([result]))  # a book of claims alone has every page of a book
    assert make_book(profile)["claims"] == []


def test_marks_become_parts_even_among_brackets():
    seen = Context("[CLS]", "*", 0.5, 0, 0, 2, "[[CLS]] [a] *** b")
    assert _context(seen)["parts"] == [["token", "[CLS]"], ["", " [a] "], ["attended", "*"], ["", " b"]]
    back = Context("it", "cat", 0.5, 0, 2, 0, "*cat* saw [it]")
    assert _context(back)["parts"] == [["attended", "cat"], ["", " saw "], ["token", "it"]]


def test_the_page_is_made_of_small_files_that_are_all_there():
    page = page_files()
    assert {"index.html", "style.css", "main.js"} <= set(page)
    assert all(content.decode().count("\n") <= 400 for content in page.values())
