"""`cache_study`: key heads that keep less, what that saves and costs, beside random plans. What `headwise cache` calls."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.compression.evaluation import Estimate, PairedEvaluation, finite
from headwise.compression.passkey import ask_passkeys, make_cases
from headwise.compression.plan import Plan
from headwise.compression.report import random_plan
from headwise.compression.streaming_cost import StreamingCost, StreamingEvaluation
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_folder
from headwise.model import Transformer
from headwise.progress import Progress
from headwise.spec import Address, Keeps
from headwise.spec.cache_policy import ALL
from headwise.spec.cache_policy import BITS as CACHE_BITS
from headwise.spec.parallel_cost import cache_bytes
from headwise.text.corpus import Corpus

USUAL = 1024  # tokens of a text
WHICH = "say what key heads keep: share=0.5 chooses some that stream, heads='5.*' names them, bits=8 rounds; or plan=…."


@dataclass(frozen=True)
class CacheStudy:
    """What key heads shall keep, and how that is judged: by texts they were not chosen on.

    `on` (None: the embedded probe set, one sentence after the other) is read up to `limit` texts of `length` tokens. Key
    heads are chosen on one half of them and judged on the other, unless there is another text to judge by, `test`. Judged
    are the tokens that come after something was forgotten: earlier ones cannot differ.
    """

    share: float | None = None  # of the key heads that stream, chosen `by`
    heads: str | None = None  # or those that stream, by name
    first: int = 4  # what streaming heads keep
    last: int = 128
    bits: int = 32  # at which all key heads keep keys and values
    by: str = "writes"
    plan: Plan | None = None  # made before, in place of all these
    on: Any = None
    test: Any = None
    limit: int = 8
    length: int | None = None  # None: 1024, or the model's context
    seed: int = 0
    steps: int = 60  # in which gates learn
    rounds: int = 1  # in which key heads are chosen, a few at a time
    spare: float = 0.0  # the part of the key heads that never streams: those that find what is repeated best
    seeds: int = 3  # random plans to compare with
    shares: tuple[float, ...] = ()  # also with each of these shares streaming: a curve
    passkeys: int = 0  # numbers hidden in texts of that length and asked for; with it, also losses on retrieval texts

    def __post_init__(self) -> None:
        ways = [self.share is not None, self.heads is not None, self.plan is not None]
        if sum(ways) > 1 or not (any(ways) or self.bits != ALL.bits or self.shares):
            raise HeadwiseError(WHICH)
        if self.plan is not None and (not self.plan.cache or self.plan.cut or self.plan.weights):
            raise HeadwiseError(
                "the plan does other things to heads than letting caches keep less; use plan.apply(model)."
            )
        Keeps(self.bits, self.first, self.last)  # refuses what no cache can be

    @property
    def keeps(self) -> bool:
        """Whether a plan is asked for, or a curve alone."""
        return self.share is not None or self.heads is not None or self.plan is not None or self.bits != ALL.bits

    @property
    def chooses(self) -> bool:
        """Whether key heads are chosen on texts, which must not judge them."""
        return self.share is not None or bool(self.shares)


@dataclass(frozen=True)
class CachePoint:
    """One plan. `more` is paired with the whole cache's loss, text by text; of random plans: mean, least and most."""

    line: str
    streaming: int  # key heads
    bits: int
    bytes: int  # of a cache of `length` tokens
    more: Estimate


@dataclass(frozen=True)
class CacheReport:
    """A cache that keeps less beside a whole one; losses are of tokens past what every head keeps, intervals over texts."""

    metric: str
    texts: int
    past: int  # tokens that nobody has forgotten: not asked about
    length: int  # tokens that bytes are told for
    bytes_before: int
    bytes_after: int
    loss_before: Estimate
    loss_after: Estimate
    more: Estimate
    random: tuple[float, ...] = ()  # the loss of random plans of equal cost, a seed each
    more_than_random: Estimate | None = None
    passkeys: tuple[int, int] | None = None  # of those the whole cache finds, how many are kept; and how many those are
    retrieval: tuple[StreamingCost, ...] = ()  # increases on repeated lists and on facts asked for later

    @property
    def times(self) -> float:
        """How many times fewer bytes."""
        return self.bytes_before / self.bytes_after

    def losses(self) -> list[list[str | float]]:
        """What, mean, low, high."""
        named = {"whole cache": self.loss_before, "this plan": self.loss_after, "this plan − whole": self.more}
        if self.more_than_random is not None:
            seeds = f"random plans, {len(self.random)} seeds: mean, least, most"
            spread = Estimate(float(np.mean(self.random)), min(self.random), max(self.random))
            named |= {seeds: spread, "this plan − random": self.more_than_random}
        named |= {f"this plan − whole, {cost.kind}": cost.more for cost in self.retrieval}
        return [[name, *asdict(figure).values()] for name, figure in named.items()]


