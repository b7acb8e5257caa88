"""The demo's second half: a small decoder is trained, its heads are watched being born, and those that do nothing are cut."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import Means, mean_activations, read_on
from headwise.analysis.ablation.importance import Importance, importance
from headwise.analysis.recording.attention_maps import attend
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.history import HeadHistory
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.compression.curve import Curve, curve
from headwise.compression.plan import Plan
from headwise.compression.report import Report, report
from headwise.compression.select_heads import Scores
from headwise.io.atomic_write import whole_folder
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import ModelSpec, preset
from headwise.text.corpus import Corpus
from headwise.training import Recipe, Trained, train
from headwise.training.default_recipe import LITTLE, little_texts
from headwise.training.synthetic_eval import Mark, exam
from headwise.ui.figures.sentence import MOST, arcs
from headwise.ui.figures.tradeoff import draw_pruning
from headwise.ui.figures.training_history import draw_lives
from headwise.ui.report import write_report
from headwise.ui.report_data import make_book

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
BORN = 0.5  # the share of cases from which a head is said to do a thing
ALLOWED = 0.01  # of the full model's loss, that a cut may cost where heads are chosen


@dataclass(frozen=True)
class DemoSize:
    """How much is done: what is trained, and how many texts are read."""

    spec: ModelSpec
    recipe: Recipe
    looks: int  # at the heads while training
    documents: int | None  # of the little language that are profiled; None: as `profile` would
    texts: int  # to choose heads on and to judge the choice by, together
    questions: int  # documents of the exam


FULL = DemoSize(preset("little"), replace(LITTLE, steps=1500), 15, None, 128, 300)
QUICK = DemoSize(
    preset("little").resized(layers=2, width=32, heads=4), replace(LITTLE, steps=24, batch=4, warmup=4), 3, 40, 12, 20
)


@dataclass(frozen=True, eq=False)
class Training:
    """What was made, measured and written."""

    trained: Trained
    history: HeadHistory  # its heads, look by look
    marks: tuple[Mark, ...]  # what the trained model knows
    profile: Profile
    plan: Plan
    report: Report  # what cutting brought and cost, on texts that heads were not chosen on
    folder: Path
    files: tuple[str, ...]

    def births(self) -> list[tuple[int, str, str, float]]:
        """For each thing heads learned, the first that did it in half of the cases: when, which, what, and its share now."""
        found = []
        for measure in _learned(self.history):
            born = self.history.born(measure, BORN)
            if born and (step := min(born.values())) > 0:  # what a random model does is no birth
                head = next(head for head, at in born.items() if at == step)
                found.append((step, head, measure.removesuffix(" hits"), self.history.of(head, measure)[-1]))
        return sorted(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "births": self.births(),
            "seconds": self.trained.seconds,
            "exam": [mark._asdict() for mark in self.marks],
            "roles": {role: [str(head) for head in heads] for role, heads in self.profile.roles().items()},
            "cut": list(self.plan.cut), "report": self.report.to_dict(), "folder": str(self.folder),
            "files": list(self.files),
        }  # fmt: skip


def training(folder: Path, *, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Training:
    """Train, look, cut, and write it all into a folder, which takes its place only when all is there.

    Ctrl-C leaves nothing behind.
    """
    size = QUICK if quick else FULL
    with whole_folder(folder, ("report.html",)) as new:  # a folder that cannot be written is told before the work
        history = HeadHistory()
        trained = _train(size, seed, history, progress)
        model = trained.model
        documents = Corpus.little("held-out", documents=size.documents, seed=1) if size.documents else None
        seen = profile(model, documents, causal=not quick, progress=progress)
        texts = read_on(model, Corpus.little("held-out", documents=size.texts, seed=2))
        choosing, judging = texts.halves()  # none of those that were profiled
        means = mean_activations(model, choosing)
        worth = _worth(model, choosing, means, progress)
        scores = dict(zip(worth.addresses, worth.mean.tolist(), strict=True))
        keep = _share(model, scores, choosing, means, progress)
        plan = Plan.make(model, keep=keep, by=worth.by, on=choosing, means=means, progress=progress)
        small = plan.apply(model)
        drawn = curve(
            model, choosing, judging, keeps=SHARES, bys=(worth.by, "random"), means=means, seeds=2,
            scores={worth.by: scores}, progress=progress,
        )  # fmt: skip
        cost = report(model, small, judging, means=means, seeds=2, turns=3, progress=progress)
        sentence = min((unit.text for unit in texts), key=len)
        shown = [unit.text for unit in judging]
        _pictures(new, model, seen, drawn, sentence, history)
        model.save(new / "model")
        small.save(new / "small")
        plan.save(new / "plan.json")
        seen.save(new / "profile.npz")
        book = make_book(
            seen, model, name="the demo's decoder", sentences=[sentence, *shown[:2]], importance=worth,
            history=history, curve=drawn,
        )  # fmt: skip
        write_report(book, new / "report.html")
        files = tuple(sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()))
    return Training(trained, history, exam(model, documents=size.questions), seen, plan, cost, folder, files)


def _train(size: DemoSize, seed: int, history: HeadHistory, progress: Progress | None) -> Trained:
    recipe = replace(size.recipe, seed=seed)
    texts, valid = little_texts(recipe)
    every = max(1, recipe.steps // size.looks)
    made = train(size.spec, texts, recipe, valid=valid, call=history, every=every, progress=progress or False)
    if made.stopped == "interrupted":  # training ends its step in peace; here that is the end
        raise KeyboardInterrupt
    return made


def _worth(model: AnyModel, on: Reading, means: Means, progress: Progress | None) -> Importance:
    """What each head is worth, by really taking it away."""
    return importance(model, on, by="ablation", means=means, progress=progress)


def _share(model: AnyModel, scores: Scores, on: Reading, means: Means, progress: Progress | None) -> float:
    """The least share of heads that stays before the loss on these texts rises by a hundredth; at least one head goes.

    Each of some heads may be spared and all together not, so every cut is tried as a whole.
    """
    tried: Curve = curve(
        model, on, keeps=SHARES, bys=("ablation",), means=means, scores={"ablation": scores}, progress=progress
    )
    fine = [point.kept for point in tried.points if point.more.mean <= ALLOWED * tried.full.mean]
    return min(fine, default=1 - 1 / len(model.spec.addresses))


def _pictures(folder: Path, model: AnyModel, seen: Profile, drawn: Curve, sentence: str, history: HeadHistory) -> None:
    seen.plot.roles().save(folder / "roles.png")
    seen.plot.depth().save(folder / "depth.png")
    draw_pruning(drawn).save(folder / "pruning.png")
    best = [str(heads[0]) for heads in seen.roles().values()][: MOST // 3] or [str(seen.addresses[0])]
    arcs(attend(model, sentence, ",".join(best))).save(folder / "sentence.png")
    draw_lives(history, _most_learned(history)).save(folder / "lives.png")


def _learned(history: HeadHistory) -> list[str]:
    """What heads may learn: shares of arcs hit, and induction."""
    return [name for name in history.names if name.endswith("hits") or name == "induction"]


def _most_learned(history: HeadHistory) -> str:
    """The measure in which some head rose most from the first look to the last."""
    names = _learned(history)
    rose = history.values[-1] - history.values[0]  # (heads, measures)
    most = np.nan_to_num(rose, nan=-1.0).max(0)
    return max(names, key=lambda name: most[history.names.index(name)])
