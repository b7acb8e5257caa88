"""Checks of a sharded model: each process compares it with the full model."""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import headwise as hw
from headwise.distributed.model_partition import partition_model
from headwise.distributed.model_shard import head_collectives, shard_of
from tests.distributed.models import GENERATING_SPEC, SPECS, make_model, relative_difference


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("heads",))


def full_and_sharded(spec: hw.ModelSpec, double: bool = False) -> tuple[Any, Any]:
    model = make_model(spec, double)
    return model, hw.shard(model, mesh())


def inputs(spec: hw.ModelSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, spec.vocab, (3, 11))
    return ids, {"source": torch.randint(0, spec.vocab, (3, 7))} if spec.kind == "encoder-decoder" else {}


def forward_and_gradients(name: str, double: bool) -> dict[str, float]:
    """Compare logits, loss and all gradients with those of one process."""
    spec = SPECS[name]
    model, part = full_and_sharded(spec, double)
    ids, extra = inputs(spec)
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)
    differences = {"logits": relative_difference(model(ids, **extra), part(ids, **extra))}
    losses = []
    for candidate in (model, part):
        hidden = candidate(ids, hidden=True, **extra).flatten(0, 1)
        loss = candidate.output.cross_entropy(hidden, targets.flatten())
        loss.backward()
        losses.append(loss)
    differences["loss"] = relative_difference(*losses)
    gradients = copy.deepcopy(model)
    for expected, own in zip(gradients.parameters(), model.parameters(), strict=True):
        expected.data = torch.zeros_like(own) if own.grad is None else own.grad
    expected_part = shard_of(gradients, partition_model(spec, dist.get_world_size()), head_collectives(mesh()))
    largest = max(float(expected.abs().max()) for expected in expected_part.parameters() if expected.numel())
    max_error = 0.0
    for own, expected in zip(part.parameters(), expected_part.parameters(), strict=True):
        gradient = torch.zeros_like(own) if own.grad is None else own.grad
        max_error = max(max_error, float((gradient - expected).abs().max()) if own.numel() else 0.0)
    return {**differences, "gradients": max_error / largest}


def local_heads(name: str) -> list[list[int]]:
    """Return the local heads of each layer, from hook points."""
    _, part = full_and_sharded(SPECS[name])
    return [list(hook_point.head_ids) for hook_point in part.hook_points()]


