"""Report the effect of a plan: sizes, speed, and the loss compared with random plans of equal size."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.ablation.ablation_sweep import pass_cost
from headwise.analysis.ablation.recorded_head_outputs import MeanActivations
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.paired_timing import PairedTiming, interleaved_timing
from headwise.compression.quantize import quantize
from headwise.compression.select_heads import compute_folded_biases, lowest_scoring, rank_heads
from headwise.distributed.parallel_strategy_cost import cache_bytes
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, NON_HEAD_PARTS, Basis

BENCHMARK_TOKENS = 512  # length of the text for operation counts and timing
TIMING_REPEATS = 9  # interleaved timings of both models
TrainFunction = Callable[[ModelProtocol], object]  # trains a model in place


@dataclass(frozen=True)
class ModelSizeAndFlops:
    """Size of a model and cost of one forward pass.

    Attributes:
        heads: Number of heads.
        kv_heads: Number of KV heads.
        layers_without_heads: Number of attention layers whose heads are all pruned.
        parameters: Number of weights.
        cache_bytes_per_token: Mean bytes of the KV cache per token of the benchmark text.
        operations: Floating-point operations of matrix products in one pass over the text, without masked pairs.
    """

    heads: int
    kv_heads: int
    layers_without_heads: int
    parameters: int
    cache_bytes_per_token: int
    operations: int

    @staticmethod
    def of(spec: ModelSpec, length: int = BENCHMARK_TOKENS, element_bytes: int = 4) -> "ModelSizeAndFlops":
        """Compute the footprint from a spec, without building the model.

        >>> from headwise.spec import preset
        >>> ModelSizeAndFlops.of(preset("smollm2-135m")).cache_bytes_per_token  # 30 layers, 3 KV heads of 64 channels
        46080
        """
        layers = {layer_address: spec.attention_at(layer_address) for layer_address in spec.layer_addresses}
        return ModelSizeAndFlops(
            heads=len(spec.head_addresses),
            kv_heads=sum(len(layer.kv_head_ids) for layer in layers.values()),
            layers_without_heads=sum(not layer.head_ids for layer in layers.values()),
            parameters=spec.num_parameters,
            cache_bytes_per_token=round(cache_bytes(spec, length, element_bytes) / length),
            operations=pass_cost(spec, length, causal=True).total_flops(target_rows=length),
        )


@dataclass(frozen=True)
class RecoveryReport:
    """Loss of the pruned model after recovery fine-tuning, with baselines that had the same training.

    Fine-tuning on texts also lowers the loss of a full model. So the full model and the randomly pruned models are trained
    with the same steps on the same texts.

    Attributes:
        loss: Loss of the recovered model.
        loss_increase: Loss of the recovered model minus that of the full model before training.
        full_loss: Loss of the full model after the same training.
        increase_over_full: Loss of the recovered model minus `full_loss`.
        random: Loss of each randomly pruned model after the same training.
        increase_over_random: Loss of the recovered model minus the mean of `random`.
    """

    loss: LossEstimate
    loss_increase: LossEstimate
    full_loss: LossEstimate
    increase_over_full: LossEstimate
    random: tuple[float, ...] = ()
    increase_over_random: LossEstimate | None = None


@dataclass(frozen=True)
class PlanReport:
    """Comparison of a model before and after a plan.

    Losses have 95% confidence intervals over texts. Differences are paired by text. Intervals of differences from random
    pruning cover texts and random seeds; they are NaN for a single seed.

    Attributes:
        before: ModelSizeAndFlops of the full model.
        after: ModelSizeAndFlops of the changed model.
        length: Tokens of the text for operation counts and timing.
        time: Seconds of a forward pass over that text.
        metric: Unit of the losses.
        texts: Number of texts.
        loss_before: Loss of the full model.
        loss_after: Loss of the changed model.
        loss_increase: Loss after minus loss before.
        random: Loss of each random plan of equal size.
        increase_over_random: Loss after minus the mean of `random`.
        recovered: Losses after recovery fine-tuning. None if there was none.
    """

    before: ModelSizeAndFlops
    after: ModelSizeAndFlops
    length: int
    time: PairedTiming
    metric: str
    texts: int
    loss_before: LossEstimate
    loss_after: LossEstimate
    loss_increase: LossEstimate
    random: tuple[float, ...] = ()
    increase_over_random: LossEstimate | None = None
    recovered: RecoveryReport | None = None

    def __repr__(self) -> str:
        from headwise.ui.result_text import plan_report_table

        return plan_report_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import plan_report_table

        return plan_report_table(self).as_html()

    def footprint_rows(self) -> list[list[str | int | float]]:
        """Return rows of quantity, before, after, and the ratio of after to before."""
        rows: list[list[str | int | float]] = []
        for name, value in asdict(self.before).items():
            after_value = getattr(self.after, name)
            rows.append([name.replace("_", " "), value, after_value, after_value / value if value else float("nan")])
        rows.append([f"seconds, {self.length} tokens", self.time.before, self.time.after, self.time.ratio])
        return rows

    def loss_rows(self) -> list[list[str | float]]:
        """Return rows of label, mean, low and high."""
        seeds = f"{len(self.random)} seeds: mean, min, max"
        estimates = {"before": self.loss_before, "after": self.loss_after, "after − before": self.loss_increase}
        if self.increase_over_random is not None:
            estimates |= {
                f"random pruning, {seeds}": _mean_min_max(self.random),
                "after − random": self.increase_over_random,
            }
        if self.recovered is not None:
            recovered = self.recovered
            estimates |= {"recovered": recovered.loss, "recovered − before": recovered.loss_increase}
            estimates |= {
                "before, same training": recovered.full_loss,
                "recovered − before, same training": recovered.increase_over_full,
            }
            if recovered.increase_over_random is not None:
                estimates[f"random pruning, recovered, {seeds}"] = _mean_min_max(recovered.random)
                estimates["recovered − random, recovered"] = recovered.increase_over_random
        return [[name, *asdict(estimate).values()] for name, estimate in estimates.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data. NaN becomes None."""
        result = asdict(self, dict_factory=nan_to_none)
        result["time"] |= {"ratio": self.time.ratio, "differs": self.time.is_clearly_different}
        return result


