"""The demo's first half, on real models: one writes on and is seen doing it, the other's heads are told, heads are cut.

Each stage is a method that gives what is to be shown, so that a person reads one while the next is at work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headwise.analysis.ablation.head_outputs import eval_corpus, mean_activations
from headwise.analysis.recording.attention_maps import AttentionView, attention_maps
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.compression.plan import Plan, apply, plan_pruning
from headwise.compression.plan_report import PlanReport, report
from headwise.compression.recovery_finetune import recover
from headwise.io.atomic_write import atomic_folder
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from headwise.ui.figures.sentence_maps import draw_arcs, top_heads
from headwise.ui.report import DEFAULT_SENTENCES, write_report
from headwise.ui.report_data import make_report_data
from headwise.weights import load

DEFAULT_FOLDER = Path("headwise-demo")
PROMPT = "Once upon a time, a teacher and her students"
SENTENCE = "The teacher gave the students their homework because they had asked for it."
WORD = "their"
DECODER, ENCODER = "smollm2", "minilm"  # a decoder that writes, and an encoder whose heads are told


@dataclass(frozen=True)
class DemoOptions:
    """How much is done."""

    max_new_tokens: int  # tokens that are written
    documents: int | None  # of the probe set that are profiled; None: all
    texts: int  # to choose heads on and to judge the choice by, together
    keep: float  # the share of heads that stays
    recover_steps: int  # of healing, of `rows` rows of 64 tokens each
    recover_batch: int
    seeds: int  # random cuts to compare with


FULL = DemoOptions(24, None, 32, 0.8, 6, 4, 2)
QUICK = DemoOptions(4, 60, 12, 0.9, 1, 1, 1)


class DemoPruneResult(NamedTuple):
    """What was cut and what came of it."""

    plan: Plan
    report: PlanReport
    plan_path: Path


class Demo:
    """Real models, stage by stage; what is written lies in `folder`."""

    def __init__(self, folder: str | Path = DEFAULT_FOLDER, quick: bool = False) -> None:
        self.folder, self.options = Path(folder), QUICK if quick else FULL
        self._decoder: ModelProtocol | None = None

    @property
    def decoder(self) -> ModelProtocol:
        """The decoder, loaded once."""
        if self._decoder is None:
            self._decoder = load(DECODER)
        return self._decoder

    def generate(self, on_text: Callable[[str], object]) -> str:
        """Let the decoder continue a sentence; each piece is told as it comes."""
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(PROMPT)
        printed = text = tokenizer.decode(ids)
        on_text(printed)
        for step in self.decoder.stream(PROMPT, self.options.max_new_tokens):
            ids.append(int(step[0]))
            text = tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # a character may take several tokens
                on_text(text[len(printed) :])
                printed = text
        return text

    def attention_view(self) -> AttentionView:
        """One sentence, as every head of the decoder sees it."""
        return attention_maps(self.decoder, SENTENCE)

    def profile_encoder(self, progress: Progress | None = None) -> tuple[Profile, HeadProfile]:
        """Every head of the encoder, and one of those that do most; the report and pictures are written."""
        model = load(ENCODER)
        documents = [item for item in Corpus.probe_set().items() if isinstance(item, Document)]
        corpus = (
            Corpus.probe_set() if self.options.documents is None else Corpus.of(documents[: self.options.documents])
        )
        encoder_profile = profile(model, corpus, progress=progress)
        best_head = max(encoder_profile, key=lambda head: (len(head.roles), head.score or 0.0))
        with atomic_folder(self.folder / ENCODER, ("report.html",)) as new_folder:
            encoder_profile.save(new_folder / "profile.npz")
            encoder_profile.plot.roles().save(new_folder / "roles.png")
            view = self.attention_view()
            draw_arcs(view, top_heads(view, WORD), query=WORD).save(new_folder / "sentence.png")
            write_report(
                make_report_data(encoder_profile, model, name=ENCODER, sentences=DEFAULT_SENTENCES),
                new_folder / "report.html",
            )
        return encoder_profile, best_head

    def prune(self, progress: Progress | None = None) -> DemoPruneResult:
        """Heads of the decoder cut by what they are worth, healed, and set beside random cuts and the whole model alike."""
        options, model = self.options, self.decoder
        selection_corpus, test_corpus = eval_corpus(model, Corpus.probe_set()).first(options.texts).halves()
        means = mean_activations(model, selection_corpus)
        plan = plan_pruning(
            model, keep=options.keep, ranking="gradient", corpus=selection_corpus, means=means, progress=progress
        )
        recover_model = partial(
            _recover_model,
            corpus=selection_corpus,
            options=options,
            on_done=_step_counter(progress, "healing", 2 + options.seeds),
        )
        cost_report = report(
            model, apply(plan, model), test_corpus, means=means, seeds=options.seeds, recover=recover_model, repeats=3,
            progress=progress
        )  # fmt: skip
        with atomic_folder(self.folder / "cut", ("plan.json",)) as new_folder:
            plan.save(new_folder / "plan.json")
        return DemoPruneResult(plan, cost_report, self.folder / "cut" / "plan.json")


def _recover_model(
    model: ModelProtocol, corpus: TokenizedCorpus, options: DemoOptions, on_done: Callable[[], object]
) -> None:
    recover(
        model, corpus, steps=options.recover_steps, batch=options.recover_batch, context=64, holdout=0.0, progress=False
    )
    on_done()


def _step_counter(progress: Progress | None, task: str, total: int) -> Callable[[], object]:
    """Called once for each piece of work that is done."""
    done = 0

    def count_step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(task, done, total)

    return count_step
