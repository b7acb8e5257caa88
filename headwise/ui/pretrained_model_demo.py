"""The demo on pretrained models: generation, attention, roles, pruning, quantization, and export to llama.cpp.

Each stage is a function or method that returns its results, so that the command can print them while the next one runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult, sensitivity
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus, mean_activations
from headwise.analysis.finding.head_search import find_heads
from headwise.analysis.finding.head_search_result import HeadSearchResult
from headwise.analysis.head_facts import kv_siblings
from headwise.analysis.load_or_measure import load_or_measure_profile
from headwise.analysis.recording.attention_maps import AttentionView, attention_maps
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.compression import PruneRequest
from headwise.compression.head_compression_cost import cache_bytes_and_kv_head
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.plan_report import PlanReport, report
from headwise.compression.recovery_finetune import recover
from headwise.exporters import export, llama_cpp_runner
from headwise.io.atomic_write import atomic_folder
from headwise.io.result_store import ResultStore
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import Address, Plan
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from headwise.ui.figures.sentence_maps import draw_arcs, top_heads
from headwise.ui.report import DEFAULT_SENTENCES, write_report
from headwise.ui.report_data import make_report_data
from headwise.weights import load

DEFAULT_FOLDER = Path("headwise-demo")
PROMPT = "Once upon a time, a teacher and her students"
SENTENCE = "The teacher gave the students their homework because they wanted more practice."
WORD = "their"
DECODER, ENCODER = "smollm2", "minilm"  # the decoder generates text, the encoder is profiled
MAPPER = "rxnmapper"  # a model with one head for one job
DEMO_HEADS = ("16.0", "18.6")  # a previous-token head and an induction head
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")
MISSING_MESSAGE = "llama.cpp is not installed. Run pip install 'headwise[deploy]' to see this stage."


@dataclass(frozen=True)
class DemoOptions:
    """Sizes of the demo.

    Attributes:
        max_new_tokens: Number of generated tokens.
        documents: Documents of the probe set that are profiled. None: all.
        texts: Number of texts for pruning; heads are ranked on one half and evaluated on the other.
        keep: Fraction of the heads that remain.
        recover_steps: Steps of recovery fine-tuning.
        recover_batch: Sequences of 64 tokens per step of recovery fine-tuning.
        seeds: Number of random prunings to compare with.
    """

    max_new_tokens: int
    documents: int | None
    texts: int
    keep: float
    recover_steps: int
    recover_batch: int
    seeds: int


FULL = DemoOptions(24, None, 32, 0.8, 6, 4, 2)
QUICK = DemoOptions(4, 60, 12, 0.9, 1, 1, 1)


class DemoPruneResult(NamedTuple):
    """A pruning plan, its report and the path of the saved plan."""

    plan: Plan
    report: PlanReport
    plan_path: Path


class PretrainedDemoRunner:
    """Stages of the demo on pretrained models, loaded with a device and a dtype. Files are written to `folder`."""

    def __init__(
        self, folder: str | Path = DEFAULT_FOLDER, *, quick: bool = False, device: str = "cpu", dtype: str | None = None
    ) -> None:
        self.folder, self.options = Path(folder), QUICK if quick else FULL
        self._load = partial(load, device=device, dtype=dtype)
        self._decoder: ModelProtocol | None = None

    @property
    def decoder(self) -> ModelProtocol:
        """The decoder, loaded once."""
        if self._decoder is None:
            self._decoder = self._load(DECODER)
        return self._decoder

    def generate(self, on_text: Callable[[str], object]) -> str:
        """Continue the prompt with the decoder. `on_text` receives each new piece of text."""
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
        """Return the attention maps of all heads of the decoder on the example sentence."""
        return attention_maps(self.decoder, SENTENCE)

    def profile_encoder(self, progress: Progress | None = None) -> tuple[Profile, HeadProfile]:
        """Profile the encoder and write its report and figures. Return the profile and the head with most roles."""
        model = self._load(ENCODER)
        documents = [item for item in Corpus.probe_set().items() if isinstance(item, Document)]
        corpus = (
            Corpus.probe_set() if self.options.documents is None else Corpus.of(documents[: self.options.documents])
        )
        encoder_profile = load_or_measure_profile(model, corpus, store=ResultStore(), progress=progress)
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
        """Prune and fine-tune the decoder, and compare it with random pruning and with the fine-tuned full model."""
        options, model = self.options, self.decoder
        selection_corpus, test_corpus = eval_corpus(model, Corpus.probe_set()).first(options.texts).halves()
        means = mean_activations(model, selection_corpus)
        plan = plan_pruning(
            model,
            PruneRequest(keep=options.keep, ranking="gradient", corpus=selection_corpus),
            means=means,
            progress=progress,
        )
        recover_model = partial(
            _recover_model,
            corpus=selection_corpus,
            options=options,
            on_done=_step_counter(progress, "recovery fine-tuning", 2 + options.seeds),
        )
        cost_report = report(
            model, apply(plan, model), test_corpus, means=means, seeds=options.seeds, recover=recover_model, repeats=3,
            progress=progress
        )  # fmt: skip
        with atomic_folder(self.folder / "pruned", ("plan.json",)) as new_folder:
            plan.save(new_folder / "plan.json")
        return DemoPruneResult(plan, cost_report, self.folder / "pruned" / "plan.json")


def _recover_model(
    model: ModelProtocol, corpus: TokenizedCorpus, options: DemoOptions, on_done: Callable[[], object]
) -> None:
    recover(
        model,
        corpus,
        steps=options.recover_steps,
        batch_size=options.recover_batch,
        context=64,
        holdout=0.0,
        progress=False,
    )
    on_done()


def _step_counter(progress: Progress | None, task: str, total: int) -> Callable[[], object]:
    """Return a function that reports one more finished step."""
    done = 0

    def count_step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(task, done, total)

    return count_step


def search_atom_mapping_heads() -> HeadSearchResult:
    """Find the heads of RXNMapper that map atoms, with the examples that come with it."""
    return find_heads(load(MAPPER))


def measure_demo_quantization_sensitivity(
    model: ModelProtocol, max_texts: int, progress: Progress | None = None
) -> SensitivityResult:
    """Measure the loss increase of two heads if one part at a time has 4 bits."""
    tokenized = eval_corpus(model, Corpus.probe_set()).first(max_texts)
    return sensitivity(model, tokenized, heads=",".join(DEMO_HEADS), bits=BITS, parts=PARTS, progress=progress)


def demo_head_cache_rows(model: ModelProtocol) -> list[tuple[str, str, str, float]]:
    """Return the head, its KV head, the heads that share it, and the megabytes of 4,096 cached tokens."""
    rows = []
    for head in map(Address.parse, DEMO_HEADS):
        nbytes, kv_head = cache_bytes_and_kv_head(model.spec, head)
        rows.append((str(head), kv_head, ", ".join(kv_siblings(model.spec, head)), nbytes / 1e6))
    return rows


@dataclass(frozen=True)
class EngineTextComparison:
    """Text of the pruned model from another engine and from Headwise.

    Attributes:
        file: Exported model.
        engine_text: Prompt and continuation by the other engine.
        native_text: Prompt and continuation by Headwise.
        num_equal_tokens: Number of equal new tokens before the first difference.
    """

    file: Path
    engine_text: str
    native_text: str
    num_equal_tokens: int


def compare_with_llama_cpp(
    model: ModelProtocol, plan: Plan, folder: Path, prompt: str, max_new_tokens: int
) -> EngineTextComparison | None:
    """Export the pruned model and continue the prompt with llama.cpp. Return None if it is not installed."""
    if not llama_cpp_runner.is_available() or find_spec("gguf") is None:
        return None
    small, tokenizer = apply(plan, model), model.tokenizer
    assert tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "small.gguf"
    export(small, file, to="gguf", dtype="q8_0")
    ids = tokenizer.encode(prompt)
    engine_ids = [token.id for token in llama_cpp_runner.generate(file, [ids], max_new_tokens)[0]]
    native_ids = [int(step[0]) for step in small.stream(prompt, max_new_tokens)]
    pairs = zip(engine_ids, native_ids, strict=False)
    num_equal = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(engine_ids), len(native_ids)))
    return EngineTextComparison(file, tokenizer.decode(ids + engine_ids), tokenizer.decode(ids + native_ids), num_equal)
