"""What a plan brought and what it cost: sizes, speed, and the loss beside that of random plans of equal cost."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.ablation.ablation_sweep import pass_cost
from headwise.analysis.ablation.head_outputs import MeanActivations
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.paired_timing import PairedTiming, interleaved_timing
from headwise.compression.quantize import quantize
from headwise.compression.select_heads import compute_folded_biases, lowest_scoring, rank_heads
from headwise.distributed.parallel_cost import cache_bytes
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, NON_HEAD_PARTS, Basis

BENCHMARK_TOKENS = 512  # tokens of the text that operations are counted for and speed is measured on
TIMING_REPEATS = 9  # in which both models are timed
TrainFunction = Callable[[ModelProtocol], object]  # trains a model further, in place


@dataclass(frozen=True)
class Footprint:
    """What a model takes. Operations are those of matrix products in one pass over a text, hidden pairs left out."""

    heads: int
    kv_heads: int
    layers_without_heads: int
    parameters: int
    cache_bytes_per_token: int  # of a text of that length
    operations: int

    @staticmethod
    def of(spec: ModelSpec, length: int = BENCHMARK_TOKENS, element_bytes: int = 4) -> "Footprint":
        """Count, without building anything.

        >>> from headwise.spec import preset
        >>> Footprint.of(preset("smollm2-135m")).cache_bytes_per_token  # 30 layers, 3 heads, a key and a value of 64 numbers
        46080
        """
        layers = {layer_address: spec.attention_at(layer_address) for layer_address in spec.layer_addresses}
        return Footprint(
            heads=len(spec.head_addresses),
            kv_heads=sum(len(layer.kv_head_ids) for layer in layers.values()),
            layers_without_heads=sum(not layer.head_ids for layer in layers.values()),
            parameters=spec.num_parameters,
            cache_bytes_per_token=round(cache_bytes(spec, length, element_bytes) / length),
            operations=pass_cost(spec, length, causal=True).total_flops(target_rows=length),
        )


@dataclass(frozen=True)
class RecoveryReport:
    """The cut model after healing, and what it is to be held against: all trained alike, by the same steps on the same texts.

    Training on a text also teaches it. So the whole model is trained as well, and so are the random cuts.
    """

    loss: LossEstimate
    loss_increase: LossEstimate  # than the whole model's, which was not trained
    full_loss: LossEstimate  # the loss of the whole model, trained alike
    increase_over_full: LossEstimate
    random: tuple[float, ...] = ()  # the loss of random cuts, trained alike, a seed each
    increase_over_random: LossEstimate | None = None  # loss − their mean


@dataclass(frozen=True)
class PlanReport:
    """Two models side by side; losses with 95 % intervals over texts, differences paired text by text.

    Intervals of differences from random cuts are over texts and over the draws of cuts; of a single draw not known, NaN.
    """

    before: Footprint
    after: Footprint
    length: int  # of the text that operations and speed are told for
    time: PairedTiming  # seconds of a pass over it
    metric: str
    texts: int
    loss_before: LossEstimate
    loss_after: LossEstimate
    loss_increase: LossEstimate  # loss after − before
    random: tuple[float, ...] = ()  # the loss of random cuts of the same size, a seed each
    increase_over_random: LossEstimate | None = None  # loss after − their mean
    recovered: RecoveryReport | None = None

    def footprint_rows(self) -> list[list[str | int | float]]:
        """Figure, before, after, and after as a share of before."""
        rows: list[list[str | int | float]] = []
        for name, value in asdict(self.before).items():
            after_value = getattr(self.after, name)
            rows.append([name.replace("_", " "), value, after_value, after_value / value if value else float("nan")])
        rows.append([f"seconds, {self.length} tokens", self.time.before, self.time.after, self.time.ratio])
        return rows

    def loss_rows(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        seeds = f"{len(self.random)} seeds: mean, least, most"
        estimates = {"before": self.loss_before, "after": self.loss_after, "after − before": self.loss_increase}
        if self.increase_over_random is not None:
            estimates |= {
                f"random cuts, {seeds}": _mean_min_max(self.random),
                "after − random": self.increase_over_random,
            }
        if self.recovered is not None:
            recovered = self.recovered
            estimates |= {"healed": recovered.loss, "healed − before": recovered.loss_increase}
            estimates |= {
                "before, trained alike": recovered.full_loss,
                "healed − trained alike": recovered.increase_over_full,
            }
            if recovered.increase_over_random is not None:
                estimates[f"random cuts, healed, {seeds}"] = _mean_min_max(recovered.random)
                estimates["healed − random, healed"] = recovered.increase_over_random
        return [[name, *asdict(estimate).values()] for name, estimate in estimates.items()]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        result = asdict(self, dict_factory=nan_to_none)
        result["time"] |= {"ratio": self.time.ratio, "differs": self.time.is_clearly_different}
        return result


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
    progress: Progress | None = None,
) -> PlanReport:
    """Measure a smaller model beside the one it came from, on texts, best such that heads were not chosen on.

    Random plans cut as many heads, let as many key heads keep as little and deal out the same bits, once for each of
    `seeds`; `means` of cut heads are folded in, where they are given: `mean_activations` over the texts heads were chosen
    on. Plain text is asked about in units of `max_length` tokens (None: 256).
    `recover` trains a model further, in place. Then everything is told before and after it: of the smaller model
    (`recovered`, if that was done already), of the random cuts, and of the whole model trained alike: by `train_full`,
    where healing has a teacher, from which the whole model would learn nothing. The given models stay as they are.
    Speed is measured on a text of `length` tokens (None: 512, or the model's context), both models in turn, `repeats` times.
    """
    pruned = set(before.spec.head_addresses) - set(after.spec.head_addresses)
    if not set(after.spec.head_addresses) <= set(before.spec.head_addresses) or before.spec.vocab != after.spec.vocab:
        raise HeadwiseError(
            "the second model has heads the first has not; give the full model first, then the cut one."
        )
    if recovered is not None and (recover is None or recovered.spec != after.spec):
        raise HeadwiseError(
            "a healed model is the second one, trained further, and what it is held against must be trained alike; give it "
            "with recover=…, the function that healed it."
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
            progress("random plans" if recover is None else "random plans, healed alike", seed + 1, seeds)
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
    """Heal copies of both models, and tell what came of it beside random cuts that were healed."""
    recover, train_full = trainers  # cut models, the whole one
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
    """Mean, least and most."""
    return LossEstimate(float(np.mean(losses)), min(losses), max(losses))


def _footprint(model: ModelProtocol, length: int) -> Footprint:
    """What a model takes, its parameters counted one by one: a spec of somebody else's model does not tell them all."""
    footprint = Footprint.of(model.spec, length, next(model.parameters()).element_size())
    if model.spec.weight_rules:
        return footprint  # what is packed is no parameter, but the numbers are there
    return replace(footprint, parameters=sum(value.numel() for value in model.parameters()))


def prune_random_heads(model: ModelProtocol, count: int, means: MeanActivations | None, seed: int) -> ModelProtocol:
    """The model without so many heads drawn by chance, their means folded in where they are given."""
    pruned = lowest_scoring(model.spec.head_addresses, rank_heads(model, None, "random", seed=seed), count)
    return model.prune(pruned, compute_folded_biases(model, pruned, means))


def apply_random_compression(
    model: ModelProtocol, target_spec: ModelSpec, means: MeanActivations | None, seed: int, basis: Basis = "given"
) -> ModelProtocol:
    """The model with as many heads cut as in a spec, as many key heads keeping as little and the same bits, all drawn by
    chance. Bits go with all heads that share keys, as far as there are as many of them as in the spec."""
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
    # only models of ours have bits
    return quantize(changed, bits, group_size=group_size, activation_bits=activation_bits, basis=basis)  # pyright: ignore


def random_bit_allocation(target_spec: ModelSpec, spec: ModelSpec, seed: int) -> dict[str, int]:
    """The bits of a spec's heads, dealt anew among those of another spec: what `quantize` takes."""
    rng = np.random.default_rng(seed)
    source_bits = [[_head_bits(target_spec, head) for head in kv_group] for kv_group in _kv_groups(target_spec)]
    heads = _kv_groups(spec)
    if sorted(map(len, source_bits)) != sorted(map(len, heads)):  # other groups: head by head
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
    """Heads that share keys, together."""
    groups: dict[tuple[str, int], list[Address]] = {}
    for layer_address in spec.layer_addresses:
        layer = spec.attention_at(layer_address)
        for head_id, kv_index in zip(layer.head_ids, layer.kv_of_head, strict=True):
            groups.setdefault((str(layer_address), kv_index), []).append(layer_address.head_address(head_id))
    return list(groups.values())


def _head_bits(spec: ModelSpec, head: Address) -> tuple[int, int]:
    """Of W_Q and of W_O."""
    layer_bits = spec.attention_at(head.layer_address).weight_bits
    return (
        (FULL_PRECISION, FULL_PRECISION) if layer_bits is None else (layer_bits.q[head.head], layer_bits.o[head.head])
    )


def _all_head_bits(spec: ModelSpec) -> list[tuple[int, int]]:
    return [_head_bits(spec, head) for head in spec.head_addresses]
