"""`prune_study`: a cut, and what it brought and cost, beside random cuts of the same size. What `headwise prune` calls."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwise.analysis.ablation.head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.attached import AttachedModel
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.plan_report import PlanReport, report
from headwise.compression.prune_request import PRUNE_USAGE, PruneRequest
from headwise.compression.pruning_curve import PruningCurve, default_rankings, pruning_curve
from headwise.compression.rankers import get_ranker
from headwise.compression.recovery_finetune import recover
from headwise.distillation.distill_config import DistillConfig
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import atomic_folder
from headwise.model import ModelProtocol, Transformer
from headwise.progress import Progress
from headwise.spec import Plan
from headwise.text.corpus import Corpus

# What `python -m bench.distil` found best, on text of another kind than it was healed on.
DEFAULT_RECOVER_LOSSES = "logits"


@dataclass(frozen=True)
class PruneStudy:
    """A cut and how it is judged: by texts that heads were not chosen on.

    The request's `corpus` (None: the embedded probe set) is read up to `max_texts` texts, plain text in units of
    `max_length` tokens.
    Heads are chosen on one half of them and judged on the other, unless there is another text to judge by, `test`.
    """

    request: PruneRequest = PruneRequest()  # noqa: RUF009 (frozen)
    plan: Plan | None = None  # made before; in place of the request's keep or heads
    test: Any = None
    max_texts: int = 64
    max_length: int | None = None
    recover_steps: int = 0  # then train it so many steps on the texts heads were chosen on
    # text, or of the model before the cut: logits (None), hidden, maps, qkv, with commas
    recover_losses: str | None = None
    seeds: int = 3  # random cuts to compare with
    fractions: tuple[float, ...] = ()  # also cut at each of these, by several ways: a curve

    def __post_init__(self) -> None:
        if (self.plan is not None and self.request.has_heads_to_prune) or not (self.prunes_heads or self.fractions):
            raise HeadwiseError(PRUNE_USAGE)
        if self.recover_steps < 0 or (self.recover_steps and not self.prunes_heads):
            raise HeadwiseError(
                f"recover_steps trains a model that was cut, so many steps, 1 or more; got {self.recover_steps}."
            )
        if self.recover_losses is not None:
            _ = self.distill_losses  # refuses what nobody can learn from
            if not self.recover_steps:
                raise HeadwiseError(
                    "recover_losses says how a model is healed; say how long, too: recover_steps=200, "
                    f"got {self.recover_steps}."
                )

    @property
    def distill_losses(self) -> tuple[str, ...]:
        """What is learned of the model before the cut when it is healed; nothing: it learns from the text alone."""
        if self.recover_losses == "text":
            return ()
        losses = tuple((self.recover_losses or DEFAULT_RECOVER_LOSSES).split(","))
        DistillConfig(losses)
        return losses

    @property
    def prunes_heads(self) -> bool:
        """Whether heads go, or a curve alone is asked for."""
        return self.plan is not None or self.request.has_heads_to_prune

    @property
    def needs_corpus_split(self) -> bool:
        """Whether anything is chosen, learned or measured on texts that must not judge it."""
        request = self.request
        return bool(
            self.fractions
            or self.recover_steps
            or request.keep is not None
            or (request.heads is not None and request.fold_mean)
        )

    @property
    def needs_corpus(self) -> bool:
        """Whether it needs texts besides those that judge."""
        folds_mean = self.request.fold_mean and self.plan is None
        return bool(self.recover_steps or self.fractions or folds_mean or self.request.ranks_on_corpus)


@dataclass(frozen=True, eq=False)
class PruneStudyResult:
    """What came of it; None where it was not asked for, or there was no text to judge by."""

    plan: Plan | None
    model: Transformer | AttachedModel | None  # the smaller one, healed where that was asked for
    report: PlanReport | None
    curve: PruningCurve | None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; a plan without what it folds, which a saved plan has."""
        plan = self.plan
        return {
            "plan": None if plan is None else {
                "ranking": plan.ranking, "rounds": plan.rounds, "fold_mean": bool(plan.folded_biases),
                "pruned_heads": plan.pruned_heads,
                "scores": {str(head): score for head, score in plan.head_scores.items()},
            },
            "report": None if self.report is None else self.report.to_dict(),
            "curve": None if self.curve is None else self.curve.to_dict(),
        }  # fmt: skip


