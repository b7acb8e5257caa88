"""Time and memory of measuring every head, compared with a forward pass without measurement.

python -m bench.look                       512, 2048 and 4096 tokens
python -m bench.look ratios                one part: ratios, memory, or long (32768 tokens, one block of rows in 16)
python -m bench.look --rounds 3            faster
python -m bench.look --headwise-only       without dense maps and TransformerLens, which take most of the time
python -m bench.look --cpu-time            CPU time of one thread, for a machine with other work
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

import headwise as hw
from bench.measure import (
    BenchmarkReport,
    add_json_option,
    add_parts,
    interleaved_timing,
    machine,
    process_peak_memory,
    ratio_text,
)
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, TokenBatch
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.heads.hook_point import AttentionCall

LENGTHS = (512, 2048, 4096)
GOALS = {512: "≤ 1.20", 2048: "≤ 1.32", 4096: "≤ 1.45"}
PARTS = ("ratios", "memory", "long")
LONG = 32768  # tokens
VOCAB, HEADS = 1000, 144
BASE = "fused forward"


def make_model(T: int) -> hw.Transformer:
    """Return a model of the size of GPT-2 small without output layer."""
    torch.manual_seed(0)
    return hw.Transformer(replace(hw.preset("gpt2"), vocab=VOCAB, context=T, output="none")).eval()


def make_batch(T: int) -> TokenBatch:
    ids = torch.randint(1, VOCAB, (1, T), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = 0
    sample = TextSample(0, 0, tuple(ids[0].tolist()), None, None)  # pyright: ignore[reportArgumentType]  # the text is not used
    return TokenBatch((sample,), ids, torch.ones_like(ids, dtype=torch.bool))


def run_with_listener(model: hw.Transformer, batch: TokenBatch, listener: Callable[[AttentionCall, int], None]) -> None:
    with torch.no_grad(), ExitStack() as stack:
        for layer, hook_point in enumerate(model.hook_points()):
            stack.enter_context(hook_point.listen(lambda call, first=12 * layer: listener(call, first)))
        model(batch.ids)


def make_flags() -> Tensor:
    """Return token classes with a tenth of the vocabulary each, and one special token at the start of texts."""
    flags = (torch.rand(VOCAB, len(CLASSES), generator=torch.Generator().manual_seed(2)) < 0.1).float()
    flags[:, CLASSES.index("special")] = torch.arange(VOCAB) == 0
    return flags


def profile_pass(model: hw.Transformer, batch: TokenBatch, row_stride: int = 1) -> Callable[[], None]:
    """Return a pass with all surface metrics in row blocks."""
    metrics, observers = default_metrics(make_flags()), [TopContexts(HEADS)]
    runner = MetricRunner(
        Accumulator(HEADS), metrics, row_stride, observers=observers
    )  # one runner for the full corpus

    def work() -> None:
        runner.reset_batch()  # each text is a new batch
        run_with_listener(model, batch, lambda call, first: runner.on_call(call, batch, first))

    return work


def dense_pass(model: hw.Transformer, batch: TokenBatch) -> Callable[[], None]:
    """Return a naive pass that computes the same metrics from full attention maps."""
    flags = make_flags()[batch.ids[0]]

    def listener(call: AttentionCall, first: int) -> None:
        p = call.maps()  # (1, H, T, T)
        T = p.shape[-1]
        positions = torch.arange(T)
        keep = [-(p * p.clamp(min=1e-30).log()).sum(-1), 1 / p.square().sum(-1), p.amax(-1), p @ flags, p[..., 0]]
        keep += [p @ positions.float(), p.argmax(-1)]
        keep += [p.diagonal(-offset, 2, 3) for offset in range(32)]
        distance = positions[:, None] - positions
        keep += [
            (p * ((distance >= low) & (distance < 2 * low))).sum(-1) for low in (32 << i for i in range(8)) if low < T
        ]
        W_O = call.hook_point.W_O
        norms = ((call.v @ (W_O @ W_O.mT)) * call.v).sum(-1).clamp(min=0).sqrt()
        value_weighted = p * norms[:, :, None]
        keep += [
            (value_weighted / value_weighted.sum(-1, keepdim=True)).diagonal(-offset, 2, 3) for offset in range(32)
        ]

    return lambda: run_with_listener(model, batch, listener)


def transformer_lens_pass(batch: TokenBatch) -> Callable[[], object]:
    """Return a pass of TransformerLens on a model of the same size that caches all patterns, without metrics."""
    from transformer_lens.model_bridge.sources.native import boot  # pyright: ignore[reportMissingImports]

    spec = hw.preset("gpt2")
    lens_model = boot({
        "n_layers": spec.layers, "d_model": spec.width, "n_heads": spec.attention.heads, "n_ctx": batch.ids.shape[1],
        "d_head": spec.attention.head_dim, "d_mlp": spec.mlp_width, "d_vocab": VOCAB, "act_fn": "gelu_new",
    })  # fmt: skip

    def work() -> object:
        with torch.no_grad():
            return lens_model.run_with_cache(
                batch.ids, return_type=None, names_filter=lambda name: name.endswith("hook_pattern")
            )

    return work


def plain_pass(model: hw.Transformer, batch: TokenBatch) -> Callable[[], Tensor]:
    def work() -> Tensor:
        with torch.no_grad():
            return model(batch.ids)

    return work


def print_memory(mode: str, T: int) -> None:
    """Print the peak memory above the model and its first forward pass. Runs in a separate process."""
    model, batch = make_model(T), make_batch(T)
    work = {"forward": plain_pass, "full": profile_pass, "dense": dense_pass}[mode](model, batch)
    plain_pass(model, make_batch(64))()
    print(peak_memory(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_parts(parser, PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--headwise-only", action="store_true", help="skip the other implementations")
    parser.add_argument("--cpu-time", action="store_true", help="measure the CPU time of one thread")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.memory:
        print_memory(options.memory[0], int(options.memory[1]))
        return
    clock = time.perf_counter
    if options.cpu_time:
        torch.set_num_threads(1)
        clock = time.process_time
    report = BenchmarkReport("look", options.json)
    report.console.print(
        f"Model of the size of GPT-2 small without output layer, one text; {machine()}", highlight=False
    )
    if "ratios" in options.parts:
        time_passes(options, report, clock)
    if "memory" in options.parts:
        max_tokens = max(options.lengths)
        rows = [
            [mode, process_peak_memory("bench.look", "--memory", mode, str(max_tokens))] for mode in ("forward", "full")
        ]
        report.add("memory", f"Memory beyond the model, MB, {max_tokens} tokens (goal ≤ 260)", ["", "MB"], rows)
    if "long" in options.parts:
        model, batch = make_model(LONG), make_batch(LONG)
        start = time.perf_counter()
        profile_pass(model, batch, row_stride=16)()
        title = f"{LONG} tokens, one block of rows in 16"
        report.add("long", title, ["", "seconds"], [["full profile", time.perf_counter() - start]])
    report.write()


def time_passes(options: argparse.Namespace, report: BenchmarkReport, clock: Callable[[], float]) -> None:
    """Report the time of all passes as a multiple of the plain forward pass."""
    rows, summary = [], []
    for T in options.lengths:
        model, batch = make_model(T), make_batch(T)
        candidates: dict[str, Callable[[], object]] = {
            BASE: plain_pass(model, batch),
            "full profile": profile_pass(model, batch),
        }
        if T <= 2048 and not options.headwise_only:
            candidates["dense maps, the same measures"] = dense_pass(model, batch)
            if find_spec("transformer_lens"):
                candidates["TransformerLens, patterns kept"] = transformer_lens_pass(batch)
        rounds = options.rounds if T < 4096 else max(2, options.rounds // 2)
        for name, timing in interleaved_timing(candidates, BASE, rounds, clock).items():
            goal = GOALS.get(T, "") if name == "full profile" else ""
            rows.append([T, name, timing.best, timing.median, ratio_text(timing), goal])
            if name != BASE:
                summary.append([T, name, ratio_text(timing)])
    report.add(
        "ratios", "Time, as a multiple of the forward pass", ["tokens", "", "best s", "median s", "ratio", "goal"], rows
    )
    report.keep("looking", "Time, as a multiple of the forward pass", ["tokens", "", "ratio"], summary)


if __name__ == "__main__":
    sys.exit(main())
