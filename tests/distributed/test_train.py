"""Sharded training: equal losses, and bitwise equal weights after resuming on any number of processes."""

import shutil
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.training import train
from tests.distributed.process_fixtures import WorkerGroup
from tests.distributed.train_checks import SPECS, compare_loaded, recipe_of, train_until
from tests.training.tiny import TEXT, max_weight_difference, same_weights

CHECKS = "tests.distributed.train_checks"
CASES = [pytest.param("grouped", "heads", marks=pytest.mark.slow), ("one key", "fsdp")]


def one_process(name: str) -> hw.Transformer:
    return train(SPECS[name], TEXT, recipe_of("ddp"), progress=False).model


@pytest.mark.parametrize(("name", "parallel"), CASES)
def test_train_two_processes_equal_one_and_resume_same_bits(
    two: WorkerGroup, tmp_path: Path, name: str, parallel: str
) -> None:
    results = two.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    assert results[0] == results[1]
    assert results[0]["same"]
    full = hw.load(tmp_path / "whole" / "model")
    assert max_weight_difference(one_process(name), full) < 1e-5  # pyright: ignore[reportArgumentType]
    two.run(f"{CHECKS}:save_at_checkpoint", str(tmp_path / "broken"), name, parallel)
    shutil.copytree(tmp_path / "broken", tmp_path / "alone")
    assert two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel)[0]["loss"] == results[0]["loss"]
    assert same_weights(full, hw.load(tmp_path / "broken" / "model"))  # pyright: ignore[reportArgumentType]
    count, other = compare_loaded(str(tmp_path / "alone"), str(tmp_path / "broken"), name, parallel)  # one process
    assert (count, other) == (3 * SPECS[name].num_parameters, 0)
    train_until(str(tmp_path / "alone"), name, parallel)  # ten steps
    assert max_weight_difference(full, hw.load(tmp_path / "alone" / "model")) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "sizes"), [("heads", (2, 3)), ("heads", (4, 2)), ("fsdp", (2, 4)), ("fsdp+heads", (4, 2))]
)
@pytest.mark.parametrize("name", ["grouped", "one key"])
def test_train_resumed_on_other_process_count_same_bits(
    several: dict[int, WorkerGroup], tmp_path: Path, name: str, parallel: str, sizes: tuple[int, int]
) -> None:
    first, then = (several[size] for size in sizes)
    first.run(f"{CHECKS}:save_at_checkpoint", str(tmp_path / "run"), name, parallel)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    counts = then.run(f"{CHECKS}:compare_loaded", str(tmp_path / "run"), str(tmp_path / "run"), name, parallel)
    assert sum(count for count, _ in counts) >= 3 * SPECS[name].num_parameters  # weights and two moments
    assert {other for _, other in counts} == {0}
    then.run(f"{CHECKS}:run", str(tmp_path / "run"), name, parallel)  # ten steps on another number of processes
    first.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    ends = [hw.load(tmp_path / run / "model") for run in ("run", "whole")]
    assert max_weight_difference(*ends) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
@pytest.mark.parametrize(
    "options", [{"precision": "bfloat16"}, {"checkpointing": True}], ids=["bfloat16", "checkpointing"]
)
def test_train_bfloat16_or_checkpointing_matches_one_process(
    two: WorkerGroup, tmp_path: Path, parallel: str, options: dict
) -> None:
    single = train(SPECS["grouped"], TEXT, recipe_of("ddp", **options), progress=False)
    plain = train(SPECS["grouped"], TEXT, recipe_of("ddp"), progress=False)
    for loss in two.run(f"{CHECKS}:loss", str(tmp_path / "run"), "grouped", parallel, options):
        if "checkpointing" in options:
            assert loss == pytest.approx(plain.loss, rel=1e-5)  # recomputed activations are equal
        else:  # bfloat16 shows the order of sums: at most as far from one process as one process is from float32
            assert abs(loss - single.loss) < max(abs(single.loss - plain.loss), 1e-2 * plain.loss)
            assert loss != plain.loss


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
@pytest.mark.parametrize("name", SPECS)
def test_train_all_models_two_processes_equal_one(two: WorkerGroup, tmp_path: Path, name: str, parallel: str) -> None:
    results = two.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    assert results[0] == results[1]
    assert results[0]["same"]
    if name != "noisy":  # dropout depends on the rows of a process
        assert max_weight_difference(one_process(name), hw.load(tmp_path / "whole" / "model")) < 1e-5  # pyright: ignore
    two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel, 7)
    two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel)
    assert same_weights(*(hw.load(tmp_path / run / "model") for run in ("whole", "broken")))  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "one key"])
def test_train_fsdp_head_grid_equals_one_and_resumes(
    several: dict[int, WorkerGroup], tmp_path: Path, name: str
) -> None:
    results = several[4].run(f"{CHECKS}:run", str(tmp_path / "four"), name, "fsdp+heads")
    assert all(result == results[0] for result in results)
    assert results[0]["same"]
    assert max_weight_difference(one_process(name), hw.load(tmp_path / "four" / "model")) < 1e-5  # pyright: ignore
    several[4].run(f"{CHECKS}:run", str(tmp_path / "broken"), name, "fsdp+heads", 7)
    several[2].run(f"{CHECKS}:run", str(tmp_path / "broken"), name, "fsdp+heads")
    ends = [hw.load(tmp_path / run / "model") for run in ("four", "broken")]
    assert max_weight_difference(*ends) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
def test_train_sharded_memory_is_about_half(two: WorkerGroup, tmp_path: Path, parallel: str) -> None:
    from tests.distributed.train_checks import memory

    alone = memory(str(tmp_path / "one"), "ddp")
    for num_bytes in two.run(f"{CHECKS}:memory", str(tmp_path / "two"), parallel):
        assert num_bytes < 0.6 * alone


def test_train_conflicting_run_raises(two: WorkerGroup, tmp_path: Path) -> None:
    two.run(f"{CHECKS}:run", str(tmp_path / "run"), "grouped", "heads", 6)
    for corpus, layout, batch in two.run(f"{CHECKS}:conflicting_runs", str(tmp_path / "run")):
        assert "corpus: it differs between the processes" in corpus
        assert "contains another run" in layout
        assert "parallel 'heads', now 'ddp'" in layout
        assert "not divisible by accumulation_steps × processes" in batch
    assert not (tmp_path / "run-other").exists()


@pytest.mark.slow
def test_train_lost_process_raises_and_keeps_checkpoint(tmp_path: Path) -> None:
    group = WorkerGroup(2)
    with pytest.raises(AssertionError, match=r"has ended or does not respond|did not end"):
        group.run(f"{CHECKS}:exit_process", str(tmp_path / "run"), timeout=300)
    group.stop()
    checkpoints = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert checkpoints == ["step-00000005"]
    hw.load(tmp_path / "run" / "checkpoints" / "step-00000005")
    group.run(f"{CHECKS}:run", str(tmp_path / "run"), "grouped", "heads")
    group.stop()
    assert torch.isfinite(next(iter(hw.load(tmp_path / "run" / "model").parameters()))).all()


@pytest.mark.parametrize(
    "wrong", [{"parallel": "fsdp", "compile": True}, {"parallel": "heads", "precision": "float16"}]
)
def test_recipe_conflicting_options_raise(wrong: dict) -> None:
    with pytest.raises(hw.HeadwiseError, match="supported only with parallel='ddp'"):
        hw.Recipe(**wrong)
