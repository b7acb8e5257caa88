"""Memory and traffic by layout: counted from the spec, beside what models really hold and send."""

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
from headwise.distributed import parallel_strategy as team_layout
from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.spec.parallel_cost import Layout, forward_flops, layout
from tests.distributed.models import SPEAKS, SPECS

TOKENS, BATCH = 16, 2
BIASES = hw.ModelSpec(
    vocab=96, context=32, layers=4, attention=hw.AttentionSpec(width=48, heads=4, bias=True, out_bias=True)
)
KEPT = SPEAKS.caching({"0.*": hw.Keeps(bits=8), "1.0": hw.Keeps(first=2, last=4), "1.1": 4})
MODELS = {**SPECS, "biases": BIASES, "kept": KEPT}


def named(made: tuple[Layout, ...]) -> dict[str, Layout]:
    return {one.name: one for one in made}


@dataclass
class Found:
    """What one process was seen to hold and to send, in bytes; a ring as layouts count it."""

    weights: int
    cache: int
    gathered: int
    forward: int
    step: int


class Traffic(TorchDispatchMode):
    """Counts what is given to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.name():
            given = [x for some in args for x in (some if isinstance(some, list) else [some])]
            size = next(dist.ProcessGroup.unbox(x).size() for x in given if isinstance(x, torch.ScriptObject))
            whole = max(x.nbytes for x in given if isinstance(x, Tensor))  # what is put together, or cut up
            self.sent += (2 if "allreduce" in func.name() else 1) * (size - 1) / size * whole
        return func(*args, **(kwargs or {}))


class Loss(nn.Module):
    """A step's loss."""

    def __init__(self, model: hw.Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = states(self.model, ids)
        if self.model.output is None:
            return hidden.square().mean()
        return self.model.output.cross_entropy(hidden.flatten(0, 1), ids.flatten())


def states(model: hw.Transformer, ids: Tensor, **more: Any) -> Tensor:
    source = {"source": ids} if model.spec.kind == "encoder-decoder" else {}
    return model(ids, hidden=True, **source, **more)


@contextmanager
def alone_of(processes: int, rank: int) -> Iterator[None]:
    """One process of a group whose others are made up: what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured(kind: str, spec: hw.ModelSpec, processes: int, rank: int, head_processes: int = 2) -> Found:
    with alone_of(processes, rank):
        where = team_layout.TeamLayout.of(kind, Team(rank, processes, torch.device("cpu")), head_processes)
        model = where.arranged(hw.Transformer(spec))
        where.cut(model)
        module, gathered, buckets = where.wrap(Loss(model), unused=False), [0], list[int]()
        if kind == "ddp" and processes > 1:

            def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore
                buckets.append(bucket.buffer().nbytes)
                done = torch.futures.Future[Tensor]()
                done.set_result(bucket.buffer())
                return done

            module.register_comm_hook(None, hook)  # pyright: ignore[reportCallIssue]
        weights = sum(team_layout.local(p).nbytes for p in model.parameters())

        def look(*_: Any) -> None:
            gathered.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))

        for block in (*model.blocks, *model.encoder_blocks):
            block.get_submodule("mlp").register_forward_hook(look)
        ids, cached = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS), None
        if spec.kind != "encoder":
            cached = model.cache("fixed", TOKENS)
        with Traffic() as reading, torch.no_grad():
            states(model, ids, **({} if cached is None else {"cache": cached}))
        team_layout.settle(model)
        if kind == "ddp":
            module(ids).backward()
            step = sum(2 * (processes - 1) / processes * size for size in buckets)
        else:
            with Traffic() as stepping:
                module(ids).backward()
            step = stepping.sent
        held = 0 if cached is None else cached.bytes
        return Found(weights, held, max(gathered), round(reading.sent), round(step))


def told_and_found(kind: str, name: str, processes: int) -> tuple[Layout, Found]:
    """What is told, and the most that was found in any process."""
    told = named(layout(MODELS[name], processes, TOKENS, batch=BATCH, element=4))[kind]
    found = [measured(kind, MODELS[name], processes, rank) for rank in range(processes)]
    return told, Found(*(max(some) for some in zip(*(vars(one).values() for one in found), strict=True)))


def padding(model: nn.Module, processes: int) -> tuple[int, int]:
    """FSDP cuts each tensor by rows, as many for everyone: what that adds to one process, and to all of them."""
    ranks = [(-(-len(p) // processes), p) for p in model.parameters() if p.numel()]
    return tuple(
        sum(count * rows * p[0].nbytes for rows, p in ranks) - sum(p.nbytes for _, p in ranks) * count // processes
        for count in (1, processes)
    )  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("name", ["cut", "one key", "two stacks", "slices", "kept"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_heads_in_parallel_to_the_byte(name: str, processes: int) -> None:
    told, found = told_and_found("heads", name, processes)
    assert (told.weights, told.cache) == (found.weights, found.cache)
    assert (told.forward, told.step) == pytest.approx((found.forward, found.step), abs=2)  # as a third of a byte is


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_so_it_is_for_every_model(name: str, processes: int) -> None:
    test_heads_in_parallel_to_the_byte(name, processes)


@pytest.mark.parametrize(
    "name", ["cut", "kept", *(pytest.param(n, marks=pytest.mark.slow) for n in set(SPECS) - {"cut"})]
)
@pytest.mark.parametrize("processes", [2, 3])
def test_weights_in_shares_but_for_what_fills_rows_up(name: str, processes: int) -> None:
    told, found = told_and_found("fsdp", name, processes)
    model = hw.Transformer(MODELS[name])
    blocks = [padding(block, processes)[1] for block in (*model.blocks, *model.encoder_blocks)]
    one, every = padding(model, processes)
    share = (processes - 1) / processes
    assert told.cache == found.cache
    assert told.gathered == found.gathered
    assert told.weights + one == pytest.approx(found.weights, abs=processes)
    assert told.forward + share * every == pytest.approx(found.forward, abs=processes)
    assert told.step + share * (2 * every + sum(blocks)) == pytest.approx(found.step, abs=2 * processes)


def test_a_grid_of_both() -> None:
    told, found = told_and_found("fsdp+heads", "biases", 4)
    assert told.axes == "2 × 2"
    assert (told.weights, told.cache, told.gathered) == (found.weights, found.cache, found.gathered)
    assert (told.forward, told.step) == (found.forward, found.step)


@pytest.mark.parametrize("name", ["grouped", "biases"])
def test_the_whole_model_each(name: str) -> None:
    told, found = told_and_found("ddp", name, 3)
    assert (told.weights, told.cache, told.forward, told.gathered) == (found.weights, found.cache, found.forward, 0)
    assert told.step == pytest.approx(found.step, abs=3)


@pytest.mark.parametrize("name", MODELS)
def test_one_process_holds_the_whole_and_sends_nothing(name: str) -> None:
    whole = sum(p.numel() for p in hw.Transformer(MODELS[name]).parameters())
    for one in layout(MODELS[name], 1, TOKENS, element=4):
        if one.refused:
            assert one.name == "fsdp+heads"
            continue
        assert (one.weights, one.training, one.forward, one.step) == (4 * whole, 16 * whole, 0, 0)


def test_by_hand() -> None:
    """GPT-2's widths are easy to count: a block has 12 D² + 13 D parameters."""
    D, L, V, C, n = 48, 4, 96, 32, 4 * TOKENS
    whole = L * (12 * D * D + 13 * D) + V * D + C * D + 2 * D
    made = named(layout(BIASES, 4, TOKENS, batch=4, element=2))
    assert BIASES.parameters == whole
    assert made["ddp"].weights == 2 * whole
    assert made["ddp"].step == 2 * 3 * 4 * whole // 4
    assert made["fsdp"].training == 4 * whole
    assert made["fsdp"].forward == 3 * 2 * whole // 4
    rest = V * D + C * D + 2 * D
    assert made["fsdp"].gathered == 4 * (rest + 12 * D * D + 13 * D)
    assert made["fsdp"].step == 3 * 4 * (3 * whole - rest) // 4
    assert made["heads"].forward == 2 * 3 * (2 * L + 1) * n * D * 2 // 4
    assert made["heads"].step == 2 * 3 * ((4 * L + 2) * n * D + 3 * n) * 4 // 4
    assert made["heads"].cache == made["ddp"].cache // 4 == 2 * L * D * 2 * n // 4
    assert forward_flops(BIASES, TOKENS) == 2 * (whole - C * D + L * 2 * D * TOKENS // 2)


def test_what_cannot_be_is_told() -> None:
    made = named(layout(SPECS["grouped"], 10, TOKENS))
    assert "10 processes are more than the 9 heads" in made["heads"].refused
    assert made["fsdp+heads"].axes == "5 × 2"
    assert not made["fsdp"].refused
    assert "no grid of 2" in named(layout(SPECS["grouped"], 7, TOKENS))["fsdp+heads"].refused
    assert "more than the 5 heads" in named(layout(SPECS["cut"], 12, TOKENS, head_processes=6))["fsdp+heads"].refused
    for wrong in (
        {"processes": 0},
        {"batch": 0},
        {"context": 0},
        {"context": -5},
        {"processes": True},
        {"element": 0.5},
    ):
        with pytest.raises(HeadwiseError, match=f"{next(iter(wrong))} is a whole number of at least 1"):
            layout(SPECS["grouped"], **{"processes": 2, **wrong})  # pyright: ignore[reportArgumentType]
