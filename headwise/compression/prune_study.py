"""`prune_study`: a cut, and what it brought and cost, beside random cuts of the same size. What `headwise prune` calls."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwise.analysis.ablation.head_outputs import Means, mean_activations, read_on
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.attached import Attached
from headwise.compression.curve import Curve, curve, usual_bys
from headwise.compression.plan import Plan
from headwise.compression.prune_request import WHICH, PruneRequest
from headwise.compression.rankers import way_of
from headwise.compression.recovery import heal
from headwise.compression.report import Report, report
from headwise.distillation.distill_config import Lesson
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_folder
from headwise.model import AnyModel, Transformer
from headwise.progress import Progress
from headwise.text.corpus import Corpus

HEAL_BY = "logits"  # what `python -m bench.distil` found best, on text of another kind than it was healed on


@dataclass(frozen=True)
class PruneStudy:
    """A cut and how it is judged: by texts that heads were not chosen on.

    The request's `on` (None: the embedded probe set) is read up to `limit` texts, plain text in units of `length` tokens.
    Heads are chosen on one half of them and judged on the other, unless there is another text to judge by, `test`.
    """

    request: PruneRequest = PruneRequest()  # noqa: RUF009 (frozen)
    plan: Plan | None = None  # made before; in place of the request's keep or heads
    test: Any = None
    limit: int = 64
    length: int | None = None
    heal: int = 0  # then train it so many steps on the texts heads were chosen on
    heal_by: str | None = None  # text, or of the model before the cut: logits (None), hidden, maps, qkv, with commas
    seeds: int = 3  # random cuts to compare with
    shares: tuple[float, ...] = ()  # also cut at each of these, by several ways: a curve

    def __post_init__(self) -> None:
        if (self.plan is not None and self.request.cuts) or not (self.cuts or self.shares):
            raise HeadwiseError(WHICH)
        if self.heal < 0 or (self.heal and not self.cuts):
            raise HeadwiseError(f"heal trains a model that was cut, so many steps, 1 or more; got {self.heal}.")
        if self.heal_by is not None:
            _ = self.lesson  # refuses what nobody can learn from
            if not self.heal:
                raise HeadwiseError(
                    f"heal_by says how a model is healed; say how long, too: heal=200, got {self.heal}."
                )

    @property
    def lesson(self) -> tuple[str, ...]:
        """What is learned of the model before the cut when it is healed; nothing: it learns from the text alone."""
        if self.heal_by == "text":
            return ()
        learned = tuple((self.heal_by or HEAL_BY).split(","))
        Lesson(learned)
        return learned

    @property
    def cuts(self) -> bool:
        """Whether heads go, or a curve alone is asked for."""
        return self.plan is not None or self.request.cuts

    @property
    def chooses(self) -> bool:
        """Whether anything is chosen, learned or measured on texts that must not judge it."""
        asked = self.request
        return bool(self.shares or self.heal or asked.keep is not None or (asked.heads is not None and asked.fold))

    @property
    def reads(self) -> bool:
        """Whether it needs texts besides those that judge."""
        folds = self.request.fold and self.plan is None
        return bool(self.heal or self.shares or folds or self.request.ranks)


@dataclass(frozen=True, eq=False)
class PruneResult:
    """What came of it; None where it was not asked for, or there was no text to judge by."""

    plan: Plan | None
    model: Transformer | Attached | None  # the smaller one, healed where that was asked for
    report: Report | None
    curve: Curve | None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; a plan without what it folds, which a saved plan has."""
        plan = self.plan
        return {
            "plan": None if plan is None else {
                "by": plan.by, "rounds": plan.rounds, "folded": bool(plan.folded), "heads": plan.cut,
                "scores": {str(head): score for head, score in plan.worth.items()},
            },
            "report": None if self.report is None else self.report.to_dict(),
            "curve": None if self.curve is None else self.curve.to_dict(),
        }  # fmt: skip


