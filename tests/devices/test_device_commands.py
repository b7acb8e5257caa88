"""Every command that loads a model prints the same numbers on the pretend device as on the CPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from tests.devices.pretend_device import pretend_device
from tests.runner import run_command

TOKENIZER = word_tokenizer(VOCABULARY)
TEXT = "the teacher gave the students their book"
NOUNS = [word for word in VOCABULARY if word.isalpha()][60:80]
FEW = ("--max-texts", 2, "--max-length", 16)
# Arguments of each command. {model}: folder, {texts}: file, {out}: a new path.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "maps": ("{model}", "{text}", "--heads", "1.0"),
    "explain": ("{model}", "{text}", "--head", "1.0", "--query", "students"),
    "scan": ("{model}", "{text}", "--no-store"),
    "profile": ("{model}", "{texts}", "--no-causal", "--no-store"),
    "profile, prompts": ("{model}", "{texts}", "--no-causal", "--no-store", "--prompts"),
    "describe": ("{model}", "1.0", "{texts}", "--no-store"),
    "plot": ("offsets", "{model}", "{texts}", "--out", "{out}.svg"),
    "importance": ("{model}", "{texts}", "--no-store", *FEW),
    "sensitivity": ("{model}", "{texts}", "--heads", "1.*", *FEW),
    "prune": ("{model}", "{texts}", "--keep", 0.5, "--ranking", "gradient", "--out", "{out}", *FEW),
    "cache": ("{model}", "{texts}", "--fraction", 0.5, "--sink-tokens", 1, "--window", 4, "--seeds", 1, *FEW),
    "quantize": ("{model}", "{texts}", "--weights", 8, "--out", "{out}", *FEW),
    "generate": ("{model}", "the teacher", "--max-new-tokens", 4),
    "generate, sampled": ("{model}", "the teacher", "--max-new-tokens", 4, "--temperature", 1.0, "--seed", 3),
    "export": ("{llama}", "{out}"),
    "train": ("{texts}", "--out", "{out}", "--preset", "nano", "--layers", 1, "--steps", 2, "--batch-size", 2),
    "distill": ("{model}", "{texts}", "--out", "{out}", "--layers", 1, "--steps", 2, "--batch-size", 2),
    "find": ("{model}", "{examples}"),
    "circuit": ("{model}", "{prompts}", "--size", 2, "--random-sets", 3, "--min-accuracy", 0, "--no-alternative"),
    "steer": (
        "{model}", "--positive", "{positive}", "--negative", "{negative}", "--num-heads", 2, "--strengths", "1,4",
        "--num-random", 3, "--max-kl", 9, "--corpus", "{few}",
    ),
    "evaluate": ("{model}", "--max-items", 6, "--silence", "1.0", "--reference", "{model}"),
    "claims": ("early-late", "--model", "{deep}", "--corpus", "{texts}", "--processes", 1),
    "demo": ("--train", "--quick", "--out", "{out}"),
}  # fmt: skip
SLOW = {
    "profile, prompts", "plot", "describe", "profile", "sensitivity", "cache", "train", "distill", "claims", "demo",
    "evaluate",
}  # fmt: skip
COMMANDS_WITHOUT_MODEL = {
    "corpus": "text", "diff": "profiles on the host", "info": "reads headers of files", "layout": "estimates from a spec",
    "presets": "specs", "store": "files", "sweep": "trains its models on the CPU, in processes of its own",
}  # fmt: skip
COMMANDS_TESTED_ELSEWHERE = {
    "selftest": "test_selftest.py",
    "view": "the server; test_device_calls.py runs its session",
}
UNCOMPARED = ("second", "path", "speed", "ratio", "time", "digest", "device", "tokens_per", "peak")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("commands")
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=4, kv_heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=len(TOKENIZER), context=256, layers=2, attention=attention))
    model.tokenizer = TOKENIZER
    model.save(folder / "model")
    deep = hw.Transformer(hw.ModelSpec(vocab=len(TOKENIZER), context=256, layers=3, attention=attention))
    deep.tokenizer = TOKENIZER
    deep.save(folder / "deep")
    rotary = hw.AttentionSpec(width=16, heads=4, kv_heads=2, rotary=hw.Rotary())
    kinds: Any = {"norm": "rms", "activation": "swiglu", "positions": "none", "mlp_bias": False}
    hw.Transformer(hw.ModelSpec(vocab=64, context=64, layers=1, attention=rotary, **kinds)).save(folder / "llama")
    documents = list(hw.Corpus.synthetic("held-out", documents=24, seed=3).items())
    (folder / "texts.txt").write_text("\n\n".join(document.text for document in documents))
    (folder / "few.txt").write_text("\n\n".join(document.text for document in documents[:2]))
    for name, adjective in (("positive", "big"), ("negative", "small")):
        lines = [f"the {adjective} {noun} saw the {adjective} door" for noun in NOUNS]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    examples = [{"text": f"the {noun} saw the big door", "pairs": [[2, 1], [5, 3]]} for noun in NOUNS]
    prompts = [
        {
            "clean": f"the {a} saw the",
            "corrupted": f"the {b} saw the",
            "right": f" {a}",
            "wrong": f" {b}",
            "template": str(i % 4),
        }
        for i, (a, b) in enumerate(zip(NOUNS[:8], NOUNS[8:16], strict=True))
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, examples)))
    return folder


def numbers(value: Any, key: str = "") -> Iterator[float]:
    """Iterate over the numbers of a JSON result that do not depend on time or place."""
    if any(word in key for word in UNCOMPARED):
        return
    if isinstance(value, dict):
        for name in sorted(value):
            yield from numbers(value[name], name)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, key)
    elif isinstance(value, int | float):
        yield float(value)


def run(files: Path, command: str, device: str) -> Any:
    """Run a command on a device and return its JSON result."""
    places = {
        "model": files / "model", "deep": files / "deep", "llama": files / "llama",
        "texts": files / "texts.txt", "text": TEXT,
        "few": files / "few.txt", "positive": files / "positive.txt", "negative": files / "negative.txt",
        "examples": files / "examples.jsonl", "prompts": files / "prompts.jsonl",
        "out": files / f"{device} {command}".replace(", ", " ").replace(" ", "-"),
    }  # fmt: skip
    arguments = [item.format(**places) if isinstance(item, str) else item for item in COMMANDS[command]]
    return json.loads(run_command(command.split(",")[0], *arguments, "--device", device, "--json").output)


@pytest.mark.parametrize(
    ("command", "float64"),
    [
        pytest.param(command, float64, marks=pytest.mark.slow if float64 or command in SLOW else ())
        for command in COMMANDS
        for float64 in (False, True)
    ],
)
def test_command_on_device_prints_same_numbers(files: Path, command: str, float64: bool) -> None:
    expected = list(numbers(run(files, command, "cpu")))
    with pretend_device(float64=float64):
        result = list(numbers(run(files, command, "pretend")))
    np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-4)
