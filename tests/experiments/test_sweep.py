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
from headwise.experiments.engine.experiment_store import RESULTS_FILE, ExperimentStore
from headwise.experiments.engine.train_model import train_or_load
from headwise.experiments.engine.training_pool import train_all
from headwise.experiments.head_count_sweep import check_heads, depth_vs_heads_sweep, head_sweep
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider

TINY: dict[str, Any] = {"width": 16, "steps": 8, "batch_size": 4, "processes": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture
def in_process(monkeypatch):
    """Run jobs in this process. The results are the same as in workers (tested below), and this is faster."""

    def run_jobs(function, jobs, *_, **__):
        return ((index, function(*job)) for index, job in enumerate(jobs))

    for module in ("engine.training_pool", "head_count_sweep"):
        monkeypatch.setattr(f"headwise.experiments.{module}.run_jobs_as_completed", run_jobs)


def test_check_heads_indivisible_count_suggests_nearest():
    with pytest.raises(HeadwiseError, match="not divisible by 6"):
        check_heads([1, 6], 64)
    with pytest.raises(HeadwiseError, match="not divisible by 100"):
        check_heads([100], 64)
    assert check_heads([6, 6, 1], 64, head_dim=8) == [6, 1]
    with pytest.raises(HeadwiseError, match="integers of at least 1"):
        check_heads([0], 64)
    with pytest.raises(HeadwiseError, match="integers of at least 1"):
        check_heads([], 64)


@pytest.mark.slow
def test_head_sweep_repeated_uses_cache(cache):
    progress_calls = []
    first = head_sweep([1, 16], seeds=1, cache=cache, progress=lambda *args: progress_calls.append(args), **TINY)
    assert [(row.heads, row.head_dim) for row in first.rows] == [(1, 16), (16, 1)]
    assert first.rows[0].parameters == first.rows[1].parameters  # at constant heads × head_dim
    assert ("training 2 models", 16, 16) in progress_calls
    assert progress_calls[-1] == ("comparing heads", 2, 2)
    assert {"bracket", "surname", "agreement", "referent"} == set(first.rows[0].probe_accuracy)
    assert not first.rows[0].diversity  # one head differs from none
    assert first.rows[1].diversity["js"].mean > 0
    assert json.loads(json.dumps(first.to_dict()))["rows"][0]["heads"] == 1

    written = {path: path.stat().st_mtime_ns for path in cache.glob(f"models/*/{RESULTS_FILE}")}
    assert len(written) == 2
    second = head_sweep(
        [1, 16], seeds=1, cache=cache, progress=lambda *args: pytest.fail("nothing is left to do"), **TINY
    )
    assert second == first
    assert written == {path: path.stat().st_mtime_ns for path in cache.glob(f"models/*/{RESULTS_FILE}")}


def test_head_sweep_constant_head_dim_adds_parameters(cache, in_process):
    result = head_sweep([1, 3], head_dim=4, seeds=1, cache=cache, **TINY)
    # a head of 4 channels: 4 matrices of 16 × 4, in 2 layers
    assert result.rows[1].parameters - result.rows[0].parameters == 2 * 2 * 4 * 16 * 4


def test_depth_or_heads_removes_equal_parameters(cache, in_process):
    result = depth_vs_heads_sweep(heads=8, layers=6, seeds=1, cache=cache, **TINY)
    full, shallow, narrow = result.rows
    assert (full.layers, shallow.layers, narrow.layers) == (6, 5, 6)
    assert (full.heads, shallow.heads, narrow.heads) == (8, 8, 4)
    block = full.parameters - shallow.parameters
    assert abs(full.parameters - narrow.parameters - block) < 0.2 * block
    assert [len(points) for points in result.curves.values()] == [8, 8, 8]


def test_head_sweep_diverged_run_is_a_row(cache, in_process):
    result = head_sweep([2], seeds=2, cache=cache, **{**TINY, "learning_rate": 1e30})
    assert result.rows[0].loss.mean == float("inf")
    assert result.rows[0].probe_accuracy == result.rows[0].diversity == {}
    assert result.curves == {"2": []}
    json.dumps(result.to_dict(), allow_nan=False)


def test_head_sweep_synthetic_language_invalid_options_raise(cache):
    with pytest.raises(HeadwiseError, match="Got 'byte'"):
        head_sweep([1], tokenizer="byte", cache=cache, **TINY)
    with pytest.raises(HeadwiseError, match="at least 128 tokens"):
        head_sweep([1], context=16, cache=cache, **TINY)
    with pytest.raises(HeadwiseError, match="Got width=16, head_dim=0"):
        head_sweep([1], head_dim=0, cache=cache, **TINY)


def test_head_sweep_changed_text_is_retrained(cache, tmp_path, in_process):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    first = head_sweep([2], corpus=text, context=16, seeds=1, cache=cache, **TINY)
    assert first.rows[0].probe_accuracy == {}
    text.write_text("a dog ran in a park and back. " * 200)  # the same name, another text: another point
    assert head_sweep([2], corpus=text, context=16, seeds=1, cache=cache, **TINY).rows[0].loss != first.rows[0].loss


def test_train_all_same_weights_in_any_process(tmp_path):
    size = ExperimentSize(width=16, heads=4, steps=8, batch_size=4)
    local, parallel = (
        TrainedModelProvider(ExperimentStore(tmp_path / "a"), size=size),
        TrainedModelProvider(ExperimentStore(tmp_path / "b"), size=size),
    )
    configs = [local.make_config(seed) for seed in (0, 1)]
    train_all(configs, parallel.store, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for config in configs:
            first, second = train_or_load(config, local.store), train_or_load(config, parallel.store)
            assert first.loss == second.loss
            for name, weight in first.load_model().state_dict().items():
                assert torch.equal(weight, second.load_model().state_dict()[name])
    finally:
        torch.set_num_threads(threads)


def test_trained_start_options_set_output_projection(tmp_path):
    experiment = TrainedModelProvider(
        ExperimentStore(tmp_path), size=ExperimentSize(width=16, heads=4, steps=8, batch_size=4)
    )
    for layer in (
        experiment.train_or_load(experiment.make_config(0, init="identity W_O")).load_model().attention_layers()
    ):
        assert torch.equal(layer.output_projection.weight, torch.eye(16))
    frozen = experiment.train_or_load(experiment.make_config(0, init="frozen W_O"))
    for before, after in zip(
        frozen.load_model(0).attention_layers(), frozen.load_model().attention_layers(), strict=True
    ):
        assert torch.equal(before.output_projection.weight, after.output_projection.weight)
        assert not torch.equal(before.heads[0].W_Q, after.heads[0].W_Q)
    with pytest.raises(HeadwiseError, match="did you mean twins"):
        experiment.make_config(0, init="twin")


def test_head_sweep_full_disk_raises_before_training(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(HeadwiseError, match=r"not enough disk space.*MB.*--cache"):
        head_sweep([1], seeds=1, cache=tmp_path, **TINY)


def test_store_unwritable_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match="cannot be written"):
        ExperimentStore(tmp_path / "file")


def test_trained_damaged_metadata_raises(tmp_path):
    experiment = TrainedModelProvider(
        ExperimentStore(tmp_path), size=ExperimentSize(width=16, heads=4, steps=8, batch_size=4)
    )
    trained = experiment.train_or_load(experiment.make_config(0))
    (trained.folder / RESULTS_FILE).write_text("{")
    with pytest.raises(HeadwiseError, match=r"done\.json: the file cannot be read"):
        experiment.train_or_load(experiment.make_config(0))


@pytest.mark.parametrize(
    ("number", "executor"),
    [
        pytest.param(signal.SIGINT, "processes", marks=pytest.mark.slow, id="interrupted"),
        pytest.param(signal.SIGKILL, "processes", marks=pytest.mark.slow, id="killed"),
        pytest.param(signal.SIGKILL, "dask", marks=pytest.mark.slow, id="killed, then Dask"),
        pytest.param(signal.SIGKILL, "slurm:cluster=local", marks=pytest.mark.slow, id="killed, then Slurm's jobs"),
    ],
)
def test_head_sweep_interrupted_resumes(tmp_path, number, executor):
    """Stopped in the middle of its second point: the first is not trained again, the second goes on, by any executor."""
    if executor != "processes":
        pytest.importorskip("distributed" if executor == "dask" else "submitit")
    code = (
        "from headwise.experiments.head_count_sweep import head_sweep\n"
        "if __name__ == '__main__':\n"
        f"    head_sweep([1, 2], width=16, steps=120, batch_size=2, seeds=1, processes=1, cache={str(tmp_path)!r})\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        done, logged = list(tmp_path.glob(f"models/*/{RESULTS_FILE}")), list(tmp_path.glob("models/*/metrics.jsonl"))
        if len(done) == 1 and len(logged) == 2:
            break
        time.sleep(0.05)
    # a kill hits the parent alone; its child follows
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait(600) != 0
    (first,) = tmp_path.glob(f"models/*/{RESULTS_FILE}")
    stamp = first.stat().st_mtime_ns
    result = head_sweep(
        [1, 2], width=16, steps=120, batch_size=2, seeds=1, processes=1, executor=executor, cache=tmp_path
    )
    assert first.stat().st_mtime_ns == stamp
    assert len(list(tmp_path.glob(f"models/*/{RESULTS_FILE}"))) == 2
    assert [row.heads for row in result.rows] == [1, 2]
