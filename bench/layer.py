"""Time and peak memory of the attention layer compared with other libraries, forward and backward.

Two comparisons, each between layers that do the same work: layers that return the output, and layers that return the output
and the attention maps of all heads, with and without biases. The outputs and maps of both libraries are checked to be equal.

python -m bench.layer              all parts, 31 rounds per size
python -m bench.layer maps         one part: maps, layers (without maps) or memory
python -m bench.layer --rounds 7   faster
python -m bench.layer --busy       one thread and processor time, for a machine with other work
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from bench.measure import (
    BenchmarkReport,
    Timing,
    add_json_option,
    add_parts,
    interleaved_timing,
    machine,
    process_peak_memory,
    ratio_text,
)
from headwise.experiments.engine.peak_process_memory import peak_memory

SIZES = [(8, 128, 512, 8), (4, 512, 768, 12), (1, 2048, 768, 12), (1, 8192, 768, 12)]  # (B, T, width, heads)
LENGTHS = [1024, 2048, 4096, 8192]
BASE = "headwise"
PARTS = ("maps", "layers", "memory")


class HandWritten(nn.Module):
    """A minimal layer around SDPA: the lower bound of the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2))


BuiltLayer = tuple[nn.Module, Callable[[Tensor], Tensor]]  # a module and a function that calls it


def headwise_layer(width: int, heads: int, T: int, backend: str = "auto") -> BuiltLayer:
    layer = hw.MultiHeadAttention(width=width, heads=heads, backend=backend)
    return layer, lambda x: layer(x, mask=hw.causal())


def hand_written(width: int, heads: int, T: int) -> BuiltLayer:
    layer = HandWritten(width, heads)
    return layer, layer


def torch_layer(width: int, heads: int, T: int) -> BuiltLayer:
    layer = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    causal_mask = nn.Transformer.generate_square_subsequent_mask(T)
    return layer, lambda x: layer(x, x, x, attn_mask=causal_mask, is_causal=True, need_weights=False)[0]