def generation() -> dict[str, bool]:
    """Compare generated tokens with every kind of cache."""
    cached_spec = GENERATING_SPEC.with_cache(
        {"0.*": hw.CachePolicy(bits=8), "1.0": hw.CachePolicy(sink_tokens=2, window=4), "2.*": 4}
    )
    results: dict[str, bool] = {}
    for variant, spec in (("plain", GENERATING_SPEC), ("by head", cached_spec)):
        model, part = full_and_sharded(spec)
        ids = torch.tensor([[72, 101, 108, 108, 111, 44], [84, 111, 32, 98, 101, 32]])
        kinds: list[tuple[Any, ...]] = [("dynamic",), ("static", 40)] + ([("sliding", 5)] if variant == "plain" else [])
        for kind in kinds:
            full_output, sharded_output = (m.generate(ids, 20, cache=m.cache(*kind)) for m in (model, part))
            results[f"{variant} {kind[0]}"] = torch.equal(full_output, sharded_output)
        full_output, sharded_output = (
            m.generate(["Hi", "Good day"], 8, temperature=1.0, seed=3) for m in (model, part)
        )
        results[f"{variant} drawn"] = full_output == sharded_output
    model, part = full_and_sharded(SPECS["two stacks"])
    start, source = torch.tensor([[1], [2]]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    results["pairs"] = torch.equal(*(m.generate(start, 6, source=source) for m in (model, part)))
    return results


def memory() -> dict[str, list[int]]:
    """Return bytes of weights and cache, local and in one process."""
    spec = hw.ModelSpec(vocab=512, context=64, layers=4, attention=hw.AttentionSpec(width=64, heads=8, kv_heads=4))
    model, part = full_and_sharded(spec)
    ids, caches = torch.randint(0, 512, (2, 32)), [m.cache("static", 32) for m in (model, part)]
    with torch.no_grad():
        for candidate, cache in zip((model, part), caches, strict=True):
            candidate(ids, cache=cache)
    weights = [sum(p.nbytes for p in m.parameters()) for m in (model, part)]
    return {"weights": weights, "cache": [cache.nbytes for cache in caches]}


def edits() -> dict[str, float]:
    """Compare silenced, scaled, masked, ablated and patched heads."""
    model, part = full_and_sharded(GENERATING_SPEC)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    gates = {"0.1": 0.0, "1.4": torch.tensor([0.5, 2.0])}
    differences = {"gates": relative_difference(model(ids, gates=gates), part(ids, gates=gates))}
    with model.heads["0.1,1.*"].silenced(), part.heads["0.1,1.*"].silenced():
        differences["silenced"] = relative_difference(model(ids), part(ids))
    with hw.ablated(model, "0.4", "resample"), hw.ablated(part, "0.4", "resample"):
        differences["resampled"] = relative_difference(model(ids), part(ids))
    with hw.patched(model, "0.4", ids.roll(1, 0)), hw.patched(part, "0.4", ids.roll(1, 0)):
        differences["patched"] = relative_difference(model(ids), part(ids))
    differences["weights"] = relative_difference(model.heads["1.8"].OV.dense(), part.heads["1.8"].OV.dense())
    differences["copied"] = relative_difference(model(ids), copy.deepcopy(part)(ids))
    mask = hw.per_head([hw.window(1 + size) for size in range(9)])
    full_layer, sharded_layer = model.blocks[0].attention, part.blocks[0].attention
    x = torch.randn(2, 7, 36, generator=torch.Generator().manual_seed(2))
    differences["masks by head"] = relative_difference(full_layer(x, mask=mask), sharded_layer(x, mask=mask))
    learned = [torch.ones(9, requires_grad=True) for _ in range(2)]
    for layer, gate in zip((full_layer, sharded_layer), learned, strict=True):
        layer(x, gate=gate).square().sum().backward()
    differences["slopes of gates"] = relative_difference(learned[0].grad, learned[1].grad)  # pyright: ignore[reportArgumentType]
    return differences


def steering() -> dict[str, Any]:
    """Compare edits along directions of heads of both processes, and return the error of folding."""
    model, part = full_and_sharded(GENERATING_SPEC)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    directions = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    result: dict[str, Any] = {"plain": relative_difference(model(ids), part(ids))}
    for edit in ("shift", "project_out"):
        steered = hw.Steering({"0.1": directions[0], "1.8": directions[1]}, edit=edit, strength=1.0)
        steered = steered.for_model(model)
        with steered.applied(model), steered.applied(part):
            result[edit] = relative_difference(model(ids), part(ids))
            result[f"{edit} changes"] = relative_difference(model(ids), make_model(GENERATING_SPEC)(ids))
            result[f"{edit}, generated"] = float((model.generate(ids, 4) != part.generate(ids, 4)).any())
    try:
        hw.fold_steering(part, steered)
    except hw.HeadwiseError as error:
        result["folded"] = str(error)
    return result


def head_search() -> dict[str, Any]:
    """Compare a search of heads."""
    model, part = full_and_sharded(GENERATING_SPEC)
    words = ["cat", "dog", "pen", "sun", "hat", "box", "car", "cup", "bed", "key"]
    rows = [{"text": f"a {word} is a {word}", "pairs": [[4, 1]]} for word in words]
    full, sharded = (hw.find_heads(m, rows) for m in (model, part))
    return {
        "addresses": full.metadata["addresses"] == sharded.metadata["addresses"],
        "scores": float(abs(full.table.scores - sharded.table.scores).max()),
        "weights": float(abs(full.table.weights - sharded.table.weights).max()),
    }


def recordings() -> dict[str, float]:
    """Compare recordings, attention maps and metrics."""
    spec = GENERATING_SPEC.with_cache({"0.0": hw.CachePolicy(bits=8), "1.0": hw.CachePolicy(sink_tokens=2, window=4)})
    model, part = full_and_sharded(spec)
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(1))
    with hw.record(model) as full_recording, hw.record(part) as sharded_recording, torch.no_grad():
        for m in (model, part):
            cache = m.cache()
            m(ids, cache=cache)
            m(ids[:, :1], cache=cache)
    differences = {"recorded": 0.0}
    assert full_recording.addresses == sharded_recording.addresses
    for a, b in zip(full_recording, sharded_recording, strict=True):
        for call in (0, 1):
            for tensor_name in ("q", "k", "v", "z", "output"):
                difference = relative_difference(getattr(a.call(call), tensor_name), getattr(b.call(call), tensor_name))
                differences["recorded"] = max(differences["recorded"], difference)
            differences["recorded"] = max(
                differences["recorded"], relative_difference(a.call(call).map(), b.call(call).map())
            )
    model, part = full_and_sharded(GENERATING_SPEC)
    views = [hw.attention_maps(m, "the cat sat on the mat") for m in (model, part)]
    differences["attended"] = max(
        relative_difference(views[0].map(head), views[1].map(head)) for head in views[0].heads
    )
    return differences


