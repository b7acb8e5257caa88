"""A transformers model attached beside the same one untouched; and looking at all its heads beside `output_attentions`.

python -m bench.attach              512 and 2048 tokens
python -m bench.attach --rounds 10  quicker
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
from bench.measure import machine, peak_memory, take_turns
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.experiments.engine.memory import rise
from headwise.ui.tables import make_table

LENGTHS = (512, 2048)
WAYS = ("untouched", "attached", "profile", "eager maps")
BASE = "untouched"


def make_model(T: int, backend: str = "sdpa") -> Any:
    """GPT-2 small's trunk, random weights."""
    torch.manual_seed(0)
    model: Any = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=T, bos_token_id=0, eos_token_id=0)
    )
    model.set_attn_implementation(backend)
    return model.eval()


def make_way(way: str, T: int) -> Callable[[], object]:
    """One pass over a text of T tokens."""
    batch = make_batch(T)
    model = make_model(T, "eager" if way == "eager maps" else "sdpa")
    theirs = hw.attach(model) if way in ("attached", "profile") else None

    runner = Runner(Tally(HEADS), [Evidence(HEADS), *usual_measures(make_flags())])  # one for a whole corpus

    @torch.no_grad()
    def run() -> object:
        if way == "eager maps":
            return model(batch.ids, use_cache=False, output_attentions=True)
        if way != "profile" or theirs is None:
            return model(batch.ids, use_cache=False)
        runner.forget()  # every text is new
        with listening(theirs.sites(), runner.see, batch):
            return model(batch.ids, use_cache=False)

    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=31)
    options.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    options.add_argument("--memory", nargs=2, metavar=("WAY", "T"), help="print the megabytes a pass takes at its peak")
    given = options.parse_args()
    if given.memory:
        way, T = given.memory
        print(rise(make_way(way, int(T)), warm_up=make_way(way, 16)))
        return
    rows = []
    for T in given.lengths:
        pair = take_turns({way: make_way(way, T) for way in WAYS[:2]}, BASE, given.rounds)
        rest = take_turns({way: make_way(way, T) for way in (BASE, *WAYS[2:])}, BASE, max(3, given.rounds // 6))
        for way, timing in (pair | {way: rest[way] for way in WAYS[2:]}).items():
            times = [1 / timing.speed, 1 / timing.high, 1 / timing.low]
            memory = peak_memory("bench.attach", "--memory", way, str(T))
            rows.append([T, way, timing.median * 1e3, *times, memory])
        print(f"{T} tokens done", file=sys.stderr)
    columns = ["tokens", "way", "ms", "× untouched", "quartiles", "", "MB of a pass"]
    Console(width=120).print(
        make_table(f"GPT-2 small's trunk in transformers {transformers.__version__}, {machine()}", columns, rows)
    )


if __name__ == "__main__":
    main()