def x_transformers(width: int, heads: int, T: int) -> BuiltLayer:
    from x_transformers.x_transformers import Attention  # pyright: ignore[reportMissingImports]

    layer = Attention(width, heads=heads, dim_head=width // heads, causal=True, flash=True)
    return layer, lambda x: layer(x)


def gpt2(width: int, heads: int, T: int) -> BuiltLayer:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(n_embd=width, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa")  # pyright: ignore
    layer = GPT2Attention(config, layer_idx=0)
    return layer, lambda x: layer(x)[0]


BUILDERS: dict[str, Callable[[int, int, int], BuiltLayer]] = {
    BASE: headwise_layer,
    "hand-written SDPA": hand_written,
    "nn.MultiheadAttention": torch_layer,
}
if importlib.util.find_spec("x_transformers"):
    BUILDERS["x-transformers"] = x_transformers
if importlib.util.find_spec("transformers"):
    BUILDERS["transformers GPT-2"] = gpt2
KERNEL_BUILDERS = {name: partial(headwise_layer, backend=name) for name in ("fused", "blockwise", "batched")}


def maps_layer(
    layer_class: Callable[..., Any], width: int, heads: int, T: int, *, causal: bool, bias: bool = False
) -> Any:
    """Return a layer whose forward returns (output, maps of all heads), with torch's weights of seed 0."""
    torch.manual_seed(0)
    layer = layer_class(width, heads, bias=bias, batch_first=True)
    options = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(T)} if causal else {}
    call = layer.forward
    layer.forward = lambda x: call(x, x, x, need_weights=True, average_attn_weights=False, **options)
    return layer


def squares_of_results(layer: Any, x: Tensor) -> Tensor:
    output, maps = layer(x)
    return output.square().sum() + maps.square().sum()


MAPS_BUILDERS: dict[str, Callable[..., Any]] = {
    BASE: hw.MultiHeadAttention.like_torch,
    "nn.MultiheadAttention": nn.MultiheadAttention,
}


def time_maps(rounds: int, report: BenchmarkReport, clock: Callable[[], float]) -> None:
    """Report the time of layers that return the output and the maps of all heads."""
    summary = []
    for (B, T, width, heads), causal, bias in product(SIZES[:3], (True, False), (False, True)):
        layers = {
            name: maps_layer(build, width, heads, T, causal=causal, bias=bias) for name, build in MAPS_BUILDERS.items()
        }
        x = torch.randn(B, T, width)
        with torch.inference_mode():
            for actual, expected in zip(*(layer.eval()(x) for layer in layers.values()), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        passes = {
            "forward": {name: forward(layer, x) for name, layer in layers.items()},
            "and backward": {
                name: backward(layer, partial(squares_of_results, layer), x) for name, layer in layers.items()
            },
        }
        setting = f"{'causal mask' if causal else 'no mask'}, {'biases' if bias else 'no biases'}"
        for mode, candidates in passes.items():
            for layer in layers.values():
                layer.train(mode != "forward")
            timings = interleaved_timing(candidates, BASE, rounds, clock)
            title = f"Output and maps, {mode}, {setting}, batch {B}, {T} tokens, width {width}, {heads} heads"
            report_timings(f"maps {T} {setting} {mode}", title, timings, report)
            summary.append(
                [f"({B}, {T}, {width}, {heads})", setting, mode, ratio_text(timings["nn.MultiheadAttention"])]
            )
    columns = ["(batch, tokens, width, heads)", "", "", "nn.MultiheadAttention"]
    report.keep("maps", "Time of layers that return output and maps, as a multiple of Headwise's", columns, summary)


def maps_memory(report: BenchmarkReport) -> None:
    """Report the peak memory of the layers that return maps, forward, causal mask, in separate processes."""
    rows = [
        [name, *(process_peak_memory("bench.layer", "--maps-memory-of", name, str(T)) for T in LENGTHS[:2])]
        for name in MAPS_BUILDERS
    ]
    title = "Peak memory above the idle process, MB, forward with maps, causal mask, batch 1, width 768, 12 heads"
    report.add("maps memory", title, ["", *(f"{T} tokens" for T in LENGTHS[:2])], rows)


def maps_memory_of(name: str, T: int) -> float:
    warm_up, layer = (maps_layer(MAPS_BUILDERS[name], 768, 12, n, causal=True).eval() for n in (64, T))
    forward(warm_up, torch.randn(1, 64, 768))()  # one-time setup of torch
    return peak_memory(forward(layer, torch.randn(1, T, 768)))


def forward(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def step() -> None:
        with torch.inference_mode():
            call(x)

    return step


def backward(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def step() -> None:
        module.zero_grad()
        call(x).sum().backward()

    return step


def report_timings(name: str, title: str, timings: dict[str, Timing], report: BenchmarkReport) -> None:
    rows = [
        [layer, 1e3 * t.best, 1e3 * t.median, 1 / t.speed, f"{1 / t.high:.2f} – {1 / t.low:.2f}"]
        for layer, t in timings.items()
    ]
    report.add(name, title, ["layer", "best ms", "median ms", "times ours", "quartiles"], rows)


def time_layers(rounds: int, report: BenchmarkReport, clock: Callable[[], float]) -> None:
    """Report the time of layers that return the output only."""
    summary = []
    for B, T, width, heads in SIZES:
        torch.manual_seed(0)
        layers = {name: build(width, heads, T) for name, build in BUILDERS.items()}
        x = torch.randn(B, T, width)
        num_rounds = rounds if T < 8192 else max(5, rounds // 3)
        passes = {
            "forward": {name: forward(call, x) for name, (_, call) in layers.items()},
            "and backward": {name: backward(module, call, x) for name, (module, call) in layers.items()},
        }
        for mode, candidates in passes.items():
            for module, _ in layers.values():
                module.train(mode != "forward")
            timings = interleaved_timing(candidates, BASE, num_rounds, clock)
            title = f"{mode}, batch {B}, {T} tokens, width {width}, {heads} heads ({num_rounds} rounds)"
            report_timings(f"layers {T} {mode}", title, timings, report)
            ratios = [ratio_text(timing) for name, timing in timings.items() if name != BASE]
            summary.append([f"({B}, {T}, {width}, {heads})", mode, *ratios])
    columns = ["(batch, tokens, width, heads)", "", *list(BUILDERS)[1:]]
    report.keep("layers", "Time of layers as a multiple of Headwise's", columns, summary)


def memory(report: BenchmarkReport) -> None:
    """Report the peak memory of forward plus backward at width 768, 12 heads, batch 1, in separate processes."""
    names = {f"headwise, {name}": name for name in KERNEL_BUILDERS} | {name: name for name in list(BUILDERS)[1:]}
    rows = [
        [label, *(process_peak_memory("bench.layer", "--memory-of", name, str(T)) for T in LENGTHS)]
        for label, name in names.items()
    ]
    title = "Peak memory above the idle process, MB, forward + backward, batch 1, width 768, 12 heads"
    report.add("memory", title, ["", *(f"{T} tokens" for T in LENGTHS)], rows)


def memory_of(name: str, T: int) -> float:
    torch.manual_seed(0)
    build = (BUILDERS | KERNEL_BUILDERS)[name]
    module, call = build(768, 12, 64)
    backward(module, call, torch.randn(1, 64, 768))()  # one-time setup of torch
    x, (module, call) = torch.randn(1, T, 768), build(768, 12, T)
    return peak_memory(backward(module, call, x))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_parts(arguments, PARTS)
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--memory-of", nargs=2, metavar=("LAYER", "T"), help=argparse.SUPPRESS)
    arguments.add_argument("--maps-memory-of", nargs=2, metavar=("LAYER", "T"), help=argparse.SUPPRESS)
    add_json_option(arguments)
    arguments.add_argument("--busy", action="store_true", help="one thread and processor time")
    args = arguments.parse_args()
    for option, measure in ((args.memory_of, memory_of), (args.maps_memory_of, maps_memory_of)):
        if option:
            print(measure(option[0], int(option[1])))
            return
    if args.busy:
        torch.set_num_threads(1)
    clock = time.process_time if args.busy else time.perf_counter
    report = BenchmarkReport("layer", args.json, width=110)
    report.console.print(f"{machine()}. 'times ours' above 1: slower than Headwise.")
    if "maps" in args.parts:
        time_maps(args.rounds, report, clock)
    if "layers" in args.parts:
        time_layers(args.rounds, report, clock)
    if "memory" in args.parts:
        maps_memory(report)
        memory(report)
    report.write()


if __name__ == "__main__":
    main()
