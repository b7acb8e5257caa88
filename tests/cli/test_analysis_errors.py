"""headwise profile, describe and importance on a small saved model: results on stdout, errors in one line."""

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.analysis.roles.profile_result import Profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.runner import run_command, run_in_subprocess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=3, head_dim=4)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=200, layers=2, attention=attention, mlp_width=7))
    model.tokenizer = tokenizer
    return str(model.save(tmp_path_factory.mktemp("models") / "little"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "little.txt"
    path.write_text(" ".join(d.text for d in Corpus.synthetic(documents=30).items()), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gold") / "gold.conllu"
    rows = [("1", "the", "DET", "2", "det"), ("2", "dog", "NOUN", "3", "nsubj"), ("3", "runs", "VERB", "0", "root")]
    sentence = "\n".join(f"{i}\t{word}\t_\t{kind}\t_\t_\t{head}\t{arc}\t_\t_" for i, word, kind, head, arc in rows)
    path.write_text("\n\n".join([sentence] * 12) + "\n\n", encoding="utf-8")
    return str(path)


def parse_strict_json(text: str) -> Any:
    """Parse strict JSON, without NaN."""

    def reject_constant(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    return json.loads(text, parse_constant=reject_constant)


pytestmark = pytest.mark.usefixtures("few_documents")


def test_profile_subprocess_json_lists_heads(folder: str, text: str, gold: str) -> None:
    done = run_in_subprocess("profile", folder, text, "--treebank", gold, "--max-length", "50", "--no-causal", "--json")
    assert [head["address"] for head in parse_strict_json(done.output)["heads"]] == [
        "0.0",
        "0.1",
        "0.2",
        "1.0",
        "1.1",
        "1.2",
    ]


def test_profile_json_equals_saved_profile(folder: str, text: str, tmp_path: Path) -> None:
    saved = tmp_path / "made.npz"
    done = run_command("profile", folder, text, "--max-length", "50", "--json", "--save", str(saved))
    assert done.code == 0, done.err
    result = parse_strict_json(done.out)
    assert result["metadata"]["tokens"] == len(Path(text).read_text().split())
    for head in result["heads"]:
        assert {
            "address",
            "role",
            "evidence_level",
            "evidence",
            "idle_pattern",
            "roles",
            "corpus_label",
            "examples",
            "examples_by_role",
            "top_contexts",
            "metrics",
        } <= set(head)
        assert 0 <= head["metrics"]["confidence"] <= 1
        assert head["role"] == "unclear", "it has learned nothing"
    assert parse_strict_json(json.dumps(Profile.load(saved).to_dict()))["heads"] == result["heads"]
    described = run_command("describe", str(saved), "1.2", "--json")
    assert described.code == 0, described.err
    assert parse_strict_json(described.out)["metrics"] == result["heads"][5]["metrics"]
    text_output = run_command("describe", str(saved), "1.2", "--all").out
    assert "texts, no role exceeded its baseline by" in text_output
    assert "see docs/analysis" in text_output
    assert "head 1.2" in text_output
    assert "entropy" in text_output


def test_profile_table_and_csv(folder: str, text: str, gold: str) -> None:
    options = ("profile", folder, text, "--treebank", gold, "--max-length", "60", "--no-causal", "--show-layers", "1")
    table = run_command(*options)
    assert table.code == 0, table.err
    assert "6 heads on" in table.out
    done = run_command(*options, "--csv")
    rows = list(csv.DictReader(StringIO(done.out)))
    assert [row["head"] for row in rows] == ["1.0", "1.1", "1.2"]
    assert float(rows[0]["entropy"]) > 0


def test_profile_treebank_and_controls(folder: str, gold: str) -> None:
    done = run_command("profile", folder, "--treebank", gold, "--no-causal", "--json")
    assert done.code == 0, done.err
    result = parse_strict_json(done.out)
    assert result["metadata"]["documents"] == 12
    assert "nsubj < hits" in result["heads"][0]["metrics"], "a decoder looks back, from the verb to its subject"
    for control in ("random-init", "shuffled"):
        options = ("--treebank", gold, "--no-causal", "--control", control, "--json")
        assert len(parse_strict_json(run_command("profile", folder, *options).out)["heads"]) == 6


def test_profile_without_terminal_prints_no_progress(folder: str, gold: str) -> None:
    assert run_command("profile", folder, "--treebank", gold, "--no-causal", "--json").err == ""
    assert run_command("importance", folder, "the dog runs", "--heads", "0.1", "--json").err == ""


def test_describe_one_head_json(folder: str, text: str) -> None:
    done = run_command("describe", folder, "0.1", text, "--json")
    assert done.code == 0, done.err
    result = parse_strict_json(done.out)
    assert result["address"] == "0.1"
    assert -1 <= result["copying"] <= 1


@pytest.mark.parametrize("ranking", ["ablation", "gradient", "attribution"])
def test_importance_selected_heads_json(ranking: str, folder: str, text: str) -> None:
    options = ("importance", folder, text, "--ranking", ranking, "--max-length", "40", "--heads", "0.*,1.2")
    done = run_command(*options, "--json")
    assert done.code == 0, done.err
    result = parse_strict_json(done.out)
    assert all(name in json.dumps(result) for name in ("0.0", "0.1", "0.2", "1.2"))
    assert "1.1" not in str([row.get("head") for row in result.get("heads", [])])
    assert "0.1" in run_command(*options).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "{}", "--control", "sorted", "the dog runs"), "'sorted': unknown control"),
        (("profile", "{}", "nowhere.txt"), "nowhere.txt: file or folder not found"),
        (("profile", "{}", "--treebank", "nowhere.conllu"), "nowhere.conllu"),
        (("profile", "{}", "the dog runs", "--max-length", "0"), "length"),
        (("profile", "{}", "the dog runs", "--max-length", "-3"), "length"),
        (("profile", "{}", "--treebank", "{gold}", "--no-causal", "--show-layers", "7"), "7"),
        (("profile", "{}", "--treebank", "{gold}", "--no-causal", "--role", "inductoin"), "inductoin"),
        (("profile", "./nowhere"), "nowhere"),
        (("describe", "{}", "9.9", "the dog runs"), "9.9"),
        (("describe", "{}", "0.*", "the dog runs"), "0.*"),
        (("describe", "{}", "nonsense", "the dog runs"), "nonsense"),
        (("importance", "{}", "the dog runs", "--ranking", "magic"), "magic"),
        (("importance", "{}", "the dog runs", "--ablation", "magic"), "magic"),
        (("importance", "{}", "the dog runs", "--metric", "magic"), "magic"),
        (("importance", "{}", "the dog runs", "--heads", "9.9"), "9.9"),
        (("importance", "{}", "the dog runs", "--max-texts", "0"), "text"),
    ],
)
def test_analysis_invalid_arguments_print_one_line(
    arguments: tuple[str, ...], message: str, folder: str, gold: str
) -> None:
    done = run_command(*(argument.format(folder, gold=gold) for argument in arguments))
    assert done.code == 2
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith("headwise: ")
    assert message in last


def test_describe_damaged_profile_raises(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and then nothing")
    done = run_command("describe", str(tmp_path / "a.npz"), "0.0")
    assert (done.code, done.out) == (2, "")
    assert "damaged" in done.err
