"""Overhead of an attached transformers model, and of measuring all heads compared with `output_attentions`.

python -m bench.attach              512 and 2048 tokens
python -m bench.attach --rounds 10  faster
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from rich.console import Console

import headwise as hw
from bench.look import HEADS, VOCAB, make_batch, make_flags
from bench.measure import interleaved_timing, machine, process_peak_memory
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.ui.terminal_table import make_table

LENGTHS = (512, 2048)
VARIANTS = ("untouched", "attached", "profile", "eager maps")
BASE = "untouched"


def make_model(T: int, backend: str = "sdpa") -> Any:
    """Return a model of the size of GPT-2 small without output layer, with random weights."""
    torch.manual_seed(0)
    model: Any = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=T, bos_token_id=0, eos_token_id=0)
    )
    model.set_attn_implementation(backend)
    return model.eval()


def make_variant(variant: str, T: int) -> Callable[[], object]:
    """Return a forward pass over T tokens."""
    batch = make_batch(T)
    model = make_model(T, "eager" if variant == "eager maps" else "sdpa")
    attached = hw.attach(model) if variant in ("attached", "profile") else None

    # one runner for the full corpus
    runner = MetricRunner(Accumulator(HEADS), default_metrics(make_flags()), observers=[TopContexts(HEADS)])

    @torch.no_grad()
    def run() -> object:
        if variant == "eager maps":
            return model(batch.ids, use_cache=False, output_attentions=True)
        if variant != "profile" or attached is None:
            return model(batch.ids, use_cache=False)
        runner.reset_batch()  # each text is a new batch
        with listen_at_hook_points(attached.hook_points(), runner.on_call, batch):
            return model(batch.ids, use_cache=False)

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=31)
    options.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    options.add_argument("--memory", nargs=2, metavar=("WAY", "T"), help="print the peak memory of a pass in MB")
    args = options.parse_args()
    if args.memory:
        variant, T = args.memory
        print(peak_memory(make_variant(variant, int(T)), warm_up=make_variant(variant, 16)))
        return
    rows = []
    for T in args.lengths:
        pair = interleaved_timing({variant: make_variant(variant, T) for variant in VARIANTS[:2]}, BASE, args.rounds)
        slow_timings = interleaved_timing(
            {variant: make_variant(variant, T) for variant in (BASE, *VARIANTS[2:])}, BASE, max(3, args.rounds // 6)
        )
        for variant, timing in (pair | {variant: slow_timings[variant] for variant in VARIANTS[2:]}).items():
            times = [1 / timing.speed, 1 / timing.high, 1 / timing.low]
            memory = process_peak_memory("bench.attach", "--memory", variant, str(T))
            rows.append([T, variant, timing.median * 1e3, *times, memory])
        print(f"{T} tokens done", file=sys.stderr)
    columns = ["tokens", "way", "ms", "× untouched", "quartiles", "", "MB of a pass"]
    Console(width=120).print(
        make_table(f"GPT-2 small's trunk in transformers {transformers.__version__}, {machine()}", columns, rows)
    )


if __name__ == "__main__":
    main()
