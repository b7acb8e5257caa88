"""CPU time of torch.compile with inductor against eager execution, one thread: forward, training step, decode step.

python -m bench.compile                        SmolLM2, and the size of GPT-2 small with 4 layers and random weights
python -m bench.compile --model gpt2 --rounds 5
python -m bench.compile --model smollm2 --blocks    all layers share the graphs of one block. No decode steps

Eager and compiled calls alternate. The table shows the median over the rounds of eager time / compiled time, its quartiles,
and the seconds of the first compiled call.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

import headwise as hw
from bench.measure import interleaved_timing, machine
from headwise.ui.terminal_table import make_table

PREFILL, DECODE_CONTEXT, DECODE_STEPS = 128, 256, 8


def load_model(name: str) -> Any:
    """Return SmolLM2, or a GPT-2 with 4 layers and random weights."""
    if name == "smollm2":
        return hw.load("smollm2")
    torch.manual_seed(0)
    return hw.Transformer(hw.preset("gpt2").resized(layers=4)).eval()


def make_calls(model: Any) -> dict[str, Callable[[Any], object]]:
    """Return the calls to time, as functions of the eager or the compiled model."""
    ids = torch.arange(100, 100 + PREFILL)[None]

    @torch.no_grad()
    def forward(run: Any) -> None:
        run(ids)

    def training_step(run: Any) -> None:
        logits = run(ids)
        F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        run.zero_grad(set_to_none=True)

    prompt_cache = model.cache("static", DECODE_CONTEXT)
    with torch.no_grad():
        model(ids, cache=prompt_cache)

    @torch.no_grad()
    def decode(run: Any) -> None:
        cache = copy.deepcopy(prompt_cache)
        for _ in range(DECODE_STEPS):
            run(ids[:, :1], cache=cache)

    return {
        f"forward, {PREFILL} tokens": forward,
        f"forward and backward, {PREFILL} tokens": training_step,
        f"{DECODE_STEPS} decode steps after {PREFILL} tokens": decode,
    }


def compile_model(model: Any, *, blocks: bool) -> Any:
    """Return the compiled model, or a copy whose blocks are compiled one by one."""
    torch._dynamo.reset()
    if not blocks:
        return torch.compile(model, fullgraph=True)
    compiled = copy.deepcopy(model)
    for block in compiled.blocks:
        block.compile()
    return compiled


def compare(name: str, rounds: int, *, blocks: bool) -> list[dict[str, Any]]:
    """Time each call of a model, eager and compiled in turn."""
    model, rows = load_model(name), []
    for label, call in make_calls(model).items():
        if blocks and "decode" in label:  # each layer has its own cache, so blocks would not share their graphs
            continue
        compiled = compile_model(model, blocks=blocks)
        start = time.perf_counter()
        call(compiled)
        compile_seconds = time.perf_counter() - start
        candidates = {"eager": partial(call, model), "compiled": partial(call, compiled)}
        timings = interleaved_timing(candidates, "eager", rounds, time.process_time)
        speed = timings["compiled"]
        rows.append({
            "model": name, "call": label, "eager ms": 1e3 * timings["eager"].best, "speed": speed.speed,
            "low": speed.low, "high": speed.high, "first call s": compile_seconds,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "gpt2"], action="append")
    parser.add_argument("--blocks", action="store_true", help="compile the blocks one by one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for name in arguments.model or ["gpt2", "smollm2"]
        for row in compare(name, arguments.rounds, blocks=arguments.blocks)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    Console().print(make_table(f"torch.compile with inductor, CPU time; {machine()}", list(rows[0]), table))


if __name__ == "__main__":
    main()
