"""Costs of heads: bits of their weights, bytes of their caches, and the loss with fewer of either."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headwise.analysis.ablation.quantization_sensitivity import QuantizationCost, SensitivityResult, sensitivity
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.head_facts import kv_siblings
from headwise.analysis.metrics.far_attention import OUTSIDE_WINDOW, STREAMING_POLICY
from headwise.analysis.roles.profile_result import HeadProfile
from headwise.analysis.roles.prompt_role_definitions import STREAMING_THRESHOLD
from headwise.compression.streaming_loss_evaluator import StreamingHeadLossEvaluator, StreamingTestResult
from headwise.compression.streaming_selection import STREAM_RANKERS
from headwise.distributed.parallel_strategy_cost import cache_bytes, cache_bytes_per_kv_head
from headwise.errors import ArgumentError, HeadwiseError
from headwise.model import ModelProtocol
from headwise.model.simulated_streaming_forward import streaming
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec, Plan
from headwise.spec.cache_policy import KEEP_ALL

CACHE_TOKENS = 4096  # tokens for which cache bytes are given


ABLATION_TEXTS = 32  # texts on which one head is measured
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")


@dataclass(frozen=True)
class HeadCompressionCost:
    """Costs of compressing one head.

    Attributes:
        costs: Loss increases with quantized weights or a quantized cache.
        unit: Unit of the losses.
        texts: Number of texts.
        cache_bytes: Bytes of its KV head at CACHE_TOKENS tokens. 0 if the KV head has no cache.
        kv_head: Address of its KV head.
        streaming_cost: Loss increases if its KV head streams. None if they were not measured.
        errors: Reasons why nothing could be measured.
    """

    costs: tuple[QuantizationCost, ...] = ()
    unit: str = ""
    texts: int = 0
    cache_bytes: int = 0
    kv_head: str = ""
    streaming_cost: StreamingTestResult | None = None
    errors: tuple[str, ...] = ()


def measure_head_compression_cost(
    model: ModelProtocol, head_profile: HeadProfile, corpus: Any = None, progress: Progress | None = None
) -> HeadCompressionCost:
    """Measure one head with quantized weights and with a streaming cache. Errors are returned in `errors`."""
    address = head_profile.address
    parts = PARTS if address in heads_with_cache(model.spec) else PARTS[:2]
    nbytes, kv_head = cache_bytes_and_kv_head(model.spec, address)
    # The loss of streaming is measured only for heads that meet the attention condition; others are not recommended anyway.
    is_local = head_profile.metrics.get(OUTSIDE_WINDOW.name, math.nan) < STREAMING_THRESHOLD
    try:
        # Raises for an encoder-decoder, which needs pairs of a source and a text; a profile has only texts.
        tokenized = eval_corpus(model, corpus, None).first(ABLATION_TEXTS)
        costs = sensitivity(model, tokenized, heads=str(address), bits=BITS, parts=parts, progress=progress)
        streaming_test = streaming_cost(model, kv_head, corpus) if nbytes and is_local else None
    except HeadwiseError as error:
        return HeadCompressionCost(errors=(str(error),))
    return HeadCompressionCost(tuple(costs), costs.metric, len(costs.counts), nbytes, kv_head, streaming_test)


def collect_costs(
    spec: ModelSpec, addresses: Iterable[Address], sensitivity: SensitivityResult | None = None
) -> dict[str, HeadCompressionCost]:
    """Return the costs of heads by address: bytes of their caches, and the results of a sensitivity measurement."""
    text_info = {} if sensitivity is None else {"unit": sensitivity.metric, "texts": len(sensitivity.counts)}
    costs: dict[str, list[QuantizationCost]] = {}
    for cost in sensitivity or ():
        for head in cost.heads.split():
            costs.setdefault(head, []).append(cost)
    summaries = {}
    for address in addresses:
        nbytes, kv_head = cache_bytes_and_kv_head(spec, address)
        summaries[str(address)] = HeadCompressionCost(
            tuple(costs.get(str(address), ())), cache_bytes=nbytes, kv_head=kv_head, **text_info
        )
    return summaries


def heads_with_cache(spec: ModelSpec) -> tuple[Address, ...]:
    """Return the heads whose keys and values are cached during generation."""
    return tuple(address for address in spec.head_addresses if cache_bytes_and_kv_head(spec, address)[0])


def cache_bytes_and_kv_head(spec: ModelSpec, head: Address) -> tuple[int, str]:
    """Return the cache bytes at CACHE_TOKENS tokens of the KV head of a head, and its address. 0 bytes without a cache."""
    layer = spec.attention_at(head.layer_address)
    kv_head = head.layer_address.head_address(layer.kv_head_ids[layer.kv_of_head[layer.head_ids.index(head.head)]])
    return (
        (cache_bytes_per_kv_head(layer, KEEP_ALL, CACHE_TOKENS), str(kv_head))
        if kv_head in spec.cached_kv_head_addresses
        else (0, str(kv_head))
    )


def streaming_cost(model: ModelProtocol, kv_head: str, corpus: Any = None) -> StreamingTestResult | None:
    """Measure the loss with this KV head streaming. Return None if the model has no cache policies per head."""
    if model.spec.kind != "decoder" or model.output is None or model.spec.cache:
        return None
    try:
        model.streaming_forward()
    except HeadwiseError:  # a torch module, or KV heads without an address
        return None
    evaluation = StreamingHeadLossEvaluator.of(model, STREAMING_POLICY, corpus)
    with streaming(model, (Address.parse(kv_head),), STREAMING_POLICY):
        return evaluation.test(model)


def head_cost_data(
    addresses: Iterable[Address],
    spec: ModelSpec | None,
    sensitivity: SensitivityResult | None = None,
    plan: Plan | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return the costs of each head and a summary of the plan. Both are empty if `spec` is None.

    Args:
        addresses: Heads.
        spec: Spec of the model.
        sensitivity: Result of `hw.sensitivity` for this model.
        plan: A plan for this model. None takes the weight bits and cache policies of `spec`.

    Returns:
        Costs by head address, and the summary as plain data. The summary is None if there is nothing to summarize.
    """
    if spec is None:
        if sensitivity is not None or plan is not None:
            raise ArgumentError(
                "model: costs and plans need the model of the profile. Got None. "
                "Pass the model: make_report_data(profile, model, …)."
            )
        return {}, None
    heads = [str(address) for address in addresses]
    if plan is not None and plan.spec != spec:
        raise ArgumentError(
            "plan: it was made for another model than the one in the report. Make a plan for this model."
        )
    spec_after = spec if plan is None else plan.changed_spec
    costs = _sensitivity_rows(sensitivity, heads)
    scores = dict(zip(map(str, spec.cached_kv_head_addresses), () if plan is None else plan.cache_scores, strict=False))
    data = {
        head: _head_bits_and_cache_data(Address.parse(head), spec, spec_after, scores) | {"costs": costs.get(head, [])}
        for head in heads
    }
    if plan is None and not (spec.cache or spec.weight_rules or costs):
        return data, None
    return data, {
        "has_plan": plan is not None,
        "description": [] if plan is None else str(plan).splitlines(),
        "weights": [spec.weight_bytes(), spec_after.weight_bytes()],
        "cache": [cache_bytes(spec, CACHE_TOKENS), cache_bytes(spec_after, CACHE_TOKENS)],
        "full_cache": cache_bytes(spec.with_cache({}), CACHE_TOKENS) if spec.cached_kv_head_addresses else 0,
        "tokens": CACHE_TOKENS,
        "score_description": ""
        if plan is None or plan.cache_ranking not in STREAM_RANKERS
        else STREAM_RANKERS[plan.cache_ranking].score_description,
        "metric": "" if sensitivity is None else sensitivity.metric,
        "texts": 0 if sensitivity is None else len(sensitivity.counts),
        "basis": "" if sensitivity is None else sensitivity.metadata["basis"],
    }


