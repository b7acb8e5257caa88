"""headwise heads, head and ablate, as a program uses them."""

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
from tests.runner import headwise

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
    path.write_text("\n".join(item.text for item in Corpus.little("held-out", documents=8).items()))
    return str(path)


def answer(*arguments: object) -> str:
    return headwise(*arguments, columns=140).told


def test_heads(folder: str, texts: str, tmp_path: Path) -> None:
    saved = tmp_path / "small.npz"
    told = json.loads(answer("heads", folder, texts, "--no-causal", "--save", str(saved), "--json"))
    assert [head["address"] for head in told["heads"]] == HEADS
    assert all(head["role"] == "unclear" and 0 < head["measures"]["entropy"] < 5 for head in told["heads"])
    assert told["about"]["documents"] == 500, "relations come from the little language, whose words the model reads"
    assert told["heads"] == json.loads(json.dumps(Profile.load(saved).to_dict()))["heads"]
    one = json.loads(answer("head", str(saved), "1.2", "--json"))
    assert one["copying"] is None, "a profile has no weights"
    assert one["measures"] == told["heads"][6]["measures"]


@pytest.mark.usefixtures("few_documents")
def test_some_heads_as_a_table(folder: str, texts: str) -> None:
    lines = answer("heads", folder, texts, "--no-causal", "--layers", "1", "--csv").splitlines()
    assert lines[0].startswith("head,role,")
    assert [line.split(",")[0] for line in lines[1:]] == HEADS[4:]


@pytest.mark.usefixtures("few_documents")
def test_head(folder: str, texts: str) -> None:
    told = json.loads(answer("head", folder, "0.3", texts, "--json"))
    assert told["address"] == "0.3"
    assert -1 <= told["copying"] <= 1
    assert told["hardest"]
    assert "7.0" in headwise("head", folder, "7.0", texts).refused


def test_ablate(folder: str, texts: str) -> None:
    told = json.loads(answer("ablate", folder, texts, "--heads", "1.*", "--limit", "4", "--json"))
    assert sorted(head["head"] for head in told["heads"]) == HEADS[4:]
    assert told["by"] == "ablation"
    assert told["how"] == "mean"


@pytest.mark.usefixtures("few_documents")
def test_what_cannot_be_done(folder: str, texts: str) -> None:
    assert "random-init, random-attention, shuffled" in headwise("heads", folder, texts, "--control", "sorted").refused
    assert "there is no role 'juggler'" in headwise("heads", folder, texts, "--no-causal", "--role", "juggler").refused


@pytest.mark.usefixtures("few_documents")
def test_diff_of_two_profiles(folder: str, texts: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    whole = hw.load(folder)
    assert isinstance(whole, Transformer)
    save(hw.prune(whole, heads="0.1", fold=False), small)
    for name, model in (("a.npz", folder), ("b.npz", str(small))):
        answer("heads", model, texts, "--no-causal", "--save", str(tmp_path / name), "--json")
    told = answer("diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"))
    assert "of 8 heads 7 have the role they had; 1 is gone" in told
    rows = json.loads(answer("diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--json"))["heads"]
    assert [row["after"] for row in rows if row["head"] == "0.1"] == ["absent"]
    torch.manual_seed(1)
    other = Transformer(
        ModelSpec(
            vocab=len(word_tokenizer(VOCABULARY)), context=128, layers=2, attention=AttentionSpec(width=16, heads=4)
        )
    )
    other.tokenizer = word_tokenizer(VOCABULARY)
    save(other, tmp_path / "other")
    answer("heads", str(tmp_path / "other"), texts, "--no-causal", "--save", str(tmp_path / "c.npz"), "--json")
    assert "profiles of two models" in headwise("diff", str(tmp_path / "a.npz"), str(tmp_path / "c.npz")).refused