TEXTS = ["The teacher gave the students their work.", "To be or not to be, that is it.", "A cat sat on the mat."]


def importance_difference(ranking: str) -> float:
    model, part = full_and_sharded(GENERATING_SPEC)
    full, sharded = (hw.importance(m, TEXTS, ranking=ranking, ablation="mean", check_heads=0) for m in (model, part))  # pyright: ignore
    assert full.addresses == sharded.addresses
    return float(abs(full.mean - sharded.mean).max() / abs(full.mean).max())


def profile_difference(causal: bool) -> float:
    """Return the largest difference between the numbers of two profiles."""
    model, part = full_and_sharded(replace(GENERATING_SPEC, kept_heads={"1": (0, 4, 8), "2": ()}, layers=3))
    full, sharded = (hw.profile(m, TEXTS, relations=None if causal else False, causal=causal) for m in (model, part))
    assert full.addresses == sharded.addresses
    worst = 0.0
    for name in full.accumulator.fields:
        a, b = (torch.from_numpy(profile.accumulator.mean(name)).nan_to_num(0.0) for profile in (full, sharded))
        worst = max(worst, float((a - b).abs().max() / (1e-3 + a.abs().max())))
    for a, b in zip(full, sharded, strict=True):
        assert (a.role, a.evidence_level) == (b.role, b.evidence_level)
    return worst


def error_messages() -> list[str]:
    """Return error messages for invalid input."""
    model, messages = make_model(SPECS["two stacks"]), []

    def collect_error(action: Any) -> None:
        try:
            action()
        except hw.HeadwiseError as error:
            messages.append(str(error))

    collect_error(lambda: hw.shard(model, "two"))  # pyright: ignore[reportArgumentType]
    collect_error(lambda: hw.shard(make_model(SPECS["grouped"] if dist.get_rank() else SPECS["one key"]), mesh()))
    part = hw.shard(model, mesh())
    collect_error(lambda: hw.shard(part, mesh()))
    collect_error(lambda: part.prune("enc.0.0"))
    collect_error(lambda: part(torch.tensor([[53]]), source=torch.tensor([[1]])))
    single = replace(SPECS["grouped"], attention=replace(SPECS["grouped"].attention, heads=1, kv_heads=1, head_dim=36))
    collect_error(lambda: hw.shard(make_model(single), mesh()))
    collect_error(lambda: part.heads["enc.0.9"])
    speaks = full_and_sharded(GENERATING_SPEC)
    collect_error(lambda: hw.profile(speaks[1], TEXTS[dist.get_rank() :], relations=False, causal=False))
    collect_error(lambda: hw.profile(speaks[0], TEXTS[dist.get_rank() :], relations=False, causal=False))
    return messages


def load_sharded(folder: str) -> dict[str, Any]:
    """Load a saved model in parts."""
    full: Any = hw.load(folder)
    part: Any = hw.load(folder, mesh=mesh())
    ids = torch.randint(0, full.spec.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    weight_bytes = [sum(p.nbytes for p in m.parameters()) for m in (full, part)]
    storage_bytes = sum(
        {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in part.parameters()}.values()
    )
    same = True
    if not full.spec.weight_rules:
        part.save(f"{folder}-again")
        again = hw.load(f"{folder}-again")
        same = all(torch.equal(a, b) for a, b in zip(again.parameters(), full.parameters(), strict=True))
    with torch.no_grad():
        return {
            "off": relative_difference(full(ids), part(ids)),
            "held": weight_bytes,
            "kept": storage_bytes,
            "saved": same,
        }


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
        full: Any = hw.load("smollm2")
        full_cache = full.cache()
        full.generate(text, 2, cache=full_cache)
        return {
            "off": float((full(ids) - logits).abs().max()), "same": full.generate(text, 8) == written,
            "weights": [sum(p.nbytes for p in full.parameters()), weights], "cache": [full_cache.nbytes, cache.nbytes],
        }  # fmt: skip