@shows_progress
def report(
    before: ModelProtocol,
    after: ModelProtocol,
    corpus: Any,
    *,
    means: MeanActivations | None = None,
    max_length: int | None = None,
    seeds: int = 3,
    recover: TrainFunction | None = None,
    recovered: ModelProtocol | None = None,
    train_full: TrainFunction | None = None,
    length: int | None = None,
    repeats: int = TIMING_REPEATS,
    progress: ProgressOption = None,
) -> PlanReport:
    """Compare a changed model with the full model on texts. The given models are not changed.

    Random plans prune as many heads, reduce the cache of as many KV heads and permute the same weight bits.

    Args:
        before: The full model.
        after: The changed model.
        corpus: Texts, preferably none of those on which heads were ranked.
        means: Mean activations over the texts on which heads were ranked. They are folded into random plans. None folds
            nothing.
        max_length: Maximum number of tokens per text. None: 256. Longer plain texts are split into chunks.
        seeds: Number of random plans.
        recover: Function that trains a model in place. If given, the changed model, the random plans and the full model are
            also evaluated after training.
        recovered: The changed model after `recover`, if that was done before.
        train_full: Function that trains the full model, if it differs from `recover`. A full model learns nothing from
            itself as teacher, so recovery with a teacher needs it.
        length: Tokens of the random text for timing. None: 512, or the context of the model if it is shorter.
        repeats: Number of timings. Both models are timed in turn.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Sizes, timing and losses with 95% confidence intervals.
    """
    progress = callback_of(progress)
    pruned = set(before.spec.head_addresses) - set(after.spec.head_addresses)
    if not set(after.spec.head_addresses) <= set(before.spec.head_addresses) or before.spec.vocab != after.spec.vocab:
        raise ArgumentError(
            "after: this model has heads or a vocabulary that the first model lacks. "
            "Pass the full model first, then the pruned model."
        )
    if recovered is not None and (recover is None or recovered.spec != after.spec):
        raise ArgumentError(
            "recovered: must be a trained copy of the changed model (the second argument), with the same spec. It needs "
            "recover=…, the function that trained it, because the random plans are trained in the same way. "
            f"Got {'recover=None' if recover is None else 'a model with another spec'}. Pass both, or only recover=…."
        )
    evaluation = PairedEvaluator.of(before, corpus, max_length)
    mixed_bits = after.spec.weight_rules != before.spec.weight_rules and len(set(_all_head_bits(after.spec))) > 1
    seeds = seeds if pruned or mixed_bits or after.spec.cache != before.spec.cache else 0
    losses, random_losses, random_recovered_losses = evaluation.losses_per_text(after), [], []
    for seed in range(seeds):
        basis = after.plans[-1].basis if after.plans else "given"
        random_model = apply_random_compression(before, after.spec, means, seed, basis)
        random_losses.append(evaluation.losses_per_text(random_model))
        if recover is not None:
            recover(random_model)
            random_recovered_losses.append(evaluation.losses_per_text(random_model))
        if progress is not None:
            progress("random plans" if recover is None else "random plans, recovered", seed + 1, seeds)
    length = min(BENCHMARK_TOKENS, before.spec.context) if length is None else length
    return PlanReport(
        before=_footprint(before, length),
        after=_footprint(after, length),
        length=length,
        time=interleaved_timing((before, after), length, repeats),
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        loss_before=evaluation.mean_loss(evaluation.full_losses_per_text),
        loss_after=evaluation.mean_loss(losses),
        loss_increase=evaluation.difference(losses, evaluation.full_losses_per_text),
        random=_mean_losses(evaluation, random_losses),
        increase_over_random=evaluation.difference_from_random(losses, random_losses) if random_losses else None,
        recovered=None
        if recover is None
        else _recovery_report(
            evaluation, before, after, (recover, train_full or recover), recovered, random_recovered_losses
        ),
    )