def _head_bits_and_cache_data(
    head: Address, spec: ModelSpec, spec_after: ModelSpec, scores: Mapping[str, float]
) -> dict[str, Any]:
    """Return the weight bits and the cache of one head after the plan."""
    layer = spec.attention_at(head.layer_address)
    kv_index = layer.kv_of_head[layer.head_ids.index(head.head)]
    kv_head = head.layer_address.head_address(layer.kv_head_ids[kv_index])
    data: dict[str, Any] = {"pruned": head not in spec_after.head_addresses, "bits": None, "cache": None}
    data["kv_siblings"] = list(kv_siblings(spec, head))
    layer_after = spec_after.attention_at(head.layer_address)
    if not data["pruned"]:
        weight_bits = layer_after.weight_bits
        data["bits"] = (
            {"qk": 32, "vo": 32}
            if weight_bits is None
            else {"qk": weight_bits.q[head.head], "vo": weight_bits.o[head.head]}
        )
    if kv_head in spec.cached_kv_head_addresses:
        is_present = kv_head in spec_after.cached_kv_head_addresses
        policy = layer_after.cache_policies[layer_after.kv_head_ids.index(kv_head.head)] if is_present else None
        data["cache"] = {
            "kv_head": str(kv_head),
            "policy": "nothing: no head reads it" if policy is None else str(policy),
            "reduced": policy != KEEP_ALL,
            "streaming": policy is not None and policy.is_streaming,
            "bits": None if policy is None else policy.bits,
            "bytes": 0 if policy is None else cache_bytes_per_kv_head(layer_after, policy, CACHE_TOKENS),
            "full_bytes": cache_bytes_per_kv_head(layer, KEEP_ALL, CACHE_TOKENS),
            "score": scores.get(str(kv_head)),
        }
    return data


def _sensitivity_rows(sensitivity: SensitivityResult | None, heads: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the costs of quantizing each head. Heads that share a KV head share its costs."""
    rows_by_head: dict[str, list[dict[str, Any]]] = {}
    for cost in sensitivity or ():
        row = {name: getattr(cost, name) for name in ("part", "bits", "loss_increase", "low", "high", "kl_divergence")}
        for head in cost.heads.split():
            rows_by_head.setdefault(head, []).append(row)
    unknown = set(rows_by_head) - set(heads)
    if unknown:
        raise ArgumentError(
            f"sensitivity: it was measured on another model. This model has no head {min(unknown)}. "
            "Measure this model: hw.sensitivity(model, corpus)."
        )
    return rows_by_head
