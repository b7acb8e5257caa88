"""Commands on pairs of files: an encoder-decoder is trained, generates, is analyzed, pruned, evaluated and recovered."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.ablate import mean_activations
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import character_tokenizer
from tests.analysis.pair_models import mean_loss
from tests.runner import run_command
from tests.training.test_pairs import reversals

PAIRS, OTHERS = reversals(300, 0), reversals(20, 1)
SIZES = (
    "--layers",
    1,
    "--num-heads",
    2,
    "--width",
    16,
    "--context",
    12,
    "--batch-size",
    16,
    "--warmup",
    5,
    "--learning-rate",
    0.01,
)


class Files(NamedTuple):
    sources: Path
    texts: Path
    other_sources: Path
    other_texts: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("pairs")
    columns = [[pair[side] for pair in pairs] for pairs in (PAIRS, OTHERS) for side in (0, 1)]
    result = Files(*(folder / f"{name}.txt" for name in Files._fields))
    for path, lines in zip(result, columns, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return result


@pytest.fixture(scope="module")
def folder(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model with the command, with a held-out pair of files."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = run_command(
        "train", files.texts, "--source", files.sources, "--valid", files.other_texts, "--valid-source",
        files.other_sources, "--preset", "transformer-base", *SIZES, "--steps", 60, "--tokenizer", "character",
        "--out", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    return out / "model"


def load_model(path: Path | str) -> Transformer:
    model = hw.load(path)
    assert isinstance(model, Transformer)
    return model


def test_train_source_file_gives_encoder_decoder(folder: Path) -> None:
    model = load_model(folder)
    assert model.spec.kind == "encoder-decoder"
    assert (model.spec.layers, model.spec.encoder_layers, model.spec.width, model.spec.context) == (1, 1, 16, 12)
    assert len(model.tokenizer) == len(character_tokenizer("abcdefgh"))  # pyright: ignore
    rows = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 60, "valid_loss": pytest.approx(mean_loss(model, OTHERS), rel=1e-5)}
    assert rows[-1]["valid_loss"] < rows[0]["loss"]


def test_train_pairs_without_valid_holds_out_last_pairs(files: Files, tmp_path: Path) -> None:
    done = run_command(
        "train", files.texts, "--source", files.sources, "--preset", "transformer-base", *SIZES, "--steps", 2, "--out",
        tmp_path / "run", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["synthetic_eval"] == []
    model = load_model(result["model"])
    held_out = [
        pair
        for i, pair in enumerate(PAIRS)
        if num_tokens(PAIRS[:i]) >= num_tokens(PAIRS) - int(num_tokens(PAIRS) * 0.1)
    ]
    assert 20 < len(held_out) < 40
    assert result["valid_loss"] == pytest.approx(mean_loss(model, held_out), rel=1e-5)
    second = run_command(
        "train", files.texts, "--source", files.other_texts, "--preset", "transformer-base", *SIZES, "--steps", 2,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert second.code == 2


def num_tokens(pairs: list[tuple[str, str]]) -> int:
    """Return the tokens of pairs, with an end token after each side."""
    return sum(len(source) + len(text) + 2 for source, text in pairs)


def test_generate_encoder_decoder_reads_source(folder: Path) -> None:
    model = load_model(folder)
    result = json.loads(run_command("generate", folder, "abcde", "--max-new-tokens", 9, "--json").out)
    expected = model.generate("abcde", 9)
    assert result["prompt"] == "abcde"
    assert result["text"] == expected
    assert result["new_tokens"] == len(result["ids"]) <= 9
    assert model.tokenizer is not None
    assert model.tokenizer.decode(result["ids"]) == expected
    done = run_command("generate", folder, "abcde", "--max-new-tokens", 9)
    assert done.out == f"{expected}\n"
    silenced = json.loads(
        run_command("generate", folder, "abcde", "--max-new-tokens", 9, "--silence", "cross.0.*", "--json").out
    )
    other_source = json.loads(
        run_command("generate", folder, "hgf", "--max-new-tokens", 9, "--silence", "cross.0.*", "--json").out
    )
    assert silenced["ids"] == other_source["ids"], "without its cross heads it writes the same, whatever it reads"


def test_importance_pairs_equals_loss_difference(folder: Path, files: Files) -> None:
    model = load_model(folder)
    command = ("importance", folder, files.other_texts, "--source", files.other_sources)
    result = json.loads(run_command(*command, "--ablation", "zero", "--max-texts", 7, "--json").out)
    assert result["texts"] == 7
    assert result["clean_loss"] == pytest.approx(mean_loss(model, OTHERS[:7]), rel=1e-5)
    assert [head["head"] for head in result["heads"]] == [str(head) for head in model.spec.head_addresses]
    importance = {head["head"]: head["importance"] for head in result["heads"]}
    for head in ("enc.0.1", "dec.0.0", "cross.0.1"):
        with model.heads[head].silenced():
            assert importance[head] == pytest.approx(mean_loss(model, OTHERS[:7]) - result["clean_loss"], abs=1e-5)
    table = run_command(*command, "--ranking", "gradient", "--heads", "cross.0.*")
    assert table.code == 0, table.err
    assert "cross.0.1" in table.out
    assert "enc.0.1" not in table.out


def test_prune_pairs_saves_evaluates_and_recovers(folder: Path, files: Files, tmp_path: Path) -> None:
    command = ("prune", folder, files.texts, "--source", files.sources, "--max-texts", 40, "--seeds", 1)
    done = run_command(
        *command, "--keep", 0.5, "--out", tmp_path / "small", "--save-plan", tmp_path / "plan.json", "--json"
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    small, model = load_model(tmp_path / "small"), load_model(folder)
    assert len(small.spec.head_addresses) == 3
    assert result["plan"]["fold_mean"]
    selection, evaluation = eval_corpus(model, PAIRS[:40]).halves()
    assert result["report"]["texts"] == evaluation.num_samples
    for field, evaluated in (("loss_before", model), ("loss_after", small)):
        assert result["report"][field]["mean"] == pytest.approx(
            mean_loss(evaluated, [(sample.source_text, sample.text) for sample in evaluation]), rel=1e-5
        )
    best = hw.importance(model, selection, means=mean_activations(model, selection)).ranked[:3]
    assert set(small.spec.head_addresses) == set(best)

    other = ("--test", files.other_texts, "--test-source", files.other_sources)
    done = run_command(*command, "--plan", tmp_path / "plan.json", *other, "--json")
    assert done.code == 0, done.err
    test_report = json.loads(done.out)["report"]
    assert test_report["texts"] == 20
    assert test_report["loss_after"]["mean"] == pytest.approx(mean_loss(small, OTHERS), rel=1e-5)

    done = run_command(*command, "--keep", 0.5, "--recover-steps", 3, "--out", tmp_path / "healed", *other, "--json")
    assert done.code == 0, done.err
    recovered = load_model(tmp_path / "healed")
    result = json.loads(done.out)["report"]["recovered"]
    assert result["loss"]["mean"] == pytest.approx(mean_loss(recovered, OTHERS), rel=1e-5)
    assert mean_loss(recovered, OTHERS) != mean_loss(small, OTHERS)


def test_prune_pairs_curve_has_all_rankings(folder: Path, files: Files) -> None:
    command = ("prune", folder, files.texts, "--source", files.sources, "--max-texts", 8, "--seeds", 1)
    done = run_command(*command, "--curve", "--fractions", "0.5", "--json")
    assert done.code == 0, done.err
    points = json.loads(done.out)["curve"]["points"]
    assert [(point["ranking"], point["heads"]) for point in points] == [("ablation", 3), ("gradient", 3), ("random", 3)]


# Errors are one line.


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = character_tokenizer("abcdefgh")
    torch.manual_seed(0)
    spec = ModelSpec(vocab=len(tokenizer), context=12, layers=1, attention=AttentionSpec(width=16, heads=2))
    model = Transformer(spec)
    model.tokenizer = tokenizer
    return model.save(tmp_path_factory.mktemp("models") / "decoder")


def test_pairs_invalid_arguments_print_one_line(
    folder: Path, decoder: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run without --out would write here
    short = tmp_path / "short.txt"
    short.write_text("ab\ncd\n")
    gap = tmp_path / "gap.txt"
    gap.write_text("ab\n\n")
    encoder_decoder = ("--preset", "transformer-base", *SIZES, "--steps", 1)
    source, keep_options = ("--source", files.sources), ("--keep", 0.5)
    source_error, unequal_error = "exactly one file of target texts", "Got 300 sources and 2 texts"
    wrong = [
        (("train", *encoder_decoder, *source), source_error),
        (("train", files.texts, files.other_texts, *encoder_decoder, *source), source_error),
        (("train", short, *encoder_decoder, *source), unequal_error),
        (("train", gap, "--source", short, *encoder_decoder), "pair 2 needs a source and a text"),
        (("train", files.texts, *encoder_decoder, "--source", tmp_path / "none.txt"), "file not found"),
        (("train", tmp_path / "none.txt", *encoder_decoder, *source), "file not found"),
        (("train", files.texts, *encoder_decoder), "needs pairs"),
        (("train", *encoder_decoder), "needs pairs"),
        (("train", files.texts, *encoder_decoder, *source, "--valid", files.other_texts), "needs pairs"),
        (("train", files.texts, *encoder_decoder, *source, "--valid-source", files.other_sources), source_error),
        (
            ("train", files.texts, *encoder_decoder, *source, "--valid", short, "--valid-source", files.sources),
            unequal_error,
        ),
        (("train", files.texts, *SIZES, "--steps", 1, *source), "kind decoder. Give it texts alone"),
        (("importance", folder, *source), source_error),
        (("importance", folder, short, *source), unequal_error),
        (("importance", folder, files.texts), "needs pairs"),
        (("importance", folder), "needs pairs"),
        (("importance", decoder, files.texts, *source), "kind decoder. Give it texts alone"),
        (("prune", folder, *keep_options, *source), source_error),
        (("prune", folder, short, *keep_options, *source), unequal_error),
        (("prune", folder, files.texts, *keep_options), "needs pairs"),
        (("prune", folder, *keep_options), "needs pairs"),
        (
            ("prune", folder, files.texts, "--heads", "cross.0.1", "--no-fold-mean", "--out", tmp_path / "o"),
            "needs pairs",
        ),
        (("prune", folder, "--curve"), "needs pairs"),
        (
            ("prune", folder, "--heads", "cross.0.1", "--no-fold-mean", "--recover-steps", 2),
            "corpus=hw.Corpus.pairs",
        ),
        (("prune", folder, files.texts, *keep_options, *source, "--test", files.other_texts), "needs pairs"),
        (("prune", folder, files.texts, *keep_options, *source, "--test-source", files.other_sources), source_error),
        (("prune", decoder, files.texts, *keep_options, *source), "kind decoder. Give it texts alone"),
    ]
    for arguments, message in wrong:
        done = run_command(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert done.err.startswith("headwise: "), arguments
        assert message in done.err, arguments
        assert done.err.count("\n") == 1, arguments
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["gap.txt", "short.txt"]


def test_prune_named_heads_without_pairs(folder: Path, files: Files, tmp_path: Path) -> None:
    done = run_command("prune", folder, "--heads", "cross.0.1", "--no-fold-mean", "--out", tmp_path / "small", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["report"] is None
    small = load_model(tmp_path / "small")
    assert len(small.spec.head_addresses) == 5
    test_options = ("--test", files.other_texts, "--test-source", files.other_sources)
    done = run_command("prune", folder, "--heads", "cross.0.1", "--no-fold-mean", *test_options, "--json")
    assert json.loads(done.out)["report"]["loss_after"]["mean"] == pytest.approx(mean_loss(small, OTHERS), rel=1e-5)
    done = run_command("prune", folder, "--heads", "cross.0.1")
    assert "corpus=hw.Corpus.pairs" in done.err
