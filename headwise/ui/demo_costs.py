"""The demo's next stages: what single heads would cost at few bits, and the cut model in another engine."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.ablation.sensitivity import Sensitivity, sensitivity
from headwise.compression.plan import Plan
from headwise.exporters import export, llama_cpp
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.ui.head_facts import cached, shares

HEADS = ("16.0", "18.6")  # one that looks a token back, and one that finds what came after a token before
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")
MISSING = "pip install 'headwise[deploy]' brings llama.cpp; then headwise export writes a cut model for it."


def ask_prices(model: AnyModel, texts: int, progress: Progress | None = None) -> Sensitivity:
    """What two heads lose at four bits, part by part, each alone."""
    reading = read_on(model, Corpus.probe()).first(texts)
    return sensitivity(model, reading, heads=",".join(HEADS), bits=BITS, parts=PARTS, progress=progress)


def cache_rows(model: AnyModel) -> list[tuple[str, str, str, float]]:
    """For each of the heads its key head, who shares it, and the megabytes it keeps of 4,096 tokens."""
    rows = []
    for head in map(Address.parse, HEADS):
        held, key = cached(model.spec, head)
        rows.append((str(head), key, ", ".join(shares(model.spec, head)), held / 1e6))
    return rows


@dataclass(frozen=True)
class Elsewhere:
    """The cut model in another engine: its file, what the engine wrote behind a prompt, and what we write there."""

    file: Path
    theirs: str
    ours: str
    same: int  # tokens from the beginning that are the same


def run_elsewhere(model: AnyModel, plan: Plan, folder: Path, prompt: str, tokens: int) -> Elsewhere | None:
    """Write the cut model for llama.cpp and let that write on; None where it is not installed."""
    if not llama_cpp.is_there() or find_spec("gguf") is None:
        return None
    small, tokenizer = plan.apply(model), model.tokenizer
    assert tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "small.gguf"
    export(small, file, to="gguf", dtype="q8_0")
    ids = tokenizer.encode(prompt)
    theirs = [one.id for one in llama_cpp.write_on(file, [ids], tokens)[0]]
    ours = [int(step[0]) for step in small.stream(prompt, tokens)]
    pairs = zip(theirs, ours, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(theirs), len(ours)))
    return Elsewhere(file, tokenizer.decode(ids + theirs), tokenizer.decode(ids + ours), same)
