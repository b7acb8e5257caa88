"""What can be read out of a head: position, word and part of speech, linearly, from its q, k and z.

A head's subspace is a small window on the stream. What a linear reader finds in it is compared with what the same reader
finds in a random window of the same size on the same stream: only what is above that was put there on purpose.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.recording.batching import Batch, Unit, make_batches, run
from headwise.analysis.recording.recording import pick
from headwise.analysis.recording.text_buckets import CHOOSING, REPORTING
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError, close_names
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Seen
from headwise.kernels.precision import at_least_float32
from headwise.kernels.score_params import spread
from headwise.model import AnyModel, quiet
from headwise.spec import Address
from headwise.text.align import Alignment
from headwise.text.corpus import Corpus

TARGETS = ("position", "word", "class")
SIDES = ("q", "k", "z")
BINS = 8  # of positions, equally full
WORDS = 50  # the commonest
DRAWS = 4  # random projections per layer
RIDGE = 1e-3  # of the features' mean variance
Key = tuple[Any, str]  # a head's address and q, k or z; or a layer's, and the number of a random projection


class Decoded(NamedTuple):
    """How often a linear reader is right on texts it was not fitted on."""

    head: str
    side: str  # q, k or z
    what: str  # position, word or class
    accuracy: float
    null: float  # from random projections of what the layer reads, of the same size: the mean
    null_sd: float  # and the spread, over projections
    majority: float  # always saying the commonest
    rows: int


@dataclass(frozen=True, eq=False)
class Labels:
    """What stands at the last token of each word of a unit: places (n,), and for each target a number, −1: none."""

    places: np.ndarray
    targets: dict[str, np.ndarray]


@dataclass(eq=False)
class Fit:
    """Sums from which a ridge regression on one-hot targets follows in closed form; they add up over batches."""

    n: float = 0.0
    x: np.ndarray | float = 0.0  # (d,)
    y: np.ndarray | float = 0.0  # (c,)
    xx: np.ndarray | float = 0.0  # (d, d)
    xy: np.ndarray | float = 0.0  # (d, c)
    hits: int = 0
    tried: int = 0
    _solved: tuple[np.ndarray, np.ndarray] | None = field(default=None)

    def add(self, features: np.ndarray, labels: np.ndarray, classes: int) -> None:
        """Rows to fit on: (n, d), (n,)."""
        onehot = np.eye(classes)[labels]
        self.n, self.x, self.y = self.n + len(features), self.x + features.sum(0), self.y + onehot.sum(0)
        self.xx, self.xy = self.xx + features.T @ features, self.xy + features.T @ onehot

    def test(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Rows to be right about."""
        weight, bias = self.solution()
        self.hits += int(((features @ weight + bias).argmax(1) == labels).sum())
        self.tried += len(labels)

    def solution(self, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray]:
        """Weights (d, c) and biases (c,) of the regression; the bias is not shrunk."""
        if self._solved is None:
            mean, rate = np.asarray(self.x) / self.n, np.asarray(self.y) / self.n
            spread = np.asarray(self.xx) / self.n - np.outer(mean, mean)
            joint = np.asarray(self.xy) / self.n - np.outer(mean, rate)
            shrink = ridge * max(np.trace(spread) / len(mean), 1e-12) * np.eye(len(mean))
            weight = np.linalg.solve(spread + shrink, joint)
            self._solved = weight, rate - mean @ weight
        return self._solved


