"""Report data match the profile, the recording and the attribution within the error bound of a byte."""

import json
import zlib
from base64 import b64decode

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis import sentence_recording
from headwise.analysis.attribution.head_output_scores import output_shares, value_weighted_map
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.recording.attention_maps import attention_maps
from headwise.analysis.recording.recording import record
from headwise.analysis.roles.best_relation_heads import best_relation_heads
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Verdict
from headwise.experiments.claim_tests.parameter_count import CLAIM
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.run_claims import ClaimResult
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.text.corpus import Corpus
from headwise.ui.claims_page_data import claim_dicts, claims_report_data
from headwise.ui.report_data import _attention_context_data, make_report_data, make_sentence_data, page_files
from headwise.ui.sentence_page_data import to_sqrt_bytes


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    spec = ModelSpec(vocab=300, context=512, layers=3, attention=AttentionSpec(width=20, heads=4, head_dim=5))
    transformer = hw.Transformer(spec.without("1.2"))
    transformer.tokenizer = byte_tokenizer()
    with torch.no_grad():
        for head in transformer.heads:
            head.W_Q.mul_(6)  # peaked maps
    return transformer


@pytest.fixture(scope="module")
def profile(model):
    documents = list(Corpus.probe_set().items())[:120]
    return hw.profile(model, documents, causal=False)


def decode_uint8(text):
    return np.frombuffer(zlib.decompress(b64decode(text)), "u1")


def decode_uint16(text):
    low, high = np.split(decode_uint8(text).astype(int), 2)
    return low + 256 * high


def test_as_bytes_error_within_bound():
    p = np.linspace(0, 1, 100_001)
    error = np.abs((to_sqrt_bytes(p) / 255.0) ** 2 - p)
    assert (error <= np.sqrt(p) / 255 + 1 / (2 * 255) ** 2 + 1e-12).all()  # (√p ± 1/510)² − p
    assert error.max() < 1 / 255


def test_make_sentence_maps_and_norms_equal_heads(model):
    text = "It was soft, so it sat."
    sentence = make_sentence_data(model, text)
    n, heads = len(sentence["tokens"]), sentence["heads"]
    assert heads == [str(a) for a in model.spec.head_addresses]
    assert "1.2" not in heads  # pruned heads are absent
    maps = (decode_uint8(sentence["maps"]).reshape(len(heads), n, n) / 255.0) ** 2
    for index, head in enumerate(heads):
        exact = attention_maps(model, text, head, words=False).map().numpy()
        assert np.abs(maps[index] - exact).max() < 1 / 255
    lengths = (
        decode_uint16(sentence["norms"]["data"]).reshape(len(heads), n)
        / 65535
        * np.array(sentence["norms"]["top"])[:, None]
    )
    with torch.no_grad(), record(model, "2.3", tensors="v") as recording:
        model(torch.tensor([model.tokenizer.encode(text)]))
        exact = (recording["2.3"].v[0] @ model.heads["2.3"].W_O).norm(dim=-1).numpy()
    assert np.allclose(lengths[heads.index("2.3")], exact, rtol=1e-3, atol=1e-4 * exact.max())


def test_make_sentence_value_weighted_maps_equal_analysis(model):
    text = "It was soft, so it sat."
    sentence = make_sentence_data(model, text, heads="2.3")
    n = len(sentence["tokens"])
    p = (decode_uint8(sentence["maps"]).reshape(n, n) / 255.0) ** 2
    weighted = p * (decode_uint16(sentence["norms"]["data"]) / 65535 * sentence["norms"]["top"][0])
    weighted /= weighted.sum(1, keepdims=True)  # as sight.js does
    exact = value_weighted_map(model, text, "2.3", words=False).weighted.numpy()
    assert np.abs(weighted - exact).max() < 0.01


def test_make_sentence_shares_equal_write_share(model):
    text = "It was soft, so it sat."
    sentence = make_sentence_data(model, text)
    shares = decode_uint8(sentence["shares"]).reshape(len(sentence["heads"]), -1) / 255.0
    exact = output_shares(model, [text])
    for index, head in enumerate(sentence["heads"]):
        assert abs(shares[index].mean() - exact[head].norm_fraction) < 1 / 255


def test_make_sentence_large_maps_keep_thumbnails_and_top_edges(model, monkeypatch):
    text = "The cat sat on the mat because it was soft, and it slept."
    full = make_sentence_data(model, text)
    monkeypatch.setattr(sentence_recording, "MAX_FULL_WEIGHTS", 0)
    sentence = make_sentence_data(model, text)
    n, H, k = len(sentence["tokens"]), len(sentence["heads"]), sentence["per_row"]
    maps = decode_uint8(full["maps"]).reshape(H, n, n)
    thumbs = decode_uint8(sentence["thumbs"]).reshape(H, sentence["thumb"], sentence["thumb"])
    assert (thumbs.max((1, 2)) == maps.max((1, 2))).all()
    weights, columns = (
        decode_uint8(sentence["weights"]).reshape(H, n, k),
        decode_uint16(sentence["columns"]).reshape(H, n, k),
    )
    expected = -np.sort(-maps.astype(int), -1)[..., :k]
    above_threshold = expected >= 255 * np.sqrt(sentence_recording.MIN_EDGE_WEIGHT) + 1
    assert above_threshold.any()
    assert (weights[above_threshold] == expected[above_threshold]).all()
    assert (np.take_along_axis(maps, columns.astype(int), -1)[above_threshold] == expected[above_threshold]).all()
    assert (weights[expected <= 255 * np.sqrt(sentence_recording.MIN_EDGE_WEIGHT) - 1] == 0).all()


