"""A model cut to half of its heads beside the full one: time and bytes, beside what operations and bytes foretell.

python -m bench.change              128, 1024 and 4096 tokens, and generation
python -m bench.change --rounds 3   quicker
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console

import headwise as hw
from bench.measure import Timing, machine, take_turns
from headwise.compression.report import Footprint
from headwise.ui.tables import make_table

LENGTHS = (128, 1024, 4096)
VOCAB = 1000
GENERATED = {"GPT-2 small's trunk": 1024, "smollm2": 512}  # the tokens before those that are generated
NEW = 32


def make_model(T: int, output: str = "none") -> hw.Transformer:
    """GPT-2 small's trunk with random weights."""
    torch.manual_seed(0)
    return hw.Transformer(replace(hw.preset("gpt2"), vocab=VOCAB, context=T, output=output)).eval()


def halved(model: hw.Transformer) -> hw.Transformer:
    """Every other head of every layer goes; grouped heads go by whole groups where they can, so that keys go as well."""
    spec = model.spec.attention
    group = spec.heads // spec.kv_heads
    goes = [head for head in model.spec.addresses if (head.head // group + head.layer) % 2]
    return hw.prune(model, heads=goes, fold=False)


def reading(T: int, rounds: int) -> list[object]:
    """One pass over T tokens."""
    full = make_model(T)
    half, ids = halved(full), torch.randint(VOCAB, (1, T))
    timing = timed({"full": lambda: full(ids), "half": lambda: half(ids)}, rounds)
    before, after = (Footprint.of(model.spec, T) for model in (full, half))
    foretold = before.operations / after.operations
    return [T, before.operations / 1e9, after.operations / 1e9, *gains(foretold, timing)]


def generating(name: str, rounds: int) -> list[object]:
    """New tokens behind a prompt; each reads all weights and the whole cache once, so bytes foretell the time."""
    start = GENERATED[name]
    full = hw.load("smollm2") if name == "smollm2" else make_model(start + NEW, "lm")
    assert isinstance(full, hw.Transformer)
    half, prompt = halved(full), torch.randint(VOCAB, (1, start))
    sizes, held, steps = [], [], {}
    for called, model in (("full", full), ("half", half)):
        size = Footprint.of(model.spec)
        cache = model.cache("fixed", start)
        model(prompt, cache=cache)
        held.append((cache.bytes, start * size.cache_bytes_per_token))
        # A tied table of tokens is read once, as the output; of positions one row is.
        read = 4 * (size.parameters - model.spec.context * model.spec.width * (model.spec.positions == "learned"))
        sizes.append(read + size.cache_bytes_per_token * (start + NEW // 2))
        steps[called] = generator(model, prompt)
    timing = timed(steps, rounds)
    kept = f"{held[0][0] / 1e6:.2f} → {held[1][0] / 1e6:.2f}"
    exact = "yes" if all(there == told for there, told in held) else "no"
    heads = f"{len(full.spec.addresses)} → {len(half.spec.addresses)}"
    return [name, heads, start, kept, exact, *gains(sizes[0] / sizes[1], timing)]


def generator(model: hw.Transformer, prompt: torch.Tensor) -> Callable[[], object]:
    """Tokens one by one behind a prompt that has been read: the same cache, gone back to after every run."""
    cache = model.cache("fixed", prompt.shape[1] + NEW)
    model(prompt, cache=cache)
    length, layers = cache.length, {kept: kept.state for kept in cache.layers.values()}

    def step() -> None:
        cache.length = length
        for kept, state in layers.items():
            kept.state = state
        for place in range(NEW):
            model(prompt[:, place : place + 1], cache=cache)

    return step


def timed(contestants: dict[str, Callable[[], object]], rounds: int) -> Timing:
    with torch.no_grad():
        return take_turns(contestants, "full", rounds)["half"]


def gains(foretold: float, timing: Timing) -> list[object]:
    """Speed foretold and measured, and which share of the foretold gain was measured."""
    share = (timing.speed - 1) / (foretold - 1)
    return [foretold, timing.speed, f"{timing.low:.2f} – {timing.high:.2f}", f"{100 * share:.0f} %"]


@torch.no_grad()
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    console = Console(file=sys.stdout, width=130)
    console.print(f"{machine()}, {rounds} rounds. Speeds are full / half.")
    shared = ["foretold", "speed", "quartiles", "of the gain"]
    rows = [reading(T, rounds) for T in LENGTHS]
    title = "Reading: GPT-2 small's trunk, 144 heads and 72; foretold by operations, hidden pairs left out"
    console.print(make_table(title, ["tokens", "GFLOP, full", "half", *shared], rows))
    rows = [generating(name, rounds) for name in GENERATED]
    columns = ["generating", "heads", "behind tokens", "cache, MB", "as foretold", *shared]
    console.print(make_table(f"{NEW} tokens, one by one; foretold by the bytes a token reads", columns, rows))


if __name__ == "__main__":
    main()
