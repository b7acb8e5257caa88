"""Time and memory of a model with half of its heads pruned, compared with the prediction from FLOPs and bytes.

python -m bench.change              128, 1024 and 4096 tokens, and generation
python -m bench.change --rounds 3   faster
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console

import headwise as hw
from bench.measure import Timing, interleaved_timing, machine
from headwise.compression.plan_report import ModelSizeAndFlops
from headwise.ui.terminal_table import make_table

LENGTHS = (128, 1024, 4096)
VOCAB = 1000
PROMPT_LENGTHS = {"GPT-2 small's trunk": 1024, "smollm2": 512}  # prompt tokens before generation
NEW_TOKENS = 32


def make_model(T: int, output: str = "none") -> hw.Transformer:
    """Return a model of the size of GPT-2 small without output layer, with random weights."""
    torch.manual_seed(0)
    return hw.Transformer(replace(hw.preset("gpt2"), vocab=VOCAB, context=T, output=output)).eval()


def prune_half(model: hw.Transformer) -> hw.Transformer:
    """Prune every other head of every layer, by full KV groups if possible, so that keys are pruned too."""
    spec = model.spec.attention
    group = spec.heads // spec.kv_heads
    pruned = [head for head in model.spec.head_addresses if (head.head // group + head.layer) % 2]
    return hw.prune(model, heads=pruned, fold_mean=False)


def time_prefill(T: int, rounds: int) -> list[object]:
    """Time a forward pass over T tokens."""
    full = make_model(T)
    half, ids = prune_half(full), torch.randint(VOCAB, (1, T))
    timing = time_half({"full": lambda: full(ids), "half": lambda: half(ids)}, rounds)
    before, after = (ModelSizeAndFlops.of(model.spec, T) for model in (full, half))
    predicted = before.operations / after.operations
    return [T, before.operations / 1e9, after.operations / 1e9, *gain_cells(predicted, timing)]


def time_generation(name: str, rounds: int) -> list[object]:
    """Time generation after a prompt. Each token reads all weights and the full cache once, so bytes predict the time."""
    start = PROMPT_LENGTHS[name]
    full = hw.load("smollm2") if name == "smollm2" else make_model(start + NEW_TOKENS, "lm")
    assert isinstance(full, hw.Transformer)
    half, prompt = prune_half(full), torch.randint(VOCAB, (1, start))
    sizes, cache_bytes, steps = [], [], {}
    for label, model in (("full", full), ("half", half)):
        size = ModelSizeAndFlops.of(model.spec)
        cache = model.cache("static", start)
        model(prompt, cache=cache)
        cache_bytes.append((cache.nbytes, start * size.cache_bytes_per_token))
        # A tied embedding is read once, as the output; of the positions only one row is read.
        weight_bytes = 4 * (
            size.parameters - model.spec.context * model.spec.width * (model.spec.positions == "learned")
        )
        sizes.append(weight_bytes + size.cache_bytes_per_token * (start + NEW_TOKENS // 2))
        steps[label] = make_generation_step(model, prompt)
    timing = time_half(steps, rounds)
    cache_text = f"{cache_bytes[0][0] / 1e6:.2f} → {cache_bytes[1][0] / 1e6:.2f}"
    exact = "yes" if all(actual == expected for actual, expected in cache_bytes) else "no"
    heads = f"{len(full.spec.head_addresses)} → {len(half.spec.head_addresses)}"
    return [name, heads, start, cache_text, exact, *gain_cells(sizes[0] / sizes[1], timing)]


def make_generation_step(model: hw.Transformer, prompt: torch.Tensor) -> Callable[[], object]:
    """Generate token by token after a cached prompt, and truncate the cache to the prompt after each run."""
    cache = model.cache("static", prompt.shape[1] + NEW_TOKENS)
    model(prompt, cache=cache)
    length, states = cache.length, [layer_cache.snapshot() for layer_cache in cache.layers.values()]

    def step() -> None:
        cache.length = length
        for layer_cache, state in zip(cache.layers.values(), states, strict=True):
            layer_cache.restore(state)
        for position in range(NEW_TOKENS):
            model(prompt[:, position : position + 1], cache=cache)

    return step


def time_half(candidates: dict[str, Callable[[], object]], rounds: int) -> Timing:
    with torch.no_grad():
        return interleaved_timing(candidates, "full", rounds)["half"]


def gain_cells(predicted: float, timing: Timing) -> list[object]:
    """Return the predicted and measured speed, and the measured fraction of the predicted gain."""
    fraction = (timing.speed - 1) / (predicted - 1)
    return [predicted, timing.speed, f"{timing.low:.2f} – {timing.high:.2f}", f"{100 * fraction:.0f} %"]


@torch.no_grad()
def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=9)
    rounds = arguments.parse_args().rounds
    console = Console(file=sys.stdout, width=130)
    console.print(f"{machine()}, {rounds} rounds. Speeds are time of the full model / time of the pruned model.")
    shared = ["foretold", "speed", "quartiles", "of the gain"]
    rows = [time_prefill(T, rounds) for T in LENGTHS]
    title = "Reading: GPT-2 small's trunk, 144 heads and 72; foretold by operations, hidden pairs left out"
    console.print(make_table(title, ["tokens", "GFLOP, full", "half", *shared], rows))
    rows = [time_generation(name, rounds) for name in PROMPT_LENGTHS]
    columns = ["generating", "heads", "behind tokens", "cache, MB", "as foretold", *shared]
    console.print(
        make_table(f"Generation of {NEW_TOKENS} tokens; predicted from the bytes read per token", columns, rows)
    )


if __name__ == "__main__":
    main()