@dataclass(frozen=True, eq=False)
class CacheResult:
    """What came of it; None where it was not asked for."""

    plan: Plan | None
    model: Transformer | None  # whose spec says what key heads keep
    report: CacheReport | None
    curve: tuple[CachePoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        plan, told = self.plan, None
        if self.report is not None:
            told = asdict(self.report, dict_factory=finite) | {"times": self.report.times}
        return {
            "plan": None if plan is None else {
                "by": plan.cache_by, "on": plan.cache_on, "rules": [asdict(rule) for rule in plan.cache],
                "scores": dict(zip(map(str, plan.spec.key_heads), plan.cache_scores, strict=False)),
            },
            "report": told,
            "curve": [asdict(point, dict_factory=finite) for point in self.curve],
        }  # fmt: skip


def cache_study(
    model: Transformer,
    study: CacheStudy,
    *,
    out: str | Path | None = None,
    save_plan: str | Path | None = None,
    progress: Progress | None = None,
) -> CacheResult:
    """Let key heads keep less, and say what that saves and costs. The given model stays as it is.

    `out` is a folder for the model whose spec says so, `save_plan` a file for the plan; both are written before anything is
    judged.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=64, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> lines = [f"{n} and {n} are {2 * n}, and so on and so on, and on and on." for n in range(8)]
    >>> made = cache_study(model, CacheStudy(share=0.5, first=1, last=8, on=lines, seeds=1))
    >>> made.plan.cache[0].keeps, made.report.past, made.report.texts
    (Keeps(bits=32, first=1, last=8), 9, 4)
    """
    _check(model, study, out is not None or save_plan is not None)
    length = min(USUAL, model.spec.context) if study.length is None else study.length
    choosing, judging = _texts(model, study, length)
    plan = small = report = None
    # The folder is asked for first: long work must not end before a folder that cannot be written.
    with nullcontext() if out is None else whole_folder(out, ("spec.json", "headwise.json")) as folder:
        if study.keeps:
            plan = _plan(model, study, choosing, length, progress)
            small = plan.apply(model) if study.plan is not None else plan.carry_out(model)
        if plan is not None and save_plan is not None:
            plan.save(save_plan)
        if small is not None and folder is not None:
            small.save(folder)
    past = _room(study, plan)
    evaluation = PairedEvaluation.of(model, judging, past=past)
    if plan is not None and small is not None:
        report = _report(model, small, evaluation, study, past, length, judging, progress)
    points = _curve(model, study, plan, choosing, evaluation, length, progress) if study.shares else ()
    return CacheResult(plan, small, report, points)


def _plan(model: Transformer, study: CacheStudy, choosing: Reading, length: int, progress: Progress | None) -> Plan:
    if study.plan is not None:
        return study.plan
    if study.share is not None:
        return Plan.streaming(
            model, study.share, first=study.first, last=study.last, bits=study.bits, by=study.by, on=choosing, longest=length,
            seed=study.seed, steps=study.steps, rounds=study.rounds, spare=study.spare, progress=progress,
        )  # fmt: skip
    rest = {} if study.bits == ALL.bits else {"*": study.bits}
    named = {} if study.heads is None else {study.heads: Keeps(study.bits, study.first, study.last)}
    return Plan.make(model, cache=rest | named)


def _report(
    model: Transformer,
    small: Transformer,
    evaluation: PairedEvaluation,
    study: CacheStudy,
    past: int,
    length: int,
    judging: Reading,
    progress: Progress | None,
) -> CacheReport:
    losses, random = evaluation.losses(small), list[np.ndarray]()
    everyone = len(small.spec.cache) == 1 and len(small.spec.cache[0].heads) == len(small.spec.key_heads)
    for seed in range(0 if everyone else study.seeds):  # where all keep alike there is nothing to draw
        random.append(evaluation.losses(random_plan(model, small.spec, None, seed)))
        if progress is not None:
            progress("random plans", seed + 1, study.seeds)
    found, retrieval = None, ()
    if study.passkeys:
        retrieval = _retrieval(model, small, judging)
        cases = make_cases(model, " ".join(unit.text for unit in judging), length, study.passkeys, study.seed)
        whole = ask_passkeys(model, cases)
        found = ask_passkeys(small, cases).kept(whole)
    return CacheReport(
        metric=evaluation.metric,
        texts=int((evaluation.counts > 0).sum()),
        past=past,
        length=length,
        bytes_before=cache_bytes(model.spec, length),
        bytes_after=cache_bytes(small.spec, length),
        loss_before=evaluation.estimate(evaluation.full),
        loss_after=evaluation.estimate(losses),
        more=evaluation.difference(losses, evaluation.full),
        random=tuple(float(one.sum() / evaluation.counts.sum()) for one in random),
        more_than_random=evaluation.difference_from_draws(losses, random) if random else None,
        passkeys=found,
        retrieval=retrieval,
    )


def _retrieval(model: Transformer, small: Transformer, judging: Reading) -> tuple[StreamingCost, ...]:
    """Loss increases on texts longer than the longest window of the plan; none if no KV head streams."""
    policies = [rule.keeps for rule in small.spec.cache if rule.keeps.last is not None]
    if not policies:
        return ()
    longest = max(policies, key=lambda policy: policy.first + (policy.last or 0))
    return StreamingEvaluation.of(model, longest, judging, running=False).test(small).costs


def _curve(
    model: Transformer,
    study: CacheStudy,
    made: Plan | None,
    choosing: Reading,
    evaluation: PairedEvaluation,
    length: int,
    progress: Progress | None,
) -> tuple[CachePoint, ...]:
    """Every share streaming, by the way asked for (ranked once) and at random; and all key heads at fewer bits."""
    ranked = made
    if ranked is None or not ranked.cache_scores:
        ranked = Plan.streaming(
            model, max(study.shares), first=study.first, last=study.last, by=study.by, on=choosing, longest=length,
            seed=study.seed, steps=study.steps, rounds=study.rounds, spare=min(study.spare, 1 - max(study.shares)),
            progress=progress,
        )  # fmt: skip
    heads = model.spec.key_heads
    order = [heads[i] for i in np.argsort(ranked.cache_scores, kind="stable")]
    keeps = Keeps(study.bits, study.first, study.last)
    tell = partial(_point, model, evaluation, length)
    shares, points = sorted(set(study.shares)), list[CachePoint]()
    for done, share in enumerate(shares, 1):
        count = round(share * len(heads))
        points.append(tell(ranked.cache_by, count, study.bits, [_rules(order[:count], keeps, heads)]))
        draws = [np.random.default_rng(seed).permutation(len(heads))[:count] for seed in range(study.seeds)]
        if draws:
            rules = [_rules([heads[i] for i in drawn], keeps, heads) for drawn in draws]
            points.append(tell("random", count, study.bits, rules))
        if progress is not None:
            progress("plans of the curve", done, len(shares))
    points += [tell("all at fewer bits", 0, bits, [{"*": bits}]) for bits in CACHE_BITS[1:]]
    return tuple(points)


def _rules(streaming: Sequence[Address], keeps: Keeps, heads: Sequence[Address]) -> dict[str, Keeps | int]:
    """Some key heads streaming, the others whole, all at the same bits."""
    rules: dict[str, Keeps | int] = {} if keeps.bits == ALL.bits else {",".join(map(str, heads)): keeps.bits}
    return rules | ({",".join(map(str, streaming)): keeps} if streaming else {})


def _point(
    model: Transformer,
    evaluation: PairedEvaluation,
    length: int,
    line: str,
    count: int,
    bits: int,
    plans: list[dict[str, Keeps | int]],
) -> CachePoint:
    """Of one plan its interval, of several the mean, the least and the most."""
    made = [Plan.make(model, cache=rules).carry_out(model) if rules else model for rules in plans]
    losses = [evaluation.losses(one) for one in made]
    each = [evaluation.difference(some, evaluation.full) for some in losses]
    means = [one.mean for one in each]
    more = each[0] if len(each) == 1 and line != "random" else Estimate(float(np.mean(means)), min(means), max(means))
    return CachePoint(line, count, bits, cache_bytes(made[0].spec, length), more)


def _room(study: CacheStudy, plan: Plan | None) -> int:
    """Tokens that no head of the plan, or of the curve, has forgotten: all are judged by what comes behind."""
    rules = () if plan is None else plan.cache
    kept = [rule.keeps.first + rule.keeps.last for rule in rules if rule.keeps.last is not None]
    kept += [study.first + study.last] if study.shares else []
    return min(kept) if kept else 0


def _texts(model: Transformer, study: CacheStudy, length: int) -> tuple[Reading, Reading]:
    """What key heads are chosen on, and what the choice is judged by."""
    given = study.on
    if given is None:  # sentences are too short to forget anything
        given = " ".join(item.text for item in Corpus.probe().items())
    texts = Reading.of(model, given, length).first(study.limit)
    if study.test is not None:
        return texts, Reading.of(model, study.test, length).first(study.limit)
    return texts.halves() if study.chooses else (texts, texts)


def _check(model: Transformer, study: CacheStudy, writes: bool) -> None:
    model.check_own("caches by head are for headwise's own models")
    if model.spec.kind != "decoder":
        raise HeadwiseError(f"a cache is what a decoder writes on with; this is an {model.spec.kind}, which has none.")
    if model.tokenizer is None or model.output is None:
        raise HeadwiseError(
            "this model cannot be asked for tokens, so a cache cannot be judged; use hw.Plan.make(cache=…)."
        )
    if writes and not study.keeps:
        raise HeadwiseError(WHICH)
    if study.limit < 2 and study.chooses and study.test is None:
        raise HeadwiseError("a single text cannot both choose key heads and judge the choice; raise the limit.")
