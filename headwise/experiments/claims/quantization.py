"""Quantisation hits heads asymmetrically, and couples them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.ablation.pair_interactions import together
from headwise.analysis.ablation.quantized_in_place import questions
from headwise.analysis.ablation.sensitivity import sensitivity
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict, every, listed
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel

BITS = 3  # few enough to cost something
HEADS = 24  # of a large model: key heads are drawn as long as no more heads than these read them
DOCUMENTS = 64  # that little models are asked about
TEXTS, SENTENCES = 16, 4  # where no text is given: so many, of so many sentences each
DRAWS = 2000  # of texts, for intervals of a single model
UNEVEN, COUPLED = 0.5, 0.1  # of the mean of heads; of what two heads cost alone
FACTOR = 1.5  # between keys and values
SPREAD, COUPLING, SIDES = "spread over heads", "coupling of pairs", "cached keys against values, doublings"
BARS = {SPREAD: UNEVEN, COUPLING: COUPLED, SIDES: float(np.log2(FACTOR))}
Halves = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Prices:
    """What few bits cost some key heads of a model, text by text; every second text is the other half."""

    drifts: np.ndarray  # (heads, texts): each head's weights alone
    singles: np.ndarray  # (heads, texts): the loss
    pairs: np.ndarray  # (pairs, texts): the loss with two heads' weights at few bits
    which: np.ndarray  # (pairs, 2): their heads
    whole: np.ndarray  # (texts,): the loss with all of these heads at few bits
    keys: np.ndarray  # (heads, texts): drift by cached keys
    values: np.ndarray  # (heads, texts): by cached values
    counts: np.ndarray  # (texts,)

    def figure(self, statistic: "Statistic", seed: int = 0) -> Figure:
        """A statistic of one model, with its interval over texts, drawn anew within each half."""
        dice, n = np.random.default_rng(seed), len(self.counts)
        drawn = []
        for _ in range(DRAWS):
            times = np.zeros(n)
            for half in (0, 1):
                some = np.arange(half, n, 2)
                times += np.bincount(dice.choice(some, len(some)), minlength=n)
            drawn.append(statistic(self, times))
        known = bool(np.isfinite(drawn).all())  # what some draws cannot tell is not known
        low, high = np.percentile(drawn, (2.5, 97.5)) if known else (-np.inf, np.inf)
        return Figure.known(statistic(self, np.ones(n)), float(low), float(high))

    def halves(self, sums: np.ndarray, times: np.ndarray) -> Halves:
        """Means a token over either half of the texts, each text so many times: (items,) twice."""
        one, other = ((sums[:, part] @ times[part]) / (self.counts[part] @ times[part]) for part in _parts(len(times)))
        return one, other


Statistic = Callable[[Prices, np.ndarray], float]


def _parts(n: int) -> tuple[slice, slice]:
    return slice(0, n, 2), slice(1, n, 2)


def spread(prices: Prices, times: np.ndarray) -> float:
    """How far heads lie apart, beyond what other texts would change: the standard deviation of drifts over their mean.

    The variance is the covariance between halves of the texts: what is due to texts is not the same in both, and drops out.
    """
    one, other = prices.halves(prices.drifts, times)
    beyond = ((one - one.mean()) * (other - other.mean())).sum() / (len(one) - 1)
    mean = (one.mean() + other.mean()) / 2
    return float(np.sqrt(max(0.0, beyond)) / mean) if mean > 0 else 0.0


def coupling(prices: Prices, times: np.ndarray) -> float:
    """How large couplings are against what the two heads cost: loss(a, b) − loss(a) − loss(b) + loss, root mean square over
    pairs, against that of loss(a) + loss(b) − 2 loss. Squares are products of both halves, so that noise drops out."""
    first, second = (prices.singles[prices.which[:, side]] for side in (0, 1))  # (pairs, texts)
    alone = first + second
    off, size = (float(np.mean(np.multiply(*prices.halves(sums, times)))) for sums in (prices.pairs - alone, alone))
    return float(np.sqrt(max(0.0, off) / size)) if size > 0 else float("nan")


def sides(prices: Prices, times: np.ndarray) -> float:
    """How many times cached keys drift further than cached values, in doublings; below 0 values drift further."""
    keys, values = (float((sums @ times).sum()) for sums in (prices.keys, prices.values))
    return float(np.log2(keys / values)) if keys > 0 and values > 0 else 0.0


def added_up(prices: Prices, times: np.ndarray) -> float:
    """What all heads cost at once, against the sum of what each costs alone."""
    alone = float((prices.singles @ times).sum())
    return float(prices.whole @ times) / alone if alone > 0 else float("nan")


STATISTICS: dict[str, Statistic] = {
    SPREAD: spread,
    COUPLING: coupling,
    SIDES: sides,
    "all at once, of the sum": added_up,
}


def prices(model: AnyModel, texts: Any, bits: int = BITS, heads: int = HEADS, seed: int = 0) -> Prices:
    """What few bits cost key heads alone and in pairs; of a model with more heads those are drawn."""
    keys = drawn_keys(model, heads, seed)
    pairs = list(combinations(range(len(keys)), 2))
    if not pairs:
        raise HeadwiseError("pairs need two key heads at least; this model has fewer.")
    sets = [*((key,) for key in keys), *((keys[a], keys[b]) for a, b in pairs), tuple(keys)]
    found = together(model, texts, sets, bits)
    if len(found.counts) < 4:
        raise HeadwiseError(f"intervals are over texts, two in each half at least; got {len(found.counts)} texts.")
    own = [head for key in keys for head in readers(model)[key]]
    cached = sensitivity(model, texts, bits=(bits,), parts=("keys", "values"), heads=",".join(own))
    both = {(one.key, one.part): cached.drifts[place] for place, one in enumerate(cached.settings)}
    n = len(keys)
    return Prices(
        found.drifts[:n], found.sums[:n], found.sums[n:-1], np.array(pairs), found.sums[-1],
        np.stack([both[key, "keys"] for key in keys]), np.stack([both[key, "values"] for key in keys]), found.counts,
    )  # fmt: skip


def readers(model: AnyModel) -> dict[str, tuple[str, ...]]:
    """Key heads, and the heads that read each."""
    layers = [layer for layer in model.attention_layers() if layer.spec.head_ids]
    asked = [one for layer in layers for one in questions(layer, model.spec.addresses, ("keys",), (BITS,))]
    return {one.key: one.heads for one in asked}


def drawn_keys(model: AnyModel, heads: int = HEADS, seed: int = 0) -> list[str]:
    """Key heads, all of them or drawn by chance, that no more than so many heads read; in their order."""
    every_key = readers(model)
    names, chosen, read = list(every_key), set[str](), 0
    for place in np.random.default_rng(seed).permutation(len(names)):
        read += len(every_key[names[place]])
        if read > heads:
            break
        chosen.add(names[place])
    return [name for name in names if name in chosen]


def points(lab: Lab) -> Iterator[Point]:
    """The usual model of every seed."""
    return (lab.point(seed) for seed in lab.seeds)


def measure(lab: Lab) -> Figures:
    """Every seed's model on held-out documents of that seed."""
    figures, found = Figures(), list[Prices]()
    for point in points(lab):
        model = lab.made(point).model()
        found.append(prices(model, read_on(model, lab.documents(point.recipe.seed)).first(DOCUMENTS)))
    for name, statistic in STATISTICS.items():
        values = [statistic(one, np.ones(len(one.counts))) for one in found]
        figures.add(name, LITTLE, values if len(values) > 1 else found[0].figure(statistic))
    figures.add("drift, nats a token", LITTLE, [_drift(one) for one in found])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """The same with a model and its text."""
    figures = Figures()
    _tell(figures, "given", prices(model, _reading(model) if text is None else read_on(model, text).first(TEXTS)))
    return figures


