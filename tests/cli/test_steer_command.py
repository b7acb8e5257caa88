"""headwise steer: table, JSON output, saved steering and wrong input, on a small saved decoder."""

import json
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cli.steer import run
from headwise.text.build_tokenizers import word_tokenizer
from tests.runner import run_command

FILLERS = [f"word{i}" for i in range(12)]
POSITIVE = [f"{first} good {second} good" for first, second in pairwise(FILLERS)]
NEGATIVE = [text.replace("good", "bad") for text in POSITIVE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steer")
    tokenizer = word_tokenizer(["good", "bad", *FILLERS])
    torch.manual_seed(0)
    spec = hw.ModelSpec(
        vocab=len(tokenizer), context=32, layers=2, mlp_width=8, attention=hw.AttentionSpec(width=16, heads=4)
    )
    model = hw.Transformer(spec)
    model.tokenizer = tokenizer
    model.save(folder / "model")
    for name, texts in {
        "good": POSITIVE, "bad": NEGATIVE, "other": [" ".join(FILLERS[i:] + FILLERS[:i]) for i in range(4)],
        "empty": [], "one": POSITIVE[:1], "broken": ['["word1", " good"]', '["word2", '],
    }.items():  # fmt: skip
        (folder / f"{name}.txt").write_text("".join(text + "\n" for text in texts))
    return folder


def arguments(folder: Path, positive: str = "good", **options: str) -> list[str]:
    named = {
        "positive": str(folder / f"{positive}.txt"), "negative": str(folder / "bad.txt"), "num-heads": "2",
        "strengths": "1,4", "num-random": "3", "max-kl": "9", "corpus": str(folder / "other.txt"),
    } | options  # fmt: skip
    return ["steer", str(folder / "model"), *(word for key, value in named.items() for word in (f"--{key}", value))]


def test_steer_json_equals_find_steering_and_saved_folder_loads(folder: Path, tmp_path: Path) -> None:
    saved, curve = tmp_path / "steering", tmp_path / "curve.csv"
    command = arguments(folder, out=str(saved), save=str(curve), name="kind")
    printed = json.loads(run_command(*command, "--json").output)
    model = hw.load(folder / "model")
    expected = hw.find_steering(
        model, POSITIVE, NEGATIVE, num_heads=2, strengths=(1.0, 4.0), num_random=3, max_kl=9.0,
        corpus=folder / "other.txt", max_texts=16, name="kind",
    )  # fmt: skip
    assert printed == json.loads(json.dumps(expected.to_dict())) | {"out": str(saved)}
    assert len(curve.read_text().splitlines()) == 3
    steering = hw.Steering.load(saved)
    assert (steering.name, steering.strength) == ("kind", expected.steering.strength)
    for address, vector in expected.steering.vectors.items():
        assert torch.equal(steering.vectors[address], vector)
    ids = torch.tensor([[3, 4, 5]])
    plain = model(ids)
    with steering.applied(model):
        assert not torch.equal(model(ids), plain)


def test_steer_prints_verdict_and_next_command(folder: Path, tmp_path: Path) -> None:
    output = run_command(*arguments(folder, heads="1.*", out=str(tmp_path / "steering"))).output
    assert "verdict" in output
    assert f"headwise view {folder / 'model'} --steering" in " ".join(output.split())
    assert all(address.startswith("1.") for address in hw.Steering.load(tmp_path / "steering").vectors)


@pytest.mark.parametrize(
    ("positive", "options", "message"),
    [
        ("empty", {}, "at least 8"),
        ("one", {}, "at least 8"),
        ("missing", {}, "missing.txt: could not be read"),
        ("broken", {}, "not JSON Lines"),
        ("bad", {}, "both sets"),
        ("good", {"heads": "7.1"}, "7.1"),
        ("good", {"heads": "head"}, "head"),
        ("good", {"strengths": "1,two"}, "Got '1,two'"),
        ("good", {"strengths": "nan"}, "positive numbers"),
        ("good", {"method": "ridge"}, "did you mean"),
        ("good", {"save": "curve.doc"}, "suffix"),
        ("good", {"case": "tense"}, "pass both files"),
    ],
)
def test_steer_wrong_input_is_one_line(folder: Path, positive: str, options: dict[str, str], message: str) -> None:
    assert message in run_command(*arguments(folder, positive, **options)).error_line


def test_steer_case_with_an_option_that_it_fixes_raises(folder: Path) -> None:
    for option, value in (("--max-kl", "0.1"), ("--max-texts", "8"), ("--heads", "1.*")):
        line = run_command("steer", folder / "model", "--case", "tense", option, value).error_line
        assert f"case: fixes {option[2:].replace('-', '_')}" in line


def test_steer_defaults_equal_those_of_find_steering() -> None:
    command, function = (signature(item).parameters for item in (run, hw.find_steering))
    shared = set(command) & set(function) - {"positive", "negative", "model", "steps_file", "strengths"}
    assert {"max_texts", "max_length", "num_heads", "num_random", "max_kl"} <= shared
    assert {name: command[name].default for name in shared} == {name: function[name].default for name in shared}


@pytest.fixture(scope="module")
def steering(folder: Path) -> hw.Steering:
    vectors = {"0.1": torch.full((4,), 0.7), "1.3": torch.linspace(-1, 1, 4)}
    made_for_model = hw.Steering(vectors, strength=6.0).for_model(hw.load(folder / "model"))
    made_for_model.save(folder / "steering")
    return made_for_model


def test_generate_with_steering_equals_context(folder: Path, steering: hw.Steering) -> None:
    command = ("generate", folder / "model", "word1 good", "--max-new-tokens", 6, "--json")
    model: Any = hw.load(folder / "model")
    texts = {}
    ids = torch.tensor([model.tokenizer.encode("word1 good")])
    for strength in (None, -9.0):
        with steering.applied(model, strength):
            expected = model.generate(ids, 6)[0].tolist()
        options = [] if strength is None else ["--strength", strength]
        printed = json.loads(run_command(*command, "--steering", folder / "steering", *options).output)
        assert printed["ids"] == expected[: len(printed["ids"])]
        texts[strength] = printed["text"]
    texts["plain"] = json.loads(run_command(*command).output)["text"]
    assert len(set(texts.values())) == 3


def test_export_with_steering_has_the_steered_logits(folder: Path, steering: hw.Steering, tmp_path: Path) -> None:
    run_command("export", folder / "model", tmp_path / "exported", "--steering", folder / "steering", "--strength", 2)
    model, ids = hw.load(folder / "model"), torch.tensor([[3, 4, 5, 6]])
    with steering.applied(model, 2.0):
        torch.testing.assert_close(hw.load(tmp_path / "exported")(ids), model(ids))


def test_evaluate_with_steering_equals_context(folder: Path, steering: hw.Steering) -> None:
    text = folder / "other.txt"
    command = ("evaluate", folder / "model", "--tasks", text, "--json", "--reference", folder / "model")
    printed = json.loads(run_command(*command, "--steering", folder / "steering").output)
    model = hw.load(folder / "model")
    with steering.applied(model):
        expected = hw.evaluate(model, [str(text)]).to_dict()
    assert printed["metrics"][0]["value"] == pytest.approx(expected["metrics"][0]["value"])
    assert abs(printed["differences"][0]["difference"]) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strength", "2"], "needs a steering"),
        (["--steering", "missing"], "missing"),
        (["--steering", "STEERING", "--strength", "nan"], "strength"),
    ],
)
def test_steering_options_wrong_input_is_one_line(
    folder: Path, steering: hw.Steering, options: list[str], message: str
) -> None:
    options = [str(folder / "steering") if option == "STEERING" else option for option in options]
    for command in (("generate", folder / "model", "word1"), ("export", folder / "model", folder / "unused")):
        assert message in run_command(*command, *options).error_line
