"""Tokens per second of CPU time in generation, one thread, batch 1, compared with transformers in float32.

python -m bench.generate                      256 tokens after 64: SmolLM2, and the size of GPT-2 small with random weights;
                                              and a step of SmolLM2 without its matrix products
python -m bench.generate smollm2 --rounds 3   one benchmark: smollm2, gpt2 or overhead
python -m bench.generate engines --folder D   SmolLM2 also in llama.cpp, CTranslate2 and onnxruntime-genai, which are
                                              installed into D, each in its own environment (bench.engines)

All candidates run once per round. The best CPU time over the rounds is compared, because other work on the machine affects
it least. With --out F.json results are stored and reused.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headwise as hw
import headwise.heads.projections as projections
import headwise.kernels.matmul_tuner as products
from bench import engines
from bench.measure import BenchmarkReport, add_json_option, add_parts, machine
from headwise.io.atomic_write import write_atomic

BITS = (16, 8, 4)
PROMPT, TOKENS = 64, 256
PROMPT_IDS = list(range(100, 100 + PROMPT))


def gpt2() -> tuple[hw.Transformer, Any]:
    """Return two models of the size of GPT-2 small with the same random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hf_model = GPT2LMHeadModel(GPT2Config()).eval()
    return _to_headwise(hf_model), hf_model


def smollm2() -> tuple[hw.Transformer, Any]:
    """Return SmolLM2-135M in Headwise, and exported to transformers."""
    from transformers import AutoModelForCausalLM

    native = hw.load("smollm2")
    assert isinstance(native, hw.Transformer)
    with tempfile.TemporaryDirectory() as folder:
        hf_model = AutoModelForCausalLM.from_pretrained(
            native.export(Path(folder) / "theirs"), dtype=torch.float32
        ).eval()
        for parameter in hf_model.parameters():
            parameter.data = parameter.data.clone()  # the folder is deleted
    return native, hf_model


def _to_headwise(hf_model: Any) -> hw.Transformer:
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        native = hw.load(folder)
    assert isinstance(native, hw.Transformer)
    return native


MODELS = {"smollm2": smollm2, "gpt2": gpt2}


def bandwidth() -> float:
    """Return the memory read speed in GB per second of CPU time: the best sum of a tensor larger than any CPU cache."""
    big, best = torch.ones(2**26), float("inf")  # 256 MB
    for _ in range(12):
        start = time.process_time()
        big.sum()
        best = min(best, time.process_time() - start)
    return big.nbytes / best / 1e9


def time_per_token(generate: Callable[[int], Any], tokens: int) -> float:
    """Return the seconds of CPU time per generated token, without the prompt."""
    began = time.process_time()
    generate(1)
    first = time.process_time() - began
    generate(tokens + 1)
    return (time.process_time() - began - 2 * first) / tokens


def compare(name: str, rounds: int, tokens: int, others: dict[str, Callable[[], float]]) -> dict[str, Any]:
    """Return the best seconds of each candidate, and its speed relative to transformers per round."""
    native, hf_model = MODELS[name]()
    prompt = torch.tensor([PROMPT_IDS])

    def hf_generate(count: int) -> Any:
        return hf_model.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, use_cache=True
        )

    generators: dict[str, Callable[[int], Any]] = {"transformers float32": hf_generate}
    generators["headwise float32"] = lambda count: native.generate(prompt, count)
    for bits in BITS:
        generators[f"headwise {bits} bits"] = partial(hw.quantize(native, bits).generate, prompt)
    int8_inputs = hw.quantize(native, 8)
    int8_inputs.matmul_tuner = products.MatmulTuner(int8_inputs=True)
    generators["headwise 8 bits, int8_inputs"] = partial(int8_inputs.generate, prompt)
    same = torch.equal(generators["headwise float32"](64), hf_generate(64))
    for generate in generators.values():
        generate(2)  # autotuning and packing of weights
    timers = {label: partial(time_per_token, generate, tokens) for label, generate in generators.items()} | others
    seconds: dict[str, list[float]] = {label: [] for label in timers}
    for round_index in range(rounds):
        names = list(timers)[round_index % len(timers) :] + list(timers)[: round_index % len(timers)]
        for label in names:
            seconds[label].append(timers[label]())
            print(
                f"round {round_index + 1}, {label}: {1e3 * seconds[label][-1]:.1f} ms a token",
                file=sys.stderr,
                flush=True,
            )
    weights = sum(p.numel() * p.element_size() for p in native.parameters()) / 1e9
    return {
        "per token": {label: min(times) for label, times in seconds.items()},
        "medians": {label: statistics.median(times) for label, times in seconds.items()},
        "ratios": {
            label: sorted(b / own for b, own in zip(seconds["transformers float32"], times, strict=True))
            for label, times in seconds.items()
        },
        "same": same,
        "tokens": tokens,
        "bound": bandwidth() / weights,
        "weights": weights,
        "chosen": {
            f"{s.outputs}×{s.inputs}, by {s.weight_layout}": kernel
            for s, kernel in native.matmul_tuner.choices.items()
            if s.rows == 1
        },
    }  # fmt: skip


