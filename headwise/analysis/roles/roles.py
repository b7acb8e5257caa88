"""Roles: what a head may be said to do, each a row of data; and the ladder of evidence a head has to climb.

    pattern     its score, on the half of the texts used for choosing, is above its null by the role's threshold
    selective   so it is on the other half, and the difference is no accident (max-T over all heads, roles and directions)
    effective   so it is when attention is weighted by the length of what it fetches
    causal      taking the head away costs the role's own answers more than the same answers reached another way, and more
                than taking away others of its layer, on every token set that is tried (see causal.py)

No role is told from the first rung alone: such a head is `unclear`. Where a head rests is told apart from what it does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.batch_context import SPECIAL, WINDOW
from headwise.analysis.metrics.induction import DUPLICATE, INDUCTION
from headwise.analysis.metrics.metric import Number
from headwise.analysis.metrics.offsets import AIMED, LOCAL, LONG
from headwise.analysis.metrics.relation_metrics import CONTROLS, HITS, MATCHED, NO_ROLE, OTHERS, SETS, SHAPES, Question
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.row_shape import ENTROPY, RELATIVE, RESTING, SHARE
from headwise.analysis.metrics.statistics import FEWEST, bootstrap, max_t
from headwise.analysis.metrics.token_classes import CLASS_NUMBERS, CLASSES
from headwise.analysis.metrics.word_arcs import NEAREST
from headwise.analysis.recording.text_buckets import CHOOSING, REPORTING, in_half
from headwise.analysis.roles.effects import Effect
from headwise.errors import HeadwiseError, close_names
from headwise.text.documents import Document

# Probes: tokens said twice; the same where a head holds them back; prompts of the role's own, by answer or by lead.
REPEATS, HELD, DUE, LEAD = "repeats", "held back", "due", "lead"
RUNGS = ("unclear", "pattern", "selective", "effective", "causal")


@dataclass(frozen=True)
class Role:
    """One row: the measure that is the score, and how far above its null it must be, (score − null) / (1 − null)."""

    name: str
    measure: Number  # it has a null and a valued twin, over the same rows: those that could have the target
    threshold: float
    probe: str | None = (
        None  # what is asked of the model when the head is taken away: one of those below, or of a relation
    )
    detail: str = ""  # told beside the role: an offset, a direction
    relation: bool = False  # asked of gold arcs
    hits: bool = False  # its score is how often a word looks hardest at the right one
    apart: bool = False  # asked on prompts of its own, and tested in a family of its own


def offset_role(offset: int) -> Role:
    """A head that looks a fixed number of tokens back, or ahead."""
    names = {1: "previous token", -1: "next token", 0: "self"}
    probe = REPEATS if offset == 1 else None
    return Role(
        names.get(offset, "fixed offset"), AIMED[offset], 0.3, probe, "" if offset in names else f"{-offset:+d}"
    )


TABLE = (
    *(offset_role(offset) for offset in range(1 - WINDOW, WINDOW)),
    Role("local", LOCAL[0], 0.4, None, "within 3"),
    *(Role(name, CLASS_NUMBERS[name], 0.3) for name in CLASSES if name != SPECIAL),
    Role("long range", LONG[0], 0.4, None, f"beyond {WINDOW}"),
    Role("induction", INDUCTION[0], 0.1, REPEATS),
    Role("duplicate token", DUPLICATE[0], 0.1, REPEATS),
)
ROOM = 0.8  # a role whose null is above this is not told: a little more would look like all there is
RELATION = 0.1  # the threshold of every relation, in accuracy above the best fixed offset
CONTROLLED = 5  # buckets of texts, in each half, that a control needs to say anything
EXCESS = 0.02  # and the weight its arcs must have above other pairs at the same distance
# relation: where a model that follows it must show it
PROBES = {
    "bracket": "later word", "quote": "later word", "copy": "later word", "if-then": "later word",
    "subject-verb": "later word", "nsubj": "later word", "pronoun-antecedent": "referent",
}  # fmt: skip
ROLE_OF = {
    "related": "semantic",
    "pronoun-antecedent": "coreference",
    "coref": "coreference",
    "same class": "part of speech",
    "delimiter": "sentence end",  # a full stop looks at the one before; the class of tokens has the other name
}
NARROW = ("previous token", "next token", "self", "fixed offset")
RESTS = ("sink", "special token", "broad", "idle")


@dataclass(frozen=True, eq=False)
class Case:
    """One role in one form, for all heads at once: sums per bucket and head, and what they are sums over."""

    role: Role
    scores: np.ndarray  # (buckets, heads)
    nulls: np.ndarray
    valued: np.ndarray
    counts: np.ndarray
    coverage: np.ndarray | None = None  # (heads,): the share of rows that could be compared, on the half for reporting

    def gain(self, half: int, valued: bool = False) -> np.ndarray:
        """(score − null) / (1 − null) on one half: (heads,); NaN where nothing was asked."""
        score, null = self.mean(half, valued), self.null(half)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (score - null) / (1 - null)

    def mean(self, half: int, valued: bool = False) -> np.ndarray:
        """The score on one half: (heads,)."""
        some = self.half(half)
        return _ratio((self.valued if valued else self.scores)[some], self.counts[some])

    def null(self, half: int) -> np.ndarray:
        """The null on one half: (heads,)."""
        some = self.half(half)
        return _ratio(self.nulls[some], self.counts[some])

    def half(self, half: int) -> np.ndarray:
        """Which buckets are in a half, (buckets,)."""
        return in_half(self.counts, half)


@dataclass(frozen=True)
class Support:
    """What speaks for one head having one role."""

    role: str
    detail: str
    rung: str
    score: float  # on the half for reporting
    null: float
    interval: tuple[float, float]
    gain: float
    p: float  # family-wise
    coverage: float  # the share of rows that could have the target or, of a relation, that could be compared
    probe: str | None
    rows: int
    effect: float | None = None  # what taking the head away costs its probe, beyond others of its layer, nats an answer
    effect_interval: tuple[float, float] | None = None
    cost: float | None = None  # what it costs by itself
    bar: float | None = None  # and what that must be above for the head to be causal
    control: float | None = None  # what it costs where the same answers are reached another way; None: nowhere found
    beyond_interval: tuple[float, float] | None = None  # of cost − control
    mean_cost: float | None = None  # what it costs with its mean in its place, asked of heads that stand so far
    causal_p: float | None = None  # the largest of its token sets, family-wise; None: not tried, for lack of a control
    relation: bool = False  # whether it was asked of gold arcs
    on: str = ""  # the texts on which it was shown, in words
    family: int = 0  # tests that p is corrected for, where they are not those of the profile
    hits: bool = False  # the score is a share of cases in which the right target gets the largest weight
    effects: tuple[Effect, ...] = ()  # of each token set tried; the numbers above are those of the first
    causal_on: tuple[str, ...] = ()  # the token sets, or prompts, on which the causal test holds

    def with_effects(self, effects: Sequence[Effect], sets: int) -> "Support":
        """Return the support with the results of its causal test. The level is causal only if all `sets` token sets were
        tried and hold on each; otherwise `causal_on` names those that hold."""
        effects = tuple(effect if effect.on else replace(effect, on=self.on) for effect in effects)
        holds = tuple(effect.on for effect in effects if effect.causal)
        tried = [effect.p for effect in effects if effect.control is not None]
        first = effects[0]
        return replace(
            self, rung="causal" if len(holds) == sets else self.rung, effect=first.more, effect_interval=first.interval,
            cost=first.cost, bar=first.bar, control=first.control, beyond_interval=first.beyond,
            mean_cost=first.mean_cost, causal_p=max(tried) if tried else None, effects=effects, causal_on=holds,
        )  # fmt: skip

    @property
    def evidence_level(self) -> str:
        """Evidence level in words, with the token sets on which the causal test holds."""
        sets = " and ".join(self.causal_on)
        if not sets:
            return self.rung
        return f"causal on {sets}" if self.rung == "causal" else f"{self.rung}; causal on {sets}"

    @property
    def stands(self) -> bool:
        """Whether it is told: a mere pattern is not."""
        return RUNGS.index(self.rung) >= 2

    @property
    def rank(self) -> tuple[int, float]:
        """Roles rank by rung, then by gain."""
        return RUNGS.index(self.rung), self.gain


def role_names(documents: Iterable[Document]) -> set[str]:
    """Every role a head may be found to have: those of the table, and those of the relations in some documents.

    >>> from headwise.text.documents import Relation
    >>> sorted(role_names([Document.of(["it", "runs"], [Relation("subject-verb", 1, 0)])]) - role_names([]))
    ['subject-verb']
    """
    names = {arc.name for document in documents for arc in document.relations} | {*SETS}
    return {role.name for role in TABLE} | {ROLE_OF.get(name, name) for name in names - NO_ROLE}


def check_roles(roles: Sequence[Role], numbers: Iterable[Number]) -> None:
    """Whether some roles can be judged beside the usual ones, on what is measured."""
    known = {number.name for number in numbers}
    told = {(role.name, role.detail) for role in TABLE}
    for role in roles:
        measure = role.measure
        if not measure.null or not measure.valued:
            raise HeadwiseError(
                f"the role {role.name!r} needs a measure with a null and a valued twin; {measure.name!r} has none."
            )
        if not {measure.name, measure.null, measure.valued} <= known:
            raise HeadwiseError(
                f"the role {role.name!r} needs {measure.name!r} to be measured; give it in measures=[…]."
            )
        if (role.name, role.detail) in told:
            raise HeadwiseError(f"there is a role {role.name!r} already; give yours another name or detail.")
        if not 0 < role.threshold < 1 or role.probe not in (None, REPEATS, HELD, *[DUE, LEAD] * role.apart):
            raise HeadwiseError(
                f"the role {role.name!r} needs a threshold between 0 and 1 and the probe {REPEATS!r}, {HELD!r} or none; "
                f"got {role.threshold} and {role.probe!r}."
            )
        told.add((role.name, role.detail))


def make_cases(
    tally: Tally, relations: Relations | None, only: str | None = None, roles: Sequence[Role] = TABLE
) -> list[Case]:
    """Every role that was measured, or one of them."""
    cases = list(_table_cases(tally, roles))
    if relations is not None:
        cases += _relation_cases(tally, relations)
    if only is not None:
        known = {case.role.name for case in cases}
        if only not in known:
            raise HeadwiseError(f"there is no role {only!r} here; {close_names(only, known)}")
        cases = [case for case in cases if case.role.name == only]
    return cases


def judge(cases: list[Case], heads: int) -> tuple[list[list[Support]], int]:
    """For every head what supports its roles, best first, at least a pattern; and the size of the family of tests. Roles
    `apart` are a second family and come behind others of their rung, so that those are told, and tried by ablation, as they
    are without them."""
    first, second = ([case for case in cases if case.role.apart == apart] for apart in (False, True))
    found, family = _judge(first, heads)
    more, beside = _judge(second, heads)
    made = [[*some, *(replace(one, family=beside) for one in others)] for some, others in zip(found, more, strict=True)]
    return [_one_each(in_order(some)) for some in made], family


def in_order(supports: Iterable[Support]) -> list[Support]:
    """The best first: by rung; those of the first family; by gain."""
    return sorted(supports, key=lambda one: (one.rank[0], not one.family, one.gain), reverse=True)


def _judge(cases: list[Case], heads: int) -> tuple[list[list[Support]], int]:
    """One family."""
    if not cases:
        return [[] for _ in range(heads)], 0
    reporting = [case.half(REPORTING) for case in cases]
    scores, nulls, valued, counts = (
        np.stack([getattr(case, name) * half[:, None] for case, half in zip(cases, reporting, strict=True)], -1)
        for name in ("scores", "nulls", "valued", "counts")
    )  # (buckets, heads, cases): the other half is empty
    p, family = max_t(scores, nulls, counts)
    p_valued, _ = max_t(valued, nulls, counts)
    found: list[list[Support]] = [[] for _ in range(heads)]
    for number, (case, half) in enumerate(zip(cases, reporting, strict=True)):
        asked = case.counts[half]  # (buckets, heads)
        chosen, told, heavy = case.gain(CHOOSING), case.gain(REPORTING), case.gain(REPORTING, valued=True)
        enough = (asked > 0).sum(0) >= FEWEST
        room = np.maximum(case.null(CHOOSING), case.null(REPORTING)) <= ROOM  # NaN is not
        wanted = np.flatnonzero((np.nan_to_num(chosen, nan=-1.0) >= case.role.threshold) & enough & room)
        if not len(wanted):
            continue
        low, high = bootstrap(case.scores[half][:, wanted], asked[:, wanted])
        score, null = case.mean(REPORTING), case.null(REPORTING)
        rows = asked.sum(0)
        for place, head in enumerate(wanted):
            rung = 1
            if told[head] >= case.role.threshold and p[head, number] < 0.05:
                rung = 3 if heavy[head] >= case.role.threshold / 2 and p_valued[head, number] < 0.05 else 2
            found[head].append(
                Support(
                    case.role.name, case.role.detail, RUNGS[rung], float(score[head]), float(null[head]),
                    (float(low[place]), float(high[place])), float(told[head]), float(p[head, number]),
                    1.0 if case.coverage is None else float(case.coverage[head]), case.role.probe, int(rows[head]),
                    relation=case.role.relation, on=case.role.measure.on, hits=case.role.hits or case.role.measure.hits,
                )
            )  # fmt: skip
    return found, family


def rest(tally: Tally, heads_in_layer: np.ndarray) -> list[tuple[str, ...]]:
    """Where each head rests: on the first token, on special tokens, everywhere alike, or without writing anything."""
    told = (RESTING.name, SPECIAL, RELATIVE.name, SHARE.name)
    nothing = np.full(tally.heads, np.nan)  # pictures have no first token
    first, special, relative, writes = (tally.mean(name) if name in tally.fields else nothing for name in told)
    share = writes * heads_in_layer
    flags = np.stack((first > 0.3, (special > 0.3) & (first <= 0.3), relative > 0.9, share < 0.2), -1)
    return [tuple(name for name, there in zip(RESTS, row, strict=True) if there) for row in flags]


def _one_each(supports: list[Support]) -> list[Support]:
    """Each role once, in its best form; `local` only where no single offset says nearly as much."""
    seen: set[str] = set()
    kept = [one for one in supports if not (one.role in seen or seen.add(one.role))]
    local = next((one for one in kept if one.role == "local"), None)
    narrow = [one for one in kept if local and one.role in NARROW and RUNGS.index(one.rung) >= RUNGS.index(local.rung)]
    if local and any(one.gain >= 0.7 * local.gain for one in narrow):
        kept.remove(local)
    return kept


def _table_cases(tally: Tally, roles: Sequence[Role]) -> Iterator[Case]:
    rows = tally.per_bucket(ENTROPY.name)[1] if ENTROPY.name in tally.fields else None
    for role in roles:
        told = role.measure
        if told.name not in tally.fields:
            continue
        (scores, counts), (nulls, asked), (valued, _) = map(tally.per_bucket, (told.name, told.null, told.valued))
        if counts.sum() == 0:
            continue
        with np.errstate(invalid="ignore", divide="ignore"):  # a null may have been measured on other texts
            rate = np.where(asked > 0, nulls / asked, 0.0)
        covered = None if rows is None or told.on else _covered(counts, rows)  # of texts of its own every row is asked
        yield Case(role, scores, rate * counts, valued, counts, covered)


def _relation_cases(tally: Tally, relations: Relations) -> Iterator[Case]:
    for number, question in enumerate(relations.questions):
        name, way, told = question.relation, question.way, question.numbers
        if name in NO_ROLE or relations.arcs[:, number].sum() == 0:
            continue
        measure = told[MATCHED if name in SETS else HITS]
        role = Role(
            ROLE_OF.get(name, name), measure, RELATION, PROBES.get(name), way, relation=True, hits=name not in SETS
        )
        matched, fit = tally.per_bucket(told[MATCHED].name)
        others = tally.per_bucket(told[OTHERS].name)[0]
        hits, counts = tally.per_bucket(told[HITS].name)
        covered, twin = _covered(fit, counts), tally.per_bucket(measure.valued)[0]
        if name in SETS:
            yield Case(role, matched, others, twin, fit, covered)
            continue
        nulls = _best_offset(relations, number)[:, None] * np.ones(tally.heads)
        for other, of in _controls(tally, relations, question):
            nulls = _larger(nulls, counts, other, of)
        chosen = in_half(counts, CHOOSING)
        excess = _ratio(matched[chosen], fit[chosen]) - _ratio(others[chosen], fit[chosen])
        follows = np.nan_to_num(excess) >= EXCESS  # a hard positional head has exactly none
        yield Case(role, hits * follows, nulls, twin * follows, counts, covered)


def _controls(tally: Tally, relations: Relations, question: Question) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """How often each head looks at the wrong words, for each control of a relation: hits, rows, (buckets, heads) each."""
    ahead = relations.offsets[:, relations.questions.index(question)].sum(0) @ np.sign(NEAREST) > 0
    for control in CONTROLS.get(question.relation, ()):
        back = "<" if ahead else ">"  # those made here look back by >
        asked = Question(control, question.way if control not in SHAPES else back)
        if asked in relations.questions:
            hits, rows = tally.per_bucket(asked.numbers[HITS].name)
            if min(in_half(rows, half).sum() for half in (CHOOSING, REPORTING)) >= CONTROLLED:
                yield hits, rows


def _covered(some: np.ndarray, of: np.ndarray) -> np.ndarray:
    """The share of rows, on the half for reporting: (heads,)."""
    half = in_half(of, REPORTING)
    return np.nan_to_num(_ratio(some[half], of[half]))


def _larger(nulls: np.ndarray, counts: np.ndarray, other: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Of two baselines the one that is larger on the half for choosing, for each head: the one so far, such as the best fixed
    offset, or how often it looks at the words of a control. (buckets, heads)"""
    halves = [(in_half(counts, half), in_half(of, half)) for half in (CHOOSING, REPORTING)]
    rates = [np.nan_to_num(_ratio(other[theirs], of[theirs])) for _, theirs in halves]  # (heads,) each
    chosen = halves[CHOOSING][0]
    take = rates[CHOOSING] > np.nan_to_num(_ratio(nulls[chosen], counts[chosen]))
    matched = sum(mine[:, None] * counts * rate for (mine, _), rate in zip(halves, rates, strict=True))
    return np.where(take, matched, nulls)


def _best_offset(relations: Relations, question: int) -> np.ndarray:
    """How many arcs the best fixed offset hits in each bucket; the offset is chosen on the half for choosing."""
    hits = relations.offsets[:, question]  # (buckets, offsets)
    allowed = np.array([offset != 0 and (offset < 0 or not relations.causal) for offset in NEAREST])
    chosen = in_half(relations.arcs[:, question], CHOOSING)
    return hits[:, np.argmax(hits[chosen].sum(0) * allowed)]


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum(0) / counts.sum(0)