def _recovery_report(
    evaluation: PairedEvaluator,
    before: ModelProtocol,
    after: ModelProtocol,
    trainers: tuple[TrainFunction, TrainFunction],
    recovered: ModelProtocol | None,
    random_losses: list[np.ndarray],
) -> RecoveryReport:
    """Train copies of both models, and compare the recovered model with its baselines."""
    recover, train_full = trainers  # for pruned models, for the full model
    full_model = copy.deepcopy(before)
    train_full(full_model)
    full_losses = evaluation.losses_per_text(full_model)
    del full_model
    if recovered is None:
        recovered = copy.deepcopy(after)
        recover(recovered)
    losses = evaluation.losses_per_text(recovered)
    return RecoveryReport(
        loss=evaluation.mean_loss(losses),
        loss_increase=evaluation.difference(losses, evaluation.full_losses_per_text),
        full_loss=evaluation.mean_loss(full_losses),
        increase_over_full=evaluation.difference(losses, full_losses),
        random=_mean_losses(evaluation, random_losses),
        increase_over_random=evaluation.difference_from_random(losses, random_losses) if random_losses else None,
    )


def _mean_losses(evaluation: PairedEvaluator, loss_sets: list[np.ndarray]) -> tuple[float, ...]:
    return tuple(float(losses.sum() / evaluation.counts.sum()) for losses in loss_sets)


def _mean_min_max(losses: tuple[float, ...]) -> LossEstimate:
    """Return the mean with minimum and maximum as its interval."""
    return LossEstimate(float(np.mean(losses)), min(losses), max(losses))


def _footprint(model: ModelProtocol, length: int) -> ModelSizeAndFlops:
    """Return the footprint of a model. Parameters are counted, because the spec of an attached model may lack some."""
    footprint = ModelSizeAndFlops.of(model.spec, length, next(model.parameters()).element_size())
    if model.spec.weight_rules:
        return footprint  # packed weights are buffers, so model.parameters() would miss them
    return replace(footprint, parameters=sum(value.numel() for value in model.parameters()))


