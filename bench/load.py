"""Loading a model beside transformers' from_pretrained: time to load, time to the first forward, peak memory.

    python -m bench.load

Every measurement has a process of its own, in which a tiny model of the same family was loaded first, so that imports do
not count; the two sides take turns. Files are GPT-2 small's size and SmolLM2's, random weights, and the MiniLM bundle.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig

import headwise as hw
from bench.measure import machine
from headwise.experiments.engine.memory import rise
from headwise.io.resolve_path import find
from headwise.ui.tables import make_table

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32),
    "bert": BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32),
    "llama": LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32
    ),
}


def theirs(folder: str) -> torch.nn.Module:
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return (AutoModel if kind == "bert" else AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)


LOADERS = {"headwise": hw.load, "headwise, unchecked": partial(hw.load, check=False), "transformers": theirs}


def measure(who: str, folder: str, tiny: str) -> dict[str, float]:
    """In a process of its own."""
    load = LOADERS[who]
    ids = torch.arange(16)[None]
    with torch.no_grad():
        load(tiny)(ids)
        took: dict[str, float] = {}

        def work() -> None:
            start = time.perf_counter()
            model = load(folder)
            took["load"] = time.perf_counter() - start
            model(ids)
            took["load + first forward"] = time.perf_counter() - start

        took["peak MB"] = rise(work)
    return took


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.measure:
        print(json.dumps(measure(*given.measure)))
        return
    console = Console(file=sys.stdout, width=110)
    console.print(f"{machine()}, {given.rounds} rounds; ratios above 1: headwise is quicker, or takes less.")
    with tempfile.TemporaryDirectory() as made:
        folders = {kind: str(Path(made) / f"tiny-{kind}") for kind in TINY}
        for kind, config in TINY.items():
            (AutoModel if kind == "bert" else AutoModelForCausalLM).from_config(config).save_pretrained(folders[kind])
        gpt2, llama = str(Path(made) / "gpt2"), str(Path(made) / "smollm2")
        AutoModelForCausalLM.from_config(GPT2Config()).save_pretrained(gpt2)
        AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).save_pretrained(llama)
        for name, folder, kind in (
            ("GPT-2 small", gpt2, "gpt2"),
            ("SmolLM2", llama, "llama"),
            ("MiniLM", find("minilm"), "bert"),
        ):
            console.print(make_table(name, *_compare(str(folder), folders[kind], given.rounds)))


def _compare(folder: str, tiny: str, rounds: int) -> tuple[list[str], list[list]]:
    seen: dict[str, dict[str, list[float]]] = {who: {} for who in LOADERS}
    for turn in range(rounds):
        for who in sorted(LOADERS, reverse=bool(turn % 2)):  # they take turns in beginning
            command = [sys.executable, "-m", "bench.load", "--measure", who, folder, tiny]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for what, value in json.loads(done.stdout.splitlines()[-1]).items():
                seen[who].setdefault(what, []).append(value)
    rows = []
    for who in list(LOADERS)[:2]:
        for what, ours in seen[who].items():
            other = seen["transformers"][what]
            low, middle, high = statistics.quantiles([b / a for a, b in zip(ours, other, strict=True)], n=4)
            unit = 1 if "MB" in what else 1e3
            rows.append([who, what, unit * min(ours), unit * min(other), middle, f"{low:.2f} – {high:.2f}"])
    return ["who", "ms (or MB)", "best", "transformers, best", "ratio", "quartiles"], rows


if __name__ == "__main__":
    main()
