"""Time and peak memory of the attention layer compared with other libraries, forward and backward.

python -m bench.layer              all sizes, 31 rounds per size
python -m bench.layer --rounds 7   faster
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import headwise as hw
from bench.measure import interleaved_timing, machine, process_peak_memory
from headwise.experiments.engine.peak_memory import peak_memory
from headwise.ui.terminal_table import make_table

SIZES = [(8, 128, 512, 8), (4, 512, 768, 12), (1, 2048, 768, 12), (1, 8192, 768, 12)]  # (B, T, width, heads)
LENGTHS = [1024, 2048, 4096, 8192]
BASE = "headwise"


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


def torch_layer(width: int, heads: int, T: int, weights: bool = False) -> BuiltLayer:
    layer = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    causal_mask = nn.Transformer.generate_square_subsequent_mask(T)

    def plain(x: Tensor) -> Tensor:
        return layer(x, x, x, attn_mask=causal_mask, is_causal=True, need_weights=False)[0]

    def with_weights(x: Tensor) -> Tensor:
        return layer(x, x, x, attn_mask=causal_mask, need_weights=True, average_attn_weights=False)[0]

    return layer, with_weights if weights else plain


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
    "the same, with weights": partial(torch_layer, weights=True),
}
if importlib.util.find_spec("x_transformers"):
    BUILDERS["x-transformers"] = x_transformers
if importlib.util.find_spec("transformers"):
    BUILDERS["transformers GPT-2"] = gpt2
KERNEL_BUILDERS = {name: partial(headwise_layer, backend=name) for name in ("fused", "blockwise", "batched")}


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


def time_layers(rounds: int, console: Console) -> None:
    for B, T, width, heads in SIZES:
        torch.manual_seed(0)
        layers = {name: build(width, heads, T) for name, build in BUILDERS.items()}
        x = torch.randn(B, T, width)
        num_rounds = rounds if T < 8192 else max(5, rounds // 3)
        passes = {
            "forward": {name: forward(call, x) for name, (_, call) in layers.items()},
            "forward + backward": {name: backward(module, call, x) for name, (module, call) in layers.items()},
        }
        for mode, candidates in passes.items():
            for module, _ in layers.values():
                module.train(mode != "forward")
            if T >= 8192:
                candidates.pop("the same, with weights")  # 3 GB of maps
            timings = interleaved_timing(candidates, BASE, num_rounds)
            rows = [
                [name, 1e3 * t.best, 1e3 * t.median, 1 / t.speed, f"{1 / t.high:.2f} – {1 / t.low:.2f}"]
                for name, t in timings.items()
            ]
            title = f"{mode}, batch {B}, {T} tokens, width {width}, {heads} heads ({num_rounds} rounds)"
            columns = ["layer", "best ms", "median ms", "times ours", "quartiles"]
            console.print(make_table(title, columns, rows))


def memory(console: Console) -> None:
    """Print the peak memory of forward plus backward at width 768, 12 heads, batch 1, in separate processes."""
    names = [*KERNEL_BUILDERS, *list(BUILDERS)[1:]]
    rows = [
        [name, *(process_peak_memory("bench.layer", "--memory-of", name, str(T)) for T in LENGTHS)] for name in names
    ]
    title = "Peak memory above the idle process, MB, forward + backward, batch 1, width 768, 12 heads"
    console.print(make_table(title, ["layer", *(f"T={T}" for T in LENGTHS)], rows))


def memory_of(name: str, T: int) -> float:
    torch.manual_seed(0)
    build = (BUILDERS | KERNEL_BUILDERS)[name]
    module, call = build(768, 12, 64)
    backward(module, call, torch.randn(1, 64, 768))()  # one-time setup of torch
    x, (module, call) = torch.randn(1, T, 768), build(768, 12, T)
    return peak_memory(backward(module, call, x))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=31)
    arguments.add_argument("--memory-of", nargs=2, metavar=("LAYER", "T"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.memory_of:
        print(memory_of(args.memory_of[0], int(args.memory_of[1])))
        return
    console = Console(file=sys.stdout, width=110)
    console.print(f"{machine()}. 'times ours' above 1: slower than Headwise.")
    time_layers(args.rounds, console)
    memory(console)


if __name__ == "__main__":
    main()