def _tell(figures: Figures, whose: str, found: Prices) -> None:
    for name, statistic in STATISTICS.items():
        figures.add(name, whose, found.figure(statistic))
    figures.add("drift, nats a token", whose, _drift(found))


def _drift(found: Prices) -> float:
    """The mean of heads."""
    return float(found.drifts.sum() / found.counts.sum() / len(found.drifts))


def _reading(model: AnyModel) -> list[str]:
    """Texts of some sentences of all kinds each, of the model's usual ones."""
    documents = [item.text for item in documents_for(model).items()]
    apart = max(1, len(documents) // SENTENCES)
    return [" ".join(documents[start::apart][:SENTENCES]) for start in range(min(TEXTS, apart))]


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    shown, missed, unsure = [], [], []
    for name, bar in BARS.items():
        for whose, figure in figures.at(name).items():
            beyond = figure.above(bar) or (name == SIDES and figure.below(-bar))
            within = figure.below(bar) and (name != SIDES or figure.above(-bar))
            told = f"{WORDS[name]} ({whose})"
            (shown if beyond else missed if within else unsure).append(told)
    if not (missed or unsure):
        return Verdict("holds")
    if len(missed) > len(shown) + len(unsure):
        return Verdict("does not hold", listed({"shown": shown, "open": unsure}))
    told = listed({"shown": shown, "not so": missed, "open": unsure})
    return Verdict("depends", f"on {'what is meant, and where' if missed else 'the seed, or the text'}; {told}")


LITTLE = "little models"
WORDS = {SPREAD: "heads uneven", COUPLING: "pairs coupled", SIDES: "keys unlike values"}
CLAIM = Claim(
    number=26,
    name="few-bits",
    says="Quantisation hits heads asymmetrically, and couples them.",
    against="Heads that cost about the same at few bits, whose costs add up, and whose cached keys and values cost alike.",
    setup=f"Weights of one head, and of every pair, at {BITS} bits in groups of 32, balanced basis: all heads of usual "
    f"models on {DOCUMENTS} held-out documents; of a given model key heads drawn by chance that {HEADS} heads read, on "
    "sentences of the probe set. Spread: standard deviation of drifts KL(untouched ‖ rounded) over "
    "their mean. "
    "Coupling: loss(a, b) − loss(a) − loss(b) + loss, root mean square over pairs, against that of the two alone. In both, "
    "squares are products of two halves of the texts, so what is due to texts drops out. Sides: drift by cached keys at "
    f"{BITS} bits over that by cached values. Intervals over seeds, for one model over texts.",
    rule=f"Three things are said of each model: heads are uneven (spread above {UNEVEN:g}), pairs are coupled (above "
    f"{COUPLED:g}), keys are unlike values (a factor of {FACTOR:g}, either way). Each is shown if surely so, not so if "
    "surely not, else open. Holds if all are shown, does not hold if more than half are not so. Else depends: on which if "
    "any is not so, on the seed or the text if some are open and none is not so.",
    asks=every(*BARS),
    measure=measure,
    judge=judge,
    picture=Picture((SPREAD, COUPLING, SIDES), y="share, or doublings"),
    points=points,
    on=on,
)
