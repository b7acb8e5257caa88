"""What processes check about a model they hold together: each compares it with the whole one, which it has too."""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import headwise as hw
from headwise.distributed.head_parallel import together_on
from headwise.model.shard import part_of
from headwise.spec.partition import share_out
from tests.distributed.models import SPEAKS, SPECS, apart, model_of


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("heads",))


def both(spec: hw.ModelSpec, double: bool = False) -> tuple[Any, Any]:
    model = model_of(spec, double)
    return model, hw.shard(model, mesh())


def inputs(spec: hw.ModelSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, spec.vocab, (3, 11))
    return ids, {"source": torch.randint(0, spec.vocab, (3, 7))} if spec.kind == "encoder-decoder" else {}


def numbers(name: str, double: bool) -> dict[str, float]:
    """Logits, loss and every gradient, beside those of one process."""
    spec = SPECS[name]
    model, part = both(spec, double)
    ids, more = inputs(spec)
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)
    found = {"logits": apart(model(ids, **more), part(ids, **more))}
    losses = []
    for one in (model, part):
        hidden = one(ids, hidden=True, **more).flatten(0, 1)
        loss = one.output.cross_entropy(hidden, targets.flatten())
        loss.backward()
        losses.append(loss)
    found["loss"] = apart(*losses)
    slopes = copy.deepcopy(model)
    for there, own in zip(slopes.parameters(), model.parameters(), strict=True):
        there.data = torch.zeros_like(own) if own.grad is None else own.grad
    wanted = part_of(slopes, share_out(spec, dist.get_world_size()), together_on(mesh()))
    largest = max(float(there.abs().max()) for there in wanted.parameters() if there.numel())
    off = 0.0
    for own, there in zip(part.parameters(), wanted.parameters(), strict=True):
        slope = torch.zeros_like(own) if own.grad is None else own.grad
        off = max(off, float((slope - there).abs().max()) if own.numel() else 0.0)
    return {**found, "gradients": off / largest}


def shares(name: str) -> list[list[int]]:
    """The heads that are here, by layer, as sites tell them."""
    _, part = both(SPECS[name])
    return [list(site.head_ids) for site in part.sites()]


