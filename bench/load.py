"""Time to load a model, time to the first forward pass and peak memory, compared with from_pretrained of transformers.

    python -m bench.load

Every measurement runs in a separate process, after loading a tiny model of the same family, so that imports do not count.
Both libraries alternate. Files have the sizes of GPT-2 small and SmolLM2 with random weights, and the MiniLM bundle.
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
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig

import headwise as hw
from bench.measure import BenchmarkReport, add_json_option, machine
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.io.resolve_path import resolve_model_path

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


def load_hf(folder: str) -> torch.nn.Module:
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return (AutoModel if kind == "bert" else AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)


LOADERS = {"headwise": hw.load, "headwise, unchecked": partial(hw.load, check=False), "transformers": load_hf}


def measure_load(loader: str, folder: str, tiny: str) -> dict[str, float]:
    """Measure one load. Runs in a separate process."""
    load = LOADERS[loader]
    ids = torch.arange(16)[None]
    with torch.no_grad():
        load(tiny)(ids)
        results: dict[str, float] = {}

        def work() -> None:
            start = time.perf_counter()
            model = load(folder)
            results["load"] = time.perf_counter() - start
            model(ids)
            results["load + first forward"] = time.perf_counter() - start

        results["peak MB"] = peak_memory(work)
    return results


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    add_json_option(arguments)
    args = arguments.parse_args()
    if args.measure:
        print(json.dumps(measure_load(*args.measure)))
        return
    report = BenchmarkReport("load", args.json, width=110)
    report.console.print(f"{machine()}, {args.rounds} rounds; ratios above 1: headwise is faster or uses less memory.")
    columns, summary = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {kind: str(Path(scratch) / f"tiny-{kind}") for kind in TINY}
        for kind, config in TINY.items():
            (AutoModel if kind == "bert" else AutoModelForCausalLM).from_config(config).save_pretrained(folders[kind])
        gpt2, llama = str(Path(scratch) / "gpt2"), str(Path(scratch) / "smollm2")
        AutoModelForCausalLM.from_config(GPT2Config()).save_pretrained(gpt2)
        AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2)).save_pretrained(llama)
        for name, folder, kind in (
            ("GPT-2 small", gpt2, "gpt2"),
            ("SmolLM2", llama, "llama"),
            ("MiniLM", resolve_model_path("minilm"), "bert"),
        ):
            columns, rows = _compare(str(folder), folders[kind], args.rounds)
            report.add(name, name, columns, rows)
            summary += [[name, *row] for row in rows]
    report.keep("summary", "Loading equal files", ["", *columns], summary)
    report.write()


def _compare(folder: str, tiny: str, rounds: int) -> tuple[list[str], list[list]]:
    measurements: dict[str, dict[str, list[float]]] = {loader: {} for loader in LOADERS}
    for turn in range(rounds):
        for loader in sorted(LOADERS, reverse=bool(turn % 2)):  # alternate the order
            command = [sys.executable, "-m", "bench.load", "--measure", loader, folder, tiny]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for quantity, value in json.loads(done.stdout.splitlines()[-1]).items():
                measurements[loader].setdefault(quantity, []).append(value)
    rows = []
    for loader in list(LOADERS)[:2]:
        for quantity, values in measurements[loader].items():
            hf_values = measurements["transformers"][quantity]
            low, middle, high = statistics.quantiles([b / a for a, b in zip(values, hf_values, strict=True)], n=4)
            scale = 1 if "MB" in quantity else 1e3
            rows.append(
                [loader, quantity, scale * min(values), scale * min(hf_values), middle, f"{low:.2f} – {high:.2f}"]
            )
    return ["who", "ms (or MB)", "best", "transformers, best", "ratio", "quartiles"], rows


if __name__ == "__main__":
    main()
