"""Tokens per second of processor time while generating, one thread, batch 1, beside transformers' float32.

python -m bench.generate                      256 tokens behind 64: SmolLM2, and GPT-2 small's size with random weights;
                                              and a step of SmolLM2 with its products left out
python -m bench.generate smollm2 --rounds 3   one of these: smollm2, gpt2 or overhead
python -m bench.generate engines --folder D   SmolLM2 in llama.cpp, CTranslate2 and onnxruntime-genai too, which are installed
                                              into D, an environment each (bench.engines)
Everyone takes a turn each round; what is compared is the best round's processor time, which other work on the machine moves
least. With --out F.json figures are kept, and what is there is not done again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import headwise as hw
import headwise.heads.projections as projections
import headwise.kernels.matmul_tuner as products
from bench import engines
from bench.measure import machine
from headwise.io.atomic_write import write_atomic
from headwise.ui.terminal_table import make_table

BITS = (16, 8, 4)
PROMPT, TOKENS = 64, 256
PROMPT_IDS = list(range(100, 100 + PROMPT))


def gpt2() -> tuple[hw.Transformer, Any]:
    """GPT-2 small's size, random weights, the same in both models."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hf_model = GPT2LMHeadModel(GPT2Config()).eval()
    return _to_headwise(hf_model), hf_model


def smollm2() -> tuple[hw.Transformer, Any]:
    """SmolLM2-135M: ours, written for transformers and read by it."""
    from transformers import AutoModelForCausalLM

    native = hw.load("smollm2")
    assert isinstance(native, hw.Transformer)
    with tempfile.TemporaryDirectory() as folder:
        hf_model = AutoModelForCausalLM.from_pretrained(
            native.export(Path(folder) / "theirs"), dtype=torch.float32
        ).eval()
        for parameter in hf_model.parameters():
            parameter.data = parameter.data.clone()  # the folder goes away
    return native, hf_model


def _to_headwise(hf_model: Any) -> hw.Transformer:
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        native = hw.load(folder)
    assert isinstance(native, hw.Transformer)
    return native


MODELS = {"smollm2": smollm2, "gpt2": gpt2}


def bandwidth() -> float:
    """Gigabytes a second of processor time that are read, best of many: the sum of a tensor far larger than any cache."""
    big, best = torch.ones(2**26), float("inf")  # 256 MB
    for _ in range(12):
        start = time.process_time()
        big.sum()
        best = min(best, time.process_time() - start)
    return big.nbytes / best / 1e9


def time_per_token(generate: Callable[[int], Any], tokens: int) -> float:
    """Seconds of processor time a token behind the prompt takes, the prompt itself taken off."""
    began = time.process_time()
    generate(1)
    first = time.process_time() - began
    generate(tokens + 1)
    return (time.process_time() - began - 2 * first) / tokens


def compare(name: str, rounds: int, tokens: int, others: dict[str, Callable[[], float]]) -> dict[str, Any]:
    """Each contestant's best seconds, and in each round how many times as quick as transformers."""
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
    same = torch.equal(generators["headwise float32"](64), hf_generate(64))
    for generate in generators.values():
        generate(2)  # products are chosen, forms made
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
    """Milliseconds of a step of SmolLM2 whose products give numbers that are there already; the best round."""
    model, outputs = hw.load("smollm2"), {}
    assert isinstance(model, hw.Transformer)

    def fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        key = (x.shape, weight.shape[0])
        if key not in outputs:
            outputs[key] = torch.randn(*x.shape[:-1], weight.shape[0])
        return outputs[key]

    best, original = float("inf"), products.linear
    products.linear = projections.linear = fake_linear
    try:
        for _ in range(rounds):
            cache = model.cache()
            list(model.stream(torch.arange(PROMPT)[None], 4, cache=cache))
            began = time.process_time()
            list(model.stream(torch.tensor([[5]]), steps, cache=cache))
            best = min(best, (time.process_time() - began) / steps)
    finally:
        products.linear = projections.linear = original
    return 1e3 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=["smollm2", "gpt2", "overhead"], choices=[*MODELS, "overhead", "engines"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--folder", type=Path, help="where other engines and their models lie, or are put")
    parser.add_argument("--out", type=Path, help="keep figures in this JSON file, and do not make again what is there")
    args = parser.parse_args()
    if "engines" in args.what and args.folder is None:
        parser.error("engines are installed somewhere: give --folder")
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=120)
    results = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    for benchmark in args.what:
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
            console.print(f"A step of SmolLM2 without its products: {results[benchmark]:.1f} ms; {machine()}.")
        else:
            print_results(console, benchmark, results[benchmark])


def print_results(console: Console, name: str, result: dict[str, Any]) -> None:
    rows = []
    for label, seconds in result["per token"].items():
        ratios, base = result["ratios"][label], result["per token"]["transformers float32"]
        spread = f"{ratios[0]:.2f} – {ratios[-1]:.2f}"
        rows.append([label, 1e3 * seconds, 1 / seconds, base / seconds, spread, 1 / seconds / result["bound"]])
    columns = ["who", "ms", "tokens/s", "times transformers", "least – most", "share of float32's bound"]
    title = f"{name}, {machine()}; weights {result['weights']:.2f} GB, bound {result['bound']:.1f} tokens/s"
    console.print(f"{title}; float32 the same tokens as transformers: {'yes' if result['same'] else 'no'}")
    console.print("products:", ", ".join(f"{shape}: {kernel}" for shape, kernel in result["chosen"].items()))
    console.print(make_table(f"Processor time, one thread, {result['tokens']} tokens behind {PROMPT}", columns, rows))


if __name__ == "__main__":
    main()
