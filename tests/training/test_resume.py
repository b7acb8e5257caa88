"""Interrupted and resumed runs give bitwise equal weights."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.training import Recipe, resume
from tests.training.tiny import (
    MASKED,
    NOISY,
    ODD,
    PLAIN,
    SHORT,
    RunInterrupted,
    assert_same_run,
    checkpoint_folder,
    checkpoint_steps,
    drop_timing,
    max_weight_difference,
    random_words,
    run,
    run_interrupted,
    same_weights,
)

RUNS: dict[str, tuple[ModelSpec, Recipe]] = {
    "plain": (PLAIN, SHORT),
    "dropout, head dropout, accumulation": (NOISY, replace(SHORT, accumulation_steps=2)),
    "masked": (MASKED, SHORT),
    "untied, gated, sink, grouped": (ODD, SHORT),
    "recomputing": (NOISY, replace(SHORT, checkpointing=True)),
}


@pytest.mark.parametrize("name", RUNS)
def test_train_interrupted_resumes_bitwise(name: str, tmp_path: Path) -> None:
    spec, recipe = RUNS[name]
    uninterrupted = run(spec, recipe, tmp_path / "whole")
    for step in (2, 6, 17):  # before the first checkpoint, after one, after several and an evaluation
        run_interrupted(spec, recipe, tmp_path / "broken", step)
    resumed = run(spec, recipe, tmp_path / "broken")
    assert_same_run(uninterrupted, resumed)
    rows = [json.loads(line) for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert drop_timing(rows) == drop_timing(uninterrupted.history)


@pytest.mark.parametrize("name", ["plain", "masked"])
def test_resume_from_folder_alone_is_bitwise(name: str, tmp_path: Path) -> None:
    spec, recipe = RUNS[name]
    uninterrupted = run(spec, recipe, tmp_path / "whole")
    for step in (2, 6):
        run_interrupted(spec, recipe, tmp_path / "broken", step)
    assert_same_run(uninterrupted, resume(tmp_path / "broken", progress=False))
    assert same_weights(uninterrupted.model, hw.load(tmp_path / "broken")), (
        "the folder of a finished run can be loaded as a model"
    )


def test_resume_not_a_run_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"run\.json is missing"):
        resume(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(HeadwiseError, match="damaged"):
        resume(tmp_path)
    with pytest.raises(HeadwiseError, match=r"not finished.*headwise train --resume"):
        hw.load(tmp_path)


def test_train_warmup_as_long_as_run_warns(capsys: pytest.CaptureFixture[str]) -> None:
    run(PLAIN, replace(SHORT, steps=4, warmup=4))
    assert "warmup=4: it is not shorter than the run of 4 steps" in capsys.readouterr().err
    run(PLAIN, replace(SHORT, steps=4, warmup=3))
    assert "warm-up" not in capsys.readouterr().err


def test_train_with_folder_equals_without(tmp_path: Path) -> None:
    without, with_folder = run(NOISY, SHORT), run(NOISY, SHORT, tmp_path / "run")
    assert same_weights(without.model, with_folder.model)
    assert drop_timing(without.history) == drop_timing(with_folder.history)


def test_resume_reports_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_interrupted(PLAIN, SHORT, tmp_path / "run", 10)
    steps: list[int] = []
    run(PLAIN, SHORT, tmp_path / "run", callback=lambda model, step: steps.append(step), callback_every=1)
    captured = capsys.readouterr()
    assert "step 8" in captured.err
    assert captured.out == ""
    assert steps == list(range(9, 21))  # earlier steps are not repeated


def test_load_checkpoint_gives_model_of_that_step(tmp_path: Path) -> None:
    models: dict[int, Transformer] = {}
    recipe = replace(SHORT, keep_checkpoints=20)
    run(
        ODD,
        recipe,
        tmp_path / "run",
        callback=lambda model, step: models.update({step: deepcopy(model)}),
        callback_every=1,
    )
    assert 4 in checkpoint_steps(tmp_path / "run")
    for step in checkpoint_steps(tmp_path / "run"):
        assert same_weights(hw.load(checkpoint_folder(tmp_path / "run", step)), models[step])


def test_train_finished_run_returns_without_training(tmp_path: Path) -> None:
    first = run(NOISY, SHORT, tmp_path / "run")
    called_steps: list[int] = []
    second = run(
        NOISY, SHORT, tmp_path / "run", callback=lambda model, step: called_steps.append(step), callback_every=1
    )
    assert called_steps == []
    assert_same_run(first, second)


# Which checkpoints are kept.


def test_checkpoints_keep_newest_and_best(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=12,
        batch_size=4,
        learning_rate=1e-9,
        warmup=0,
        save_every=2,
        evaluate_every=3,
        keep_checkpoints=2,
        log_every=5,
    )
    text = random_words(400)
    result = run(PLAIN, replace(recipe, final_lr_fraction=1.0), tmp_path / "run", text=text)
    steps = checkpoint_steps(tmp_path / "run")
    assert steps[-1] == 12
    assert result.best_step in steps
    others = [step for step in steps if step != result.best_step]
    assert set(others) <= {10, 12}
    single = run(PLAIN, replace(recipe, keep_checkpoints=1, evaluate_every=100), tmp_path / "one", text=text)
    assert checkpoint_steps(tmp_path / "one") == [12]
    assert single.best_step == 12


def test_checkpoints_best_is_kept_beyond_newest(tmp_path: Path) -> None:
    """The held-out text differs from the training text, so its loss rises and an early evaluation stays the best."""
    recipe = Recipe(
        steps=16,
        batch_size=8,
        learning_rate=3e-2,
        warmup=0,
        save_every=1,
        evaluate_every=1,
        keep_checkpoints=3,
        log_every=1,
    )
    result = run(PLAIN, recipe, tmp_path / "run", text="ab" * 300, valid="ba cd " * 40 + "xyz" * 60)
    losses = {int(row["step"]): row["valid_loss"] for row in result.history if "valid_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert best < 13
    assert result.best_step == best
    assert checkpoint_steps(tmp_path / "run") == [best, 14, 15, 16]


# Early stopping.

EARLY = Recipe(
    steps=60,
    batch_size=8,
    learning_rate=3e-2,
    warmup=0,
    save_every=7,
    evaluate_every=2,
    patience=4,
    log_every=3,
    keep_checkpoints=1,
)
HELD_OUT = "ba cd " * 40 + "xyz" * 60


def test_train_early_stop_returns_best_and_resumes(tmp_path: Path) -> None:
    result = run(PLAIN, EARLY, tmp_path / "whole", text="ab" * 300, valid=HELD_OUT)
    losses = {int(row["step"]): row["valid_loss"] for row in result.history if "valid_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert result.stop_reason == "early"
    assert result.best_step == best
    assert result.step == best + 2 * EARLY.patience
    assert same_weights(result.model, hw.load(checkpoint_folder(tmp_path / "whole", best)))
    in_memory = run(PLAIN, EARLY, text="ab" * 300, valid=HELD_OUT)
    assert same_weights(result.model, in_memory.model)

    run_interrupted(PLAIN, EARLY, tmp_path / "broken", result.step - 1, text="ab" * 300, valid=HELD_OUT)
    assert_same_run(result, run(PLAIN, EARLY, tmp_path / "broken", text="ab" * 300, valid=HELD_OUT))
    # A finished run returns at once.
    assert_same_run(result, run(PLAIN, EARLY, tmp_path / "broken", text="ab" * 300, valid=HELD_OUT))


# Folders with other runs or files.


def test_train_folder_of_other_run_raises_with_difference(tmp_path: Path) -> None:
    run(PLAIN, SHORT, tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(HeadwiseError, match=r"another run.*seed 5, now 6"):
        run(PLAIN, replace(SHORT, seed=6), tmp_path / "run")
    with pytest.raises(HeadwiseError, match=r"another run.*layers 1, now 2"):
        run(replace(PLAIN, layers=2), SHORT, tmp_path / "run")
    with pytest.raises(HeadwiseError, match=r"another run.*corpus"):
        run(PLAIN, SHORT, tmp_path / "run", text=random_words(400, seed=1))
    with pytest.raises(HeadwiseError, match=r"another run.*valid"):
        run(PLAIN, SHORT, tmp_path / "run", valid=random_words(100, seed=2))
    with pytest.raises(HeadwiseError, match=r"another run.*tokenizer.*character"):
        run(PLAIN, SHORT, tmp_path / "run", tokenizer="character")
    with pytest.raises(HeadwiseError, match=r"another run.*weights"):
        run(Transformer(PLAIN), SHORT, tmp_path / "run")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_train_folder_of_older_format_raises(tmp_path: Path) -> None:
    run(PLAIN, SHORT, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    del record["format"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    with pytest.raises(HeadwiseError, match=r"format 1.*Start the run again in a new folder"):
        run(PLAIN, SHORT, tmp_path / "run")
    with pytest.raises(HeadwiseError, match=r"format 1.*Start the run again in a new folder"):
        resume(tmp_path / "run", progress=False)


def test_train_folder_with_other_files_raises(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear all")
    with pytest.raises(HeadwiseError, match=r"Use an(other| empty)"):
        run(PLAIN, SHORT, tmp_path / "mine")
    with pytest.raises(HeadwiseError, match=r"Use an(other| empty)"):
        run(PLAIN, SHORT, tmp_path / "mine" / "letter.txt")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    assert run(PLAIN, SHORT, tmp_path / "empty").step == 20


# Training an existing model.


def test_train_given_model_starts_from_its_weights(tmp_path: Path) -> None:
    base = run(PLAIN, SHORT).model
    slow = replace(SHORT, learning_rate=1e-12, weight_decay=0.0)
    near = run(deepcopy(base), slow).model
    assert max_weight_difference(base, near) < 1e-9
    uninterrupted = run(deepcopy(base), SHORT, tmp_path / "whole")
    assert not same_weights(uninterrupted.model, base)
    run_interrupted(deepcopy(base), SHORT, tmp_path / "broken", 10)
    assert_same_run(uninterrupted, run(deepcopy(base), SHORT, tmp_path / "broken"))


def test_resume_changed_model_raises_or_restores(tmp_path: Path) -> None:
    """A model is trained in place, so after an interruption its weights differ: the run raises or restores them."""
    base = run(PLAIN, SHORT).model
    twin = deepcopy(base)
    run_interrupted(base, SHORT, tmp_path / "broken", 10)
    assert not same_weights(base, twin)
    try:
        result = run(base, SHORT, tmp_path / "broken")
    except HeadwiseError as error:
        assert "weights" in str(error)  # noqa: PT017
    else:
        assert same_weights(result.model, run(twin, SHORT).model)


def test_train_exception_in_call_propagates_and_model_is_in_eval(tmp_path: Path) -> None:
    model = Transformer(PLAIN)

    def raise_interrupt(model: Transformer, step: int) -> None:
        raise RunInterrupted

    with pytest.raises(RunInterrupted):
        run(model, SHORT, tmp_path / "run", callback=raise_interrupt)
    assert not model.training
