"""The last rung: a head is taken away, and the model is asked what the head's role is good for.

What is asked is the log-probability of certain tokens: the second copy of random tokens for heads that look back at the
first, the closing bracket for heads that look at the opening one, and so on. A head is causal if its loss

    is above what the other heads of its layer cost on average: the 95 % interval over texts lies above 0;
    is above what three in four of those others cost: beside idle ones any head would be above the average;
    is .01 nats an answer at least, and a hundredth of what an answer costs the whole model: so much that it matters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headwise.look.measure.repeats import Repeats
from headwise.look.measure.statistics import bootstrap
from headwise.look.profile.roles import PROBES, ROLE_OF, Effect, Support
from headwise.look.record.buckets import BUCKETS
from headwise.look.record.units import Unit, make_batches
from headwise.look.worth.ablate import stand_in
from headwise.look.worth.outputs import Means
from headwise.look.worth.sweep import sweep
from headwise.look.worth.targets import TargetBatch
from headwise.model import AnyModel
from headwise.model.loss import IGNORE
from headwise.progress import Progress
from headwise.spec import Address
from headwise.text.documents import Document
from headwise.text.little.quizzes import CHOICES

DOCUMENTS = 20  # documents a relation's probe reads, at most
TOKENS = 96  # in a batch of them: texts of about one length, for a sweep pays for padding again and again
MOST = 0.75  # the share of the layer's other heads that must cost less
NATS, SHARE = 0.01, 0.01  # the least loss that counts: in nats an answer, and as a share of the whole model's surprise


def climb(
    model: AnyModel,
    addresses: Sequence[Address],
    found: Sequence[Sequence[Support]],
    related: Iterable[Unit],
    repeats: Repeats,
    means: Means,
    progress: Progress,
) -> list[list[Support]]:
    """The same with the last rung tried for every head whose best role is effective and has a probe."""
    made = [list(supports) for supports in found]
    wanted: dict[tuple[str, str], list[int]] = {}  # a probe and its role: the heads
    for head, supports in enumerate(found):
        if supports and supports[0].rung == "effective" and supports[0].probe:
            probe = supports[0].probe
            wanted.setdefault((probe, "" if probe == "repeats" else supports[0].role), []).append(head)
    for number, ((probe, role), heads) in enumerate(wanted.items()):
        progress("ablations", number, len(wanted))
        words = partial(word_questions, related, role, probe, model.device)
        questions = repeat_questions(repeats) if probe == "repeats" else words()
        layers = {addresses[head].site for head in heads}
        beside = [address for address in addresses if address.site in layers]
        costs = effects(model, beside, questions, means) if questions else None
        if costs is None:
            continue
        for head in heads:
            mates = [place for place, other in enumerate(beside) if other.site == addresses[head].site]
            place = mates.index(beside.index(addresses[head]))
            made[head][0] = made[head][0].with_effect(costs.only(mates).of(place))
    progress("ablations", len(wanted), len(wanted))
    return made


def repeat_questions(repeats: Repeats) -> list[TargetBatch]:
    """Random tokens said twice: the second copy is asked for, but for its first token."""
    if not len(repeats.twice):
        return []
    second = slice(repeats.second.start, repeats.second.stop - 1)
    ids = repeats.twice[:, : second.stop]
    targets = torch.full_like(ids, IGNORE)
    targets[:, second] = repeats.twice[:, second.start + 1 : second.stop + 1]
    return [TargetBatch(ids, torch.ones_like(ids, dtype=torch.bool), targets, None, tuple(range(len(ids))))]


def word_questions(
    units: Iterable[Unit], role: str, where: str, device: torch.device | str = "cpu"
) -> list[TargetBatch]:
    """Documents with a relation: the first token of the word that depends on it is asked for, and nothing is read behind."""
    chosen: list[Unit] = []
    wanted: dict[int, dict[int, int]] = {}  # for each text the token asked for, by its place
    for unit in units:
        places = _target_places(unit, role, where) if len(chosen) < DOCUMENTS else ()
        if places:
            chosen.append(replace(unit, ids=unit.ids[: max(places)]))
            wanted[unit.number] = {place: unit.ids[place] for place in places}
    made = []
    for batch in make_batches(chosen, TOKENS, device=device):
        targets = torch.full_like(batch.ids, IGNORE)
        for row, unit in enumerate(batch.units):
            for place, token in wanted[unit.number].items():
                targets[row, place - 1] = token
        padding = None if batch.whole else batch.real
        made.append(TargetBatch(batch.ids, batch.real, targets, padding, tuple(unit.number for unit in batch.units)))
    return made


class Few:
    """The texts that probes will ask about, kept while a corpus streams by: of each role and probe the first so many."""

    def __init__(self) -> None:
        self.units: dict[int, Unit] = {}
        self._found: Counter[tuple[str, str]] = Counter()

    def see(self, unit: Unit) -> None:
        """Keep a text if it is needed."""
        for name, where in PROBES.items() if unit.document else ():
            role = ROLE_OF.get(name, name)
            if self._found[role, where] < DOCUMENTS and _target_places(unit, role, where):
                self._found[role, where] += 1
                self.units[unit.number] = unit


def _target_places(unit: Unit, role: str, where: str) -> set[int]:
    """The tokens of a text that are asked for."""
    if unit.document is None:
        return set()
    words = unit.alignment.tokens_of_word
    return {words[word][0] for word in _target_words(unit.document, role, where) if words[word]} - {0}


def _target_words(document: Document, role: str, where: str) -> Iterator[int]:
    for name, source, target in document.relations:
        if ROLE_OF.get(name, name) != role:
            continue
        if where == "later word":
            yield max(source, target)
        elif (
            where == "referent"
            and document.words[source + 2 : source + 3]
            and document.words[source + 2] in CHOICES[where]
        ):
            yield source + 2  # they are tired: what is said of the one meant


@dataclass(frozen=True, eq=False)
class Costs:
    """What taking away each of some heads costs: lost log-probability by bucket of texts, and over how many answers."""

    sums: np.ndarray  # (buckets, heads)
    counts: np.ndarray  # (buckets,)
    clean: float  # what an answer costs the whole model, in nats

    def only(self, heads: list[int]) -> "Costs":
        """The same for some of the heads."""
        return Costs(self.sums[:, heads], self.counts, self.clean)

    def of(self, place: int) -> Effect:
        """One head beside the others, in nats an answer.

        >>> lost = np.zeros((20, 5))
        >>> lost[:, 0] = 0.5
        >>> Costs(lost, np.ones(20), clean=2.0).of(0)
        Effect(more=0.5, low=0.5, high=0.5, cost=0.5, bar=0.02)
        """
        others = np.delete(self.sums, place, 1)
        answers = max(1.0, self.counts.sum())
        more = self.sums[:, place] - (others.mean(1) if others.shape[1] else 0.0)
        low, high = bootstrap(more[:, None], self.counts[:, None])
        most = float(np.quantile(others.sum(0) / answers, MOST)) if others.shape[1] else 0.0
        cost = float(self.sums[:, place].sum() / answers)
        bar = max(most, NATS, SHARE * self.clean)
        return Effect(float(more.sum() / answers), float(low[0]), float(high[0]), cost, bar)


def effects(model: AnyModel, heads: Sequence[Address], questions: list[TargetBatch], means: Means) -> Costs:
    """What taking away each head costs, by its mean."""
    sums, counts, clean = np.zeros((BUCKETS, len(heads))), np.zeros(BUCKETS), 0.0
    for asked in questions:
        stands = partial(stand_in, how="mean", means=means, real=asked.real)
        lost, untouched = sweep(model, asked, heads, stands)  # (heads, B), (B,)
        buckets = np.array(asked.units) % BUCKETS
        np.add.at(sums, buckets, lost.T.double().cpu().numpy())
        np.add.at(counts, buckets, asked.counts.numpy())
        clean += float(untouched.sum())
    return Costs(sums, counts, clean / max(1.0, counts.sum()))
