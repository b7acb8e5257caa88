"""What the last rung asks: cases of a role, and beside each the same answers reached another way.

    lists    tokens in random order, said twice (induction, duplicate, previous token). Half of them or more are drawn from
             the vocabulary. The answers are tokens that the whole model foresees in a text, each where it is said for the
             first time; that text is the control
    texts    the beginning of a text, said twice, for the same roles. The answers are the tokens of the second copy. Those
             that the model foresees in the text as well have a control: the text, read once
    words    documents with a relation (brackets, quotes, if-then …): the later word of the arc, or what is said of the noun
             meant. The control is another text in which the same token is foreseen and the role has no part

Both answers are foreseen by the whole model, so that there is something to lose on either side. Why the same answer: a head
that hurts whatever is asked, or that writes answers however they were found, costs as much there
(https://arxiv.org/abs/2606.08292).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.induction import make_repeats
from headwise.analysis.metrics.relation_metrics import CONTROLS
from headwise.analysis.metrics.statistics import FEWEST
from headwise.analysis.metrics.tasks import bare_unit
from headwise.analysis.metrics.token_classes import CLASSES, class_flags
from headwise.analysis.recording.batching import Unit, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.control_sentences import WRITTEN
from headwise.analysis.roles.roles import PROBES, ROLE_OF
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel
from headwise.model.loss import IGNORE
from headwise.text.documents import Document
from headwise.text.synthetic.cloze_probes import CHOICES

CASES = 16  # lists said twice, at most
DOCUMENTS = 20  # documents with a relation, at most
TEXTS = 64  # texts in which answers to put into lists are looked for, at most
LISTED = 8  # tokens in a list
TWICE = 16  # tokens of a text that is said twice
CUT = 24  # tokens of a text that are read for its answers
NATS = 3.0  # an answer counts as foreseen if it costs the whole model no more (p is .05), and a nat less than guessing
TOKENS = 512  # in a batch: as a rule all cases, so that what one borrows from another is at hand
# Relations that every sentence has, so that only gold arcs can tell a word that has no part in them.
ANNOTATED = {"subject-verb", "nsubj", "coreference"}


class Prompt(NamedTuple):
    """A text, and the tokens asked for, by their places; nothing behind the last of them is read."""

    unit: Unit
    wanted: Mapping[int, int]
    rivals: Mapping[int, int] = {}  # by place, a token whose surprise is subtracted: then the answer is a lead

    @property
    def read(self) -> Unit:
        """The text as it is read."""
        return replace(self.unit, ids=self.unit.ids[: max(self.wanted)])


@dataclass(frozen=True, eq=False)
class Trial:
    """Cases of a role, and for each the rows that ask for the same answers another way; no controls: none were found."""

    cases: tuple[Prompt, ...]
    controls: tuple[Prompt, ...] = ()
    of_case: tuple[tuple[int, ...], ...] = ()  # for each case its controls
    held: bool = False  # whether the role holds answers back: then what counts is what they gain without a head
    singles: tuple[Prompt, ...] = ()  # single-name prompts, one for each case
    share: float = 1.0  # of the loss in single-name prompts that the loss of a case must exceed
    matched: tuple[Prompt, ...] = ()  # the cases with the answers that have a control; none: all answers have one

    def by_case(self, values: np.ndarray) -> np.ndarray:
        """Sums over the controls of each case: (controls, heads) → (cases, heads)."""
        return np.stack([values[list(some)].sum(0) for some in self.of_case])


class Few:
    """The documents asked about, kept while a corpus streams by: of each role, and of each control, the first so many."""

    def __init__(self) -> None:
        self.units: dict[int, Unit] = {}
        self._found: Counter[str] = Counter()

    def see(self, unit: Unit) -> None:
        """Keep a text if it is needed."""
        if unit.document is None:
            return
        there = {name for name, _, _ in unit.document.relations}
        for name, where in PROBES.items():
            role = ROLE_OF.get(name, name)
            self._keep(unit, role, bool(target_places(unit, role, where)))
            self._keep(unit, f"control of {role}", not there.isdisjoint(CONTROLS.get(name, ())))

    def _keep(self, unit: Unit, what: str, needed: bool) -> None:
        if needed and self._found[what] < DOCUMENTS:
            self._found[what] += 1
            self.units[unit.number] = unit


def list_trial(model: AnyModel, texts: Sequence[Unit], seed: int) -> Trial:
    """Lists of random tokens said twice. The model foresees the answers in one of the texts as well, where they were not said
    before; at least half of a list is drawn from the vocabulary."""
    dice = np.random.default_rng(seed)
    found = _answers_in_texts(model, [texts[i] for i in dice.permutation(len(texts))])
    tokenizer = tokenizer_of(model)
    before, behind = tokenizer.around
    ordinary = [token for token in _ordinary(model).nonzero()[:, 0].tolist() if token < len(tokenizer)]
    length = min(LISTED, len(ordinary) // 2, (model.spec.room - len(before) - len(behind)) // 2)
    if len(found) < FEWEST or length < 3:
        return _plain_lists(model, seed)
    lists: list[Prompt] = []
    for number, row in enumerate(found):
        answers = [int(token) for token in dice.permutation(list(row.wanted.values()))][: length // 2]
        drawn = dice.permutation(ordinary)[: length + len(answers)].tolist()
        first, *others = [token for token in drawn if token not in answers][: length - len(answers)]
        # The first token of a list cannot be foreseen: it is not asked for.
        rest = [*answers, *others]
        said = [first, *(rest[i] for i in dice.permutation(len(rest)))]
        start = len(before) + len(said)
        wanted = {start + place: token for place, token in enumerate(said) if place and token in answers}
        lists.append(Prompt(bare_unit(number, (*before, *said, *said), tokenizer), wanted))
    return paired(lists, foreseen(model, lists), found)


def text_trial(model: AnyModel, texts: Sequence[Unit], seed: int) -> Trial:
    """Beginnings of texts said twice, in their own order. The control is the same text, read once: it asks for the answers
    that the model foresees there too. Whether the second copy depends on a head is asked of all its tokens, because what the
    text itself foretells needs no copy."""
    dice, tokenizer, ordinary = np.random.default_rng(seed), tokenizer_of(model), _ordinary(model)
    found = _answers_in_texts(model, [texts[i] for i in dice.permutation(len(texts))])
    before, behind = tokenizer.around
    length = min(TWICE, (model.spec.room - len(before) - len(behind)) // 2)
    rows, shifts = [], []
    for number, row in enumerate(found):
        ids = row.unit.ids
        start = len(before) if ids[: len(before)] == before else 0
        end = len(ids) - len(behind) if behind and ids[-len(behind) :] == behind else len(ids)
        body = ids[start:end][:length]
        wanted = {place + len(body): token for place, token in _first_times(ids[: start + len(body)], ordinary).items()}
        wanted = {place: token for place, token in wanted.items() if place > start + len(body)}
        rows.append(Prompt(bare_unit(number, (*ids[:start], *body, *body), tokenizer), wanted))
        shifts.append(len(body))
    cases, matched, controls = [], [], []
    for row, once, shift in zip(foreseen(model, rows), found, shifts, strict=True):
        both = {place: token for place, token in row.wanted.items() if place - shift in once.wanted}
        if both:
            cases.append(row)
            matched.append(row._replace(wanted=both))
            controls.append(once._replace(wanted={place - shift: token for place, token in both.items()}))
    if len(cases) < FEWEST:
        return Trial(tuple(row for row in rows if row.wanted))
    numbers = tuple((number,) for number in range(len(cases)))
    return Trial(tuple(cases), tuple(controls), numbers, matched=tuple(matched))


def word_trial(model: AnyModel, units: Iterable[Unit], texts: Sequence[Unit], role: str, where: str) -> Trial:
    """Documents with a relation: the word that depends on it; beside it, where the same token comes for another reason."""
    units = list(units)
    asked = [
        Prompt(unit, {place: unit.ids[place] for place in target_places(unit, role, where)})
        for unit in units
        if target_places(unit, role, where)
    ][:DOCUMENTS]
    costs = surprises(model, asked)
    limit = _limit(model)
    partners: dict[int, set[str]] = {}  # for each answer the words that the role would look at
    for row in asked:
        for place, partner in target_places(row.unit, role, where).items():
            partners.setdefault(row.unit.ids[place], set()).add(partner)
    written = list(Reading.of(model, list(WRITTEN[role]))) if role in WRITTEN else []
    places = [
        Prompt(unit, {place: unit.ids[place]})
        for unit in {id(unit): unit for unit in (*written, *units, *texts)}.values()
        for place in _control_places(model, unit, role, where, partners)
    ]
    pool: dict[int, list[tuple[float, int]]] = {}  # for each answer what it costs there, and where
    for number, (row, cost) in enumerate(zip(places, surprises(model, places), strict=True)):
        for place, nats in cost.items():
            if nats <= limit:
                pool.setdefault(row.wanted[place], []).append((nats, number))
    used: Counter[int] = Counter()
    cases, of_case = [], []
    for row, cost in zip(asked, costs, strict=True):
        wanted, mine = {}, []
        for place, token in row.wanted.items():
            if cost[place] <= limit and token in pool:  # those used least, then the one that costs the model as much
                chosen = min(pool[token], key=lambda one: (used[one[1]], abs(one[0] - cost[place])))[1]
                used[chosen] += 1
                wanted[place] = token
                mine.append(chosen)
        if mine:
            cases.append(Prompt(row.unit, wanted))
            of_case.append(mine)
    chosen = sorted(used)
    if len(cases) < FEWEST or len({places[number].unit.ids for number in chosen}) < FEWEST:
        return Trial(tuple(asked))
    return Trial(
        tuple(cases), tuple(places[i] for i in chosen), tuple(tuple(chosen.index(i) for i in some) for some in of_case)
    )


def target_places(unit: Unit, role: str, where: str) -> dict[int, str]:
    """The tokens of a text that are asked for, and for each the word at the other end of the arc."""
    if unit.document is None:
        return {}
    words = unit.alignment.tokens_of_word
    found = {words[word][0]: partner for word, partner in _target_words(unit.document, role, where) if words[word]}
    return {place: partner for place, partner in found.items() if place}


def surprises(model: AnyModel, rows: Sequence[Prompt]) -> list[dict[int, float]]:
    """What each answer costs the whole model, in nats, by its place."""
    made: list[dict[int, float]] = [{} for _ in rows]
    assert model.output is not None
    for batch in target_batches(rows, model.device, tokens=2048):
        assert batch.targets is not None
        hidden, there = batch.run(model), batch.targets != IGNORE
        logits = at_least_float32(model.output(hidden[there]))  # (n, V)
        costs = F.cross_entropy(logits, batch.targets[there], reduction="none").tolist()
        for (row, place), cost in zip(there.nonzero().tolist(), costs, strict=True):
            made[batch.units[row]][place + 1] = cost
    return made


def target_batches(
    rows: Sequence[Prompt], device: torch.device | str = "cpu", tokens: int = TOKENS
) -> Iterator[TargetBatch]:
    """Rows side by side; `units` says which they are. A decoder never sees the padding behind them, so it is not told of it:
    the plain causal kernel serves."""
    numbered = [replace(row.read, number=number) for number, row in enumerate(rows)]
    for batch in make_batches(numbered, tokens, device=device):
        targets, rivals = torch.full_like(batch.ids, IGNORE), torch.full_like(batch.ids, IGNORE)
        for place, unit in enumerate(batch.units):
            row = rows[unit.number]
            for at, token in row.wanted.items():
                targets[place, at - 1] = token
                rivals[place, at - 1] = row.rivals.get(at, IGNORE)
        subtracted = rivals if bool((rivals != IGNORE).any()) else None
        numbers = tuple(unit.number for unit in batch.units)
        yield TargetBatch(batch.ids, batch.real, targets, None, numbers, rivals=subtracted)


def _answers_in_texts(model: AnyModel, texts: Sequence[Unit]) -> list[Prompt]:
    """Of the first texts that have some: the tokens that the model foresees there and that were not said before."""
    ordinary = _ordinary(model)
    found: list[Prompt] = []
    for start in range(0, len(texts), CASES):  # no more are read than needed
        some = [replace(unit, ids=unit.ids[:CUT]) for unit in texts[start : start + CASES]]
        new = [Prompt(unit, _first_times(unit.ids, ordinary)) for unit in some]
        found += [row for row in foreseen(model, [row for row in new if row.wanted]) if len(row.wanted) > 1]
        if len(found) >= CASES:
            break
    return found[:CASES]


def _ordinary(model: AnyModel) -> torch.Tensor:
    """True at tokens of the vocabulary that are not special, (V,)."""
    return class_flags(tokenizer_of(model), model.spec.vocab)[:, CLASSES.index(SPECIAL)] == 0


def _first_times(ids: Sequence[int], ordinary: torch.Tensor) -> dict[int, int]:
    """Ordinary tokens where they are said for the first time, by their places; nobody is asked for the first of all."""
    return {place: token for place, token in enumerate(ids) if place and ordinary[token] and token not in ids[:place]}


def foreseen(model: AnyModel, rows: Sequence[Prompt]) -> list[Prompt]:
    """The same rows, with the answers that the whole model foresees."""
    limit = _limit(model)
    return [
        row._replace(wanted={place: token for place, token in row.wanted.items() if cost[place] <= limit})
        for row, cost in zip(rows, surprises(model, rows), strict=True)
    ]


def paired(rows: Sequence[Prompt], answered: Sequence[Prompt], others: Sequence[Prompt]) -> Trial:
    """Each row beside its control, with the answers foreseen in both; `answered` are the rows with those foreseen there."""
    cases, controls = [], []
    for one, other in zip(answered, others, strict=True):
        both = {*one.wanted.values()} & {*other.wanted.values()}
        if both:
            cases.append(Prompt(one.unit, {place: token for place, token in one.wanted.items() if token in both}))
            controls.append(
                Prompt(other.unit, {place: token for place, token in other.wanted.items() if token in both})
            )
    if len(cases) < FEWEST:
        return Trial(tuple(rows))
    return Trial(tuple(cases), tuple(controls), tuple((number,) for number in range(len(cases))))


def _plain_lists(model: AnyModel, seed: int) -> Trial:
    """Lists of any tokens, where the texts give no answers: what a head costs is told, and no more."""
    repeats = make_repeats(model, CASES, LISTED, seed)
    rows = []
    for number, ids in enumerate(repeats.twice.tolist()):
        places = range(repeats.second.start + 1, repeats.second.stop)
        rows.append(Prompt(bare_unit(number, tuple(ids), tokenizer_of(model)), {place: ids[place] for place in places}))
    return Trial(tuple(row for row in rows if row.wanted))


def _target_words(document: Document, role: str, where: str) -> Iterator[tuple[int, str]]:
    words = document.words
    for name, source, target in document.relations:
        if ROLE_OF.get(name, name) != role:
            continue
        if where == "later word":
            yield max(source, target), words[min(source, target)]
        elif where == "referent" and words[source + 2 : source + 3] and words[source + 2] in CHOICES[where]:
            yield source + 2, words[target]  # they are tired: what is said of the one meant


def _control_places(
    model: AnyModel, unit: Unit, role: str, where: str, partners: Mapping[int, set[str]]
) -> Iterator[int]:
    """Where an answer comes for another reason: gold says so, or what the role would look at does not stand before it."""
    there = [place for place, token in enumerate(unit.ids) if place and token in partners]
    if not there:
        return
    mine, names = target_places(unit, role, where), {ROLE_OF.get(name, name): name for name in PROBES}
    other = {place for name in CONTROLS.get(names[role], ()) for place in target_places(unit, name, "later word")}
    annotated = unit.document is not None and any(
        ROLE_OF.get(one, one) == role for one, _, _ in unit.document.relations
    )
    for place in there:
        if place in mine or (role in ANNOTATED and not annotated):
            continue
        if place in other or role in ANNOTATED:
            yield place
            continue
        read = tokenizer_of(model).decode(list(unit.ids[:place]))
        if not any(_says(read, word) for word in partners[unit.ids[place]]):
            yield place


def _says(text: str, word: str) -> bool:
    """Whether a text has a word; marks count wherever they stand.

    >>> _says("a different one", "if"), _says("see (above", "(")
    (False, True)
    """
    return (
        bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)) if word[:1].isalnum() else word in text
    )


def _limit(model: AnyModel) -> float:
    return min(NATS, math.log(model.spec.vocab) - 1)
