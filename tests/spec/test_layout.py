"""Memory and traffic by layout: counted from the spec, beside what models really hold and send."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.spec.layout import Layout, forward_flops, layout

GROUPED = AttentionSpec(width=48, heads=6, kv_heads=3, head_dim=8, rotary=Rotary())
SPECS = {
    "grouped": ModelSpec(vocab=90, context=32, layers=3, hidden=60, attention=GROUPED, positions="none", mlp_bias=False),
    "biases": ModelSpec(vocab=90, context=32, layers=2, attention=AttentionSpec(width=48, heads=4, bias=True, out_bias=True)),
    "encoder": ModelSpec(vocab=90, context=32, layers=2, attention=AttentionSpec(width=48, heads=4), kind="encoder",
                         output="none"),
    "cut": ModelSpec(vocab=90, context=32, layers=2, attention=GROUPED, positions="none").without("0.0,0.1,1.4"),
}  # fmt: skip
TOKENS = 16


def named(made: tuple[Layout, ...]) -> dict[str, Layout]:
    return {one.name: one for one in made}


def measured(spec: ModelSpec, rank: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """One process of a group whose others are made up, and what it sends goes nowhere: bytes of its weights, of its cache,
    and those it gives to be summed."""
    summed: list[int] = []
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        part = hw.shard(hw.Transformer(spec).eval(), init_device_mesh("cpu", (processes,), mesh_dim_names=("heads",)))
        monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: summed.append(x.numel() * x.element_size()))
        cache, ids = None if spec.kind == "encoder" else part.cache("fixed", TOKENS), torch.arange(TOKENS)[None]
        with torch.no_grad():
            part(ids, hidden=True, **({} if cache is None else {"cache": cache}))
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    held = sum(p.numel() * p.element_size() for p in part.parameters())
    return held, 0 if cache is None else cache.bytes, sum(summed)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("processes", [2, 3])
def test_heads_in_parallel_as_measured(name: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = named(layout(SPECS[name], processes, TOKENS, element=4))["heads"]
    held, kept, given = zip(
        *(measured(SPECS[name], rank, processes, monkeypatch) for rank in range(processes)), strict=True
    )
    assert (told.weights, told.cache) == (max(held), max(kept))
    assert told.forward == pytest.approx(2 * (processes - 1) / processes * max(given), abs=processes * len(SPECS))


@pytest.mark.parametrize("name", SPECS)
def test_one_process_holds_the_whole_and_sends_nothing(name: str) -> None:
    spec = SPECS[name]
    whole = sum(p.numel() for p in hw.Transformer(spec).parameters())
    for one in layout(spec, 1, TOKENS, element=4):
        if one.refused:
            assert one.name == "fsdp+heads"
            continue
        assert (one.weights, one.training, one.forward, one.step) == (4 * whole, 16 * whole, 0, 0)


def test_by_hand() -> None:
    """GPT-2's widths are easy to count: a block has 12 D² + 13 D parameters."""
    spec = replace(SPECS["biases"], layers=4)
    D, L, V = 48, 4, 90
    whole = L * (12 * D * D + 13 * D) + V * D + 32 * D + 2 * D
    made = named(layout(spec, 4, TOKENS, batch=2, element=2))
    assert spec.parameters == whole
    assert made["ddp"].weights == 2 * whole
    assert made["ddp"].step == 2 * 3 * 4 * whole // 4
    assert made["fsdp"].training == 4 * whole
    assert made["fsdp"].forward == 3 * 2 * whole // 4
    assert made["fsdp"].step == 3 * 3 * 4 * whole // 4
    stream = 2 * TOKENS * D * 2
    assert made["heads"].forward == (2 * L + 1) * (2 * 3 * stream // 4)
    assert made["heads"].cache == made["ddp"].cache // 4 == 2 * L * D * 2 * TOKENS * 2 // 4
    assert made["fsdp+heads"].axes == "2 × 2"
    assert forward_flops(spec, TOKENS) == 2 * (whole - V * D - 32 * D + V * D + L * 2 * D * TOKENS // 2)


def test_what_cannot_be_is_told() -> None:
    made = named(layout(SPECS["grouped"], 7, TOKENS))
    assert "7 processes are more than the 6 heads" in made["heads"].refused
    assert "no grid" in made["fsdp+heads"].refused
    assert not made["fsdp"].refused
    for wrong in ({"processes": 0}, {"processes": 2, "batch": 0}, {"processes": 2, "context": 0}, {"processes": True}):
        with pytest.raises(HeadwiseError, match="at least"):
            layout(SPECS["grouped"], **wrong)
