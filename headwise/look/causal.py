"""The last rung: a head is taken away, and the model is asked what the head's role is good for.

What is asked is the log-probability of certain tokens: the second copy of random tokens for heads that look back at the
first, the closing bracket for heads that look at the opening one, and so on. A head hurts if it costs more than the other
heads of its layer do on average, text by text.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from headwise.look.ablate import stand_in
from headwise.look.asked import Asked
from headwise.look.inputs import Unit, make_batches
from headwise.look.repeats import Repeats
from headwise.look.roles import TOLD, Support
from headwise.look.runs import Means
from headwise.look.statistics import bootstrap
from headwise.look.sweep import sweep
from headwise.look.tally import BUCKETS
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.documents import Document
from headwise.text.little.quizzes import CHOICES
from headwise.train.batches import IGNORE

DOCUMENTS = 20  # documents a relation's probe reads, at most


def climb(
    model: Transformer,
    addresses: Sequence[Address],
    found: list[list[Support]],
    related: list[Unit],
    repeats: Repeats,
    means: Means,
) -> Iterator[tuple[int, int]]:
    """Try the last rung for every head whose best role is effective and has a probe; yields how many of how many are done."""
    wanted: dict[tuple[str, str], list[int]] = {}  # a probe and its role: the heads
    for head, supports in enumerate(found):
        if supports and supports[0].rung == "effective" and supports[0].probe:
            probe = supports[0].probe
            wanted.setdefault((probe, "" if probe == "repeats" else supports[0].role), []).append(head)
    for number, ((probe, role), heads) in enumerate(wanted.items()):
        yield number, len(wanted)
        questions = repeat_questions(repeats) if probe == "repeats" else word_questions(related, role, probe)
        layers = {addresses[head].site for head in heads}
        beside = [address for address in addresses if address.site in layers]
        costs = effects(model, beside, questions, means) if questions else None
        if costs is None:
            continue
        for head in heads:
            mates = [place for place, other in enumerate(beside) if other.site == addresses[head].site]
            sums, counts = costs[0][:, mates], costs[1]
            place = mates.index(beside.index(addresses[head]))
            found[head][0] = found[head][0].with_effect(*hurts(sums, counts, place))
    yield len(wanted), len(wanted)


def repeat_questions(repeats: Repeats) -> list[Asked]:
    """Random tokens said twice: the second copy is asked for, but for its first token."""
    ids = repeats.twice
    targets = torch.full_like(ids, IGNORE)
    second = slice(repeats.second.start, repeats.second.stop - 1)
    targets[:, second] = ids[:, second.start + 1 : second.stop + 1]
    return [Asked(ids, torch.ones_like(ids, dtype=torch.bool), targets, None, tuple(range(len(ids))))]


def word_questions(units: Iterable[Unit], role: str, where: str) -> list[Asked]:
    """Documents with a relation: the first token of the word that depends on it is asked for."""
    chosen: list[Unit] = []
    places: dict[int, set[int]] = {}
    for unit in units:
        if unit.document is None or len(chosen) >= DOCUMENTS:
            continue
        words = unit.alignment.tokens_of_word
        tokens = {words[word][0] for word in _words_asked(unit.document, role, where) if words[word]} - {0}
        if tokens:
            chosen.append(unit)
            places[unit.number] = tokens
    made = []
    for batch in make_batches(chosen):
        targets = torch.full_like(batch.ids, IGNORE)
        for row, unit in enumerate(batch.units):
            for token in places[unit.number]:
                targets[row, token - 1] = batch.ids[row, token]
        padding = None if batch.whole else batch.real
        made.append(Asked(batch.ids, batch.real, targets, padding, tuple(unit.number for unit in batch.units)))
    return made


def _words_asked(document: Document, role: str, where: str) -> Iterator[int]:
    for name, source, target in document.relations:
        if TOLD.get(name, name) != role:
            continue
        if where == "later word":
            yield max(source, target)
        elif (
            where == "referent"
            and document.words[source + 2 : source + 3]
            and document.words[source + 2] in CHOICES[where]
        ):
            yield source + 2  # they are tired: what is said of the one meant


def effects(
    model: Transformer, heads: Sequence[Address], questions: list[Asked], means: Means
) -> tuple[np.ndarray, np.ndarray]:
    """What taking away each head costs, by its mean: sums of lost log-probability (buckets, heads), and counts (buckets,)."""
    sums, counts = np.zeros((BUCKETS, len(heads))), np.zeros(BUCKETS)
    for asked in questions:
        lost, _ = sweep(model, asked, heads, partial(stand_in, how="mean", means=means, real=asked.real))  # (heads, B)
        buckets = np.array(asked.units) % BUCKETS
        np.add.at(sums, buckets, lost.T.double().cpu().numpy())
        np.add.at(counts, buckets, asked.counts.numpy())
    return sums, counts


def hurts(sums: np.ndarray, counts: np.ndarray, place: int) -> tuple[float, float, float]:
    """How much more one head costs than the others of its layer, per token asked for, and its interval."""
    others = np.delete(sums, place, 1).mean(1) if sums.shape[1] > 1 else np.zeros(len(sums))
    more = sums[:, place] - others
    low, high = bootstrap(more[:, None], counts[:, None])
    return float(more.sum() / max(1.0, counts.sum())), float(low[0]), float(high[0])
