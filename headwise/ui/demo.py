"""The demo's first half, on real models: one writes on and is seen doing it, the other's heads are told, heads are cut.

Each stage is a method that gives what is to be shown, so that a person reads one while the next is at work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headwise.analysis.ablation.head_outputs import mean_activations, read_on
from headwise.analysis.recording.attention_maps import Attended, attend
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.compression.plan import Plan
from headwise.compression.recovery import heal
from headwise.compression.report import Report, report
from headwise.io.atomic_write import whole_folder
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from headwise.ui.figures.sentence import arcs, hardest
from headwise.ui.report import SENTENCES, write_report
from headwise.ui.report_data import make_book
from headwise.weights import load

FOLDER = Path("headwise-demo")
PROMPT = "Once upon a time, a teacher and her students"
SENTENCE = "The teacher gave the students their homework because they had asked for it."
WORD = "their"
DECODER, ENCODER = "smollm2", "minilm"  # a decoder that writes, and an encoder whose heads are told


@dataclass(frozen=True)
class Amount:
    """How much is done."""

    written: int  # tokens that are written
    documents: int | None  # of the probe set that are profiled; None: all
    texts: int  # to choose heads on and to judge the choice by, together
    keep: float  # the share of heads that stays
    steps: int  # of healing, of `rows` rows of 64 tokens each
    rows: int
    seeds: int  # random cuts to compare with


FULL = Amount(24, None, 32, 0.8, 6, 4, 2)
QUICK = Amount(4, 60, 12, 0.9, 1, 1, 1)


class DemoCut(NamedTuple):
    """What was cut and what came of it."""

    plan: Plan
    report: Report
    saved: Path


class Demo:
    """Real models, stage by stage; what is written lies in `folder`."""

    def __init__(self, folder: str | Path = FOLDER, quick: bool = False) -> None:
        self.folder, self.amount = Path(folder), QUICK if quick else FULL
        self._writer: AnyModel | None = None

    @property
    def writer(self) -> AnyModel:
        """The decoder, loaded once."""
        if self._writer is None:
            self._writer = load(DECODER)
        return self._writer

    def write_on(self, tell: Callable[[str], object]) -> str:
        """Let the decoder continue a sentence; each piece is told as it comes."""
        tokenizer = self.writer.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(PROMPT)
        shown = text = tokenizer.decode(ids)
        tell(shown)
        for step in self.writer.stream(PROMPT, self.amount.written):
            ids.append(int(step[0]))
            text = tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # a character may take several tokens
                tell(text[len(shown) :])
                shown = text
        return text

    def look(self) -> Attended:
        """One sentence, as every head of the decoder sees it."""
        return attend(self.writer, SENTENCE)

    def heads(self, progress: Progress | None = None) -> tuple[Profile, HeadProfile]:
        """Every head of the encoder, and one of those that do most; the report and pictures are written."""
        model = load(ENCODER)
        documents = [item for item in Corpus.probe().items() if isinstance(item, Document)]
        corpus = Corpus.probe() if self.amount.documents is None else Corpus.of(documents[: self.amount.documents])
        seen = profile(model, corpus, progress=progress)
        most = max(seen, key=lambda head: (len(head.roles), head.score or 0.0))
        with whole_folder(self.folder / ENCODER, ("report.html",)) as new:
            seen.save(new / "profile.npz")
            seen.plot.roles().save(new / "roles.png")
            sight = self.look()
            arcs(sight, hardest(sight, WORD), source=WORD).save(new / "sentence.png")
            write_report(make_book(seen, model, name=ENCODER, sentences=SENTENCES), new / "report.html")
        return seen, most

    def cut(self, progress: Progress | None = None) -> DemoCut:
        """Heads of the decoder cut by what they are worth, healed, and set beside random cuts and the whole model alike."""
        amount, model = self.amount, self.writer
        choosing, judging = read_on(model, Corpus.probe()).first(amount.texts).halves()
        means = mean_activations(model, choosing)
        plan = Plan.make(model, keep=amount.keep, by="gradient", on=choosing, means=means, progress=progress)
        mend = partial(_mend, corpus=choosing, amount=amount, tick=_counting(progress, "healing", 2 + amount.seeds))
        cost = report(
            model, plan.apply(model), judging, means=means, seeds=amount.seeds, heal=mend, turns=3, progress=progress
        )  # fmt: skip
        with whole_folder(self.folder / "cut", ("plan.json",)) as new:
            plan.save(new / "plan.json")
        return DemoCut(plan, cost, self.folder / "cut" / "plan.json")


def _mend(model: AnyModel, corpus: Reading, amount: Amount, tick: Callable[[], object]) -> None:
    heal(model, corpus, steps=amount.steps, batch=amount.rows, context=64, holdout=0.0, progress=False)
    tick()


def _counting(progress: Progress | None, what: str, of: int) -> Callable[[], object]:
    """Called once for each piece of work that is done."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, of)

    return tick
