"""Tokens per second while generating, a GPT-2-small-sized model with random weights, beside transformers' generate.

python -m bench.generate
"""

import argparse
import sys
import tempfile
import time

import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import headwise as hw
import headwise.kernels.linear as quick
from bench.measure import machine, take_turns
from headwise.show.tables import make_table


def pair() -> tuple[hw.Transformer, GPT2LMHeadModel]:
    """The same weights in both models."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hw.load(folder)
    assert isinstance(ours, hw.Transformer)
    return ours, theirs


def bandwidth() -> float:
    """Gigabytes a second this machine reads, best of many: the sum of a tensor far larger than any cache."""
    big = torch.ones(2**27)  # 512 MB
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        big.sum()
        best = min(best, time.perf_counter() - start)
    return big.numel() * 4 / best / 1e9


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--tokens", type=int, default=64)
    given = arguments.parse_args()
    ours, theirs = pair()
    speed = bandwidth()
    weights = sum(p.numel() * p.element_size() for p in ours.parameters()) / 1e9
    rows = []
    for B in (1, 8):
        prompt = torch.randint(0, 50257, (B, 32))
        made: dict[str, torch.Tensor] = {}

        def headwise(prompt: torch.Tensor = prompt, made: dict = made) -> None:
            made["headwise"] = ours.generate(prompt, given.tokens)

        def transformers(prompt: torch.Tensor = prompt, made: dict = made) -> None:
            n = given.tokens
            made["transformers"] = theirs.generate(  # pyright: ignore
                prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
            )

        def always_onednn(prompt: torch.Tensor = prompt, made: dict = made) -> None:
            usual, quick.FEW_ROWS = quick.FEW_ROWS, range(1, 17)
            made["headwise, oneDNN from one row on"] = ours.generate(prompt, given.tokens)
            quick.FEW_ROWS = usual

        contestants = {
            "headwise": headwise,
            "headwise, oneDNN from one row on": always_onednn,
            "transformers": transformers,
        }
        timings = take_turns(contestants, "transformers", given.rounds)
        for name, t in timings.items():
            per_second = B * given.tokens / t.best
            spread = f"{t.low:.2f} – {t.high:.2f}"
            same = "yes" if torch.equal(made[name], made["transformers"]) else "no"
            rows.append([B, name, per_second, t.speed, spread, B * speed / weights, same])
    columns = ["batch", "who", "tokens/s (best)", "times transformers", "quartiles", "bandwidth bound", "same tokens"]
    console = Console(file=sys.stdout, width=120)
    console.print(f"{machine()}; reads {speed:.1f} GB/s; weights {weights:.2f} GB, {given.rounds} rounds.")
    console.print(make_table("Generating with a cache, GPT-2 small's size, float32", columns, rows))


if __name__ == "__main__":
    main()