def prune_study(
    model: Transformer | Attached,
    study: PruneStudy,
    *,
    out: str | Path | None = None,
    save_plan: str | Path | None = None,
    progress: Progress | None = None,
) -> PruneResult:
    """Cut heads and say what that brought and cost, beside random cuts of the same size. The given model stays as it is.

    `out` is a folder for the smaller model and `save_plan` a file for the plan; both are written before anything is judged.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.training.loop import Recipe, train
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> lines = [f"{n} and {n} are {2 * n}" for n in range(20)]
    >>> model = train(spec, lines, Recipe(steps=2, batch=4), progress=False).model
    >>> made = prune_study(model, PruneStudy(PruneRequest(keep=0.5, on=lines), seeds=1))
    >>> len(made.model.spec.addresses), made.report.texts
    (1, 10)
    """
    if not study.cuts and (out is not None or save_plan is not None):
        raise HeadwiseError(WHICH)
    choosing, judging = _texts(model, study)
    _check(model, study, choosing)
    healer = train_whole = None
    if study.heal:
        train_whole = partial(heal, corpus=choosing, steps=study.heal, seed=study.request.seed, progress=False)
        taught = {"teacher": model, "learn": study.lesson} if study.lesson else {}
        healer = partial(train_whole, **taught)
    made = small = healed = measured = drawn = means = None
    # The folder is asked for first: long work must not end before a folder that cannot be written.
    with nullcontext() if out is None else whole_folder(out, ("spec.json", "headwise.json")) as folder:
        if study.plan is not None:
            made, small = study.plan, study.plan.apply(model)
        elif study.request.cuts:
            means = mean_activations(model, choosing) if study.request.fold and choosing is not None else None
            made = Plan.make(model, replace(study.request, on=choosing), means=means, progress=progress)
            small = made.carry_out(model)
        if made is not None and save_plan is not None:
            made.save(save_plan)
        if small is not None and healer is not None:
            healed = copy.deepcopy(small)
            healer(healed)
        if small is not None and folder is not None:
            (small if healed is None else healed).save(folder)
    if made is not None and small is not None and judging is not None:
        if made.folded and means is None and choosing is not None:  # the plan was made before
            means = mean_activations(model, choosing)
        measured = report(
            model, small, judging, means=means, seeds=study.seeds, heal=healer, healed=healed, train_whole=train_whole,
            progress=progress,
        )  # fmt: skip
    if study.shares:
        drawn = _curve(model, study, made, choosing, judging, means, progress)
    return PruneResult(made, small if healed is None else healed, measured, drawn)


def _curve(
    model: AnyModel,
    study: PruneStudy,
    made: Plan | None,
    choosing: Any,
    judging: Any,
    means: Means | None,
    progress: Progress | None,
) -> Curve:
    """Loss at every share, by the usual ways and the one asked for; a ranking that was made is not made again."""
    asked = study.request
    ranked = {made.by: made.worth} if made is not None and made.worth and made.rounds == 1 else None
    bys = (*usual_bys(model), *(() if way_of(asked.by).usual else (asked.by,)))
    return curve(
        model, choosing, judging, keeps=study.shares, bys=bys, folded=asked.fold if made is None else bool(made.folded),
        means=means, seeds=study.seeds, steps=asked.steps, scores=ranked, progress=progress,
    )  # fmt: skip


def _texts(model: AnyModel, study: PruneStudy) -> tuple[Reading | None, Reading | None]:
    """What heads are chosen on, and what the choice is judged by; none where a model cannot be asked about texts."""
    if model.tokenizer is None:
        return None, None  # heads can still be cut by name
    unread = model.spec.kind == "encoder-decoder" and study.request.on is None  # no pairs are embedded
    given = study.request.on if isinstance(study.request.on, Reading) else Corpus.of(study.request.on)
    texts = None if unread else read_on(model, given, study.length).first(study.limit)
    if study.test is not None:
        return texts, read_on(model, study.test, study.length).first(study.limit)
    if texts is None:
        return None, None
    return texts.halves() if study.chooses or texts.texts > 1 else (texts, texts)


def _check(model: AnyModel, study: PruneStudy, choosing: Reading | None) -> None:
    if study.reads and choosing is None and model.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "ranking, folding or healing an encoder-decoder needs pairs: give on=hw.Corpus.pairs(sources, texts), TEXT and "
            "--source on the command line; or name heads and leave folding out."
        )
    if study.heal and (choosing is None or model.output is None):
        raise HeadwiseError("this model cannot be asked for tokens, so it cannot be healed; leave heal out.")
