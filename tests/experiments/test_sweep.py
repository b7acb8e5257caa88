import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from typing import Any

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.engine.pool import train_all
from headwise.experiments.engine.store import DONE, Store
from headwise.experiments.engine.train_model import make
from headwise.experiments.experiment import Lab, LabSize
from headwise.experiments.head_sweep import check_heads, depth_or_heads, head_sweep

TINY: dict[str, Any] = {"width": 16, "steps": 8, "batch": 4, "processes": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture
def here(monkeypatch):
    """Work is done in this process: a point is the same bits whoever trains it, as is shown below, and this is quicker."""

    def work(function, jobs, *_, **__):
        return ((number, function(*job)) for number, job in enumerate(jobs))

    for room in ("engine.pool", "experiments.head_sweep"):
        monkeypatch.setattr(f"headwise.experiments.{room}.work", work)


def test_head_counts_that_do_not_divide_are_refused_with_the_nearest():
    with pytest.raises(HeadwiseError, match="6 heads do not divide a width of 64; nearest to it 4 and 8 would"):
        check_heads([1, 6], 64)
    with pytest.raises(HeadwiseError, match="100 heads do not divide a width of 64; nearest to it 64 would"):
        check_heads([100], 64)
    assert check_heads([6, 6, 1], 64, head_dim=8) == [6, 1]
    with pytest.raises(HeadwiseError, match="whole numbers of at least 1"):
        check_heads([0], 64)
    with pytest.raises(HeadwiseError, match="whole numbers of at least 1"):
        check_heads([], 64)


@pytest.mark.slow
def test_a_sweep_and_the_same_again(cache):
    notes = []
    first = head_sweep([1, 16], seeds=1, cache=cache, progress=lambda *told: notes.append(told), **TINY)
    assert [(row.heads, row.head_dim) for row in first.rows] == [(1, 16), (16, 1)]
    assert first.rows[0].parameters == first.rows[1].parameters  # at constant heads × head_dim
    assert ("training 2 models", 16, 16) in notes
    assert notes[-1] == ("comparing heads", 2, 2)
    assert {"bracket", "surname", "agreement", "referent"} == set(first.rows[0].marks)
    assert not first.rows[0].diversity  # one head differs from none
    assert first.rows[1].diversity["js"].mean > 0
    assert json.loads(json.dumps(first.to_dict()))["rows"][0]["heads"] == 1

    written = {path: path.stat().st_mtime_ns for path in cache.glob(f"points/*/{DONE}")}
    assert len(written) == 2
    again = head_sweep(
        [1, 16], seeds=1, cache=cache, progress=lambda *told: pytest.fail("nothing is left to do"), **TINY
    )
    assert again == first
    assert written == {path: path.stat().st_mtime_ns for path in cache.glob(f"points/*/{DONE}")}


def test_at_constant_head_dim_heads_add_parameters(cache, here):
    made = head_sweep([1, 3], head_dim=4, seeds=1, cache=cache, **TINY)
    # a head of 4 channels: 4 matrices of 16 × 4, in 2 layers
    assert made.rows[1].parameters - made.rows[0].parameters == 2 * 2 * 4 * 16 * 4


def test_depth_or_heads_cuts_alike(cache, here):
    made = depth_or_heads(heads=8, layers=6, seeds=1, cache=cache, **TINY)
    whole, shallow, narrow = made.rows
    assert (whole.layers, shallow.layers, narrow.layers) == (6, 5, 6)
    assert (whole.heads, shallow.heads, narrow.heads) == (8, 8, 4)
    block = whole.parameters - shallow.parameters
    assert abs(whole.parameters - narrow.parameters - block) < 0.2 * block
    assert [len(points) for points in made.curves.values()] == [8, 8, 8]


def test_a_run_that_diverged_is_a_row_like_others(cache, here):
    made = head_sweep([2], seeds=2, cache=cache, **{**TINY, "rate": 1e30})
    assert made.rows[0].loss.mean == float("inf")
    assert made.rows[0].marks == made.rows[0].diversity == {}
    assert made.curves == {"2": []}
    json.dumps(made.to_dict(), allow_nan=False)


def test_the_little_language_is_read_in_words_and_whole(cache):
    with pytest.raises(HeadwiseError, match="read in words, got tokenizer 'byte'"):
        head_sweep([1], tokenizer="byte", cache=cache, **TINY)
    with pytest.raises(HeadwiseError, match="a context of 128 tokens, got 16"):
        head_sweep([1], context=16, cache=cache, **TINY)
    with pytest.raises(HeadwiseError, match="at least 1, got 16 and 0"):
        head_sweep([1], head_dim=0, cache=cache, **TINY)


def test_another_text(cache, tmp_path, here):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    first = head_sweep([2], corpus=text, context=16, seeds=1, cache=cache, **TINY)
    assert first.rows[0].marks == {}
    text.write_text("a dog ran in a park and back. " * 200)  # the same name, another text: another point
    assert head_sweep([2], corpus=text, context=16, seeds=1, cache=cache, **TINY).rows[0].loss != first.rows[0].loss


def test_a_point_is_the_same_whoever_trains_it(tmp_path):
    size = LabSize(width=16, heads=4, steps=8, batch=4)
    alone, spread = Lab(Store(tmp_path / "a"), size=size), Lab(Store(tmp_path / "b"), size=size)
    points = [alone.point(seed) for seed in (0, 1)]
    train_all(points, spread.store, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for point in points:
            one, other = make(point, alone.store), make(point, spread.store)
            assert one.loss == other.loss
            for name, weight in one.model().state_dict().items():
                assert torch.equal(weight, other.model().state_dict()[name])
    finally:
        torch.set_num_threads(threads)


def test_beginnings(tmp_path):
    lab = Lab(Store(tmp_path), size=LabSize(width=16, heads=4, steps=8, batch=4))
    for layer in lab.made(lab.point(0, start="identity W_O")).model().attention_layers():
        assert torch.equal(layer.write.weight, torch.eye(16))
    frozen = lab.made(lab.point(0, start="frozen W_O"))
    for before, after in zip(frozen.model(0).attention_layers(), frozen.model().attention_layers(), strict=True):
        assert torch.equal(before.write.weight, after.write.weight)
        assert not torch.equal(before.heads[0].W_Q, after.heads[0].W_Q)
    with pytest.raises(HeadwiseError, match="did you mean twins"):
        lab.point(0, start="twin")


def test_no_space_is_said_before_the_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(HeadwiseError, match=r"no space for the cache.*MB.*--cache"):
        head_sweep([1], seeds=1, cache=tmp_path, **TINY)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match="cannot be written"):
        Store(tmp_path / "file")


def test_a_damaged_note_is_named(tmp_path):
    lab = Lab(Store(tmp_path), size=LabSize(width=16, heads=4, steps=8, batch=4))
    made = lab.made(lab.point(0))
    (made.folder / DONE).write_text("{")
    with pytest.raises(HeadwiseError, match=r"done\.json cannot be read; delete it"):
        lab.made(lab.point(0))


@pytest.mark.parametrize(
    ("number", "executor"),
    [
        pytest.param(signal.SIGINT, "processes", marks=pytest.mark.slow, id="interrupted"),
        pytest.param(signal.SIGKILL, "processes", marks=pytest.mark.slow, id="killed"),
        pytest.param(signal.SIGKILL, "dask", marks=pytest.mark.slow, id="killed, then Dask"),
        pytest.param(signal.SIGKILL, "slurm:cluster=local", marks=pytest.mark.slow, id="killed, then Slurm's jobs"),
    ],
)
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, number, executor):
    """Stopped in the middle of its second point: the first is not trained again, the second goes on, by any executor."""
    if executor != "processes":
        pytest.importorskip("distributed" if executor == "dask" else "submitit")
    code = (
        "from headwise.experiments.head_sweep import head_sweep\n"
        "if __name__ == '__main__':\n"
        f"    head_sweep([1, 2], width=16, steps=120, batch=2, seeds=1, processes=1, cache={str(tmp_path)!r})\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    run = subprocess.Popen([sys.executable, str(script)], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        done, logged = list(tmp_path.glob(f"points/*/{DONE}")), list(tmp_path.glob("points/*/metrics.jsonl"))
        if len(done) == 1 and len(logged) == 2:
            break
        time.sleep(0.05)
    (os.killpg if number == signal.SIGINT else os.kill)(
        run.pid, number
    )  # a kill hits the parent alone; its child follows
    assert run.wait(60) != 0
    (first,) = tmp_path.glob(f"points/*/{DONE}")
    stamp = first.stat().st_mtime_ns
    made = head_sweep([1, 2], width=16, steps=120, batch=2, seeds=1, processes=1, executor=executor, cache=tmp_path)
    assert first.stat().st_mtime_ns == stamp
    assert len(list(tmp_path.glob(f"points/*/{DONE}"))) == 2
    assert [row.heads for row in made.rows] == [1, 2]
