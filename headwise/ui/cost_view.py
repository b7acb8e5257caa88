"""What heads take and cost, as the page shows it: bits of their weights, their caches, what fewer of either would cost."""

from collections.abc import Iterable, Mapping
from typing import Any

from headwise.analysis.ablation.sensitivity import Sensitivity
from headwise.compression.plan import Plan
from headwise.compression.streaming_selection import STREAM_WAYS
from headwise.errors import HeadwiseError
from headwise.spec import Address, ModelSpec
from headwise.spec.cache_policy import ALL
from headwise.spec.parallel_cost import cache_bytes, held_bytes

LENGTH = 4096  # tokens that bytes of caches are told for


def tell_prices(
    addresses: Iterable[Address],
    spec: ModelSpec | None,
    sensitivity: Sensitivity | None = None,
    plan: Plan | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """For each head its price, and what a plan does altogether; without a spec of the model there is no price.

    The plan is one for this model; without one it is told what the model's own spec says of bits and caches.
    """
    if spec is None:
        if sensitivity is not None or plan is not None:
            raise HeadwiseError(
                "prices are told of a model's heads; give the model, too: make_book(profile, model, …)."
            )
        return {}, None
    heads = [str(address) for address in addresses]
    if plan is not None and plan.spec != spec:
        raise HeadwiseError("the plan was made for another model than the one that is shown; make one for it.")
    after = spec if plan is None else plan.after
    costs = _costs(sensitivity, heads)
    scores = dict(zip(map(str, spec.key_heads), () if plan is None else plan.cache_scores, strict=False))
    told = {head: _price(Address.parse(head), spec, after, scores) | {"costs": costs.get(head, [])} for head in heads}
    if plan is None and not (spec.cache or spec.weights or costs):
        return told, None
    return told, {
        "given": plan is not None,
        "told": [] if plan is None else str(plan).splitlines(),
        "weights": [spec.weight_bytes(), after.weight_bytes()],
        "cache": [cache_bytes(spec, LENGTH), cache_bytes(after, LENGTH)],
        "whole": cache_bytes(spec.caching({}), LENGTH) if spec.key_heads else 0,
        "length": LENGTH,
        "score": "" if plan is None or plan.cache_by not in STREAM_WAYS else STREAM_WAYS[plan.cache_by].score,
        "metric": "" if sensitivity is None else sensitivity.metric,
        "texts": 0 if sensitivity is None else len(sensitivity.counts),
        "basis": "" if sensitivity is None else sensitivity.about["basis"],
    }


def _price(head: Address, spec: ModelSpec, after: ModelSpec, scores: Mapping[str, float]) -> dict[str, Any]:
    """What is done to one head, and what its cache holds."""
    layer = spec.attention_at(head.site)
    place = layer.kv_of_head[layer.head_ids.index(head.head)]
    key = head.site.head(layer.kv_ids[place])
    readers = [str(head.site.head(n)) for n, its in zip(layer.head_ids, layer.kv_of_head, strict=True) if its == place]
    made: dict[str, Any] = {"cut": head not in after.addresses, "bits": None, "cache": None}
    made["shares"] = [other for other in readers if other != str(head)]
    now = after.attention_at(head.site)
    if not made["cut"]:
        few = now.weights
        made["bits"] = {"qk": 32, "vo": 32} if few is None else {"qk": few.q[head.head], "vo": few.o[head.head]}
    if key in spec.key_heads:
        there = key in after.key_heads
        keeps = now.keeps[now.kv_ids.index(key.head)] if there else None
        made["cache"] = {
            "key": str(key),
            "keeps": "nothing: no head reads it" if keeps is None else str(keeps),
            "less": keeps != ALL,
            "streams": keeps is not None and keeps.streams,
            "bits": None if keeps is None else keeps.bits,
            "bytes": 0 if keeps is None else held_bytes(now, keeps, LENGTH),
            "whole": held_bytes(layer, ALL, LENGTH),
            "score": scores.get(str(key)),
        }
    return made


def _costs(found: Sensitivity | None, heads: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """What few bits cost each head; who shares keys shares the costs."""
    made: dict[str, list[dict[str, Any]]] = {}
    for cost in found or ():
        row = {name: getattr(cost, name) for name in ("part", "bits", "more", "low", "high", "drift")}
        for head in cost.heads.split():
            made.setdefault(head, []).append(row)
    unknown = set(made) - set(heads)
    if unknown:
        raise HeadwiseError(f"sensitivities are of another model: it has no head {min(unknown)}; measure this one's.")
    return made
