"""Time and memory of a profile of SmolLM2 over one very long text, compared with a plain forward pass.

python -m bench.long                    8,192, 16,384 and 32,768 tokens: hours on one core
python -m bench.long --lengths 8192 --rounds 3
python -m bench.long --layers 2 --modes plain every   two of thirty layers; every layer has the same cost

Each run is a separate process. Times are CPU times of one thread, which other work on the machine affects little. Results
are printed as they arrive. Ratios are relative to the plain pass of the same length and round.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

import headwise as hw
from bench.distil import DATA
from headwise.analysis.recording.batching import forward_batch, make_batches
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.model import eval_mode
from headwise.ui.terminal_table import make_table

LENGTHS = (8192, 16384, 32768)
WARMUP_TOKENS = 512
TEXT = DATA / "wikitext-2" / "test.txt"
PROFILE_OPTIONS: dict[str, dict[str, Any]] = {"every": {"every": 16}, "full": {}}


def prepare(model: hw.Transformer, mode: str, tokens: int) -> Callable[[], object]:
    """Return a function that processes one text of `tokens` tokens in the given mode."""
    text = TEXT.read_text(encoding="utf-8")[: 6 * tokens]
    corpus = TokenizedCorpus.of(model, text, tokens).first(1)
    assert corpus.num_tokens == tokens, f"{TEXT} is too short"

    def plain() -> None:
        with torch.no_grad(), eval_mode(model):
            for batch in make_batches(corpus, tokens):
                forward_batch(model, batch)

    def profile() -> object:
        return hw.profile(model, corpus, relations=False, causal=False, batch_tokens=tokens, **PROFILE_OPTIONS[mode])

    return plain if mode == "plain" else profile


def first_layers(model: hw.Transformer, layers: int) -> hw.Transformer:
    """Return the model with only its first layers."""
    small = hw.Transformer(replace(model.spec, layers=layers)).eval()
    small.load_state_dict({name: value for name, value in model.state_dict().items() if name in small.state_dict()})
    small.tokenizer = model.tokenizer
    return small


def run_single(mode: str, tokens: int, layers: int) -> None:
    """Print the seconds of a short and of this text, and the additional peak memory in MB. Runs in a separate process."""
    torch.set_num_threads(1)
    model = hw.load("smollm2")
    assert isinstance(model, hw.Transformer)
    model = first_layers(model, layers) if layers < model.spec.layers else model
    times = []

    def timed(tokens: int) -> Callable[[], None]:
        work = prepare(model, mode, tokens)

        def clocked() -> None:
            start = time.process_time()
            work()
            times.append(time.process_time() - start)

        return clocked

    memory = peak_memory(timed(tokens), timed(WARMUP_TOKENS))
    print(json.dumps({"short": times[0], "seconds": times[1], "memory": memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--modes", nargs="+", choices=["plain", *PROFILE_OPTIONS], default=["plain", *PROFILE_OPTIONS])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--single", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        run_single(options.single[0], int(options.single[1]), options.layers)
        return
    rows = []
    for tokens in options.lengths:
        for turn in range(options.rounds):
            base = None
            for mode in options.modes:
                command = [
                    sys.executable,
                    "-m",
                    "bench.long",
                    "--layers",
                    str(options.layers),
                    "--single",
                    mode,
                    str(tokens),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                result = json.loads(done.stdout.splitlines()[-1])
                base = result["seconds"] if mode == "plain" else base
                ratio = result["seconds"] / base if base else None
                rows.append([tokens, turn, mode, result["short"], result["seconds"], ratio, result["memory"]])
                print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["tokens", "round", "", f"seconds of {WARMUP_TOKENS} tokens", "seconds", "ratio", "MB beyond the model"]
    Console().print(make_table(f"SmolLM2, {options.layers} layers, one text, one thread", columns, rows))


if __name__ == "__main__":
    sys.exit(main())
