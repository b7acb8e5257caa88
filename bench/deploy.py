"""Cut models in stock llama.cpp: do they say what ours say, and how quick are they there and here?

python -m bench.deploy                 SmolLM2 whole, 30 % cut, uneven, with an emptied layer, folded, healed; 50 prompts each
python -m bench.deploy --prompts 8     the same with fewer
Prompts and texts come from $HEADWISE_DATA/wikitext-2. Needs `pip install 'headwise[deploy]'`.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

import headwise as hw
from bench.measure import machine
from bench.prune import DATA, paragraphs
from headwise.change.heal import heal
from headwise.deploy.check import compare
from headwise.deploy.llama_cpp import write_on
from headwise.model import Transformer
from headwise.show.tables import make_table

TOKENS = 32  # written behind each prompt


def models(model: Transformer, texts: list[str], steps: int) -> dict[str, Transformer]:
    """SmolLM2 in the shapes a person may bring."""
    third = hw.prune(model, keep=0.7, by="gradient", on=texts)
    healed = hw.prune(model, keep=0.7, by="gradient", on=texts)
    valid = next(path for path in (DATA / "valid.txt", DATA / "validation.txt") if path.is_file())
    heal(healed, valid.read_text(encoding="utf-8")[:200_000], steps=steps, batch=4, context=128, progress=False)
    return {
        "whole": model,
        "30 % cut, folded": third,
        "uneven": hw.prune(model, heads="0.1,5.2,5.3,9.0,17.4,17.5,17.8", fold=False),
        "emptied layers": hw.prune(model, heads="0.*,12.*,20.1", on=texts),
        "30 % cut, not folded": hw.prune(model, keep=0.7, by="random", fold=False),
        "30 % cut, healed": healed,
    }


def our_speed(model: Transformer, prompt: list[int]) -> float:
    """Tokens a second, one row, with a cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        began = time.perf_counter()
        model.generate(ids, tokens=TOKENS)
    return TOKENS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--heal", type=int, default=10, help="steps")
    options = parser.parse_args()
    model = cast(Transformer, hw.load("smollm2"))
    texts = paragraphs("test.txt", 8, 64, model)
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(text)[:24] for text in paragraphs("test.txt", options.prompts, 32, model)]
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    print(f"{len(prompts)} prompts of 24 tokens, {TOKENS} written behind each, {threads} threads; {machine()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, one in models(model, texts, options.heal).items():
            path = Path(folder) / "m.gguf"
            made = hw.export(one, path, to="gguf")
            answers, speed = write_on(path, prompts, TOKENS, threads=threads)
            found = compare(one.eval(), prompts, answers, speed)
            ours = our_speed(one, prompts[0])
            zeros = next((note.split()[0] for note in made.notes if "of zeros" in note), "0")
            size = path.stat().st_size / 2**20
            rows.append((name, len(one.spec.addresses), zeros, f"{size:.0f}", f"{found.largest:.1e}",
                         f"{found.parted} ({found.parted_close})", f"{speed:.1f}", f"{ours:.1f}"))  # fmt: skip
            print(name, found, flush=True)
    columns = [
        "model",
        "heads",
        "zeros added",
        "MB",
        "top 5 within",
        "texts part (close)",
        "llama.cpp tok/s",
        "ours tok/s",
    ]
    Console().print(make_table("SmolLM2 in llama.cpp, float32", columns, rows))


if __name__ == "__main__":
    main()
