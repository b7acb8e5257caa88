"""Heads in parallel: what processes compute together is what one computes."""

from pathlib import Path

import pytest

import headwise as hw
from headwise.spec.partition import share_out
from tests.distributed.models import SPEAKS, SPECS, model_of
from tests.distributed.process_fixtures import Crew

CHECKS = "tests.distributed.shard_checks"


@pytest.mark.parametrize("name", ["grouped", "cut", "one key", "two stacks"])
def test_logits_loss_and_gradients_are_those_of_one_process(two: Crew, name: str) -> None:
    for found in two.run(f"{CHECKS}:numbers", name, True):
        assert max(found.values()) < 1e-12
    for found in two.run(f"{CHECKS}:numbers", name, False):
        assert max(found.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
def test_so_they_are_for_every_model_and_any_number_of_processes(
    several: dict[int, Crew], name: str, size: int
) -> None:
    for double, most in ((True, 1e-12), (False, 1e-5)):
        for found in several[size].run(f"{CHECKS}:numbers", name, double):
            assert max(found.values()) < most


def test_sites_show_the_heads_that_are_here_under_their_own_numbers(two: Crew) -> None:
    one, other = two.run(f"{CHECKS}:shares", "cut")
    assert one == [[0, 1, 5], [], []]
    assert other == [[2, 3], [4], []]


def test_generation_with_every_cache(two: Crew) -> None:
    for found in two.run(f"{CHECKS}:generation"):
        assert all(found.values()), found


def test_weights_and_caches_are_halved(two: Crew) -> None:
    for found in two.run(f"{CHECKS}:memory"):
        assert found["cache"][1] * 2 == found["cache"][0]
        assert found["weights"][1] < 0.53 * found["weights"][0]  # norms and positions are everywhere


def test_silence_gates_and_masks_by_head(two: Crew) -> None:
    for found in two.run(f"{CHECKS}:edits"):
        assert max(found.values()) < 1e-5, found


def test_recordings_and_maps(two: Crew) -> None:
    for found in two.run(f"{CHECKS}:looks"):
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    "by", ["gradient", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ablation", "attribution"))]
)
def test_what_heads_are_worth(two: Crew, by: str) -> None:
    assert max(two.run(f"{CHECKS}:worth", by)) < 1e-4


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_profiles(two: Crew, causal: bool) -> None:
    assert max(two.run(f"{CHECKS}:profiled", causal)) < 1e-4


def test_bad_input_is_told_in_every_process(two: Crew) -> None:
    one, other = two.run(f"{CHECKS}:refusals")
    assert one == other
    for told, said in zip(
        one,
        [
            "a mesh is made by torch.distributed.init_device_mesh",
            "the processes have different models",
            "this is a part of a model already",
            "cut heads from the whole, then use hw.shard",
            "token ids must lie in 0-52",
            "2 processes are more than the 1 heads of the largest layer",
            "enc.0.9",
            "the processes have different texts",
            "do not read the same texts; give every machine the same files",
        ],
        strict=True,
    ):
        assert said in told


@pytest.mark.parametrize("storage", ["qkv", "q,k,v"])
def test_a_folder_is_read_in_parts(two: Crew, tmp_path: Path, storage: str) -> None:
    model = hw.Transformer(SPEAKS, storage=storage)
    model.load_state_dict(model_of(SPEAKS).state_dict())
    model.save(tmp_path / "model")
    for found in two.run(f"{CHECKS}:loaded", str(tmp_path / "model")):
        assert found["off"] < 1e-6
        assert found["held"][1] < 0.55 * found["held"][0]
        assert found["saved"]  # by both, and whole again bit by bit
        assert found["kept"] < 0.56 * found["held"][0]  # nothing of the others' parts is kept alive


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8, 4, 3])
def test_weights_at_few_bits_too(two: Crew, tmp_path: Path, bits: int) -> None:
    hw.quantise(model_of(SPEAKS), {"*": bits, "0.1": 32, "1.4": 8, "mlp": bits, "vocabulary": bits}).save(
        tmp_path / "few"
    )
    for found in two.run(f"{CHECKS}:loaded", str(tmp_path / "few")):
        assert found["off"] < 1e-5


@pytest.mark.slow
def test_families_of_others_are_read_in_parts(two: Crew, tmp_path: Path) -> None:
    for family, spec in (("gpt2", hw.preset("gpt2")), ("llama", hw.preset("smollm2-135m"))):
        small = spec.resized(layers=2, width=36, heads=3)
        hw.Transformer(small).export(tmp_path / family, family)
        for found in two.run(f"{CHECKS}:loaded", str(tmp_path / family)):
            assert found["off"] < 1e-5
            assert found["kept"] < 0.62 * found["held"][0]


@pytest.mark.slow
def test_a_real_model(two: Crew) -> None:
    found = two.run(f"{CHECKS}:smollm2", patience=400)[0]
    assert found["off"] < 1e-3
    assert found["same"]
    assert found["weights"][1] < 0.51 * found["weights"][0]
    assert found["cache"][1] * 2 == found["cache"][0]


@pytest.mark.parametrize("processes", range(1, 10))
def test_shares_are_whole_groups_and_balanced(processes: int) -> None:
    spec = hw.preset("smollm2-135m")
    shares = share_out(spec, processes)
    for site in spec.sites:
        here = [share.by_layer[str(site)] for share in shares]
        assert sorted(number for some in here for number in some) == list(range(9))
        if processes <= 3:  # as many as there are groups
            assert all(len({number // 3 for number in some}) * 3 == len(some) for some in here)
        assert max(map(len, here)) <= {1: 9, 2: 6}.get(processes, 3)
    totals = [sum(map(len, share.by_layer.values())) for share in shares]
    assert max(totals) - min(totals) <= 3


@pytest.mark.parametrize("processes", [0, 10, True])
def test_shares_that_cannot_be(processes: int) -> None:
    with pytest.raises(hw.HeadwiseError, match="process"):
        share_out(hw.preset("smollm2-135m"), processes)
