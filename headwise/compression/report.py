"""What a plan brought and what it cost: sizes, speed, and the loss beside that of random plans of equal cost."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import Means
from headwise.analysis.ablation.sweep import pass_cost
from headwise.compression.evaluation import Estimate, PairedEvaluation, finite
from headwise.compression.prune_heads import cut, fold
from headwise.compression.quantize import quantise
from headwise.compression.select_heads import rank, worst
from headwise.compression.timing import Timing, take_turns
from headwise.errors import HeadwiseError
from headwise.heads.balanced_basis import Basis
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.parallel_cost import cache_bytes
from headwise.spec.weight_bits import BESIDE, FULL

LENGTH = 512  # tokens of the text that operations are counted for and speed is measured on
TURNS = 9  # in which both models are timed
Train = Callable[[AnyModel], object]  # trains a model further, in place


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
    def of(spec: ModelSpec, length: int = LENGTH, bytes_per_number: int = 4) -> "Footprint":
        """Count, without building anything.

        >>> from headwise.spec import preset
        >>> Footprint.of(preset("smollm2-135m")).cache_bytes_per_token  # 30 layers, 3 heads, a key and a value of 64 numbers
        46080
        """
        layers = {site: spec.attention_at(site) for site in spec.sites}
        return Footprint(
            heads=len(spec.addresses),
            kv_heads=sum(len(layer.kv_ids) for layer in layers.values()),
            layers_without_heads=sum(not layer.head_ids for layer in layers.values()),
            parameters=spec.parameters,
            cache_bytes_per_token=round(cache_bytes(spec, length, bytes_per_number) / length),
            operations=pass_cost(spec, length, causal=True).whole(rows=length),
        )


@dataclass(frozen=True)
class Healed:
    """The cut model after healing, and what it is to be held against: all trained alike, by the same steps on the same texts.

    Training on a text also teaches it. So the whole model is trained as well, and so are the random cuts.
    """

    loss: Estimate
    more: Estimate  # than the whole model's, which was not trained
    whole: Estimate  # the loss of the whole model, trained alike
    more_than_whole: Estimate
    random: tuple[float, ...] = ()  # the loss of random cuts, trained alike, a seed each
    more_than_random: Estimate | None = None  # loss − their mean


@dataclass(frozen=True)
class Report:
    """Two models side by side; losses with 95 % intervals over texts, differences paired text by text.

    Intervals of differences from random cuts are over texts and over the draws of cuts; of a single draw not known, NaN.
    """

    before: Footprint
    after: Footprint
    length: int  # of the text that operations and speed are told for
    time: Timing  # seconds of a pass over it
    metric: str
    texts: int
    loss_before: Estimate
    loss_after: Estimate
    more: Estimate  # loss after − before
    random: tuple[float, ...] = ()  # the loss of random cuts of the same size, a seed each
    more_than_random: Estimate | None = None  # loss after − their mean
    healed: Healed | None = None

    def rows(self) -> list[list[str | int | float]]:
        """Figure, before, after, and after as a share of before."""
        made: list[list[str | int | float]] = []
        for name, value in asdict(self.before).items():
            now = getattr(self.after, name)
            made.append([name.replace("_", " "), value, now, now / value if value else float("nan")])
        made.append([f"seconds, {self.length} tokens", self.time.before, self.time.after, self.time.share])
        return made

    def losses(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        seeds = f"{len(self.random)} seeds: mean, least, most"
        named = {"before": self.loss_before, "after": self.loss_after, "after − before": self.more}
        if self.more_than_random is not None:
            named |= {f"random cuts, {seeds}": _spread(self.random), "after − random": self.more_than_random}
        if self.healed is not None:
            healed = self.healed
            named |= {"healed": healed.loss, "healed − before": healed.more}
            named |= {"before, trained alike": healed.whole, "healed − trained alike": healed.more_than_whole}
            if healed.more_than_random is not None:
                named[f"random cuts, healed, {seeds}"] = _spread(healed.random)
                named["healed − random, healed"] = healed.more_than_random
        return [[name, *asdict(figure).values()] for name, figure in named.items()]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        made = asdict(self, dict_factory=finite)
        made["time"] |= {"share": self.time.share, "differs": self.time.differs}
        return made


def report(
    before: AnyModel,
    after: AnyModel,
    on: Any,
    *,
    means: Means | None = None,
    longest: int | None = None,
    seeds: int = 3,
    heal: Train | None = None,
    healed: AnyModel | None = None,
    train_whole: Train | None = None,
    length: int | None = None,
    turns: int = TURNS,
    progress: Progress | None = None,
) -> Report:
    """Measure a smaller model beside the one it came from, on texts, best such that heads were not chosen on.

    Random plans cut as many heads, let as many key heads keep as little and deal out the same bits, once for each of
    `seeds`; `means` of cut heads are folded in, where they are given: `mean_activations` over the texts heads were chosen
    on. Plain text is asked about in units of `longest` tokens (None: 256).
    `heal` trains a model further, in place. Then everything is told before and after it: of the smaller model (`healed`, if
    that was done already), of the random cuts, and of the whole model trained alike: by `train_whole`, where healing has a
    teacher, from which the whole model would learn nothing. The given models stay as they are.
    Speed is measured on a text of `length` tokens (None: 512, or the model's context), both models in turn, `turns` times.
    """
    gone = set(before.spec.addresses) - set(after.spec.addresses)
    if not set(after.spec.addresses) <= set(before.spec.addresses) or before.spec.vocab != after.spec.vocab:
        raise HeadwiseError(
            "the second model has heads the first has not; give the full model first, then the cut one."
        )
    if healed is not None and (heal is None or healed.spec != after.spec):
        raise HeadwiseError(
            "a healed model is the second one, trained further, and what it is held against must be trained alike; give it "
            "with heal=…, the function that healed it."
        )
    evaluation = PairedEvaluation.of(before, on, longest)
    mixed = after.spec.weights != before.spec.weights and len(set(_bits_of_heads(after.spec))) > 1
    seeds = seeds if gone or mixed or after.spec.cache != before.spec.cache else 0
    losses, random, random_healed = evaluation.losses(after), [], []
    for seed in range(seeds):
        basis = after.plans[-1].basis if after.plans else "given"
        other = random_plan(before, after.spec, means, seed, basis)
        random.append(evaluation.losses(other))
        if heal is not None:
            heal(other)
            random_healed.append(evaluation.losses(other))
        if progress is not None:
            progress("random plans" if heal is None else "random plans, healed alike", seed + 1, seeds)
    length = min(LENGTH, before.spec.context) if length is None else length
    return Report(
        before=_size(before, length),
        after=_size(after, length),
        length=length,
        time=take_turns((before, after), length, turns),
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        loss_before=evaluation.estimate(evaluation.full),
        loss_after=evaluation.estimate(losses),
        more=evaluation.difference(losses, evaluation.full),
        random=_means(evaluation, random),
        more_than_random=evaluation.difference_from_draws(losses, random) if random else None,
        healed=None
        if heal is None
        else _heal(evaluation, before, after, (heal, train_whole or heal), healed, random_healed),
    )


def _heal(
    evaluation: PairedEvaluation,
    before: AnyModel,
    after: AnyModel,
    how: tuple[Train, Train],
    healed: AnyModel | None,
    random: list[np.ndarray],
) -> Healed:
    """Heal copies of both models, and tell what came of it beside random cuts that were healed."""
    heal, train_whole = how  # cut models, the whole one
    whole = copy.deepcopy(before)
    train_whole(whole)
    trained = evaluation.losses(whole)
    del whole
    if healed is None:
        healed = copy.deepcopy(after)
        heal(healed)
    losses = evaluation.losses(healed)
    return Healed(
        loss=evaluation.estimate(losses),
        more=evaluation.difference(losses, evaluation.full),
        whole=evaluation.estimate(trained),
        more_than_whole=evaluation.difference(losses, trained),
        random=_means(evaluation, random),
        more_than_random=evaluation.difference_from_draws(losses, random) if random else None,
    )


def _means(evaluation: PairedEvaluation, several: list[np.ndarray]) -> tuple[float, ...]:
    return tuple(float(losses.sum() / evaluation.counts.sum()) for losses in several)


def _spread(losses: tuple[float, ...]) -> Estimate:
    """Mean, least and most."""
    return Estimate(float(np.mean(losses)), min(losses), max(losses))


def _size(model: AnyModel, length: int) -> Footprint:
    """What a model takes, its parameters counted one by one: a spec of somebody else's model does not tell them all."""
    size = Footprint.of(model.spec, length, next(model.parameters()).element_size())
    if model.spec.weights:
        return size  # what is packed is no parameter, but the numbers are there
    return replace(size, parameters=sum(value.numel() for value in model.parameters()))


def random_cut(model: AnyModel, count: int, means: Means | None, seed: int) -> AnyModel:
    """The model without so many heads drawn by chance, their means folded in where they are given."""
    gone = worst(model.spec.addresses, rank(model, None, "random", seed=seed), count)
    return cut(model, gone, None if means is None else fold(model, gone, means))


def random_plan(model: AnyModel, like: ModelSpec, means: Means | None, seed: int, basis: Basis = "given") -> AnyModel:
    """The model with as many heads cut as in a spec, as many key heads keeping as little and the same bits, all drawn by
    chance. Bits go with all heads that share keys, as far as there are as many of them as in the spec."""
    made = random_cut(model, len(model.spec.addresses) - len(like.addresses), means, seed)
    if like.cache != model.spec.cache:
        heads = [str(made.spec.key_heads[i]) for i in np.random.default_rng(seed).permutation(len(made.spec.key_heads))]
        rules = []
        for rule in like.cache:
            some, heads = heads[: len(rule.heads)], heads[len(rule.heads) :]
            rules.append(replace(rule, heads=tuple(some)))
        made = cut(made, (), None, rules)
    if like.weights == model.spec.weights:
        return made
    group = next(rule.group for rule in like.weights)
    bits = dealt_bits(like, made.spec, seed)
    return quantise(made, bits, group=group, activations=like.activations, basis=basis)  # pyright: ignore  # ours: it has bits


def dealt_bits(like: ModelSpec, spec: ModelSpec, seed: int) -> dict[str, int]:
    """The bits of a spec's heads, dealt anew among those of another spec: what `quantise` takes."""
    dice = np.random.default_rng(seed)
    given = [[_bits_of(like, head) for head in unit] for unit in _units(like)]
    heads = _units(spec)
    if sorted(map(len, given)) != sorted(map(len, heads)):  # other groups: head by head
        given, heads = [[one] for unit in given for one in unit], [[head] for unit in heads for head in unit]
    made = {part: bits for part in BESIDE if (bits := like.bits_of(part)[0]) != FULL}
    for size in sorted({len(unit) for unit in heads}):
        some = [unit for unit in given if len(unit) == size]
        order = dice.permutation(len(some))
        for place, unit in zip(order, (unit for unit in heads if len(unit) == size), strict=True):
            for head, (qk, vo) in zip(unit, some[place], strict=True):
                made |= {f"{head}:qk": qk, f"{head}:vo": vo}
    return made


def _units(spec: ModelSpec) -> list[list[Address]]:
    """Heads that share keys, together."""
    made: dict[tuple[str, int], list[Address]] = {}
    for site in spec.sites:
        layer = spec.attention_at(site)
        for number, key in zip(layer.head_ids, layer.kv_of_head, strict=True):
            made.setdefault((str(site), key), []).append(site.head(number))
    return list(made.values())


def _bits_of(spec: ModelSpec, head: Address) -> tuple[int, int]:
    """Of W_Q and of W_O."""
    few = spec.attention_at(head.site).weights
    return (FULL, FULL) if few is None else (few.q[head.head], few.o[head.head])


def _bits_of_heads(spec: ModelSpec) -> list[tuple[int, int]]:
    return [_bits_of(spec, head) for head in spec.addresses]
