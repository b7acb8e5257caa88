"""The demo's next stages: what single heads would cost at few bits, and the cut model in another engine."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.ablation.sensitivity import Sensitivity, sensitivity
from headwise.compression.plan import Plan, apply
from headwise.exporters import export, llama_cpp
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.ui.head_facts import cache_bytes_of, kv_siblings

DEMO_HEADS = ("16.0", "18.6")  # one that looks a token back, and one that finds what came after a token before
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")
MISSING_MESSAGE = "pip install 'headwise[deploy]' brings llama.cpp; then headwise export writes a cut model for it."


def measure_demo_costs(model: ModelProtocol, texts: int, progress: Progress | None = None) -> Sensitivity:
    """What two heads lose at four bits, part by part, each alone."""
    tokenized = eval_corpus(model, Corpus.probe_set()).first(texts)
    return sensitivity(model, tokenized, heads=",".join(DEMO_HEADS), bits=BITS, parts=PARTS, progress=progress)


def cache_rows(model: ModelProtocol) -> list[tuple[str, str, str, float]]:
    """For each of the heads its key head, who shares it, and the megabytes it keeps of 4,096 tokens."""
    rows = []
    for head in map(Address.parse, DEMO_HEADS):
        nbytes, kv_head = cache_bytes_of(model.spec, head)
        rows.append((str(head), kv_head, ", ".join(kv_siblings(model.spec, head)), nbytes / 1e6))
    return rows


@dataclass(frozen=True)
class EngineTextComparison:
    """The cut model in another engine: its file, what the engine wrote behind a prompt, and what we write there."""

    file: Path
    engine_text: str
    native_text: str
    num_equal_tokens: int  # tokens from the beginning that are the same


def run_llama_cpp(
    model: ModelProtocol, plan: Plan, folder: Path, prompt: str, max_new_tokens: int
) -> EngineTextComparison | None:
    """Write the cut model for llama.cpp and let that write on; None where it is not installed."""
    if not llama_cpp.is_available() or find_spec("gguf") is None:
        return None
    small, tokenizer = apply(plan, model), model.tokenizer
    assert tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "small.gguf"
    export(small, file, to="gguf", dtype="q8_0")
    ids = tokenizer.encode(prompt)
    engine_ids = [token.id for token in llama_cpp.generate(file, [ids], max_new_tokens)[0]]
    native_ids = [int(step[0]) for step in small.stream(prompt, max_new_tokens)]
    pairs = zip(engine_ids, native_ids, strict=False)
    num_equal = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(engine_ids), len(native_ids)))
    return EngineTextComparison(file, tokenizer.decode(ids + engine_ids), tokenizer.decode(ids + native_ids), num_equal)