def decodable(
    model: AnyModel, corpus: Any = None, heads: Pattern = "*", what: str | Sequence[str] = ("position", "class"),
    sides: str | Sequence[str] = SIDES, *, tokens: int = 4096, seed: int = 0,
) -> list[Decoded]:  # fmt: skip
    """Position, word and part of speech, read linearly from each head's q, k and z; half the texts fit, half are tested.

    `position` is one of eight equally full ranges, `word` one of the fifty commonest, `class` a document's part of speech;
    all at the last token of each word. Without a corpus: 64 documents of the little language, which have classes.
    """
    targets, sides = _names(what, TARGETS, "decoded"), _names(sides, SIDES, "decoded from")
    chosen = set(pick(heads, model.spec.addresses))
    units = list(Reading.of(model, Corpus.little(documents=64) if corpus is None else corpus))
    dealt = _dealt(units)
    labels, sizes = _labels(units, targets, dealt)
    majorities = {name: _majority(dealt, labels, name) for name in targets}
    projections = _projections(model, chosen, seed)
    fits: dict[tuple[Key, str], Fit] = {}

    def fit(key: Key, name: str, features: np.ndarray, found: np.ndarray) -> None:
        fits.setdefault((key, name), Fit()).add(features, found, sizes[name])

    def test(key: Key, name: str, features: np.ndarray, found: np.ndarray) -> None:
        fits[key, name].test(features, found)

    with quiet(model), torch.no_grad():
        for half, use in ((CHOOSING, fit), (REPORTING, test)):
            some = [unit for unit in units if dealt[unit.number] == half]
            for batch in make_batches(some, tokens, device=model.device):
                _read(model, batch, labels, chosen, sides, projections, use)
    return [
        _decoded(address, side, name, fits, majorities[name])
        for address in model.spec.addresses
        if address in chosen
        for side in sides
        for name in targets
    ]


def _read(
    model: AnyModel,
    batch: Batch,
    labels: dict[int, Labels],
    chosen: set[Address],
    sides: Sequence[str],
    projections: dict[Any, Tensor],
    use: Callable[[Key, str, np.ndarray, np.ndarray], None],
) -> None:
    """Run a batch and hand every head's rows, and those of the random projections, to whoever fits or tests."""
    rows = torch.tensor([row for row, unit in enumerate(batch.units) for _ in labels[unit.number].places])
    begins = zip(batch.units, batch.first.tolist(), strict=True)
    places = torch.tensor([first + place for unit, first in begins for place in labels[unit.number].places])
    names = next(iter(labels.values())).targets
    wanted = {name: np.concatenate([labels[unit.number].targets[name] for unit in batch.units]) for name in names}

    def give(keys: Sequence[Key | None], x: Tensor) -> None:
        """Features of many at once, (B, h, T, d), one key each; None: nobody asked."""
        features = x[rows, :, places].double().cpu().numpy()  # (n, h, d)
        for i, key in enumerate(keys):
            for name, found in wanted.items() if key is not None else ():
                there = found >= 0
                if key is not None and there.any():
                    use(key, name, features[there, i], found[there])

    def hear(seen: Seen) -> None:
        for side, x in (("q", seen.q), ("k", spread(seen.k, seen.terms.groups)), ("z", seen.z)):
            keys = [(address, side) if address in chosen else None for address in seen.site.addresses]
            if side in sides and any(keys):
                give(keys, x)

    def project(layer: MultiHeadAttention, module: Any, given: tuple[Any, ...]) -> None:
        x, here = given[0], projections.get(layer.site.address)
        if here is not None:
            keys = [(layer.site.address, str(number)) for number in range(len(here))]
            x = at_least_float32(x)
            give(keys, x[:, None] @ here.to(x))  # (B, draws, T, d)

    with ExitStack() as watching:
        for layer in model.attention_layers():
            watching.enter_context(layer.site.listen(hear))
            watching.callback(layer.register_forward_pre_hook(partial(project, layer)).remove)
        run(model, batch)


def _projections(model: AnyModel, chosen: set[Address], seed: int) -> dict[Any, Tensor]:
    """For each layer some random matrices from the stream to the size of a head, (draws, D, d)."""
    dice = torch.Generator().manual_seed(seed)
    d, D = model.spec.attention.head_dim, model.spec.width
    sites = [site for site in model.spec.sites if any(address.site == site for address in chosen)]
    return {site: torch.randn(DRAWS, D, d, generator=dice) / D**0.5 for site in sites}