def test_make_sentence_next_token_shares_sum_to_logit(model):
    next_token = make_sentence_data(model, "It was so")["next"]
    with torch.no_grad():
        logits = model(torch.tensor([model.tokenizer.encode("It was so")]))[0, -1].double()
    p = torch.softmax(logits, -1)
    assert next_token["likely"][0][1] == pytest.approx(float(p.max()), rel=1e-5)
    assert len(next_token["likely"]) == 10
    assert next_token["logit"] == pytest.approx(float(logits.max()), abs=1e-4)
    assert sum(next_token["shares"].values()) + sum(next_token["other_parts"].values()) == pytest.approx(
        next_token["logit"], abs=1e-4
    )


def test_make_sentence_long_text_truncated_empty_raises(model):
    sentence = make_sentence_data(model, "so it sat " * 30, max_tokens=40)
    assert len(sentence["tokens"]) == 40
    assert sentence["truncated_from"] == len(model.tokenizer.encode("so it sat " * 30))
    with pytest.raises(HeadwiseError, match="no text"):
        make_sentence_data(model, "  ")


def test_report_data_equals_profile(model, profile):
    report_data = make_report_data(profile, model, name="small", sentences=["It sat."])
    assert json.loads(json.dumps(report_data, allow_nan=False)) == report_data
    assert [len(layer["heads"]) for layer in report_data["model"]["layers"]] == [4, 3, 4]
    for head_data, head in zip(report_data["heads"], profile, strict=True):
        assert head_data["address"] == str(head.address)
        assert (head_data["role"], head_data["evidence_level"], head_data["score"], head_data["baseline"]) == (
            head.role,
            head.evidence_level,
            head.score,
            head.baseline,
        )
        assert head_data["metrics"]["entropy"] == pytest.approx(head.metrics["entropy"], rel=1e-5)
        assert dict(map(tuple, head_data["offsets"]))[1] == pytest.approx(head.metrics["offset 1"], rel=1e-5, abs=1e-12)
        assert [item["weight"] for item in head_data["top_contexts"]] == [item.weight for item in head.top_contexts[:5]]
        assert (
            [item["role"] for item in head_data["examples"]] == head_data["roles"] == [item.role for item in head.roles]
        )
        assert len(head_data["similar_heads"]) == 5
        assert head_data["address"] not in dict(head_data["similar_heads"])
    best = {row.relation: row for row in best_relation_heads(profile, 20)}
    assert set(best) == {row["relation"] for row in report_data["relations"]["rows"]}
    for row in report_data["relations"]["rows"]:  # the cell of the best head has its reported score
        cell = row["scores"][report_data["relations"]["heads"].index(row["head"])]
        assert cell == pytest.approx(best[row["relation"]].accuracy, rel=1e-5)


def test_report_data_without_model_omits_weights_facts(profile):
    report_data = make_report_data(profile)
    assert all(head["ov"] is None and head["similar_heads"] == [] for head in report_data["heads"])
    with pytest.raises(HeadwiseError, match="requires the model"):
        make_report_data(profile, sentences=["It sat."])


def test_report_data_claims_from_results_or_dicts(profile):
    statistics = StatisticTable().add("parameters", 1, 64).add("most over fewest", "plain", 1)
    result = ClaimResult(CLAIM, statistics, Verdict("holds"), (0,))
    report_data = make_report_data(profile, claims=[result, *claim_dicts([result])])
    assert report_data["claims"] == claim_dicts([result]) * 2
    assert set(report_data) == set(claims_report_data([result]))  # report data with claims only have all keys
    assert make_report_data(profile)["claims"] == []


def test_context_marks_become_parts():
    context = AttentionContext("[CLS]", "*", 0.5, 0, 0, 2, "[[CLS]] [a] *** b")
    assert _attention_context_data(context)["segments"] == [
        ["token", "[CLS]"],
        ["", " [a] "],
        ["attended", "*"],
        ["", " b"],
    ]
    reversed_context = AttentionContext("it", "cat", 0.5, 0, 2, 0, "*cat* saw [it]")
    assert _attention_context_data(reversed_context)["segments"] == [
        ["attended", "cat"],
        ["", " saw "],
        ["token", "it"],
    ]


def test_page_files_are_present_and_small():
    page = page_files()
    assert {"index.html", "style.css", "main.js"} <= set(page)
    assert all(content.decode().count("\n") <= 400 for content in page.values())
