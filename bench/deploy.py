"""Cut models in stock llama.cpp: do they say what ours say, and how quick are they there and here?

python -m bench.deploy                 SmolLM2 whole, 30 % cut, uneven, with emptied layers, folded, healed; 50 prompts each
python -m bench.deploy --prompts 8     the same with fewer
python -m bench.deploy --speed         how quick they are, and nothing else
python -m bench.deploy --out FOLDER    keeps what was found, model by model, and goes on from there

Asked for, in float32: the five likeliest tokens of every step within 5e-3, and the same 32 tokens but where our two
candidates lie within 1e-2. Speeds are tokens per second of processor time, one thread, one text; models take turns, and what
is told is the ratio to the whole model in each round: its median and quartiles. It runs twice: that is the noise.
Prompts and texts come from $HEADWISE_DATA/wikitext-2. Needs `pip install 'headwise[deploy]'`.
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
from headwise.compression.recovery import heal
from headwise.exporters.llama_cpp import race, write_on
from headwise.exporters.parity import compare
from headwise.model import Transformer
from headwise.ui.tables import make_table

TOKENS = 32  # written behind each prompt
ROUNDS, SOME = 9, 16  # of a race, and the tokens of each
COLUMNS = ["model", "heads", "zeros", "MB", "top 5 within", "texts part (close)"]
SPEEDS = ["model", "llama.cpp", "× whole", "ours", "× whole"]


def makers(model: Transformer, steps: int) -> dict[str, Callable[[], Transformer]]:
    """SmolLM2 in the shapes a person may bring."""
    texts = paragraphs("test.txt", 8, 64, model)

    def third() -> Transformer:
        return hw.prune(model, keep=0.7, by="gradient", on=texts)

    def healed() -> Transformer:
        small = third()
        valid = next(path for path in (DATA / "valid.txt", DATA / "validation.txt") if path.is_file())
        heal(small, valid.read_text(encoding="utf-8")[:200_000], steps=steps, batch=4, context=128, progress=False)
        return small

    return {
        "whole": lambda: model,
        "30 % cut": lambda: hw.prune(model, keep=0.7, by="random", fold=False),
        "uneven": lambda: hw.prune(model, heads="0.1,5.2,5.3,9.0,17.4,17.5,17.8", fold=False),
        "emptied layers": lambda: hw.prune(model, heads="0.*,12.*,20.1", on=texts),
        "30 % cut, folded": third,
        "30 % cut, healed": healed,
    }


def our_speed(model: Transformer, prompt: list[int]) -> float:
    """Tokens per second of processor time, one text, with a cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        began = time.process_time()
        model.generate(ids, tokens=SOME)
    return SOME / (time.process_time() - began)


def look_at(one: Transformer, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    """What the engine says of one model beside what we say."""
    path = folder / "one.gguf"
    made = hw.export(one, path, to="gguf")
    found = compare(one.eval(), prompts, write_on(path, prompts, TOKENS))
    return {
        "heads": len(one.spec.addresses),
        "zeros": next((int(note.split()[0]) for note in made.notes if "of zeros" in note), 0),
        "MB": path.stat().st_size / 2**20,
        **vars(found),
    }


def speeds(model: Transformer, folder: Path) -> list[tuple[str, ...]]:
    """Whole and cut models, there and here."""
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("The teacher gave the")
    models = {
        "whole": model,
        "30 % cut": hw.prune(model, keep=0.7, by="random", fold=False),
        "half of the layers emptied": hw.prune(model, heads="15-29.*", fold=False),
        "whole, again": model,
    }
    files = [folder / f"{number}.gguf" for number in range(len(models))]
    for file, one in zip(files, models.values(), strict=True):
        hw.export(one, file, to="gguf")
    theirs = race(files, prompt, SOME, ROUNDS)
    rounds = [[our_speed(one, prompt) for one in models.values()] for _ in range(ROUNDS)]
    ours = [list(speed) for speed in zip(*rounds, strict=True)]
    return [
        (name, *beside(there, theirs[0]), *beside(here, ours[0]))
        for name, there, here in zip(models, theirs, ours, strict=True)
    ]


def beside(own: list[float], base: list[float]) -> tuple[str, str]:
    """The median, and the ratio round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
    return f"{statistics.median(own):.1f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    sizes = (str(found["heads"]), str(found["zeros"]), f"{found['MB']:.0f}")
    return name, *sizes, f"{found['largest']:.1e}", f"{found['parted']} ({found['parted_close']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--heal", type=int, default=10, help="steps")
    parser.add_argument("--speed", action="store_true", help="how quick they are, and nothing else")
    parser.add_argument("--out", type=Path, help="a folder for what was found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = cast(Transformer, hw.load("smollm2"))
    if options.speed:
        with tempfile.TemporaryDirectory() as folder:
            told = speeds(model, Path(folder))
        Console(width=150).print(make_table("SmolLM2, float32, tokens per processor second", SPEEDS, told))
        return
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:24] for text in paragraphs("test.txt", options.prompts, 32, model)]
    print(f"{len(prompts)} prompts of 24 tokens, {TOKENS} written behind each; {machine()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, make in makers(model, options.heal).items():
            kept = None if options.out is None else options.out / f"{name}.json"
            if kept is not None and kept.is_file():
                found = json.loads(kept.read_text())
            else:
                found = look_at(make(), prompts, Path(folder))
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(found))
            rows.append(row(name, found))
            print(name, found, flush=True)
    Console(width=150).print(make_table("SmolLM2 in llama.cpp, float32", COLUMNS, rows))


if __name__ == "__main__":
    main()
