"""Pruned models in unmodified llama.cpp: agreement with Headwise, and speed in both engines.

python -m bench.deploy                 SmolLM2 full, 30% pruned, uneven, with empty layers, folded, recovered; 50 prompts each
python -m bench.deploy --prompts 8     fewer prompts
python -m bench.deploy --speed         measure only the speed
python -m bench.deploy --out FOLDER    store the results per model and resume from them

Required, in float32: the log-probabilities of the five most likely tokens of every step agree within 5e-3, and the 32
generated tokens are equal except where the two best candidates of Headwise differ by less than 1e-2. Speeds are tokens per
second of CPU time, one thread, one text. Models alternate, and the result is the ratio to the full model per round (median
and quartiles). The full model runs twice to show the noise.
Prompts and texts come from $HEADWISE_DATA/wikitext-2. Requires `pip install 'headwise[deploy]'`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

import headwise as hw
from bench.measure import machine
from bench.prune import DATA, paragraphs
from headwise.compression.recovery_finetune import recover
from headwise.exporters.engine_parity import compare_generated
from headwise.exporters.llama_cpp_runner import benchmark, generate
from headwise.model import Transformer
from headwise.ui.terminal_table import make_table

NEW_TOKENS = 32  # generated per prompt
ROUNDS, SPEED_TOKENS = 9, 16  # rounds of the speed test, and tokens per round
COLUMNS = ["model", "heads", "zeros", "MB", "top 5 within", "texts part (close)"]
SPEEDS = ["model", "llama.cpp", "× whole", "ours", "× whole"]


def model_builders(model: Transformer, steps: int) -> dict[str, Callable[[], Transformer]]:
    """Return functions that build the variants of SmolLM2."""
    texts = paragraphs("test.txt", 8, 64, model)

    def prune_third() -> Transformer:
        return hw.prune(model, keep=0.7, ranking="gradient", corpus=texts)

    def recovered() -> Transformer:
        small = prune_third()
        valid = next(path for path in (DATA / "valid.txt", DATA / "validation.txt") if path.is_file())
        recover(
            small, valid.read_text(encoding="utf-8")[:200_000], steps=steps, batch_size=4, context=128, progress=False
        )
        return small

    return {
        "whole": lambda: model,
        "30 % cut": lambda: hw.prune(model, keep=0.7, ranking="random", fold_mean=False),
        "uneven": lambda: hw.prune(model, heads="0.1,5.2,5.3,9.0,17.4,17.5,17.8", fold_mean=False),
        "emptied layers": lambda: hw.prune(model, heads="0.*,12.*,20.1", corpus=texts),
        "30 % cut, folded": prune_third,
        "30 % cut, healed": recovered,
    }


def native_speed(model: Transformer, prompt: list[int]) -> float:
    """Return tokens per second of CPU time for one text with a cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        began = time.process_time()
        model.generate(ids, max_new_tokens=SPEED_TOKENS)
    return SPEED_TOKENS / (time.process_time() - began)


def compare_engine(model: Transformer, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    """Compare the generated tokens of one model in llama.cpp and in Headwise."""
    path = folder / "one.gguf"
    exported = hw.export(model, path, to="gguf")
    comparison = compare_generated(model.eval(), prompts, generate(path, prompts, NEW_TOKENS))
    return {
        "heads": len(model.spec.head_addresses),
        "zeros": next((int(note.split()[0]) for note in exported.notes if "zero heads" in note), 0),
        "MB": path.stat().st_size / 2**20,
        **vars(comparison),
    }


def compare_speeds(model: Transformer, folder: Path) -> list[tuple[str, ...]]:
    """Measure the speed of full and pruned models in both engines."""
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("The teacher gave the")
    models = {
        "whole": model,
        "30 % cut": hw.prune(model, keep=0.7, ranking="random", fold_mean=False),
        "half of the layers emptied": hw.prune(model, heads="15-29.*", fold_mean=False),
        "whole, again": model,
    }
    files = [folder / f"{index}.gguf" for index in range(len(models))]
    for file, variant in zip(files, models.values(), strict=True):
        hw.export(variant, file, to="gguf")
    engine_speeds = benchmark(files, prompt, SPEED_TOKENS, ROUNDS)
    rounds = [[native_speed(variant, prompt) for variant in models.values()] for _ in range(ROUNDS)]
    native_speeds = [list(speed) for speed in zip(*rounds, strict=True)]
    return [
        (name, *speed_cells(engine, engine_speeds[0]), *speed_cells(native, native_speeds[0]))
        for name, engine, native in zip(models, engine_speeds, native_speeds, strict=True)
    ]


def speed_cells(own: list[float], base: list[float]) -> tuple[str, str]:
    """Return the median, and the quartiles of the ratio per round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
    return f"{statistics.median(own):.1f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"


def row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    sizes = (str(result["heads"]), str(result["zeros"]), f"{result['MB']:.0f}")
    return name, *sizes, f"{result['largest']:.1e}", f"{result['parted']} ({result['parted_close']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--recover-steps", type=int, default=10, help="steps of recovery fine-tuning")
    parser.add_argument("--speed", action="store_true", help="measure only the speed")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = cast(Transformer, hw.load("smollm2"))
    if options.speed:
        with tempfile.TemporaryDirectory() as folder:
            speed_rows = compare_speeds(model, Path(folder))
        Console(width=150).print(make_table("SmolLM2, float32, tokens per second of CPU time", SPEEDS, speed_rows))
        return
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:24] for text in paragraphs("test.txt", options.prompts, 32, model)]
    print(f"{len(prompts)} prompts of 24 tokens, {NEW_TOKENS} generated tokens each; {machine()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in model_builders(model, options.recover_steps).items():
            saved = None if options.out is None else options.out / f"{name}.json"
            if saved is not None and saved.is_file():
                result = json.loads(saved.read_text())
            else:
                result = compare_engine(make(), prompts, Path(folder))
                if saved is not None:
                    saved.parent.mkdir(parents=True, exist_ok=True)
                    saved.write_text(json.dumps(result))
            rows.append(row(name, result))
            print(name, result, flush=True)
    Console(width=150).print(make_table("SmolLM2 in llama.cpp, float32", COLUMNS, rows))


if __name__ == "__main__":
    main()
