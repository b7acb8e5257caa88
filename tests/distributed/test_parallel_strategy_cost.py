"""Memory and traffic of parallel strategies: computed from the spec, against measurements of real models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.distributed import parallel_strategies as team_layout
from headwise.distributed.parallel_strategy_cost import ParallelStrategyCost, forward_flops_per_token, layout
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import HeadwiseError
from tests.distributed.models import GENERATING_SPEC, SPECS

TOKENS, BATCH = 16, 2
BIASES = hw.ModelSpec(
    vocab=96, context=32, layers=4, attention=hw.AttentionSpec(width=48, heads=4, bias=True, out_bias=True)
)
MIXED_CACHE = GENERATING_SPEC.with_cache(
    {"0.*": hw.CachePolicy(bits=8), "1.0": hw.CachePolicy(sink_tokens=2, window=4), "1.1": 4}
)
MODELS = {**SPECS, "biases": BIASES, "kept": MIXED_CACHE}


def by_name(costs: tuple[ParallelStrategyCost, ...]) -> dict[str, ParallelStrategyCost]:
    return {cost.name: cost for cost in costs}


@dataclass
class MeasuredCost:
    """Measured memory and traffic of one process, in bytes, with collectives counted as rings."""

    weights: int
    cache: int
    gathered: int
    forward: int
    step: int


class TrafficCounter(TorchDispatchMode):
    """Counts bytes sent to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.name():
            flat_args = [x for argument in args for x in (argument if isinstance(argument, list) else [argument])]
            size = next(dist.ProcessGroup.unbox(x).size() for x in flat_args if isinstance(x, torch.ScriptObject))
            num_bytes = max(x.nbytes for x in flat_args if isinstance(x, Tensor))  # size of the full tensor
            self.sent += (2 if "allreduce" in func.name() else 1) * (size - 1) / size * num_bytes
        return func(*args, **(kwargs or {}))


