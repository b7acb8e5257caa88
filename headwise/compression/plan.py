"""Make pruning and streaming plans, and apply them. `prune` does both in one call.

An attention layer computes Σ_h z[h] W_O[h] + b_O. Pruning head h removes its term from the sum. Folding adds the mean of the
removed term over a corpus to the output bias, b_O + mean(z[h]) W_O[h], which costs nothing at inference.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch

from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.prune_request import PruneRequest
from headwise.compression.quantize import check_supported_basis, quantize_to_spec
from headwise.compression.rankers import RANKERS
from headwise.compression.select_heads import compute_folded_biases, select_heads_to_prune
from headwise.compression.streaming_selection import STREAM_RANKERS, StreamingRequest, select_streaming_heads
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, Transformer, check_model  # noqa: F401 (examples use Transformer)
from headwise.model.prune import heads_to_prune
from headwise.model.weights_digest import check_plan, weights_digest
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import CachePolicy, CacheRule, LayerAddress, Plan
from headwise.spec.cache_policy import CachePolicies, rules_from_policies
from headwise.spec.plan import FoldedBias
from headwise.spec.weight_bits import FULL_PRECISION, GROUP_SIZE, Basis, BitAllocation, drop_pruned_heads

M = TypeVar("M", bound=ModelProtocol)


@shows_progress
def prune(
    model: M,
    *,
    keep: float | None = None,
    heads: HeadPattern | None = None,
    ranking: str = "ablation",
    fold_mean: bool = True,
    corpus: Any = None,
    rounds: int = 1,
    seed: int = 0,
    gate_steps: int = 200,
    progress: ProgressOption = None,
) -> M:
    """Return a smaller model without the named or the lowest-ranked heads. The given model is not changed.

    `plan_pruning` makes only the plan, to print, save or apply later. `prune_study` also reports the loss increase.

    Args:
        model: The model to prune.
        keep: Fraction of the heads that remain, above 0 and at most 1.
        heads: Heads to prune, by address or pattern, instead of `keep`.
        ranking: Ranking method: ablation, gradient, random or gates.
        fold_mean: Fold the mean output of each pruned head over `corpus` into the output bias of its layer.
        corpus: A text, a list of texts, a path or a Corpus. Heads are ranked and means are taken on it.
        rounds: Number of pruning rounds. Each round ranks the remaining heads again.
        seed: Seed of random rankings and gates.
        gate_steps: Training steps of learned gates.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        A new model of the same class. The remaining heads keep their addresses.

    Raises:
        ArgumentError: If neither or both of `keep` and `heads` are given, or a needed corpus is missing.

    >>> from headwise.spec import preset
    >>> small = prune(Transformer(preset("nano")), keep=0.5, ranking="random", fold_mean=False)
    >>> len(small.spec.head_addresses)
    18
    """
    progress = callback_of(progress)
    check_model(model)
    model = model.copy_offloaded_to_memory()
    request = PruneRequest(keep, heads, ranking, fold_mean, corpus, rounds, seed, gate_steps)
    return apply(plan_pruning(model, request, progress=progress), model, check=False)


@shows_progress
def plan_pruning(
    model: ModelProtocol,
    request: PruneRequest | None = None,
    *,
    cache: CachePolicies | None = None,
    weights: BitAllocation | None = None,
    group_size: int = GROUP_SIZE,
    basis: Basis = "given",
    activation_bits: int = FULL_PRECISION,
    means: MeanActivations | None = None,
    progress: ProgressOption = None,
) -> Plan:
    """Plan pruned heads, cache policies of KV heads, and weight bits of a model.

    Args:
        model: The model. It is not changed.
        request: Heads to prune. None plans only caches and weights.
        cache: Cache policies of KV heads, {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}. A number means bits.
            KV heads that are not named keep their policy. `plan_streaming` selects KV heads automatically.
        weights: Bits of the weights of the remaining heads, in the format of `hw.quantize`.
            `hw.allocate_bits(…).bits_by_head_and_part` selects them automatically.
        group_size: Number of consecutive input weights that share a quantization scale.
        basis: Basis in which the weights of heads are quantized.
        activation_bits: Bits of the activations that quantized weights are multiplied by.
        means: Mean activations of the heads over the corpus of the request, if they were computed before.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        A plan for this model. `apply` returns the changed model.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> plan = plan_pruning(model, PruneRequest(heads="5.1,3.*", fold_mean=False))
    >>> print(plan)
    7 of 36 heads are pruned, named by hand; nothing is folded.
      layer 3 loses 0 1 2 3 4 5 (all heads)
      layer 5 loses 1
    >>> len(apply(plan, model).spec.head_addresses)
    29
    >>> print(plan_pruning(model, cache={"0-1.*": CachePolicy(sink_tokens=4, window=64), "2.0": 8}))
    13 of 36 KV heads cache less, named by hand.
      streaming 4 + 64: 0.0 0.1 0.2 0.3 0.4 0.5 1.0 1.1 1.2 1.3 1.4 1.5
      8 bits: 2.0
    >>> print(plan_pruning(model, weights={"*": 8, "5.1": 4, "mlp": 8}))
    Weights are quantized in groups of 32.
      mlp: 8 bits
      W_Q: 35 at 8 bits, 1 at 4 bits
      W_K: 35 at 8 bits, 1 at 4 bits
      W_V: 35 at 8 bits, 1 at 4 bits
      W_O: 35 at 8 bits, 1 at 4 bits
    """
    progress = callback_of(progress)
    check_model(model)
    model = model.copy_offloaded_to_memory()
    if request is None and cache is None and weights is None:
        request = PruneRequest()
    rules = model.spec.cache if cache is None else _merged_cache_rules(model, cache)
    if weights is not None:
        check_supported_basis(model, basis)
        # Raises for wrong bits before long work.
        model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    if request is not None:
        request.check(model)
    plan = Plan(model.spec, weights_digest(model), cache=rules)
    if request is not None:
        plan = _add_pruned_heads(plan, model, request, means, progress)
    if weights is None:
        return plan
    if plan.pruned_heads:  # bits of a pruned head must not constrain the K and V weights that it shared
        weights = drop_pruned_heads(weights, model.spec.head_addresses, plan.pruned_addresses)
    quantized = model.spec.without(plan.pruned_addresses).quantized(weights, group_size=group_size)
    return replace(plan, weight_rules=quantized.weight_rules, basis=basis, activation_bits=activation_bits)


def _add_pruned_heads(
    plan: Plan,
    model: ModelProtocol,
    request: PruneRequest,
    means: MeanActivations | None,
    progress: Progress | None,
) -> Plan:
    """Return the plan with the pruned heads, their scores and folded biases."""
    is_calls = reads_calls(model)
    tokenized = None if request.corpus is None else request.corpus if is_calls else eval_corpus(model, request.corpus)
    pruned = () if request.heads is None else heads_to_prune(model.spec, request.heads)
    if request.fold_mean and means is None:
        means = mean_activations(model, tokenized, heads=pruned or "*")
    means = means if request.fold_mean else None
    scores = {}
    if request.keep is not None:
        pruned, scores = select_heads_to_prune(
            model,
            tokenized,
            request.keep,
            request.ranking,
            means=means,
            rounds=request.rounds,
            seed=request.seed,
            gate_steps=request.gate_steps,
            progress=progress,
        )
    biases = compute_folded_biases(model, pruned, means)
    return replace(
        plan,
        pruned_heads=tuple(map(str, pruned)),
        ranking="named" if request.keep is None else request.ranking,
        rounds=request.rounds,
        corpus=_describe_corpus(tokenized) if tokenized is not None and request.needs_corpus else "",
        scores=tuple(scores[head] for head in model.spec.head_addresses) if scores else (),
        folded_biases=tuple(FoldedBias(str(layer), tuple(bias.tolist())) for layer, bias in biases.items()),
    )


def _describe_corpus(corpus: Any) -> str:
    return corpus.corpus.description if isinstance(corpus, TokenizedCorpus) else f"{len(corpus)} calls"


@shows_progress
def plan_streaming(
    model: ModelProtocol, request: StreamingRequest | None = None, *, progress: ProgressOption = None
) -> Plan:
    """Plan which KV heads stream. The lowest-ranked KV heads cache only the sink tokens and a window of recent tokens.

    Args:
        model: A decoder, native or attached.
        request: Fraction of the KV heads that stream, their window and their ranking. None takes the defaults.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        A plan with cache rules and the score of each KV head. `apply` returns the changed model.

    >>> from headwise.spec import preset
    >>> plan = plan_streaming(Transformer(preset("nano")), StreamingRequest(0.5, window=64, ranking="random"))
    >>> plan.cache[0].policy, len(plan.cache[0].heads)
    (CachePolicy(bits=32, sink_tokens=4, window=64), 18)
    """
    progress = callback_of(progress)
    check_model(model)
    request = StreamingRequest() if request is None else request
    selected, scores, corpus_name = select_streaming_heads(model, request, progress)
    cache: dict[str, CachePolicy | int] = {} if request.bits == FULL_PRECISION else {"*": request.bits}
    if selected:
        cache[",".join(map(str, selected))] = replace(request.policy, bits=request.bits)
    return Plan(
        spec=model.spec,
        digest=weights_digest(model),
        cache=_merged_cache_rules(model, cache),
        cache_ranking=request.ranking,
        cache_corpus=corpus_name,
        cache_scores=tuple(scores[head] for head in model.spec.cached_kv_head_addresses),
    )


def apply(plan: Plan, model: M, *, check: bool = True) -> M:
    """Return the model that a plan describes. The given model is not changed.

    Args:
        plan: A plan made for this model.
        model: The model, with the weights that the plan was made for.
        check: Raise if the plan was made for another model or for other weights. The check reads all weights.

    Returns:
        A new model with the heads, caches and weight bits of the plan.

    Raises:
        HeadwiseError: If `check` is True and the plan does not belong to the model.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> len(apply(plan_pruning(model, PruneRequest(heads="0.*", fold_mean=False)), model).spec.head_addresses)
    30
    """
    if check:
        _check_ranking_names(plan)
        check_plan(plan, model)
    biases = {
        LayerAddress.parse(folded_bias.layer): torch.tensor(folded_bias.bias, dtype=torch.float64, device="cpu")
        for folded_bias in plan.folded_biases
    }
    changed = model.prune(plan.pruned_addresses, biases, plan.cache)
    if plan.weight_rules:
        changed = quantize_to_spec(changed, plan.quantized_spec(changed.spec), plan.basis)
    changed.plans = (*changed.plans, plan)  # saved with the model
    return changed  # pyright: ignore[reportReturnType]


def _check_ranking_names(plan: Plan) -> None:
    for ranking, rankers in ((plan.ranking, RANKERS), (plan.cache_ranking, STREAM_RANKERS)):
        if ranking not in ("named", *rankers):
            names = ("named", *rankers)
            raise ArgumentError(f"plan: unknown ranking method. Got {ranking!r}; {suggest_names(ranking, names)}")


def _merged_cache_rules(model: ModelProtocol, cache: CachePolicies) -> tuple[CacheRule, ...]:
    """Return the cache rules of the model, updated with new policies. KV heads that are not named keep theirs."""
    new = model.spec.with_cache(cache).cache
    old = {",".join(rule.heads): rule.policy for rule in model.spec.cache}
    return rules_from_policies(
        old | {",".join(rule.heads): rule.policy for rule in new}, model.spec.cached_kv_head_addresses
    )
