"""headwise heads, head and ablate, as a person uses them: a small model on disk, results on stdout, trouble in one line."""

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
from tests.runner import alone, headwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=3, head_dim=4)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=200, layers=2, attention=attention, hidden=7))
    model.tokenizer = tokenizer
    return str(model.save(tmp_path_factory.mktemp("models") / "little"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "little.txt"
    path.write_text(" ".join(d.text for d in Corpus.little(documents=30).items()), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gold") / "gold.conllu"
    rows = [("1", "the", "DET", "2", "det"), ("2", "dog", "NOUN", "3", "nsubj"), ("3", "runs", "VERB", "0", "root")]
    sentence = "\n".join(f"{i}\t{word}\t_\t{kind}\t_\t_\t{head}\t{arc}\t_\t_" for i, word, kind, head, arc in rows)
    path.write_text("\n\n".join([sentence] * 12) + "\n\n", encoding="utf-8")
    return str(path)


def strict(text: str) -> Any:
    """JSON as other programs read it: there is no NaN in it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


pytestmark = pytest.mark.usefixtures("few_documents")


def test_as_a_program_of_its_own(folder: str, text: str, gold: str) -> None:
    done = alone("heads", folder, text, "--treebank", gold, "--length", "50", "--no-causal", "--json")
    assert [head["address"] for head in strict(done.told)["heads"]] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def test_heads(folder: str, text: str, tmp_path: Path) -> None:
    saved = tmp_path / "made.npz"
    done = headwise("heads", folder, text, "--length", "50", "--json", "--save", str(saved))
    assert done.code == 0, done.err
    told = strict(done.out)
    assert told["about"]["tokens"] == len(Path(text).read_text().split())
    for head in told["heads"]:
        assert {
            "address",
            "role",
            "rung",
            "supports",
            "rest",
            "roles",
            "on",
            "evidence",
            "cases",
            "hardest",
            "measures",
        } <= set(head)
        assert 0 <= head["measures"]["confidence"] <= 1
        assert head["role"] == "unclear", "it has learned nothing"
    assert strict(json.dumps(Profile.load(saved).to_dict()))["heads"] == told["heads"]
    one = headwise("head", str(saved), "1.2", "--json")
    assert one.code == 0, one.err
    assert strict(one.out)["measures"] == told["heads"][5]["measures"]
    shown = headwise("head", str(saved), "1.2", "--all").out
    assert "Head 1.2: nothing found." in shown
    assert "how: docs/look.md#roles-and-the-ladder" in shown
    assert "head 1.2" in shown
    assert "entropy" in shown


def test_a_table_for_people_and_one_for_sheets(folder: str, text: str, gold: str) -> None:
    options = ("heads", folder, text, "--treebank", gold, "--length", "60", "--no-causal", "--layers", "1")
    shown = headwise(*options)
    assert shown.code == 0, shown.err
    assert "6 heads on" in shown.out
    done = headwise(*options, "--csv")
    rows = list(csv.DictReader(StringIO(done.out)))
    assert [row["head"] for row in rows] == ["1.0", "1.1", "1.2"]
    assert float(rows[0]["entropy"]) > 0


def test_treebanks_and_controls(folder: str, gold: str) -> None:
    done = headwise("heads", folder, "--treebank", gold, "--no-causal", "--json")
    assert done.code == 0, done.err
    told = strict(done.out)
    assert told["about"]["documents"] == 12
    assert "nsubj < hits" in told["heads"][0]["measures"], "a decoder looks back, from the verb to its subject"
    for control in ("random-init", "shuffled"):
        options = ("--treebank", gold, "--no-causal", "--control", control, "--json")
        assert len(strict(headwise("heads", folder, *options).out)["heads"]) == 6


def test_where_nobody_watches_there_is_no_progress(folder: str, gold: str) -> None:
    assert headwise("heads", folder, "--treebank", gold, "--no-causal", "--json").err == ""
    assert headwise("ablate", folder, "the dog runs", "--heads", "0.1", "--json").err == ""


def test_one_head(folder: str, text: str) -> None:
    done = headwise("head", folder, "0.1", text, "--json")
    assert done.code == 0, done.err
    told = strict(done.out)
    assert told["address"] == "0.1"
    assert -1 <= told["copying"] <= 1


@pytest.mark.parametrize("by", ["ablation", "gradient", "attribution"])
def test_ablate(by: str, folder: str, text: str) -> None:
    options = ("ablate", folder, text, "--by", by, "--length", "40", "--heads", "0.*,1.2")
    done = headwise(*options, "--json")
    assert done.code == 0, done.err
    told = strict(done.out)
    assert all(name in json.dumps(told) for name in ("0.0", "0.1", "0.2", "1.2"))
    assert "1.1" not in str([row.get("head") for row in told.get("heads", [])])
    assert "0.1" in headwise(*options).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("heads", "{}", "--control", "sorted", "the dog runs"), "'sorted': not a control"),
        (("heads", "{}", "nowhere.txt"), "there is no file or folder nowhere.txt"),
        (("heads", "{}", "--treebank", "nowhere.conllu"), "nowhere.conllu"),
        (("heads", "{}", "the dog runs", "--length", "0"), "length"),
        (("heads", "{}", "the dog runs", "--length", "-3"), "length"),
        (("heads", "{}", "--treebank", "{gold}", "--no-causal", "--layers", "7"), "7"),
        (("heads", "{}", "--treebank", "{gold}", "--no-causal", "--role", "inductoin"), "inductoin"),
        (("heads", "./nowhere"), "nowhere"),
        (("head", "{}", "9.9", "the dog runs"), "9.9"),
        (("head", "{}", "0.*", "the dog runs"), "0.*"),
        (("head", "{}", "nonsense", "the dog runs"), "nonsense"),
        (("ablate", "{}", "the dog runs", "--by", "magic"), "magic"),
        (("ablate", "{}", "the dog runs", "--how", "magic"), "magic"),
        (("ablate", "{}", "the dog runs", "--metric", "magic"), "magic"),
        (("ablate", "{}", "the dog runs", "--heads", "9.9"), "9.9"),
        (("ablate", "{}", "the dog runs", "--limit", "0"), "text"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: tuple[str, ...], said: str, folder: str, gold: str) -> None:
    done = headwise(*(argument.format(folder, gold=gold) for argument in arguments))
    assert done.code == 2
    assert done.out == ""
    last = done.err.splitlines()[-1]
    assert last.startswith("headwise: ")
    assert said in last


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and then nothing")
    done = headwise("head", str(tmp_path / "a.npz"), "0.0")
    assert (done.code, done.out) == (2, "")
    assert "damaged" in done.err