def generation() -> dict[str, bool]:
    """Tokens written on, with every cache."""
    treated = SPEAKS.caching({"0.*": hw.Keeps(bits=8), "1.0": hw.Keeps(first=2, last=4), "2.*": 4})
    found: dict[str, bool] = {}
    for what, spec in (("plain", SPEAKS), ("by head", treated)):
        model, part = both(spec)
        ids = torch.tensor([[72, 101, 108, 108, 111, 44], [84, 111, 32, 98, 101, 32]])
        kinds: list[tuple[Any, ...]] = [("growing",), ("fixed", 40)] + ([("sliding", 5)] if what == "plain" else [])
        for kind in kinds:
            one, other = (m.generate(ids, 20, cache=m.cache(*kind)) for m in (model, part))
            found[f"{what} {kind[0]}"] = torch.equal(one, other)
        one, other = (m.generate(["Hi", "Good day"], 8, temperature=1.0, seed=3) for m in (model, part))
        found[f"{what} drawn"] = one == other
    model, part = both(SPECS["two stacks"])
    start, source = torch.tensor([[1], [2]]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    found["pairs"] = torch.equal(*(m.generate(start, 6, source=source) for m in (model, part)))
    return found


def memory() -> dict[str, list[int]]:
    """Bytes of weights and of the cache: here, and in one process."""
    spec = hw.ModelSpec(vocab=512, context=64, layers=4, attention=hw.AttentionSpec(width=64, heads=8, kv_heads=4))
    model, part = both(spec)
    ids, caches = torch.randint(0, 512, (2, 32)), [m.cache("fixed", 32) for m in (model, part)]
    with torch.no_grad():
        for one, cache in zip((model, part), caches, strict=True):
            one(ids, cache=cache)
    weights = [sum(p.nbytes for p in m.parameters()) for m in (model, part)]
    return {"weights": weights, "cache": [cache.bytes for cache in caches]}


def edits() -> dict[str, float]:
    """Silence, gates, masks by head, what was ablated or patched."""
    model, part = both(SPEAKS)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    gates = {"0.1": 0.0, "1.4": torch.tensor([0.5, 2.0])}
    found = {"gates": apart(model(ids, gates=gates), part(ids, gates=gates))}
    with model.heads["0.1,1.*"].silenced(), part.heads["0.1,1.*"].silenced():
        found["silenced"] = apart(model(ids), part(ids))
    with hw.ablated(model, "0.4", "resample"), hw.ablated(part, "0.4", "resample"):
        found["resampled"] = apart(model(ids), part(ids))
    with hw.patched(model, "0.4", ids.roll(1, 0)), hw.patched(part, "0.4", ids.roll(1, 0)):
        found["patched"] = apart(model(ids), part(ids))
    found["weights"] = apart(model.heads["1.8"].OV.dense(), part.heads["1.8"].OV.dense())
    found["copied"] = apart(model(ids), copy.deepcopy(part)(ids))
    mask = hw.per_head([hw.window(1 + number) for number in range(9)])
    one, other = model.blocks[0].attention, part.blocks[0].attention
    x = torch.randn(2, 7, 36, generator=torch.Generator().manual_seed(2))
    found["masks by head"] = apart(one(x, mask=mask), other(x, mask=mask))
    learned = [torch.ones(9, requires_grad=True) for _ in range(2)]
    for layer, gate in zip((one, other), learned, strict=True):
        layer(x, gate=gate).square().sum().backward()
    found["slopes of gates"] = apart(learned[0].grad, learned[1].grad)  # pyright: ignore[reportArgumentType]
    return found


def looks() -> dict[str, float]:
    """What is recorded, seen and measured."""
    spec = SPEAKS.caching({"0.0": hw.Keeps(bits=8), "1.0": hw.Keeps(first=2, last=4)})
    model, part = both(spec)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    with hw.record(model) as one, hw.record(part) as other, torch.no_grad():
        for m in (model, part):
            cache = m.cache()
            m(ids, cache=cache)
            m(ids[:, :1], cache=cache)
    found = {"recorded": 0.0}
    assert one.addresses == other.addresses
    for a, b in zip(one, other, strict=True):
        for call in (0, 1):
            for what in ("q", "k", "v", "z", "write"):
                off = apart(getattr(a.call(call), what), getattr(b.call(call), what))
                found["recorded"] = max(found["recorded"], off)
            found["recorded"] = max(found["recorded"], apart(a.call(call).map(), b.call(call).map()))
    model, part = both(SPEAKS)
    seen = [hw.attend(m, "the cat sat on the mat") for m in (model, part)]
    found["attended"] = max(apart(seen[0].map(head), seen[1].map(head)) for head in seen[0].heads)
    return found


TEXTS = ["The teacher gave the students their work.", "To be or not to be, that is it.", "A cat sat on the mat."]


def worth(by: str) -> float:
    model, part = both(SPEAKS)
    one, other = (hw.importance(m, TEXTS, by=by, how="mean", check=0) for m in (model, part))  # pyright: ignore
    assert one.addresses == other.addresses
    return float(abs(one.mean - other.mean).max() / abs(one.mean).max())


def profiled(causal: bool) -> float:
    """The largest difference between any numbers of two profiles."""
    model, part = both(replace(SPEAKS, kept={"1": (0, 4, 8), "2": ()}, layers=3))
    one, other = (hw.profile(m, TEXTS, relations=None if causal else False, causal=causal) for m in (model, part))
    assert one.addresses == other.addresses
    worst = 0.0
    for name in one.tally.fields:
        a, b = (torch.from_numpy(made.tally.mean(name)).nan_to_num(0.0) for made in (one, other))
        worst = max(worst, float((a - b).abs().max() / (1e-3 + a.abs().max())))
    for a, b in zip(one, other, strict=True):
        assert (a.role, a.rung) == (b.role, b.rung)
    return worst


def refusals() -> list[str]:
    """Bad input, in words."""
    model, told = model_of(SPECS["two stacks"]), []

    def refused(ask: Any) -> None:
        try:
            ask()
        except hw.HeadwiseError as error:
            told.append(str(error))

    refused(lambda: hw.shard(model, "two"))  # pyright: ignore[reportArgumentType]
    refused(lambda: hw.shard(model_of(SPECS["grouped"] if dist.get_rank() else SPECS["one key"]), mesh()))
    part = hw.shard(model, mesh())
    refused(lambda: hw.shard(part, mesh()))
    refused(lambda: part.without("enc.0.0"))
    refused(lambda: part(torch.tensor([[53]]), source=torch.tensor([[1]])))
    single = replace(SPECS["grouped"], attention=replace(SPECS["grouped"].attention, heads=1, kv_heads=1, head_dim=36))
    refused(lambda: hw.shard(model_of(single), mesh()))
    refused(lambda: part.heads["enc.0.9"])
    speaks = both(SPEAKS)
    refused(lambda: hw.profile(speaks[1], TEXTS[dist.get_rank() :], relations=False, causal=False))
    refused(lambda: hw.profile(speaks[0], TEXTS[dist.get_rank() :], relations=False, causal=False))
    return told


def loaded(folder: str) -> dict[str, Any]:
    """A model that was saved, read in parts."""
    whole: Any = hw.load(folder)
    part: Any = hw.load(folder, mesh=mesh())
    ids = torch.randint(0, whole.spec.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    held = [sum(p.nbytes for p in m.parameters()) for m in (whole, part)]
    kept = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in part.parameters()}.values())
    same = True
    if not whole.spec.weights:
        part.save(f"{folder}-again")
        again = hw.load(f"{folder}-again")
        same = all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    with torch.no_grad():
        return {"off": apart(whole(ids), part(ids)), "held": held, "kept": kept, "saved": same}


def smollm2() -> dict[str, Any]:
    part: Any = hw.load("smollm2", mesh=mesh())
    text = "The teacher gave the students their homework. They did it at once, because"
    ids = torch.tensor([part.tokenizer.encode(text)])
    with torch.no_grad():
        logits, written, cache = part(ids), part.generate(text, 8), part.cache()
        part.generate(text, 2, cache=cache)
        weights = sum(p.nbytes for p in part.parameters())
        if dist.get_rank():
            return {}
        whole: Any = hw.load("smollm2")
        whole_cache = whole.cache()
        whole.generate(text, 2, cache=whole_cache)
        return {
            "off": float((whole(ids) - logits).abs().max()), "same": whole.generate(text, 8) == written,
            "weights": [sum(p.nbytes for p in whole.parameters()), weights], "cache": [whole_cache.bytes, cache.bytes],
        }  # fmt: skip
