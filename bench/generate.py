"""Tokens per second while generating, a GPT-2-small-sized model with random weights, beside transformers' generate.

python -m bench.generate
"""

import argparse
import sys
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
    ours = hw.Transformer(hw.preset("gpt2")).eval()
    ours.load_state_dict(from_gpt2(theirs.state_dict()))
    return ours, theirs


def from_gpt2(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' names and layout for ours; their linear layers are stored the other way round."""
    state = {
        "embed.tokens.weight": theirs["transformer.wte.weight"],
        "embed.positions.weight": theirs["transformer.wpe.weight"],
        "norm.weight": theirs["transformer.ln_f.weight"],
        "norm.bias": theirs["transformer.ln_f.bias"],
        "output.vocabulary.weight": theirs["lm_head.weight"],
    }
    for layer in range(12):
        old, new = f"transformer.h.{layer}.", f"blocks.{layer}."
        weights = theirs[old + "attn.c_attn.weight"].T.unflatten(0, (3, 12, 64))
        biases = theirs[old + "attn.c_attn.bias"].unflatten(0, (3, 12, 64))
        for letter, weight, bias in zip("qkv", weights, biases, strict=True):
            state[f"{new}attention.read.{letter}.weight"] = weight
            state[f"{new}attention.read.{letter}.bias"] = bias
        state[new + "attention.write.weight"] = theirs[old + "attn.c_proj.weight"].T.unflatten(1, (12, 64))
        state[new + "attention.write.bias"] = theirs[old + "attn.c_proj.bias"]
        for part, name in (("up", "c_fc"), ("down", "c_proj")):
            state[f"{new}mlp.{part}.weight"] = theirs[f"{old}mlp.{name}.weight"].T
            state[f"{new}mlp.{part}.bias"] = theirs[f"{old}mlp.{name}.bias"]
        for part, name in (("norm_attention", "ln_1"), ("norm_mlp", "ln_2")):
            for kind in ("weight", "bias"):
                state[f"{new}{part}.{kind}"] = theirs[f"{old}{name}.{kind}"]
    return state


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
