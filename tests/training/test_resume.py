"""Stopped and gone on with: the same bits as if nothing had happened."""

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
    Stop,
    broken,
    checkpoint,
    distance,
    run,
    same_run,
    same_weights,
    there,
    timeless,
    words,
)

RUNS: dict[str, tuple[ModelSpec, Recipe]] = {
    "plain": (PLAIN, SHORT),
    "dropout, head dropout, accumulation": (NOISY, replace(SHORT, accumulate=2)),
    "masked": (MASKED, SHORT),
    "untied, gated, sink, grouped": (ODD, SHORT),
    "recomputing": (NOISY, replace(SHORT, checkpointing=True)),
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_is_bitwise_the_same(name: str, tmp_path: Path) -> None:
    spec, recipe = RUNS[name]
    whole = run(spec, recipe, tmp_path / "whole")
    for at in (2, 6, 17):  # before the first checkpoint, behind one, behind a few and an evaluation
        broken(spec, recipe, tmp_path / "broken", at)
    again = run(spec, recipe, tmp_path / "broken")
    same_run(whole, again)
    told = [json.loads(line) for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert timeless(told) == timeless(whole.history)


@pytest.mark.parametrize("name", ["plain", "masked"])
def test_a_run_goes_on_from_its_folder_alone(name: str, tmp_path: Path) -> None:
    spec, recipe = RUNS[name]
    whole = run(spec, recipe, tmp_path / "whole")
    for at in (2, 6):
        broken(spec, recipe, tmp_path / "broken", at)
    same_run(whole, resume(tmp_path / "broken", progress=False))
    assert same_weights(whole.model, hw.load(tmp_path / "broken")), "a run's folder is a model's, when it has finished"


def test_only_a_run_can_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"there is no run in .*; *|it has no run.json"):
        resume(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(HeadwiseError, match="damaged"):
        resume(tmp_path)
    with pytest.raises(HeadwiseError, match=r"not finished; go on with headwise train --resume"):
        hw.load(tmp_path)


def test_a_warm_up_as_long_as_the_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run(PLAIN, replace(SHORT, steps=4, warmup=4))
    assert "the warm-up of 4 steps is not shorter than the run of 4" in capsys.readouterr().err
    run(PLAIN, replace(SHORT, steps=4, warmup=3))
    assert "warm-up" not in capsys.readouterr().err


def test_the_folder_changes_nothing(tmp_path: Path) -> None:
    without, having = run(NOISY, SHORT), run(NOISY, SHORT, tmp_path / "run")
    assert same_weights(without.model, having.model)
    assert timeless(without.history) == timeless(having.history)


def test_resuming_says_where_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken(PLAIN, SHORT, tmp_path / "run", 10)
    steps: list[int] = []
    run(PLAIN, SHORT, tmp_path / "run", call=lambda model, step: steps.append(step), every=1)
    said = capsys.readouterr()
    assert "step 8" in said.err
    assert said.out == ""
    assert steps == list(range(9, 21))  # nothing before is done again


def test_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    seen: dict[int, Transformer] = {}
    recipe = replace(SHORT, keep=20)
    run(ODD, recipe, tmp_path / "run", call=lambda model, step: seen.update({step: deepcopy(model)}), every=1)
    assert 4 in there(tmp_path / "run")
    for step in there(tmp_path / "run"):
        assert same_weights(hw.load(checkpoint(tmp_path / "run", step)), seen[step])


def test_a_finished_run_comes_back_at_once(tmp_path: Path) -> None:
    first = run(NOISY, SHORT, tmp_path / "run")
    called: list[int] = []
    again = run(NOISY, SHORT, tmp_path / "run", call=lambda model, step: called.append(step), every=1)
    assert called == []
    same_run(first, again)


# Checkpoints that are kept.


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    recipe = Recipe(steps=12, batch=4, rate=1e-9, warmup=0, save_every=2, evaluate_every=3, keep=2, log_every=5)
    text = words(400)
    made = run(PLAIN, replace(recipe, floor=1.0), tmp_path / "run", text=text)
    kept = there(tmp_path / "run")
    assert kept[-1] == 12
    assert made.best_step in kept
    others = [step for step in kept if step != made.best_step]
    assert set(others) <= {10, 12}
    one = run(PLAIN, replace(recipe, keep=1, evaluate_every=100), tmp_path / "one", text=text)
    assert there(tmp_path / "one") == [12]
    assert one.best_step == 12


def test_the_best_outlives_the_newest(tmp_path: Path) -> None:
    """A held-out text unlike the text: fitting the one makes the other worse, so an early evaluation stays the best."""
    recipe = Recipe(steps=16, batch=8, rate=3e-2, warmup=0, save_every=1, evaluate_every=1, keep=3, log_every=1)
    made = run(PLAIN, recipe, tmp_path / "run", text="ab" * 300, valid="ba cd " * 40 + "xyz" * 60)
    losses = {int(row["step"]): row["valid_loss"] for row in made.history if "valid_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert best < 13
    assert made.best_step == best
    assert there(tmp_path / "run") == [best, 14, 15, 16]


# Stopping early.

EARLY = Recipe(steps=60, batch=8, rate=3e-2, warmup=0, save_every=7, evaluate_every=2, patience=4, log_every=3, keep=1)
HELD_OUT = "ba cd " * 40 + "xyz" * 60


def test_early_stop_gives_the_best_weights_and_survives_a_stop(tmp_path: Path) -> None:
    made = run(PLAIN, EARLY, tmp_path / "whole", text="ab" * 300, valid=HELD_OUT)
    losses = {int(row["step"]): row["valid_loss"] for row in made.history if "valid_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert made.stopped == "early"
    assert made.best_step == best
    assert made.step == best + 2 * EARLY.patience
    assert same_weights(made.model, hw.load(checkpoint(tmp_path / "whole", best)))
    in_memory = run(PLAIN, EARLY, text="ab" * 300, valid=HELD_OUT)
    assert same_weights(made.model, in_memory.model)

    broken(PLAIN, EARLY, tmp_path / "broken", made.step - 1, text="ab" * 300, valid=HELD_OUT)
    same_run(made, run(PLAIN, EARLY, tmp_path / "broken", text="ab" * 300, valid=HELD_OUT))
    same_run(made, run(PLAIN, EARLY, tmp_path / "broken", text="ab" * 300, valid=HELD_OUT))  # and once more: at once


# Folders of others.


def test_a_folder_of_another_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    run(PLAIN, SHORT, tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(HeadwiseError, match=r"another run.*seed 5, now 6"):
        run(PLAIN, replace(SHORT, seed=6), tmp_path / "run")
    with pytest.raises(HeadwiseError, match=r"another run.*layers 1, now 2"):
        run(replace(PLAIN, layers=2), SHORT, tmp_path / "run")
    with pytest.raises(HeadwiseError, match=r"another run.*text"):
        run(PLAIN, SHORT, tmp_path / "run", text=words(400, seed=1))
    with pytest.raises(HeadwiseError, match=r"another run.*held out"):
        run(PLAIN, SHORT, tmp_path / "run", valid=words(100, seed=2))
    with pytest.raises(HeadwiseError, match=r"another run.*tokenizer.*character"):
        run(PLAIN, SHORT, tmp_path / "run", tokenizer="character")
    with pytest.raises(HeadwiseError, match=r"another run.*weights"):
        run(Transformer(PLAIN), SHORT, tmp_path / "run")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear all")
    with pytest.raises(HeadwiseError, match="something else"):
        run(PLAIN, SHORT, tmp_path / "mine")
    with pytest.raises(HeadwiseError, match="something else"):
        run(PLAIN, SHORT, tmp_path / "mine" / "letter.txt")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    assert run(PLAIN, SHORT, tmp_path / "empty").step == 20


# A model that was given.


def test_a_model_goes_on_from_its_weights_and_resumes(tmp_path: Path) -> None:
    base = run(PLAIN, SHORT).model
    slow = replace(SHORT, rate=1e-12, weight_decay=0.0)
    near = run(deepcopy(base), slow).model
    assert distance(base, near) < 1e-9
    whole = run(deepcopy(base), SHORT, tmp_path / "whole")
    assert not same_weights(whole.model, base)
    broken(deepcopy(base), SHORT, tmp_path / "broken", 10)
    same_run(whole, run(deepcopy(base), SHORT, tmp_path / "broken"))


def test_a_model_that_changed_meanwhile_is_never_gone_on_with_wrongly(tmp_path: Path) -> None:
    """A model is trained in place, so behind a stop the very same object is another one: refused, or put right."""
    base = run(PLAIN, SHORT).model
    twin = deepcopy(base)
    broken(base, SHORT, tmp_path / "broken", 10)
    assert not same_weights(base, twin)
    try:
        made = run(base, SHORT, tmp_path / "broken")
    except HeadwiseError as error:
        assert "weights" in str(error)  # noqa: PT017
    else:
        assert same_weights(made.model, run(twin, SHORT).model)


def test_a_stop_leaves_the_caller_an_error_and_the_model_in_eval(tmp_path: Path) -> None:
    model = Transformer(PLAIN)

    def stop(model: Transformer, step: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(model, SHORT, tmp_path / "run", call=stop)
    assert not model.training
