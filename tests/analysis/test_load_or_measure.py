"""Stored profiles, importances and descriptions: equal to measured ones, and never those of another model or setting."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.analysis import load_or_measure
from headwise.analysis.head_facts import composition_partners, measure_related_heads, nearest_heads
from headwise.analysis.load_or_measure import (
    ModelKey,
    as_whole_layer_patterns,
    corpus_key_fields,
    find_default_corpus_profile,
    load_or_measure_importance,
    load_or_measure_profile,
)
from headwise.cli import app
from headwise.io.result_store import ResultStore
from headwise.text.annotated_document import Document, Relation
from headwise.ui.stored_head_descriptions import HeadDescriptionStore
from tests.analysis.models import TEXTS, character_model
from tests.contract.attached_models import cached_model
from tests.contract.layers import MODELS


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results")


def decoder(**changes: Any) -> hw.Transformer:
    return character_model(MODELS["decoder"], **changes)


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{name} was measured again")

    monkeypatch.setattr(load_or_measure, name, fail)


def test_second_profile_is_read_and_equal(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_or_measure_profile(decoder(), TEXTS, store=store, causal=False)
    assert first.to_dict() == hw.profile(decoder(), TEXTS, causal=False).to_dict()
    forbid(monkeypatch, "profile")
    second = load_or_measure_profile(decoder(), TEXTS, store=store, causal=False)
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
    assert first.table() == second.table()
    assert first.summary("0.1").lines == second.summary("0.1").lines


def test_keys_differ_for_any_change(store: ResultStore) -> None:
    """One weight, the dtype, pruning, the tokenizer, the spec."""
    changed = decoder()
    with torch.no_grad():
        next(iter(changed.parameters())).view(-1)[0] += 1e-3
    other_tokenizer = decoder()
    other_tokenizer.tokenizer = character_model(MODELS["encoder"]).tokenizer
    other_tokenizer.tokenizer.special["eos"] = 11  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    models = [decoder(), changed, decoder().float(), decoder().prune("0.1"), other_tokenizer, cached_model("llama")]
    keys = [ModelKey.of(model) for model in models]
    assert len({json.dumps(key.to_dict()) for key in keys if key is not None}) == len(models)
    assert ModelKey.of(decoder()) == keys[0]


def test_corpus_keys_differ_in_texts_and_relations() -> None:
    model = decoder()
    words = ["the", "cat", "sat"]
    corpora: list[Any] = [
        TEXTS, TEXTS[:2], [Document.of(words, [Relation("det", 1, 0)])], [Document.of(words, [Relation("det", 2, 0)])],
        [" ".join(words)],
    ]  # fmt: skip
    assert len({json.dumps(corpus_key_fields(model, corpus)) for corpus in corpora}) == len(corpora)


def test_silenced_model_neither_reads_nor_writes(store: ResultStore) -> None:
    model = decoder()
    full = load_or_measure_profile(model, TEXTS, store=store, causal=False)
    with model.heads["0.*"].silenced():
        assert ModelKey.of(model) is None
        silenced = load_or_measure_profile(model, TEXTS, store=store, causal=False)
        assert find_default_corpus_profile(model, store) is None
    assert len(store.list_entries()) == 1
    assert silenced.to_dict()["heads"] != full.to_dict()["heads"]


def test_importance_is_stored_layer_by_layer(store: ResultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    expected = hw.importance(model, TEXTS)
    layer = load_or_measure_importance(model, TEXTS, ["1.*"], store=store)
    assert [str(address) for address in layer.addresses] == [str(a) for a in model.spec.head_addresses if a.layer == 1]
    joined = load_or_measure_importance(model, TEXTS, as_whole_layer_patterns(model, "*"), store=store)
    forbid(monkeypatch, "importance")
    again = load_or_measure_importance(model, TEXTS, as_whole_layer_patterns(model, "*"), store=store)
    for result in (joined, again):
        assert result.addresses == expected.addresses
        np.testing.assert_allclose(result.mean, expected.mean, atol=1e-6)
        np.testing.assert_allclose(result.interval, expected.interval, atol=1e-6)
        np.testing.assert_allclose(result.above_layer, expected.above_layer, atol=1e-6)
        assert result.clean_loss == pytest.approx(expected.clean_loss, rel=1e-6)


def test_whole_layers_of_patterns() -> None:
    model = decoder()
    assert as_whole_layer_patterns(model, "1.*") == ["1.*"]
    assert as_whole_layer_patterns(model, "0.1") == []
    assert as_whole_layer_patterns(model, "0.*,1.0") == []


def test_damaged_result_is_measured_again(store: ResultStore) -> None:
    model = decoder()
    first = load_or_measure_importance(model, TEXTS, ["0.*"], store=store)
    (result,) = store.list_entries()
    store.write(result.kind, result.key, b"not a result", result.description)
    np.testing.assert_array_equal(load_or_measure_importance(model, TEXTS, ["0.*"], store=store).mean, first.mean)


def test_no_pickle_in_stored_files(store: ResultStore) -> None:
    load_or_measure_profile(decoder(), TEXTS, store=store, causal=False)
    load_or_measure_importance(decoder(), TEXTS, ["0.*"], store=store)
    for result in store.list_entries():
        assert b"cnumpy" not in result.path.read_bytes()
        assert b"\x80\x04\x95" not in result.path.read_bytes()[:4096]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return decoder().save(tmp_path / "model")


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert done.exit_code == 0, (words, done.exception, done.output)
    return done.stdout


def test_describe_command_reads_the_second_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    words = ("describe", str(folder), "0.1", str(texts))
    first = run(*words)
    listed = run("store", "--json")
    assert run(*words, "--no-store") == first
    assert len(json.loads(run("store", "--json"))["results"]) == len(json.loads(listed)["results"])
    monkeypatch.setattr("headwise.weights.load", None)  # a second call does not load the model
    assert run(*words) == first
    data = json.loads(run(*words, "--json"))
    assert all(line["text"] in " ".join(first.split()) or len(line["text"]) > 90 for line in data["summary"])


def test_description_key_changes_with_weights(folder: Path) -> None:
    store = ResultStore()
    before = HeadDescriptionStore(store, str(folder), "0.1", None).key
    assert HeadDescriptionStore(store, str(folder), "0.1", None).key == before
    others = [
        HeadDescriptionStore(store, str(folder), "0.2", None),
        HeadDescriptionStore(store, str(folder), "0.1", "the cat"),
        HeadDescriptionStore(store, str(folder), "0.1", None, {"prompts": True}),
    ]
    model = hw.load(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    model.save(folder)
    others.append(HeadDescriptionStore(store, str(folder), "0.1", None))
    assert len({before, *(other.key for other in others)}) == 5


def test_store_command_lists_locates_and_prunes(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    assert "No results" in run("store")
    run("profile", str(folder), str(texts), "--no-causal")
    run("importance", str(folder), str(texts), "--max-texts", "2")
    listed = run("store")
    assert "profile" in listed
    assert "importance" in listed
    assert Path(run("store", "--path").strip()).is_dir()
    assert {row["kind"] for row in json.loads(run("store", "--kind", "profile", "--json"))["results"]} == {"profile"}
    assert json.loads(run("store", "--prune", "0", "--json"))["results"] == []


def test_scan_finds_roles_in_the_store() -> None:
    model = decoder()
    assert hw.scan(model, "a cat").profile_name == ""
    profile = load_or_measure_profile(model, None, store=ResultStore(), causal=False)
    assert hw.scan(model, "a cat").profile_name == profile.metadata["corpus"]
    assert hw.scan(model, "a cat", store=False).profile_name == ""


def test_describe_function_uses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    first = hw.describe(model, "0.1", TEXTS)
    forbid(monkeypatch, "profile")
    forbid(monkeypatch, "importance")
    assert hw.describe(model, "0.1", TEXTS).lines == first.lines
    with pytest.raises(AssertionError, match="measured again"):
        hw.describe(model, "0.1", TEXTS, store=False)


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut"])
def test_related_heads_of_one_head_equal_those_of_all_heads(name: str) -> None:
    model = character_model(MODELS[name])
    partners, nearest = composition_partners(model), nearest_heads(model)
    for address in model.spec.head_addresses:
        facts = measure_related_heads(model, address)
        assert (facts.reads_from, facts.read_by) == partners.get(str(address), (None, None))
        assert [list(item) for item in facts.similar_heads] == nearest[str(address)]
