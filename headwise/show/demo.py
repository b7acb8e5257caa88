"""The demo: a small decoder is trained, every head is looked at, those that do nothing are cut, and what was lost is shown.

With a model's name the same is done to a real one, without the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.change.curve import Curve, curve
from headwise.change.plan import Plan
from headwise.change.rank import Scores
from headwise.change.report import Report, report
from headwise.change.trial import halves, read_texts
from headwise.errors import HeadwiseError
from headwise.look.attend import attend
from headwise.look.biography import Biography
from headwise.look.importance import Importance, importance
from headwise.look.profile import Note, documents_for, profile
from headwise.look.result import Profile
from headwise.model import AnyModel
from headwise.show.book import make_book
from headwise.show.figures.lives import draw_lives
from headwise.show.figures.sentence import MOST, arcs
from headwise.show.figures.tradeoff import draw_pruning
from headwise.show.report import write_report
from headwise.spec import ModelSpec, preset
from headwise.text.corpus import Corpus
from headwise.train import Recipe, Trained, train
from headwise.train.exam import Mark, exam
from headwise.train.little import LITTLE, little_texts
from headwise.weights import load
from headwise.weights.save import whole_folder

FOLDER = Path("headwise-demo")
SENTENCE = "The teacher gave the students their homework because they had asked for it."
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
ALLOWED = 0.01  # of the full model's loss, that a cut may cost where heads are chosen


@dataclass(frozen=True)
class Size:
    """How much is done: what is trained, and how many texts are read."""

    spec: ModelSpec
    recipe: Recipe
    looks: int  # at the heads while training
    documents: int | None  # of the little language that are profiled; None: as `profile` would
    texts: int  # to choose heads on and to judge the choice by, together
    questions: int  # documents of the exam


FULL = Size(preset("little"), replace(LITTLE, steps=1500), 15, None, 128, 300)
QUICK = Size(
    preset("little").resized(layers=2, width=32, heads=4), replace(LITTLE, steps=24, batch=4, warmup=4), 3, 40, 12, 20
)


@dataclass(frozen=True, eq=False)
class Demo:
    """What was made, measured and written."""

    name: str
    trained: Trained | None
    marks: tuple[Mark, ...]  # what the trained model knows
    profile: Profile
    plan: Plan
    report: Report  # what cutting brought and cost, on texts that heads were not chosen on
    folder: Path
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "name": self.name, "seconds": None if self.trained is None else self.trained.seconds,
            "exam": [mark._asdict() for mark in self.marks],
            "roles": {role: [str(head) for head in heads] for role, heads in self.profile.roles().items()},
            "cut": list(self.plan.heads), "report": self.report.to_dict(), "folder": str(self.folder),
            "files": list(self.files),
        }  # fmt: skip


def demo(
    folder: str | Path = FOLDER, model: str | None = None, *, quick: bool = False, seed: int = 0,
    note: Note | None = None, progress: bool = True,
) -> Demo:  # fmt: skip
    """Train (or load `model`), look, cut, and write it all into a folder, which takes its place only when all is there."""
    size, folder = (QUICK if quick else FULL), Path(folder)
    with whole_folder(folder, ("report.html",)) as new:  # a folder that cannot be written is told before the work
        little, biography = model is None, Biography()
        trained = None
        if model is None:
            trained = _train(size, seed, biography, progress)
            read = trained.model
        else:
            read = load(model)
        documents = Corpus.little("held-out", documents=size.documents, seed=1) if little and size.documents else None
        seen = profile(read, documents, causal=little and not quick, note=note)
        texts = read_texts(read, _judges(read, little, size.texts), size.texts)
        choosing, judging = halves(texts)
        worth = _worth(read, choosing, note)
        scores = dict(zip(worth.addresses, worth.mean.tolist(), strict=True))
        plan = Plan.make(read, keep=_share(read, scores, choosing, note), by=worth.by, on=choosing, note=note)
        small = plan.apply(read)
        drawn = curve(
            read,
            choosing,
            judging,
            keeps=SHARES,
            bys=(worth.by, "random"),
            seeds=2,
            scores={worth.by: scores},
            note=note,
        )
        cost = report(read, small, judging, folded_on=choosing, seeds=2, turns=3, note=note)
        sentence = SENTENCE if not little else min(texts, key=len)
        _pictures(new, read, seen, drawn, sentence, biography if little else None)
        if little:
            read.save(new / "model")
            small.save(new / "small")
        plan.save(new / "plan.json")
        seen.save(new / "profile.npz")
        book = make_book(
            seen, read, name=model or "the demo's decoder", sentences=[sentence, *judging[:2]], importance=worth,
            biography=biography if little else None, curve=drawn,
        )  # fmt: skip
        write_report(book, new / "report.html")
        files = tuple(sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()))
    marks = () if trained is None else exam(trained.model, documents=size.questions)
    return Demo(model or "a decoder trained just now", trained, marks, seen, plan, cost, folder, files)


def _train(size: Size, seed: int, biography: Biography, progress: bool) -> Trained:
    recipe = replace(size.recipe, seed=seed)
    texts, valid = little_texts(recipe)
    every = max(1, recipe.steps // size.looks)
    made = train(size.spec, texts, recipe, valid=valid, call=biography, every=every, progress=progress)
    if made.stopped == "interrupted":
        raise HeadwiseError(f"the training was stopped at step {made.step} of {recipe.steps}; nothing was written.")
    return made


def _judges(model: AnyModel, little: bool, count: int) -> Corpus:
    """Texts to choose and to judge by; those of the little language are none of those that were profiled."""
    return Corpus.little("held-out", documents=count, seed=2) if little else documents_for(model)


def _worth(model: AnyModel, texts: Sequence[str], note: Note | None) -> Importance:
    """What each head is worth: by really taking it away; where that would take long, by a slope."""

    def hear(done: int, of: int) -> None:
        if note is not None:
            note("what heads are worth", done, of)

    dear = model.spec.parameters > 20_000_000 and model.output is not None
    return importance(model, texts, by="gradient" if dear else "ablation", progress=hear)


def _share(model: AnyModel, scores: Scores, texts: Sequence[str], note: Note | None) -> float:
    """The least share of heads that stays before the loss on these texts rises by a hundredth; at least one head goes.

    Each of some heads may be spared and all together not, so every cut is tried as a whole.
    """
    tried: Curve = curve(model, texts, keeps=SHARES, bys=("ranked",), scores={"ranked": scores}, note=note)
    full = (
        tried.full.mean if tried.full.mean > 0 else 1.0
    )  # without an output the full model loses nothing; of a cosine's 1
    fine = [point.kept for point in tried.points if point.more.mean <= ALLOWED * full]
    return min(fine, default=1 - 1 / len(model.spec.addresses))


def _pictures(
    folder: Path, model: AnyModel, seen: Profile, drawn: Curve, sentence: str, biography: Biography | None
) -> None:
    seen.plot.roles().save(folder / "roles.png")
    seen.plot.depth().save(folder / "depth.png")
    draw_pruning(drawn).save(folder / "pruning.png")
    best = [str(heads[0]) for heads in seen.roles().values()][: MOST // 3] or [str(seen.addresses[0])]
    arcs(attend(model, sentence, ",".join(best))).save(folder / "sentence.png")
    if biography is not None:
        draw_lives(biography, _most_learned(biography)).save(folder / "lives.png")


def _most_learned(biography: Biography) -> str:
    """The measure in which some head rose most from the first look to the last: a share of arcs hit, or induction."""
    names = [name for name in biography.names if name.endswith("hits") or name == "induction"]
    rose = biography.values[-1] - biography.values[0]  # (heads, measures)
    most = np.nan_to_num(rose, nan=-1.0).max(0)
    return max(names, key=lambda name: most[biography.names.index(name)])
