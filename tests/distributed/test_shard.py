"""Head parallelism: several processes compute the same results as one."""

from pathlib import Path

import pytest

import headwise as hw
from headwise.distributed.model_partition import partition_model
from tests.distributed.models import GENERATING_SPEC, SPECS, make_model
from tests.distributed.process_fixtures import WorkerGroup

CHECKS = "tests.distributed.shard_checks"


@pytest.mark.parametrize("name", ["grouped", "cut", "one key", "two stacks"])
def test_shard_forward_and_gradients_equal_one_process(two: WorkerGroup, name: str) -> None:
    for differences in two.run(f"{CHECKS}:forward_and_gradients", name, True):
        assert max(differences.values()) < 1e-12
    for differences in two.run(f"{CHECKS}:forward_and_gradients", name, False):
        assert max(differences.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.slow if "norms" in name and size != 3 else ())
        for name in SPECS
        for size in (2, 3, 4)
    ],
)
def test_shard_all_models_and_sizes_equal_one_process(several: dict[int, WorkerGroup], name: str, size: int) -> None:
    for double, tolerance in ((True, 1e-12), (False, 1e-5)):
        for differences in several[size].run(f"{CHECKS}:forward_and_gradients", name, double):
            assert max(differences.values()) < tolerance


def test_shard_hook_points_show_local_heads(two: WorkerGroup) -> None:
    first, second = two.run(f"{CHECKS}:local_heads", "cut")
    assert first == [[0, 1, 5], [], []]
    assert second == [[2, 3], [4], []]


def test_shard_generate_any_cache_equals_one_process(two: WorkerGroup) -> None:
    for results in two.run(f"{CHECKS}:generation"):
        assert all(results.values()), results


def test_shard_two_processes_halve_weights_and_caches(two: WorkerGroup) -> None:
    for sizes in two.run(f"{CHECKS}:memory"):
        assert sizes["cache"][1] * 2 == sizes["cache"][0]
        assert sizes["weights"][1] < 0.53 * sizes["weights"][0]  # norms and positions are replicated


def test_shard_edits_equal_one_process(two: WorkerGroup) -> None:
    for differences in two.run(f"{CHECKS}:edits"):
        assert max(differences.values()) < 1e-5, differences


def test_shard_steering_equals_one_process(two: WorkerGroup) -> None:
    for result in two.run(f"{CHECKS}:steering"):
        assert "Fold the full model" in result.pop("folded")
        assert min(result.pop(f"{edit} changes") for edit in ("shift", "project_out")) > 1e-3
        assert max(result.values()) < 1e-5, result


def test_shard_head_search_equals_one_process(two: WorkerGroup) -> None:
    for result in two.run(f"{CHECKS}:head_search"):
        assert result.pop("addresses")
        assert max(result.values()) < 1e-5, result


def test_shard_recordings_equal_one_process(two: WorkerGroup) -> None:
    for differences in two.run(f"{CHECKS}:recordings"):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize(
    "ranking", ["gradient", *(pytest.param(method, marks=pytest.mark.slow) for method in ("ablation", "attribution"))]
)
def test_shard_importance_equals_one_process(two: WorkerGroup, ranking: str) -> None:
    assert max(two.run(f"{CHECKS}:importance_difference", ranking)) < 1e-4


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shard_profile_equals_one_process(two: WorkerGroup, causal: bool) -> None:
    assert max(two.run(f"{CHECKS}:profile_difference", causal)) < 1e-4


def test_shard_invalid_input_raises_in_every_process(two: WorkerGroup) -> None:
    first, second = two.run(f"{CHECKS}:error_messages")
    assert first == second
    for message, fragment in zip(
        first,
        [
            "a DeviceMesh is needed",
            "Pass the same model to all processes",
            "it is a part of a sharded model already",
            "Prune the full model, then use hw",
            "token ids must be from 0 to 52",
            "each process needs at least one",
            "enc.0.9",
            "text: it differs between the processes",
            "the processes have different texts",
        ],
        strict=True,
    ):
        assert fragment in message


@pytest.mark.parametrize("storage", ["qkv", "q,k,v"])
def test_load_sharded_reads_parts_and_saves_full(two: WorkerGroup, tmp_path: Path, storage: str) -> None:
    model = hw.Transformer(GENERATING_SPEC, storage=storage)
    model.load_state_dict(make_model(GENERATING_SPEC).state_dict())
    model.save(tmp_path / "model")
    for result in two.run(f"{CHECKS}:load_sharded", str(tmp_path / "model")):
        assert result["off"] < 1e-6
        assert result["held"][1] < 0.55 * result["held"][0]
        assert result["saved"]  # saved by both processes, and bitwise equal to the full model
        assert result["kept"] < 0.56 * result["held"][0]  # memory of other parts is freed


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8, 4, 3])
def test_load_sharded_quantized_equals_full(two: WorkerGroup, tmp_path: Path, bits: int) -> None:
    hw.quantize(make_model(GENERATING_SPEC), {"*": bits, "0.1": 32, "1.4": 8, "mlp": bits, "vocabulary": bits}).save(
        tmp_path / "few"
    )
    for result in two.run(f"{CHECKS}:load_sharded", str(tmp_path / "few")):
        assert result["off"] < 1e-5


@pytest.mark.slow
def test_load_sharded_exported_families_equal_full(two: WorkerGroup, tmp_path: Path) -> None:
    for family, spec in (("gpt2", hw.preset("gpt2")), ("llama", hw.preset("smollm2-135m"))):
        small = spec.resized(layers=2, width=36, heads=3)
        hw.Transformer(small).export(tmp_path / family, family)
        for result in two.run(f"{CHECKS}:load_sharded", str(tmp_path / family)):
            assert result["off"] < 1e-5
            assert result["kept"] < 0.62 * result["held"][0]


@pytest.mark.slow
def test_load_sharded_smollm2_equals_full(two: WorkerGroup) -> None:
    result = two.run(f"{CHECKS}:smollm2", timeout=400)[0]
    assert result["off"] < 1e-3
    assert result["same"]
    assert result["weights"][1] < 0.51 * result["weights"][0]
    assert result["cache"][1] * 2 == result["cache"][0]


@pytest.mark.parametrize("processes", range(1, 10))
def test_partition_groups_are_full_and_balanced(processes: int) -> None:
    spec = hw.preset("smollm2-135m")
    partitions = partition_model(spec, processes)
    for layer_address in spec.layer_addresses:
        by_process = [partition.heads_by_layer[str(layer_address)] for partition in partitions]
        assert sorted(head for heads in by_process for head in heads) == list(range(9))
        if processes <= 3:  # not more than KV groups
            assert all(len({head // 3 for head in heads}) * 3 == len(heads) for heads in by_process)
        assert max(map(len, by_process)) <= {1: 9, 2: 6}.get(processes, 3)
    totals = [sum(map(len, partition.heads_by_layer.values())) for partition in partitions]
    assert max(totals) - min(totals) <= 3


@pytest.mark.parametrize("processes", [0, 10, True])
def test_partition_invalid_process_count_raises(processes: int) -> None:
    with pytest.raises(hw.HeadwiseError, match="process"):
        partition_model(hw.preset("smollm2-135m"), processes)