def prune_random_heads(model: ModelProtocol, count: int, means: MeanActivations | None, seed: int) -> ModelProtocol:
    """Return the model without `count` random heads. Their mean outputs are folded if means are given."""
    pruned = lowest_scoring(model.spec.head_addresses, rank_heads(model, None, "random", seed=seed), count)
    return model.prune(pruned, compute_folded_biases(model, pruned, means))


def apply_random_compression(
    model: ModelProtocol, target_spec: ModelSpec, means: MeanActivations | None, seed: int, basis: Basis = "given"
) -> ModelProtocol:
    """Return the model with random heads pruned, random KV heads reduced and weight bits permuted, as many as in the spec.

    Bits are permuted among groups of query heads that share a KV head, if the groups have the same sizes as in the spec.
    """
    changed = prune_random_heads(model, len(model.spec.head_addresses) - len(target_spec.head_addresses), means, seed)
    if target_spec.cache != model.spec.cache:
        heads = [
            str(changed.spec.cached_kv_head_addresses[i])
            for i in np.random.default_rng(seed).permutation(len(changed.spec.cached_kv_head_addresses))
        ]
        rules = []
        for rule in target_spec.cache:
            assigned, heads = heads[: len(rule.heads)], heads[len(rule.heads) :]
            rules.append(replace(rule, heads=tuple(assigned)))
        changed = changed.prune((), cache=rules)
    if target_spec.weight_rules == model.spec.weight_rules:
        return changed
    group_size = next(rule.group_size for rule in target_spec.weight_rules)
    bits = random_bit_allocation(target_spec, changed.spec, seed)
    activation_bits = target_spec.activation_bits
    # Only headwise's own models have weight rules.
    return quantize(changed, bits, group_size=group_size, activation_bits=activation_bits, basis=basis)  # pyright: ignore


def random_bit_allocation(target_spec: ModelSpec, spec: ModelSpec, seed: int) -> dict[str, int]:
    """Return the bits of the heads of one spec, permuted among the heads of another, in the format of `quantize`."""
    rng = np.random.default_rng(seed)
    source_bits = [
        [_query_and_output_bits(target_spec, head) for head in kv_group] for kv_group in _kv_groups(target_spec)
    ]
    heads = _kv_groups(spec)
    if sorted(map(len, source_bits)) != sorted(map(len, heads)):  # groups differ: permute single heads
        source_bits, heads = (
            [[head_bits] for kv_group in source_bits for head_bits in kv_group],
            [[head] for kv_group in heads for head in kv_group],
        )
    allocation = {
        part: bits for part in NON_HEAD_PARTS if (bits := target_spec.bits_and_group_size(part)[0]) != FULL_PRECISION
    }
    for size in sorted({len(kv_group) for kv_group in heads}):
        same_size = [kv_group for kv_group in source_bits if len(kv_group) == size]
        order = rng.permutation(len(same_size))
        for index, kv_group in zip(order, (kv_group for kv_group in heads if len(kv_group) == size), strict=True):
            for head, (qk, vo) in zip(kv_group, same_size[index], strict=True):
                allocation |= {f"{head}:qk": qk, f"{head}:vo": vo}
    return allocation


def _kv_groups(spec: ModelSpec) -> list[list[Address]]:
    """Return the query heads of each KV head."""
    groups: dict[tuple[str, int], list[Address]] = {}
    for layer_address in spec.layer_addresses:
        layer = spec.attention_at(layer_address)
        for head_id, kv_index in zip(layer.head_ids, layer.kv_of_head, strict=True):
            groups.setdefault((str(layer_address), kv_index), []).append(layer_address.head_address(head_id))
    return list(groups.values())


def _query_and_output_bits(spec: ModelSpec, head: Address) -> tuple[int, int]:
    """Return the bits of W_Q and W_O of a head."""
    layer_bits = spec.attention_at(head.layer_address).weight_bits
    return (
        (FULL_PRECISION, FULL_PRECISION) if layer_bits is None else (layer_bits.q[head.head], layer_bits.o[head.head])
    )


def _all_head_bits(spec: ModelSpec) -> list[tuple[int, int]]:
    return [_query_and_output_bits(spec, head) for head in spec.head_addresses]
