"""Prune a model and measure the result against random pruning of the same size. Called by `headwise prune`."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.attached import AttachedModel
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.plan_report import PlanReport, report
from headwise.compression.prune_request import PRUNE_USAGE, PruneRequest
from headwise.compression.pruning_curve import PruningCurves, default_rankings, pruning_curve
from headwise.compression.rankers import get_ranker
from headwise.compression.recovery_finetune import recover
from headwise.distillation.distill_config import DistillConfig
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.io.atomic_write import atomic_folder
from headwise.model import ModelProtocol, Transformer
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Plan
from headwise.text.corpus import Corpus

# Best losses in `python -m bench.distil`, evaluated on another kind of text than the recovery corpus.
DEFAULT_RECOVER_LOSSES = "logits"


@dataclass(frozen=True)
class PruneStudy:
    """Options of `prune_study`: the heads to prune and the texts that evaluate the pruned model.

    Heads are ranked on one half of the corpus and evaluated on the other half, unless `test` gives separate texts.

    Attributes:
        request: Heads to prune. Its `corpus` defaults to the embedded probe set.
        plan: A plan made before, instead of `keep` or `heads` of the request.
        test: Texts for the evaluation: a text, a list of texts, a path or a Corpus. None takes half of the corpus.
        max_texts: Maximum number of texts of the corpus and of `test`.
        max_length: Maximum number of tokens per text. Longer plain texts are split into chunks. None: 256 tokens, or the
            context of the model if it is shorter.
        recover_steps: Steps of recovery fine-tuning on the texts on which heads were ranked. 0 turns it off.
        recover_losses: Losses of the recovery fine-tuning: "text" for the language modeling loss, or losses between the
            pruned and the full model, separated by commas: logits, hidden, maps, qkv. None: logits.
        seeds: Number of random prunings to compare with.
        fractions: Also measure a pruning curve at each of these fractions of remaining heads, for several ranking methods.

    >>> PruneStudy(PruneRequest(keep=0.5), recover_steps=100).distill_losses
    ('logits',)
    """

    request: PruneRequest = PruneRequest()  # noqa: RUF009 (frozen)
    plan: Plan | None = None
    test: Any = None
    max_texts: int = 64
    max_length: int | None = None
    recover_steps: int = 0
    recover_losses: str | None = None
    seeds: int = 3
    fractions: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.plan is not None and self.request.has_heads_to_prune) or not (self.prunes_heads or self.fractions):
            raise ArgumentError(PRUNE_USAGE)
        if self.recover_steps < 0 or (self.recover_steps and not self.prunes_heads):
            raise ArgumentError(
                "recover_steps: the steps of recovery fine-tuning must be 0 or more, and 0 if no heads are pruned. "
                f"Got {self.recover_steps}. Prune heads with keep=0.5, heads='5.1' or plan=…, or set recover_steps=0."
            )
        if self.recover_losses is not None:
            _ = self.distill_losses  # raises for unknown losses
            if not self.recover_steps:
                raise ArgumentError(
                    "recover_losses: these losses are used only by recovery fine-tuning, which is off. "
                    f"Got recover_steps={self.recover_steps}. Set a number of steps: recover_steps=200."
                )

    @property
    def distill_losses(self) -> tuple[str, ...]:
        """Losses between the pruned and the full model. Empty if recovery uses only the language modeling loss."""
        if self.recover_losses == "text":
            return ()
        losses = tuple((self.recover_losses or DEFAULT_RECOVER_LOSSES).split(","))
        DistillConfig(losses)
        return losses

    @property
    def prunes_heads(self) -> bool:
        """Whether heads are pruned. If False, the study only measures a pruning curve."""
        return self.plan is not None or self.request.has_heads_to_prune

    @property
    def needs_corpus_split(self) -> bool:
        """Whether a part of the corpus must be held out for the evaluation."""
        request = self.request
        return bool(
            self.fractions
            or self.recover_steps
            or request.keep is not None
            or (request.heads is not None and request.fold_mean)
        )

    @property
    def needs_corpus(self) -> bool:
        """Whether the study needs texts other than those of the evaluation."""
        folds_mean = self.request.fold_mean and self.plan is None
        return bool(self.recover_steps or self.fractions or folds_mean or self.request.ranks_on_corpus)


@dataclass(frozen=True, eq=False)
class PruneStudyResult:
    """Result of `prune_study`.

    Attributes:
        plan: The plan that was applied. None if only a curve was measured.
        model: The pruned model, after recovery fine-tuning if that was requested. None if only a curve was measured.
        report: Sizes, speed and losses. None without texts to evaluate on.
        curve: Pruning curve. None if it was not requested.
    """

    plan: Plan | None
    model: Transformer | AttachedModel | None
    report: PlanReport | None
    curve: PruningCurves | None

    def __repr__(self) -> str:
        from headwise.ui.result_text import prune_study_table

        return prune_study_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import prune_study_table

        return prune_study_table(self).as_html()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data. The plan is without its folded biases, which a saved plan contains."""
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


@shows_progress
def prune_study(
    model: Transformer | AttachedModel,
    study: PruneStudy,
    *,
    out: str | Path | None = None,
    save_plan: str | Path | None = None,
    progress: ProgressOption = None,
) -> PruneStudyResult:
    """Prune heads and report sizes, speed and loss, compared with random pruning of the same size.

    Args:
        model: The model to prune. It is not changed.
        study: Heads to prune, texts, recovery fine-tuning and baselines.
        out: Folder for the pruned model. None writes no model.
        save_plan: File for the plan. None writes no plan. Model and plan are written before the evaluation starts.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The plan, the pruned model, the report and the curve. A part that was not requested is None.

    Raises:
        ArgumentError: If the study does not say which heads to prune, or needs texts that are missing.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.training.loop import Recipe, train
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> lines = [f"{n} and {n} are {2 * n}" for n in range(20)]
    >>> model = train(spec, lines, Recipe(steps=2, batch_size=4), progress=False).model
    >>> result = prune_study(model, PruneStudy(PruneRequest(keep=0.5, corpus=lines), seeds=1))
    >>> len(result.model.spec.head_addresses), result.report.texts
    (1, 10)
    """
    progress = callback_of(progress)
    if not study.prunes_heads and (out is not None or save_plan is not None):
        raise ArgumentError(PRUNE_USAGE)
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
    # Open the output folder first, so that an unwritable folder raises before the long computation.
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
        if plan.folded_biases and means is None and selection_corpus is not None:  # study.plan was given
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
) -> PruningCurves:
    """Return the pruning curve for the default ranking methods and the requested one. Known scores are reused."""
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
    """Return the texts for ranking and the texts for evaluation. None for texts that the model cannot process."""
    if model.tokenizer is None:
        return None, None  # heads can still be pruned by address
    lacks_pairs = model.spec.kind == "encoder-decoder" and study.request.corpus is None  # the probe set has no pairs
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
        raise ArgumentError(
            "corpus: an encoder-decoder needs pairs of a source and a text. Got None. "
            "Give corpus=hw.Corpus.pairs(sources, texts), or TEXT and --source on the command line. "
            "To prune without a corpus, name the heads and set fold_mean=False and recover_steps=0."
        )
    if study.recover_steps and (selection_corpus is None or model.output is None):
        raise UnsupportedModelError(
            "recover_steps: recovery fine-tuning needs a tokenizer and a language modeling head, and this model lacks one of "
            f"them. Got recover_steps={study.recover_steps}. Set recover_steps=0."
        )
