"""What heads take and cost, as the page shows it: bits of their weights, their caches, what fewer of either would cost."""

from collections.abc import Iterable, Mapping
from typing import Any

from headwise.analysis.ablation.sensitivity import Sensitivity
from headwise.compression.plan import Plan
from headwise.compression.streaming_selection import STREAM_RANKERS
from headwise.errors import HeadwiseError
from headwise.spec import Address, ModelSpec
from headwise.spec.cache_policy import KEEP_ALL
from headwise.spec.parallel_cost import cache_bytes, kv_head_cache_bytes

CACHE_TOKENS = 4096  # tokens that bytes of caches are told for


def head_cost_data(
    addresses: Iterable[Address],
    spec: ModelSpec | None,
    sensitivity: Sensitivity | None = None,
    plan: Plan | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """For each head its cost, and what a plan does altogether; without a spec of the model there is no cost.

    The plan is one for this model; without one it is told what the model's own spec says of bits and caches.
    """
    if spec is None:
        if sensitivity is not None or plan is not None:
            raise HeadwiseError(
                "costs are of a model's heads; give the model, too: make_report_data(profile, model, …)."
            )
        return {}, None
    heads = [str(address) for address in addresses]
    if plan is not None and plan.spec != spec:
        raise HeadwiseError("the plan was made for another model than the one that is shown; make one for it.")
    spec_after = spec if plan is None else plan.changed_spec
    costs = _sensitivity_rows(sensitivity, heads)
    scores = dict(zip(map(str, spec.kv_head_addresses), () if plan is None else plan.cache_scores, strict=False))
    data = {
        head: _head_cost_data(Address.parse(head), spec, spec_after, scores) | {"costs": costs.get(head, [])}
        for head in heads
    }
    if plan is None and not (spec.cache or spec.weight_rules or costs):
        return data, None
    return data, {
        "has_plan": plan is not None,
        "description": [] if plan is None else str(plan).splitlines(),
        "weights": [spec.weight_bytes(), spec_after.weight_bytes()],
        "cache": [cache_bytes(spec, CACHE_TOKENS), cache_bytes(spec_after, CACHE_TOKENS)],
        "full_cache": cache_bytes(spec.with_cache({}), CACHE_TOKENS) if spec.kv_head_addresses else 0,
        "tokens": CACHE_TOKENS,
        "score_description": ""
        if plan is None or plan.cache_ranking not in STREAM_RANKERS
        else STREAM_RANKERS[plan.cache_ranking].score_description,
        "metric": "" if sensitivity is None else sensitivity.metric,
        "texts": 0 if sensitivity is None else len(sensitivity.counts),
        "basis": "" if sensitivity is None else sensitivity.metadata["basis"],
    }


def _head_cost_data(
    head: Address, spec: ModelSpec, spec_after: ModelSpec, scores: Mapping[str, float]
) -> dict[str, Any]:
    """What is done to one head, and what its cache holds."""
    layer = spec.attention_at(head.layer_address)
    kv_index = layer.kv_of_head[layer.head_ids.index(head.head)]
    kv_head = head.layer_address.head_address(layer.kv_head_ids[kv_index])
    readers = [
        str(head.layer_address.head_address(n))
        for n, head_kv in zip(layer.head_ids, layer.kv_of_head, strict=True)
        if head_kv == kv_index
    ]
    data: dict[str, Any] = {"pruned": head not in spec_after.head_addresses, "bits": None, "cache": None}
    data["kv_siblings"] = [other for other in readers if other != str(head)]
    layer_after = spec_after.attention_at(head.layer_address)
    if not data["pruned"]:
        weight_bits = layer_after.weight_bits
        data["bits"] = (
            {"qk": 32, "vo": 32}
            if weight_bits is None
            else {"qk": weight_bits.q[head.head], "vo": weight_bits.o[head.head]}
        )
    if kv_head in spec.kv_head_addresses:
        is_present = kv_head in spec_after.kv_head_addresses
        policy = layer_after.cache_policies[layer_after.kv_head_ids.index(kv_head.head)] if is_present else None
        data["cache"] = {
            "kv_head": str(kv_head),
            "policy": "nothing: no head reads it" if policy is None else str(policy),
            "reduced": policy != KEEP_ALL,
            "streaming": policy is not None and policy.is_streaming,
            "bits": None if policy is None else policy.bits,
            "bytes": 0 if policy is None else kv_head_cache_bytes(layer_after, policy, CACHE_TOKENS),
            "full_bytes": kv_head_cache_bytes(layer, KEEP_ALL, CACHE_TOKENS),
            "score": scores.get(str(kv_head)),
        }
    return data


def _sensitivity_rows(sensitivity: Sensitivity | None, heads: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """What few bits cost each head; who shares keys shares the costs."""
    rows_by_head: dict[str, list[dict[str, Any]]] = {}
    for cost in sensitivity or ():
        row = {name: getattr(cost, name) for name in ("part", "bits", "loss_increase", "low", "high", "kl_divergence")}
        for head in cost.heads.split():
            rows_by_head.setdefault(head, []).append(row)
    unknown = set(rows_by_head) - set(heads)
    if unknown:
        raise HeadwiseError(f"sensitivities are of another model: it has no head {min(unknown)}; measure this one's.")
    return rows_by_head