class Loss(nn.Module):
    """Loss of a training step."""

    def __init__(self, model: hw.Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = states(self.model, ids)
        if self.model.output is None:
            return hidden.square().mean()
        return self.model.output.cross_entropy(hidden.flatten(0, 1), ids.flatten())


def states(model: hw.Transformer, ids: Tensor, **extra: Any) -> Tensor:
    source = {"source": ids} if model.spec.kind == "encoder-decoder" else {}
    return model(ids, hidden=True, **source, **extra)


@contextmanager
def fake_group(processes: int, rank: int) -> Iterator[None]:
    """Open one process of a fake group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_cost(kind: str, spec: hw.ModelSpec, processes: int, rank: int, head_processes: int = 2) -> MeasuredCost:
    with fake_group(processes, rank):
        strategy = team_layout.ParallelStrategy.of(
            kind, ProcessGroup(rank, processes, torch.device("cpu")), head_processes
        )
        model = strategy.place_model(hw.Transformer(spec))
        strategy.apply_fsdp(model)
        module, gathered, buckets = strategy.wrap_ddp(Loss(model), find_unused=False), [0], list[int]()
        if kind == "ddp" and processes > 1:

            def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore
                buckets.append(bucket.buffer().nbytes)
                done = torch.futures.Future[Tensor]()
                done.set_result(bucket.buffer())
                return done

            module.register_comm_hook(None, hook)  # pyright: ignore[reportCallIssue]
        weights = sum(team_layout.local_tensor(p).nbytes for p in model.parameters())

        def record_gathered(*_: Any) -> None:
            gathered.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))

        for block in (*model.blocks, *model.encoder_blocks):
            block.get_submodule("mlp").register_forward_hook(record_gathered)
        ids, cached = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS), None
        if spec.kind != "encoder":
            cached = model.cache("static", TOKENS)
        with TrafficCounter() as forward_traffic, torch.no_grad():
            states(model, ids, **({} if cached is None else {"cache": cached}))
        team_layout.reshard(model)
        if kind == "ddp":
            module(ids).backward()
            step = sum(2 * (processes - 1) / processes * size for size in buckets)
        else:
            with TrafficCounter() as step_traffic:
                module(ids).backward()
            step = step_traffic.sent
        cache_bytes = 0 if cached is None else cached.nbytes
        return MeasuredCost(weights, cache_bytes, max(gathered), round(forward_traffic.sent), round(step))


def predicted_and_measured(kind: str, name: str, processes: int) -> tuple[ParallelStrategyCost, MeasuredCost]:
    """Return the predicted cost, and the largest measured cost of any process."""
    predicted = by_name(layout(MODELS[name], processes, TOKENS, batch_size=BATCH, element_bytes=4))[kind]
    per_rank = [measure_cost(kind, MODELS[name], processes, rank) for rank in range(processes)]
    return predicted, MeasuredCost(
        *(max(values) for values in zip(*(vars(cost).values() for cost in per_rank), strict=True))
    )


def fsdp_padding(model: nn.Module, processes: int) -> tuple[int, int]:
    """FSDP splits each tensor into equal numbers of rows. Return the padding of one process and of all processes."""
    ranks = [(-(-len(p) // processes), p) for p in model.parameters() if p.numel()]
    return tuple(
        sum(count * rows * p[0].nbytes for rows, p in ranks) - sum(p.nbytes for _, p in ranks) * count // processes
        for count in (1, processes)
    )  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", ["cut", "one key", "two stacks", "slices", "kept"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_layout_head_parallel_equals_measured_bytes(name: str, processes: int) -> None:
    predicted, actual = predicted_and_measured("heads", name, processes)
    assert (predicted.weight_bytes, predicted.cache_bytes) == (actual.weights, actual.cache)
    # Bytes are rounded to integers.
    assert (predicted.forward_traffic, predicted.step_traffic) == pytest.approx((actual.forward, actual.step), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_layout_head_parallel_all_models_equal_measured_bytes(name: str, processes: int) -> None:
    test_layout_head_parallel_equals_measured_bytes(name, processes)


@pytest.mark.parametrize(
    "name", ["cut", "kept", *(pytest.param(n, marks=pytest.mark.slow) for n in set(SPECS) - {"cut"})]
)
@pytest.mark.parametrize("processes", [2, 3])
def test_layout_fsdp_equals_measured_bytes_plus_padding(name: str, processes: int) -> None:
    predicted, actual = predicted_and_measured("fsdp", name, processes)
    model = hw.Transformer(MODELS[name])
    blocks = [fsdp_padding(block, processes)[1] for block in (*model.blocks, *model.encoder_blocks)]
    rank_padding, total_padding = fsdp_padding(model, processes)
    fraction = (processes - 1) / processes
    assert predicted.cache_bytes == actual.cache
    assert predicted.gathered_bytes == actual.gathered
    assert predicted.weight_bytes + rank_padding == pytest.approx(actual.weights, abs=processes)
    assert predicted.forward_traffic + fraction * total_padding == pytest.approx(actual.forward, abs=processes)
    assert predicted.step_traffic + fraction * (2 * total_padding + sum(blocks)) == pytest.approx(
        actual.step, abs=2 * processes
    )


def test_layout_fsdp_head_grid_equals_measured_bytes() -> None:
    predicted, actual = predicted_and_measured("fsdp+heads", "biases", 4)
    assert predicted.mesh_shape == "2 × 2"
    assert (predicted.weight_bytes, predicted.cache_bytes, predicted.gathered_bytes) == (
        actual.weights,
        actual.cache,
        actual.gathered,
    )
    assert (predicted.forward_traffic, predicted.step_traffic) == (actual.forward, actual.step)


@pytest.mark.parametrize("name", ["grouped", "biases"])
def test_layout_ddp_equals_measured_bytes(name: str) -> None:
    predicted, actual = predicted_and_measured("ddp", name, 3)
    assert (predicted.weight_bytes, predicted.cache_bytes, predicted.forward_traffic, predicted.gathered_bytes) == (
        actual.weights,
        actual.cache,
        actual.forward,
        0,
    )
    assert predicted.step_traffic == pytest.approx(actual.step, abs=3)


@pytest.mark.parametrize("name", MODELS)
def test_layout_one_process_sends_nothing(name: str) -> None:
    num_parameters = sum(p.numel() for p in hw.Transformer(MODELS[name]).parameters())
    for cost in layout(MODELS[name], 1, TOKENS, element_bytes=4):
        if cost.error:
            assert cost.name == "fsdp+heads"
            continue
        assert (cost.weight_bytes, cost.training_bytes, cost.forward_traffic, cost.step_traffic) == (
            4 * num_parameters,
            16 * num_parameters,
            0,
            0,
        )


def test_layout_gpt2_widths_equal_hand_count() -> None:
    """A block of GPT-2 has 12 D² + 13 D parameters."""
    D, L, V, C, n = 48, 4, 96, 32, 4 * TOKENS
    total = L * (12 * D * D + 13 * D) + V * D + C * D + 2 * D
    costs = by_name(layout(BIASES, 4, TOKENS, batch_size=4, element_bytes=2))
    assert BIASES.num_parameters == total
    assert costs["ddp"].weight_bytes == 2 * total
    assert costs["ddp"].step_traffic == 2 * 3 * 4 * total // 4
    assert costs["fsdp"].training_bytes == 4 * total
    assert costs["fsdp"].forward_traffic == 3 * 2 * total // 4
    outside_blocks = V * D + C * D + 2 * D
    assert costs["fsdp"].gathered_bytes == 4 * (outside_blocks + 12 * D * D + 13 * D)
    assert costs["fsdp"].step_traffic == 3 * 4 * (3 * total - outside_blocks) // 4
    assert costs["heads"].forward_traffic == 2 * 3 * (2 * L + 1) * n * D * 2 // 4
    assert costs["heads"].step_traffic == 2 * 3 * ((4 * L + 2) * n * D + 3 * n) * 4 // 4
    assert costs["heads"].cache_bytes == costs["ddp"].cache_bytes // 4 == 2 * L * D * 2 * n // 4
    assert forward_flops_per_token(BIASES, TOKENS) == 2 * (total - C * D + L * 2 * D * TOKENS // 2)


def test_layout_impossible_settings_are_reported() -> None:
    costs = by_name(layout(SPECS["grouped"], 10, TOKENS))
    assert "the largest layer has 9 heads" in costs["heads"].error
    assert costs["fsdp+heads"].mesh_shape == "5 × 2"
    assert not costs["fsdp"].error
    assert (
        "cannot be split into several groups of 2" in by_name(layout(SPECS["grouped"], 7, TOKENS))["fsdp+heads"].error
    )
    assert "has 5 heads" in by_name(layout(SPECS["cut"], 12, TOKENS, head_processes=6))["fsdp+heads"].error
    for wrong in (
        {"processes": 0},
        {"batch_size": 0},
        {"context": 0},
        {"context": -5},
        {"processes": True},
        {"element_bytes": 0.5},
    ):
        with pytest.raises(HeadwiseError, match=f"{next(iter(wrong))}: must be an integer of at least 1"):
            layout(SPECS["grouped"], **{"processes": 2, **wrong})  # pyright: ignore[reportArgumentType]