def _dealt(units: Sequence[Unit]) -> dict[int, int]:
    """The half of each unit, by its number: texts in the order of a hash of them take turns, the same text in one half."""
    order = sorted({unit.ids for unit in units}, key=lambda ids: hashlib.sha256(repr(ids).encode()).digest())
    if len(order) < 2:
        raise HeadwiseError(
            f"decoding fits on half of the texts and tests on the other; got {len(order)}, need 2 or more that differ."
        )
    halves = {ids: (CHOOSING, REPORTING)[place % 2] for place, ids in enumerate(order)}
    return {unit.number: halves[unit.ids] for unit in units}


def _labels(
    units: Sequence[Unit], targets: Sequence[str], dealt: dict[int, int]
) -> tuple[dict[int, Labels], dict[str, int]]:
    """The labels of every unit, and how many classes each target has. Only the fitting half decides what the classes are."""
    if "class" in targets and not any(unit.document is not None and unit.document.classes for unit in units):
        raise HeadwiseError(
            "these texts have no word classes; use the little language or a treebank, or leave 'class' out of what=."
        )
    ends = {unit.number: _ends(unit.alignment) for unit in units}
    fitting = [unit for unit in units if dealt[unit.number] == CHOOSING]
    edges = np.quantile([p for unit in fitting for _, p in ends[unit.number]], np.arange(1, BINS) / BINS)
    common = Counter(word.casefold() for unit in fitting for word in unit.alignment.words).most_common(WORDS)
    words = {word: i for i, (word, _) in enumerate(common)}
    kinds = sorted({kind for unit in fitting if unit.document is not None for kind in unit.document.classes})
    numbers = {kind: i for i, kind in enumerate(kinds)}
    made = {}
    for unit in units:
        places = np.array([place for _, place in ends[unit.number]], dtype=np.int64)
        classes = unit.document.classes if unit.document is not None else ()
        found = {
            "position": np.searchsorted(edges, places, side="right"),
            "word": np.array(
                [words.get(unit.alignment.words[w].casefold(), -1) for w, _ in ends[unit.number]], np.int64
            ),
            "class": np.array([numbers.get(classes[w], -1) if classes else -1 for w, _ in ends[unit.number]], np.int64),
        }
        made[unit.number] = Labels(places, {name: found[name] for name in targets})
    return made, {"position": BINS, "word": len(words), "class": len(kinds)}


def _ends(aligned: Alignment) -> list[tuple[int, int]]:
    """Words with their last tokens; one whose last token is another's too has none of its own, and is left out."""
    ends = [(word, tokens[-1]) for word, tokens in enumerate(aligned.tokens_of_word) if tokens]
    return [(word, token) for word, token in ends if aligned.words_of_token[token] == (word,)]


def _majority(dealt: dict[int, int], labels: dict[int, Labels], name: str) -> float:
    """How often the commonest answer of the fitting half is right on the other."""
    halves: list[list[int]] = [[], []]
    for number, half in dealt.items():
        found = labels[number].targets[name]
        halves[half] += found[found >= 0].tolist()
    commonest = Counter(halves[CHOOSING]).most_common(1)[0][0]
    return float(np.mean(np.array(halves[REPORTING]) == commonest))


def _decoded(address: Address, side: str, name: str, fits: dict[tuple[Key, str], Fit], majority: float) -> Decoded:
    mine = fits[(address, side), name]
    nulls = [fits[(address.site, str(number)), name] for number in range(DRAWS)]
    rates = [fit.hits / fit.tried for fit in nulls]
    return Decoded(
        str(address), side, name, mine.hits / mine.tried, float(np.mean(rates)), float(np.std(rates, ddof=1)), majority,
        mine.tried,
    )  # fmt: skip


def _names(given: str | Sequence[str], known: Sequence[str], verb: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in known:
            raise HeadwiseError(f"{name!r} cannot be {verb}; {close_names(str(name), known)}")
    return names
