"""The verbs on pairs of files: an encoder-decoder is trained, writes, is asked about, cut, judged and healed."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.ablate import mean_activations
from headwise.analysis.ablation.head_outputs import read_on
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import character_tokenizer
from tests.analysis.pair_models import mean_loss
from tests.runner import headwise
from tests.training.test_pairs import reversals

PAIRS, OTHERS = reversals(300, 0), reversals(20, 1)
SIZES = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 12, "--batch", 16, "--warmup", 5, "--rate", 0.01)


class Files(NamedTuple):
    sources: Path
    texts: Path
    other_sources: Path
    other_texts: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("pairs")
    sides = [[pair[side] for pair in pairs] for pairs in (PAIRS, OTHERS) for side in (0, 1)]
    made = Files(*(folder / f"{name}.txt" for name in Files._fields))
    for path, lines in zip(made, sides, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return made


@pytest.fixture(scope="module")
def folder(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained by the verb itself, with a held-out pair of files."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = headwise(
        "train", files.texts, "--source", files.sources, "--valid", files.other_texts, "--valid-source",
        files.other_sources, "--preset", "transformer-base", *SIZES, "--steps", 60, "--tokenizer", "character",
        "--out", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    return out / "model"


def loaded(path: Path | str) -> Transformer:
    model = hw.load(path)
    assert isinstance(model, Transformer)
    return model


def test_a_model_is_trained_on_two_files(folder: Path) -> None:
    model = loaded(folder)
    assert model.spec.kind == "encoder-decoder"
    assert (model.spec.layers, model.spec.encoder_layers, model.spec.width, model.spec.context) == (1, 1, 16, 12)
    assert len(model.tokenizer) == len(character_tokenizer("abcdefgh"))  # pyright: ignore
    rows = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 60, "valid_loss": pytest.approx(mean_loss(model, OTHERS), rel=1e-5)}
    assert rows[-1]["valid_loss"] < rows[0]["loss"]


def test_without_held_out_files_the_end_is_held_out(files: Files, tmp_path: Path) -> None:
    done = headwise(
        "train", files.texts, "--source", files.sources, "--preset", "transformer-base", *SIZES, "--steps", 2, "--out",
        tmp_path / "run", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["exam"] == []
    model = loaded(told["model"])
    held = [pair for i, pair in enumerate(PAIRS) if size(PAIRS[:i]) >= size(PAIRS) - int(size(PAIRS) * 0.1)]
    assert 20 < len(held) < 40
    assert told["valid_loss"] == pytest.approx(mean_loss(model, held), rel=1e-5)
    again = headwise(
        "train", files.texts, "--source", files.other_texts, "--preset", "transformer-base", *SIZES, "--steps", 2,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert again.code == 2


def size(pairs: list[tuple[str, str]]) -> int:
    """Tokens of pairs, an end behind each side."""
    return sum(len(source) + len(text) + 2 for source, text in pairs)


def test_a_text_is_read_and_another_written(folder: Path) -> None:
    model = loaded(folder)
    told = json.loads(headwise("generate", folder, "abcde", "--tokens", 9, "--json").out)
    want = model.generate("abcde", 9)
    assert told["prompt"] == "abcde"
    assert told["text"] == want
    assert told["new_tokens"] == len(told["ids"]) <= 9
    assert model.tokenizer is not None
    assert model.tokenizer.decode(told["ids"]) == want
    done = headwise("generate", folder, "abcde", "--tokens", 9)
    assert done.out == f"{want}\n"
    silent = json.loads(headwise("generate", folder, "abcde", "--tokens", 9, "--silence", "cross.0.*", "--json").out)
    other = json.loads(headwise("generate", folder, "hgf", "--tokens", 9, "--silence", "cross.0.*", "--json").out)
    assert silent["ids"] == other["ids"], "without its cross heads it writes the same, whatever it reads"


def test_what_heads_are_worth_on_two_files(folder: Path, files: Files) -> None:
    model = loaded(folder)
    asked = ("ablate", folder, files.other_texts, "--source", files.other_sources)
    told = json.loads(headwise(*asked, "--how", "zero", "--limit", 7, "--json").out)
    assert told["texts"] == 7
    assert told["clean"] == pytest.approx(mean_loss(model, OTHERS[:7]), rel=1e-5)
    assert [head["head"] for head in told["heads"]] == [str(head) for head in model.spec.addresses]
    worth = {head["head"]: head["worth"] for head in told["heads"]}
    for head in ("enc.0.1", "dec.0.0", "cross.0.1"):
        with model.heads[head].silenced():
            assert worth[head] == pytest.approx(mean_loss(model, OTHERS[:7]) - told["clean"], abs=1e-5)
    table = headwise(*asked, "--by", "gradient", "--heads", "cross.0.*")
    assert table.code == 0, table.err
    assert "cross.0.1" in table.out
    assert "enc.0.1" not in table.out


def test_a_model_is_cut_healed_saved_and_judged(folder: Path, files: Files, tmp_path: Path) -> None:
    asked = ("prune", folder, files.texts, "--source", files.sources, "--limit", 40, "--seeds", 1)
    done = headwise(*asked, "--keep", 0.5, "--out", tmp_path / "small", "--plan", tmp_path / "plan.json", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    small, model = loaded(tmp_path / "small"), loaded(folder)
    assert len(small.spec.addresses) == 3
    assert told["plan"]["folded"]
    choosing, judging = read_on(model, PAIRS[:40]).halves()
    assert told["report"]["texts"] == judging.texts
    for which, of in (("loss_before", model), ("loss_after", small)):
        assert told["report"][which]["mean"] == pytest.approx(
            mean_loss(of, [(unit.source_text, unit.text) for unit in judging]), rel=1e-5
        )
    best = hw.importance(model, choosing, means=mean_activations(model, choosing)).ranked[:3]
    assert set(small.spec.addresses) == set(best)

    other = ("--test", files.other_texts, "--test-source", files.other_sources)
    done = headwise(*asked, "--apply", tmp_path / "plan.json", *other, "--json")
    assert done.code == 0, done.err
    judged = json.loads(done.out)["report"]
    assert judged["texts"] == 20
    assert judged["loss_after"]["mean"] == pytest.approx(mean_loss(small, OTHERS), rel=1e-5)

    done = headwise(*asked, "--keep", 0.5, "--heal", 3, "--out", tmp_path / "healed", *other, "--json")
    assert done.code == 0, done.err
    healed = loaded(tmp_path / "healed")
    told = json.loads(done.out)["report"]["healed"]
    assert told["loss"]["mean"] == pytest.approx(mean_loss(healed, OTHERS), rel=1e-5)
    assert mean_loss(healed, OTHERS) != mean_loss(small, OTHERS)


def test_a_curve(folder: Path, files: Files) -> None:
    asked = ("prune", folder, files.texts, "--source", files.sources, "--limit", 8, "--seeds", 1)
    done = headwise(*asked, "--curve", "--shares", "0.5", "--json")
    assert done.code == 0, done.err
    points = json.loads(done.out)["curve"]["points"]
    assert [(point["by"], point["heads"]) for point in points] == [("ablation", 3), ("gradient", 3), ("random", 3)]


# What is wrong is one line.


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer("abcdefgh")
    torch.manual_seed(0)
    spec = ModelSpec(vocab=len(tokenizer), context=12, layers=1, attention=AttentionSpec(width=16, heads=2))
    model = Transformer(spec)
    model.tokenizer = tokenizer
    return model.save(tmp_path_factory.mktemp("models") / "decoder")


def test_trouble_is_one_line(
    folder: Path, decoder: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run without --out would begin here
    short = tmp_path / "short.txt"
    short.write_text("ab\ncd\n")
    gap = tmp_path / "gap.txt"
    gap.write_text("ab\n\n")
    both = ("--preset", "transformer-base", *SIZES, "--steps", 1)
    source, cut = ("--source", files.sources), ("--keep", 0.5)
    alone, unequal = "a source belongs to one file", "there are 300 sources and 2 texts"
    wrong = [
        (("train", *both, *source), alone),
        (("train", files.texts, files.other_texts, *both, *source), alone),
        (("train", short, *both, *source), unequal),
        (("train", gap, "--source", short, *both), "pair 2 lacks a text"),
        (("train", files.texts, *both, "--source", tmp_path / "none.txt"), "there is no file"),
        (("train", tmp_path / "none.txt", *both, *source), "there is no file"),
        (("train", files.texts, *both), "needs pairs"),
        (("train", *both), "needs pairs"),
        (("train", files.texts, *both, *source, "--valid", files.other_texts), "needs pairs"),
        (("train", files.texts, *both, *source, "--valid-source", files.other_sources), alone),
        (("train", files.texts, *both, *source, "--valid", short, "--valid-source", files.sources), unequal),
        (("train", files.texts, *SIZES, "--steps", 1, *source), "give this decoder texts alone"),
        (("ablate", folder, *source), alone),
        (("ablate", folder, short, *source), unequal),
        (("ablate", folder, files.texts), "needs pairs"),
        (("ablate", folder), "needs pairs"),
        (("ablate", decoder, files.texts, *source), "give this decoder texts alone"),
        (("prune", folder, *cut, *source), alone),
        (("prune", folder, short, *cut, *source), unequal),
        (("prune", folder, files.texts, *cut), "needs pairs"),
        (("prune", folder, *cut), "needs pairs"),
        (("prune", folder, files.texts, "--heads", "cross.0.1", "--no-fold", "--out", tmp_path / "o"), "needs pairs"),
        (("prune", folder, "--curve"), "needs pairs"),
        (("prune", folder, "--heads", "cross.0.1", "--no-fold", "--heal", 2), "needs pairs: give on="),
        (("prune", folder, files.texts, *cut, *source, "--test", files.other_texts), "needs pairs"),
        (("prune", folder, files.texts, *cut, *source, "--test-source", files.other_sources), alone),
        (("prune", decoder, files.texts, *cut, *source), "give this decoder texts alone"),
    ]
    for arguments, message in wrong:
        done = headwise(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err.startswith("headwise: "), arguments
        assert message in done.err, arguments
        assert done.err.count("\n") == 1, arguments
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["gap.txt", "short.txt"]


def test_heads_are_cut_by_name_without_pairs(folder: Path, files: Files, tmp_path: Path) -> None:
    done = headwise("prune", folder, "--heads", "cross.0.1", "--no-fold", "--out", tmp_path / "small", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["report"] is None
    small = loaded(tmp_path / "small")
    assert len(small.spec.addresses) == 5
    judging = ("--test", files.other_texts, "--test-source", files.other_sources)
    done = headwise("prune", folder, "--heads", "cross.0.1", "--no-fold", *judging, "--json")
    assert json.loads(done.out)["report"]["loss_after"]["mean"] == pytest.approx(mean_loss(small, OTHERS), rel=1e-5)
    done = headwise("prune", folder, "--heads", "cross.0.1")
    assert "needs pairs: give on=" in done.err