def overhead(rounds: int, steps: int = 32) -> float:
    """Return the best milliseconds of a step of SmolLM2 with precomputed matrix products."""
    model, outputs = hw.load("smollm2"), {}
    assert isinstance(model, hw.Transformer)

    def fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        key = (x.shape, weight.shape[0])
        if key not in outputs:
            outputs[key] = torch.randn(*x.shape[:-1], weight.shape[0])
        return outputs[key]

    def fake_bind(
        tuner: products.MatmulTuner, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
    ) -> products.BoundMatmul:
        return lambda x: fake_linear(x, weight)

    best, original, original_bind = float("inf"), products.linear, products.MatmulTuner.bind
    products.linear = projections.linear = fake_linear
    products.MatmulTuner.bind = fake_bind
    try:
        for _ in range(rounds):
            cache = model.cache()
            list(model.stream(torch.arange(PROMPT)[None], 4, cache=cache))
            began = time.process_time()
            list(model.stream(torch.tensor([[5]]), steps, cache=cache))
            best = min(best, (time.process_time() - began) / steps)
    finally:
        products.linear = projections.linear = original
        products.MatmulTuner.bind = original_bind
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_parts(parser, [*MODELS, "overhead", "engines"], default=["smollm2", "gpt2", "overhead"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--folder", type=Path, help="folder of the other engines and their models")
    parser.add_argument("--out", type=Path, help="JSON file in which results are stored and reused")
    add_json_option(parser)
    args = parser.parse_args()
    if "engines" in args.parts and args.folder is None:
        parser.error("engines are installed somewhere: give --folder")
    torch.set_num_threads(1)
    report = BenchmarkReport("generate", args.json)
    results = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    for benchmark in args.parts:
        if benchmark not in results:
            if benchmark == "overhead":
                results[benchmark] = overhead(args.rounds)
            else:
                engine_entries = engines.prepare_engines(args.folder) if benchmark == "engines" else {}
                others = {
                    name: partial(engines.seconds_per_token, entry, PROMPT_IDS, args.tokens)
                    for name, entry in engine_entries.items()
                }
                results[benchmark] = compare(
                    "smollm2" if engine_entries else benchmark, args.rounds, args.tokens, others
                )
            if args.out:
                write_atomic(args.out, json.dumps(results, indent=1).encode())
        if benchmark == "overhead":
            title = f"A step of SmolLM2 without matrix products; {machine()}"
            report.add("overhead", title, ["", "ms"], [["headwise float32", results[benchmark]]])
        else:
            report_results(report, benchmark, results[benchmark])
    report.write()


def report_results(report: BenchmarkReport, name: str, result: dict[str, Any]) -> None:
    rows = []
    for label, seconds in result["per token"].items():
        ratios, base = result["ratios"][label], result["per token"]["transformers float32"]
        spread = f"{ratios[0]:.2f} – {ratios[-1]:.2f}"
        median = result["medians"][label]
        rows.append(
            [label, 1e3 * seconds, 1e3 * median, base / seconds, spread, f"{1 / seconds / result['bound']:.0%}"]
        )
    columns = [
        "",
        "best ms per token",
        "median ms",
        "times transformers",
        "lowest – highest",
        "of float32's bandwidth bound",
    ]
    title = f"{name}, {machine()}; weights {result['weights']:.2f} GB, bound {result['bound']:.1f} tokens/s"
    report.console.print(f"{title}; float32 tokens equal to those of transformers: {'yes' if result['same'] else 'no'}")
    report.console.print(
        "matrix products:", ", ".join(f"{shape}: {kernel}" for shape, kernel in result["chosen"].items())
    )
    report.add(name, f"CPU time, one thread, {result['tokens']} tokens after {PROMPT}", columns, rows)


if __name__ == "__main__":
    main()