def prune_study(
    model: Transformer | AttachedModel,
    study: PruneStudy,
    *,
    out: str | Path | None = None,
    save_plan: str | Path | None = None,
    progress: Progress | None = None,
) -> PruneStudyResult:
    """Cut heads and say what that brought and cost, beside random cuts of the same size. The given model stays as it is.

    `out` is a folder for the smaller model and `save_plan` a file for the plan; both are written before anything is judged.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.training.loop import Recipe, train
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> lines = [f"{n} and {n} are {2 * n}" for n in range(20)]
    >>> model = train(spec, lines, Recipe(steps=2, batch_size=4), progress=False).model
    >>> result = prune_study(model, PruneStudy(PruneRequest(keep=0.5, corpus=lines), seeds=1))
    >>> len(result.model.spec.head_addresses), result.report.texts
    (1, 10)
    """
    if not study.prunes_heads and (out is not None or save_plan is not None):
        raise HeadwiseError(PRUNE_USAGE)
    selection_corpus, test_corpus = _split_texts(model, study)
    _check(model, study, selection_corpus)
    recover_fn = train_full = None
    if study.recover_steps:
        train_full = partial(
            recover, corpus=selection_corpus, steps=study.recover_steps, seed=study.request.seed, progress=False
        )
        teacher_options = {"teacher": model, "losses": study.distill_losses} if study.distill_losses else {}
        recover_fn = partial(train_full, **teacher_options)
    plan = pruned_model = recovered = prune_report = prune_curve = means = None
    # The folder is asked for first: long work must not end before a folder that cannot be written.
    with nullcontext() if out is None else atomic_folder(out, ("spec.json", "headwise.json")) as folder:
        if study.plan is not None:
            plan, pruned_model = study.plan, apply(study.plan, model)
        elif study.request.has_heads_to_prune:
            means = (
                mean_activations(model, selection_corpus)
                if study.request.fold_mean and selection_corpus is not None
                else None
            )
            plan = plan_pruning(model, replace(study.request, corpus=selection_corpus), means=means, progress=progress)
            pruned_model = apply(plan, model, check=False)
        if plan is not None and save_plan is not None:
            plan.save(save_plan)
        if pruned_model is not None and recover_fn is not None:
            recovered = copy.deepcopy(pruned_model)
            recover_fn(recovered)
        if pruned_model is not None and folder is not None:
            (pruned_model if recovered is None else recovered).save(folder)
    if plan is not None and pruned_model is not None and test_corpus is not None:
        if plan.folded_biases and means is None and selection_corpus is not None:  # the plan was made before
            means = mean_activations(model, selection_corpus)
        prune_report = report(
            model, pruned_model, test_corpus, means=means, seeds=study.seeds, recover=recover_fn, recovered=recovered,
            train_full=train_full, progress=progress,
        )  # fmt: skip
    if study.fractions:
        prune_curve = _make_curve(model, study, plan, selection_corpus, test_corpus, means, progress)
    return PruneStudyResult(plan, pruned_model if recovered is None else recovered, prune_report, prune_curve)


def _make_curve(
    model: ModelProtocol,
    study: PruneStudy,
    plan: Plan | None,
    selection_corpus: Any,
    test_corpus: Any,
    means: MeanActivations | None,
    progress: Progress | None,
) -> PruningCurve:
    """Loss at every share, by the usual ways and the one asked for; a ranking that was made is not made again."""
    request = study.request
    known_scores = (
        {plan.ranking: plan.head_scores} if plan is not None and plan.head_scores and plan.rounds == 1 else None
    )
    rankings = (*default_rankings(model), *(() if get_ranker(request.ranking).is_default else (request.ranking,)))
    return pruning_curve(
        model, selection_corpus, test_corpus, keep_fractions=study.fractions, rankings=rankings,
        fold_mean=request.fold_mean if plan is None else bool(plan.folded_biases), means=means, seeds=study.seeds,
        gate_steps=request.gate_steps, scores=known_scores, progress=progress,
    )  # fmt: skip


def _split_texts(model: ModelProtocol, study: PruneStudy) -> tuple[TokenizedCorpus | None, TokenizedCorpus | None]:
    """What heads are chosen on, and what the choice is judged by; none where a model cannot be asked about texts."""
    if model.tokenizer is None:
        return None, None  # heads can still be cut by name
    lacks_pairs = model.spec.kind == "encoder-decoder" and study.request.corpus is None  # no pairs are embedded
    corpus = (
        study.request.corpus if isinstance(study.request.corpus, TokenizedCorpus) else Corpus.of(study.request.corpus)
    )
    texts = None if lacks_pairs else eval_corpus(model, corpus, study.max_length).first(study.max_texts)
    if study.test is not None:
        return texts, eval_corpus(model, study.test, study.max_length).first(study.max_texts)
    if texts is None:
        return None, None
    return texts.halves() if study.needs_corpus_split or texts.num_samples > 1 else (texts, texts)


def _check(model: ModelProtocol, study: PruneStudy, selection_corpus: TokenizedCorpus | None) -> None:
    if study.needs_corpus and selection_corpus is None and model.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "ranking, folding or healing an encoder-decoder needs pairs: give corpus=hw.Corpus.pairs(sources, texts), TEXT "
            "and --source on the command line; or name heads and leave folding out."
        )
    if study.recover_steps and (selection_corpus is None or model.output is None):
        raise HeadwiseError("this model cannot be asked for tokens, so it cannot be healed; leave recover_steps out.")
