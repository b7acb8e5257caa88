"""Training in parts: the same numbers, the same bits after a stop, on any number of processes."""

import shutil
import time
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.training import train
from tests.distributed.process_fixtures import Crew
from tests.distributed.train_checks import SPECS, as_loaded, recipe_of, trained
from tests.training.tiny import TEXT, distance, same_weights

CHECKS = "tests.distributed.train_checks"
CASES = [pytest.param("grouped", "heads", marks=pytest.mark.slow), ("one key", "fsdp")]


def one_process(name: str) -> hw.Transformer:
    return train(SPECS[name], TEXT, recipe_of("ddp"), progress=False).model


@pytest.mark.parametrize(("name", "parallel"), CASES)
def test_two_end_where_one_does_and_after_a_stop_at_the_same_bits(
    two: Crew, tmp_path: Path, name: str, parallel: str
) -> None:
    found = two.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    assert found[0] == found[1]
    assert found[0]["same"]
    whole = hw.load(tmp_path / "whole" / "model")
    assert distance(one_process(name), whole) < 1e-5  # pyright: ignore[reportArgumentType]
    two.run(f"{CHECKS}:kept", str(tmp_path / "broken"), name, parallel)
    shutil.copytree(tmp_path / "broken", tmp_path / "alone")
    assert two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel)[0]["loss"] == found[0]["loss"]
    assert same_weights(whole, hw.load(tmp_path / "broken" / "model"))  # pyright: ignore[reportArgumentType]
    numbers, other = as_loaded(str(tmp_path / "alone"), str(tmp_path / "broken"), name, parallel)  # on one process
    assert (numbers, other) == (3 * SPECS[name].parameters, 0)
    trained(str(tmp_path / "alone"), name, parallel)  # ten steps
    assert distance(whole, hw.load(tmp_path / "alone" / "model")) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "sizes"), [("heads", (2, 3)), ("heads", (4, 2)), ("fsdp", (2, 4)), ("fsdp+heads", (4, 2))]
)
@pytest.mark.parametrize("name", ["grouped", "one key"])
def test_on_another_number_it_begins_with_the_same_bits(
    several: dict[int, Crew], tmp_path: Path, name: str, parallel: str, sizes: tuple[int, int]
) -> None:
    first, then = (several[size] for size in sizes)
    first.run(f"{CHECKS}:kept", str(tmp_path / "run"), name, parallel)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    here = then.run(f"{CHECKS}:as_loaded", str(tmp_path / "run"), str(tmp_path / "run"), name, parallel)
    assert sum(numbers for numbers, _ in here) >= 3 * SPECS[name].parameters  # weights, and two moments of each
    assert {other for _, other in here} == {0}
    then.run(f"{CHECKS}:run", str(tmp_path / "run"), name, parallel)  # ten steps on another number
    first.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    ends = [hw.load(tmp_path / run / "model") for run in ("run", "whole")]
    assert distance(*ends) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
@pytest.mark.parametrize("how", [{"precision": "bfloat16"}, {"checkpointing": True}], ids=["bfloat16", "checkpointing"])
def test_bfloat16_and_checkpointing(two: Crew, tmp_path: Path, parallel: str, how: dict) -> None:
    one = train(SPECS["grouped"], TEXT, recipe_of("ddp", **how), progress=False)
    plain = train(SPECS["grouped"], TEXT, recipe_of("ddp"), progress=False)
    for loss in two.run(f"{CHECKS}:loss", str(tmp_path / "run"), "grouped", parallel, how):
        if "checkpointing" in how:
            assert loss == pytest.approx(plain.loss, rel=1e-5)  # what is computed again is the same
        else:  # the order of sums is seen in 8 bits: as far from one process as one process is from float32, at most
            assert abs(loss - one.loss) < max(abs(one.loss - plain.loss), 1e-2 * plain.loss)
            assert loss != plain.loss


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
@pytest.mark.parametrize("name", SPECS)
def test_so_it_is_for_every_model(two: Crew, tmp_path: Path, name: str, parallel: str) -> None:
    found = two.run(f"{CHECKS}:run", str(tmp_path / "whole"), name, parallel)
    assert found[0] == found[1]
    assert found[0]["same"]
    if name != "noisy":  # what is dropped out depends on who reads what
        assert distance(one_process(name), hw.load(tmp_path / "whole" / "model")) < 1e-5  # pyright: ignore
    two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel, 7)
    two.run(f"{CHECKS}:run", str(tmp_path / "broken"), name, parallel)
    assert same_weights(*(hw.load(tmp_path / run / "model") for run in ("whole", "broken")))  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "one key"])
def test_four_share_heads_and_rows_and_three_go_on(several: dict[int, Crew], tmp_path: Path, name: str) -> None:
    found = several[4].run(f"{CHECKS}:run", str(tmp_path / "four"), name, "fsdp+heads")
    assert all(one == found[0] for one in found)
    assert found[0]["same"]
    assert distance(one_process(name), hw.load(tmp_path / "four" / "model")) < 1e-5  # pyright: ignore
    several[4].run(f"{CHECKS}:run", str(tmp_path / "broken"), name, "fsdp+heads", 7)
    several[2].run(f"{CHECKS}:run", str(tmp_path / "broken"), name, "fsdp+heads")
    ends = [hw.load(tmp_path / run / "model") for run in ("four", "broken")]
    assert distance(*ends) < 1e-5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("parallel", ["fsdp", "heads"])
def test_a_process_holds_little_more_than_half(two: Crew, tmp_path: Path, parallel: str) -> None:
    from tests.distributed.train_checks import memory

    alone = memory(str(tmp_path / "one"), "ddp")
    for held in two.run(f"{CHECKS}:memory", str(tmp_path / "two"), parallel):
        assert held < 0.6 * alone


def test_a_run_of_another_layout_is_refused(two: Crew, tmp_path: Path) -> None:
    two.run(f"{CHECKS}:run", str(tmp_path / "run"), "grouped", "heads", 6)
    for text, layout, batch in two.run(f"{CHECKS}:disagree", str(tmp_path / "run")):
        assert "given a different text" in text
        assert "holds another run" in layout
        assert "parallel 'heads', now 'ddp'" in layout
        assert "cannot be shared by 2 processes" in batch
    assert not (tmp_path / "run-other").exists()


@pytest.mark.slow
def test_a_process_that_goes_away_is_told_at_once_and_nothing_is_half_written(tmp_path: Path) -> None:
    crew, before = Crew(2), time.monotonic()
    with pytest.raises(AssertionError, match=r"is gone or does not answer|did not end"):
        crew.run(f"{CHECKS}:vanish", str(tmp_path / "run"), patience=30)
    crew.stop()
    assert time.monotonic() - before < 60
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert kept == ["step-00000005"]
    hw.load(tmp_path / "run" / "checkpoints" / "step-00000005")
    crew.run(f"{CHECKS}:run", str(tmp_path / "run"), "grouped", "heads")
    crew.stop()
    assert torch.isfinite(next(iter(hw.load(tmp_path / "run" / "model").parameters()))).all()


@pytest.mark.parametrize(
    "wrong", [{"parallel": "fsdp", "compile": True}, {"parallel": "heads", "precision": "float16"}]
)
def test_what_does_not_go_together_is_told(wrong: dict) -> None:
    with pytest.raises(hw.HeadwiseError, match="goes with parallel='ddp' alone"):
        hw.Recipe(**wrong)
