"""The training part of the demo: train a small decoder, track its heads, and prune the unimportant ones."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.ablation.importance import Importance, importance
from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.analysis.recording.attention_maps import attention_maps
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.head_history import HeadHistory
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.compression import PruneRequest
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.plan_report import PlanReport, report
from headwise.compression.pruning_curve import PruningCurves, pruning_curve
from headwise.compression.select_heads import Scores
from headwise.io.atomic_write import atomic_folder
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import ModelSpec, Plan, preset
from headwise.text.corpus import Corpus
from headwise.training import Recipe, TrainResult, train
from headwise.training.default_synthetic_run import DEFAULT_RECIPE, default_corpora
from headwise.training.synthetic_evaluation import ClozeScore, synthetic_eval
from headwise.ui.figures.head_history_plots import draw_history
from headwise.ui.figures.sentence_maps import MAX_HEADS, draw_arcs
from headwise.ui.figures.tradeoff_curves import draw_pruning
from headwise.ui.report import write_report
from headwise.ui.report_data import make_report_data

KEPT_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
EMERGENCE_THRESHOLD = 0.5  # accuracy at which a head is said to have learned a relation
MAX_LOSS_INCREASE = 0.01  # relative to the loss of the full model on the selection texts


@dataclass(frozen=True)
class DemoTrainOptions:
    """Sizes of the training part.

    Attributes:
        spec: Configuration of the model.
        recipe: Training recipe.
        num_snapshots: Number of times that all heads are measured during training.
        documents: Documents of the synthetic language that are profiled. None: the default of `profile`.
        texts: Number of texts for pruning; heads are ranked on one half and evaluated on the other.
        probe_documents: Documents of the synthetic evaluation.
    """

    spec: ModelSpec
    recipe: Recipe
    num_snapshots: int
    documents: int | None
    texts: int
    probe_documents: int


FULL = DemoTrainOptions(preset("synthetic"), replace(DEFAULT_RECIPE, steps=1500), 15, None, 128, 300)
QUICK = DemoTrainOptions(
    preset("synthetic").resized(layers=2, width=32, heads=4),
    replace(DEFAULT_RECIPE, steps=24, batch_size=4, warmup=4),
    3,
    40,
    12,
    20,
)


@dataclass(frozen=True, eq=False)
class DemoTrainResult:
    """Results of the training part.

    Attributes:
        trained: Result of the training.
        history: Metrics of all heads during training.
        probe_scores: Scores of the trained model on cloze probes.
        profile: Profile of the trained model.
        plan: Pruning plan.
        report: Sizes and losses before and after pruning, on texts that were not used for the ranking.
        folder: Output folder.
        files: Paths of all files in `folder`, relative to it.
    """

    trained: TrainResult
    history: HeadHistory
    probe_scores: tuple[ClozeScore, ...]
    profile: Profile
    plan: Plan
    report: PlanReport
    folder: Path
    files: tuple[str, ...]

    def emergence(self) -> list[tuple[int, str, str, float]]:
        """Return (step, head, relation, final accuracy) of the first head to reach an accuracy of 0.5 in each relation."""
        rows = []
        for metric in _learnable_metrics(self.history):
            step_of_head = self.history.first_step_reached(metric, EMERGENCE_THRESHOLD)
            if step_of_head and (step := min(step_of_head.values())) > 0:  # not learned if the initial model reaches it
                head = next(head for head, emergence_step in step_of_head.items() if emergence_step == step)
                rows.append((step, head, metric.removesuffix(" hits"), self.history.curve(head, metric)[-1]))
        return sorted(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "emergence": self.emergence(),
            "seconds": self.trained.seconds,
            "synthetic_eval": [probe_score._asdict() for probe_score in self.probe_scores],
            "roles": {role: [str(head) for head in heads] for role, heads in self.profile.heads_by_role().items()},
            "pruned_heads": list(self.plan.pruned_heads), "report": self.report.to_dict(), "folder": str(self.folder),
            "files": list(self.files),
        }  # fmt: skip


def run_train_prune_demo(
    folder: Path, *, quick: bool = False, seed: int = 0, device: str = "cpu", progress: Progress | None = None
) -> DemoTrainResult:
    """Train, profile and prune a model, and write the results to a folder atomically. Ctrl-C leaves no files."""
    options = QUICK if quick else FULL
    with atomic_folder(folder, ("report.html",)) as new_folder:  # raises before the work if the folder is not writable
        history = HeadHistory()
        trained = _train(options, seed, device, history, progress)
        model = trained.model
        documents = Corpus.synthetic("held-out", documents=options.documents, seed=1) if options.documents else None
        profile_result = profile(model, documents, causal=not quick, progress=progress)
        tokenized = eval_corpus(model, Corpus.synthetic("held-out", documents=options.texts, seed=2))
        selection_corpus, test_corpus = tokenized.halves()  # disjoint from the profiled texts
        means = mean_activations(model, selection_corpus)
        head_importance = _ablation_importance(model, selection_corpus, means, progress)
        scores = dict(zip(head_importance.addresses, head_importance.mean.tolist(), strict=True))
        keep = _choose_kept_fraction(model, scores, selection_corpus, means, progress)
        plan = plan_pruning(
            model,
            PruneRequest(keep=keep, ranking=head_importance.ranking, corpus=selection_corpus),
            means=means,
            progress=progress,
        )
        small = apply(plan, model)
        curve = pruning_curve(
            model, selection_corpus, test_corpus, keep_fractions=KEPT_FRACTIONS,
            rankings=(head_importance.ranking, "random"), means=means, seeds=2,
            scores={head_importance.ranking: scores}, progress=progress,
        )  # fmt: skip
        cost_report = report(model, small, test_corpus, means=means, seeds=2, repeats=3, progress=progress)
        sentence = min((sample.text for sample in tokenized), key=len)
        test_texts = [sample.text for sample in test_corpus]
        _save_figures(new_folder, model, profile_result, curve, sentence, history)
        model.save(new_folder / "model")
        small.save(new_folder / "small")
        plan.save(new_folder / "plan.json")
        profile_result.save(new_folder / "profile.npz")
        report_data = make_report_data(
            profile_result, model, name="demo decoder", sentences=[sentence, *test_texts[:2]],
            importance=head_importance,
            history=history, curve=curve,
        )  # fmt: skip
        write_report(report_data, new_folder / "report.html")
        files = tuple(sorted(str(path.relative_to(new_folder)) for path in new_folder.rglob("*") if path.is_file()))
    return DemoTrainResult(
        trained,
        history,
        synthetic_eval(model, documents=options.probe_documents),
        profile_result,
        plan,
        cost_report,
        folder,
        files,
    )


def _train(
    options: DemoTrainOptions, seed: int, device: str, history: HeadHistory, progress: Progress | None
) -> TrainResult:
    recipe = replace(options.recipe, seed=seed)
    texts, valid = default_corpora(recipe)
    snapshot_interval = max(1, recipe.steps // options.num_snapshots)
    result = train(
        options.spec,
        texts,
        recipe,
        valid=valid,
        device=device,
        callback=history,
        callback_every=snapshot_interval,
        progress=progress or False,
    )
    if result.stop_reason == "interrupted":  # `train` returns after Ctrl-C; stop the demo too
        raise KeyboardInterrupt
    return result


def _ablation_importance(
    model: ModelProtocol, corpus: TokenizedCorpus, means: MeanActivations, progress: Progress | None
) -> Importance:
    """Return the importance of each head by ablation."""
    return importance(model, corpus, ranking="ablation", means=means, progress=progress)


def _choose_kept_fraction(
    model: ModelProtocol, scores: Scores, corpus: TokenizedCorpus, means: MeanActivations, progress: Progress | None
) -> float:
    """Return the smallest fraction of heads with a loss increase of at most 1%. At least one head is pruned.

    Heads that are unimportant alone can be important together, so each fraction is evaluated with all its heads pruned.
    """
    curve = pruning_curve(
        model,
        corpus,
        keep_fractions=KEPT_FRACTIONS,
        rankings=("ablation",),
        means=means,
        scores={"ablation": scores},
        progress=progress,
    )
    acceptable = [
        point.kept_fraction
        for point in curve.points
        if point.loss_increase.mean <= MAX_LOSS_INCREASE * curve.full_loss.mean
    ]
    return min(acceptable, default=1 - 1 / len(model.spec.head_addresses))


def _save_figures(
    folder: Path,
    model: ModelProtocol,
    profile_result: Profile,
    curve: PruningCurves,
    sentence: str,
    history: HeadHistory,
) -> None:
    profile_result.plot.roles().save(folder / "roles.png")
    profile_result.plot.depth().save(folder / "depth.png")
    draw_pruning(curve).save(folder / "pruning.png")
    best = [str(heads[0]) for heads in profile_result.heads_by_role().values()][: MAX_HEADS // 3] or [
        str(profile_result.addresses[0])
    ]
    draw_arcs(attention_maps(model, sentence, ",".join(best))).save(folder / "sentence.png")
    draw_history(history, _most_learned_metric(history)).save(folder / "history.png")


def _learnable_metrics(history: HeadHistory) -> list[str]:
    """Return the metrics that heads can learn: accuracies of relations, and induction."""
    return [name for name in history.metric_names if name.endswith("hits") or name == "induction"]


def _most_learned_metric(history: HeadHistory) -> str:
    """Return the metric with the largest increase of any head during training."""
    names = _learnable_metrics(history)
    increase = history.values[-1] - history.values[0]  # (heads, metrics)
    max_increase = np.nan_to_num(increase, nan=-1.0).max(0)
    return max(names, key=lambda name: max_increase[history.metric_names.index(name)])
