"""headwise profile, describe and importance with JSON output."""

import json
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.roles.profile_result import Profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.weights.save import save
from tests.runner import run_command

HEADS = [f"{layer}.{head}" for layer in range(2) for head in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    spec = ModelSpec(vocab=len(tokenizer), context=128, layers=2, attention=AttentionSpec(width=32, heads=4))
    model = Transformer(spec)
    model.tokenizer = tokenizer
    return str(save(model, tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "little.txt"
    path.write_text("\n".join(item.text for item in Corpus.synthetic("held-out", documents=8).items()))
    return str(path)


def run_output(*arguments: object) -> str:
    return run_command(*arguments, columns=140).output


def test_profile_json_equals_saved_profile(folder: str, texts: str, tmp_path: Path) -> None:
    saved = tmp_path / "small.npz"
    result = json.loads(run_output("profile", folder, texts, "--no-causal", "--save", str(saved), "--json"))
    assert [head["address"] for head in result["heads"]] == HEADS
    assert all(head["role"] == "unclear" and 0 < head["metrics"]["entropy"] < 5 for head in result["heads"])
    assert result["metadata"]["documents"] == 500, (
        "relations come from the synthetic language, whose words the model reads"
    )
    assert result["heads"] == json.loads(json.dumps(Profile.load(saved).to_dict()))["heads"]
    described = json.loads(run_output("describe", str(saved), "1.2", "--json"))
    assert described["copying"] is None, "a profile has no weights"
    assert described["metrics"] == result["heads"][6]["metrics"]


@pytest.mark.usefixtures("few_documents")
def test_profile_csv_selected_layer(folder: str, texts: str) -> None:
    lines = run_output("profile", folder, texts, "--no-causal", "--show-layers", "1", "--csv").splitlines()
    assert lines[0].startswith("head,role,")
    assert [line.split(",")[0] for line in lines[1:]] == HEADS[4:]


@pytest.mark.usefixtures("few_documents")
def test_describe_head_json(folder: str, texts: str) -> None:
    result = json.loads(run_output("describe", folder, "0.3", texts, "--json"))
    assert result["address"] == "0.3"
    assert -1 <= result["copying"] <= 1
    assert result["top_contexts"]
    assert "7.0" in run_command("describe", folder, "7.0", texts).error_line


def test_importance_heads_json(folder: str, texts: str) -> None:
    result = json.loads(run_output("importance", folder, texts, "--heads", "1.*", "--max-texts", "4", "--json"))
    assert sorted(head["head"] for head in result["heads"]) == HEADS[4:]
    assert result["ranking"] == "ablation"
    assert result["ablation"] == "mean"


@pytest.mark.usefixtures("few_documents")
def test_profile_unknown_control_or_role_raises(folder: str, texts: str) -> None:
    assert (
        "random-init, random-attention, shuffled"
        in run_command("profile", folder, texts, "--control", "sorted").error_line
    )
    assert (
        "'juggler': not a role" in run_command("profile", folder, texts, "--no-causal", "--role", "juggler").error_line
    )


@pytest.mark.usefixtures("few_documents")
def test_diff_pruned_profile_marks_absent_head(folder: str, texts: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    full = hw.load(folder)
    assert isinstance(full, Transformer)
    save(hw.prune(full, heads="0.1", fold_mean=False), small)
    for name, model in (("a.npz", folder), ("b.npz", str(small))):
        run_output("profile", model, texts, "--no-causal", "--save", str(tmp_path / name), "--json")
    output = run_output("diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    assert "7 of 8 heads have the same role; 1 removed" in output
    rows = json.loads(run_output("diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--json"))["heads"]
    assert [row["after"] for row in rows if row["head"] == "0.1"] == ["absent"]
    torch.manual_seed(1)
    other = Transformer(
        ModelSpec(
            vocab=len(word_tokenizer(VOCABULARY)), context=128, layers=2, attention=AttentionSpec(width=16, heads=4)
        )
    )
    other.tokenizer = word_tokenizer(VOCABULARY)
    save(other, tmp_path / "other")
    run_output("profile", str(tmp_path / "other"), texts, "--no-causal", "--save", str(tmp_path / "c.npz"), "--json")
    assert (
        "profiles of different models"
        in run_command("diff", str(tmp_path / "a.npz"), str(tmp_path / "c.npz")).error_line
    )
