"""Memory, speed and loss of KV caches per head: half of the KV heads of SmolLM2 stream (4 sink tokens, --window 128).

python -m bench.spend cache --out F               all parts below; almost two hours on one core
python -m bench.spend cache --out F --only loss   loss after the window, for the full cache and each ranking, at --lengths
  other parts: bytes (cache and process memory), speed (of generation), passkeys, prompt (peak memory of long prompts)
python -m bench.spend bits smollm2 --out F        cost of quantization (bench.bits, with its options)
python -m bench.spend generate                    generation speed, also of other engines (bench.generate)
python -m bench.spend products                    matrix-vector products of torch (bench.products)
python -m bench.spend claim --full                claim 26 on bits and heads (headwise claims 26)
Reads $HEADWISE_DATA/wikitext-2: heads are selected on the validation text and evaluated on the test text. F contains plans
and results, which are reused.

Goal at 4096 tokens: a cache 1.8 times smaller with a loss increase of at most 0.03 nats. The mean over the texts decides.
Each protocol was fixed before its run:

1. --window 384, the largest multiple of 128 with a ratio of at least 1.8 (1 / (0.5 + 0.5 · 388 / 4096) = 1.83); --ranking
   output in --rounds 5 on --selection-texts 2 of --selection-length 2048; evaluation on --evaluation-texts 2 after token 388,
   with --seeds 2 random plans and --cases 5 passkeys of 4096 tokens, counted among those that the full cache retrieves.
   Result: 1 of 5 passkeys retrieved.
2. Protocol 1 with --protected-fraction 0.25 (the KV heads with the highest retrieval scores never stream) and --pass-seed 1.
   Result: loss increase 0.0302, 3 of 3 passkeys retrieved.
3. Protocol 2 with --window 448, the largest multiple of 64 with a ratio of at least 1.8 (1 / (0.5 + 0.5 · 452 / 4096) =
   1.801); evaluation on unseen texts (--evaluation-texts 4 --other-texts) after token 452, without random plans, and with
   --cases 5 --pass-seed 2.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import headwise as hw
from bench.measure import machine
from headwise.cache import ModelCache, PerHeadCache, SharedKVCache
from headwise.compression import StreamingRequest
from headwise.compression.passkey_test import make_passkey_cases, run_passkeys
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.experiments.engine.statistic import Statistic
from headwise.io.atomic_write import write_atomic
from headwise.model import Transformer
from headwise.model.simulated_streaming_forward import streaming
from headwise.spec import Address, ModelSpec
from headwise.ui.progress import show_progress

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "wikitext-2"
SINK_TOKENS = 4
CHUNK = 256  # prompt tokens per chunk
PARTS = ("loss", "bytes", "speed", "passkeys", "prompt")


def load_model() -> Transformer:
    model = hw.load("smollm2")
    assert isinstance(model, Transformer)
    return model


def tokens_of(model: Transformer, part: str) -> torch.Tensor:
    """Return all tokens of a part of the corpus, (N,)."""
    assert model.tokenizer is not None
    return torch.tensor(model.tokenizer.encode((DATA / part).read_text(encoding="utf-8")))


def texts(model: Transformer, part: str, length: int, count: int, between: bool = False) -> list[torch.Tensor]:
    """Return evenly spaced texts, (1, length) each. `between` shifts them by half of their spacing."""
    ids = tokens_of(model, part)
    return [ids[None, (2 * i + between) * (len(ids) - length) // (2 * count) :][:, :length] for i in range(count)]


def plan_file(options: argparse.Namespace, ranking: str, seed: int = 0) -> Path:
    stem = (
        f"{ranking}{seed}"
        if ranking == "random"
        else f"{ranking} in {options.rounds} rounds"
        if options.rounds > 1
        else ranking
    )
    stem += f", {options.protected_fraction} spared" if options.protected_fraction and ranking != "random" else ""
    return options.out / f"{stem}-{options.fraction}-{options.window}.json"


def load_or_make_plan(model: Transformer, ranking: str, options: argparse.Namespace, seed: int = 0) -> hw.Plan:
    """Load the plan, or create and save it."""
    saved = plan_file(options, ranking, seed)
    if not saved.is_file():
        assert model.tokenizer is not None
        chosen_on = [
            model.tokenizer.decode(ids[0].tolist())
            for ids in texts(model, "valid.txt", options.selection_length, options.selection_texts)
        ]
        start = time.perf_counter()
        with show_progress() as progress:
            request = StreamingRequest(
                options.fraction,
                sink_tokens=SINK_TOKENS,
                window=options.window,
                ranking=ranking,
                corpus=chosen_on,
                seed=seed,
                gate_steps=options.steps,
                max_length=2 * options.selection_length,
                rounds=1 if ranking == "random" else options.rounds,
                protected_fraction=0.0 if ranking == "random" else options.protected_fraction,
            )
            plan = hw.plan_streaming(model, request, progress=progress)
        plan.save(saved)
        print(f"ranked by {ranking} in {time.perf_counter() - start:.0f} s")
    return hw.Plan.load(saved)


def streaming_heads(plan: hw.Plan) -> tuple[Address, ...]:
    return tuple(Address.parse(head) for rule in plan.cache for head in rule.heads)


@torch.no_grad()
def measure_loss(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loss of the tokens after the window, per text, and the increase by each plan, with 95% intervals.

    Each loss is stored at once, so that a stopped run can be resumed.
    """
    losses, summary = {}, {}
    plans: dict[str, hw.Plan | None] = {
        "whole": None,
        **{ranking: load_or_make_plan(model, ranking, options) for ranking in options.ranking},
    }
    plans |= {f"random {seed}": load_or_make_plan(model, "random", options, seed) for seed in range(options.seeds)}
    for length in options.lengths:
        stem = f"losses-{length}-{options.evaluation_texts}-{options.fraction}-{options.window}-{options.rounds}"
        stem += f"-{options.protected_fraction}" * bool(options.protected_fraction) + "-between" * options.other_texts
        saved = options.out / f"{stem}.json"
        losses = json.loads(saved.read_text()) if saved.is_file() else {}
        for index, ids in enumerate(texts(model, "test.txt", length, options.evaluation_texts, options.other_texts)):
            for name, plan in plans.items():
                if len(losses.setdefault(name, [])) == index:
                    losses[name].append(_loss_of(model, ids, plan, SINK_TOKENS + options.window))
                    write_atomic(saved, json.dumps(losses, indent=1).encode())
                    print(
                        f"{length} tokens, text {index}, {name}: {losses[name][-1] - losses['whole'][index]:+.4f}",
                        flush=True,
                    )
        summary[str(length)] = {name: _mean_increase(losses[name], losses["whole"]) for name in plans}
        for name, (mean, low, high) in summary[str(length)].items():
            print(f"{length} tokens, {name}: {mean:+.4f} ({low:+.4f} to {high:+.4f})", flush=True)
    return summary


def _loss_of(model: Transformer, ids: torch.Tensor, plan: hw.Plan | None, start: int) -> float:
    with nullcontext() if plan is None else streaming(model, streaming_heads(plan), plan.cache[0].policy):
        hidden = model(ids, hidden=True)[0]
    assert model.output is not None
    return model.output.cross_entropy(hidden[start:-1], ids[0, start + 1 :]).item()


def _mean_increase(values: list[float], full_values: list[float]) -> tuple[float, float, float]:
    """Return the mean loss increase with the interval of Student's t over texts."""
    statistic = Statistic.mean_of([value - full_value for value, full_value in zip(values, full_values, strict=True)])
    low, high = (float("nan") if end is None else end for end in (statistic.low, statistic.high))
    return statistic.mean, low, high


def resident() -> int:
    """Return the current memory of the process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def filled_cache(spec: ModelSpec, length: int) -> ModelCache:
    """Return a cache filled with random tokens; bytes and seconds do not depend on their values."""
    model_cache = ModelCache(spec)
    for address, cache in model_cache.layers.items():
        layer = spec.attention_at(address)
        assert isinstance(cache, PerHeadCache | SharedKVCache)
        for start in range(0, length, CHUNK):
            size = (1, len(layer.kv_head_ids), min(CHUNK, length - start), layer.head_dim)
            cache.append(torch.randn(size), torch.randn(size))
    model_cache.length = length
    return model_cache


def print_cache_bytes(options: argparse.Namespace) -> None:
    """Print the bytes of a cache and the growth of the process while it is filled. Runs in a separate process."""
    model = load_model()
    spec = model.spec if options.cache_memory_of == "plain" else hw.Plan.load(options.cache_memory_of).cache_spec()
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory, which the cache would otherwise reuse
    before = resident()
    cache = filled_cache(spec, options.lengths[0])
    print(json.dumps({"cache": cache.nbytes, "process": resident() - before}))


def measure_bytes(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    load_or_make_plan(model, options.ranking[0], options)
    for length in options.lengths:
        entry = results[str(length)] = {}
        for name, plan_argument in (("plain", "plain"), ("half", plan_file(options, options.ranking[0]))):
            call = [
                sys.executable,
                "-m",
                "bench.spend",
                "cache",
                "--out",
                options.out,
                "--cache-memory-of",
                plan_argument,
            ]
            done = subprocess.run(
                [*map(str, call), "--lengths", str(length)], capture_output=True, text=True, check=True
            )
            entry[name] = json.loads(done.stdout.splitlines()[-1])
        for quantity in ("cache", "process"):
            ratio = entry["plain"][quantity] / entry["half"][quantity]
            print(
                f"{length} tokens, {quantity}: {entry['plain'][quantity]:,} → {entry['half'][quantity]:,}, {ratio:.2f}×",
                flush=True,
            )
    return results


@torch.no_grad()
def measure_speed(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds per token of both caches, alternating. `cpu` measures CPU time."""
    results, plan = {}, load_or_make_plan(model, options.ranking[0], options)
    for length in options.lengths:
        caches = {"plain": filled_cache(model.spec, length), "half": filled_cache(plan.cache_spec(), length)}
        wall: dict[str, list[float]] = {name: [] for name in caches}
        cpu: dict[str, list[float]] = {name: [] for name in caches}
        token = torch.tensor([[1]])
        for turn in range(options.tokens + 2):
            for name in sorted(caches, reverse=bool(turn % 2)):
                began, counted = time.perf_counter(), time.process_time()
                model(token, cache=caches[name])
                if turn > 1:  # the first turn allocates memory
                    wall[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - counted)
        ratios = results[str(length)] = {"wall": speed_ratio(wall), "cpu": speed_ratio(cpu)}
        for kind, figures in ratios.items():
            print(f"{length} tokens, {kind}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    return results


def speed_ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians and the quartiles of the speedup."""
    ratios = [plain / half for plain, half in zip(seconds["plain"], seconds["half"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    medians = {name: median(several) for name, several in seconds.items()}
    return medians | {
        "times": middle,
        "low": low,
        "high": high,
        "of the least": min(seconds["plain"]) / min(seconds["half"]),
    }


def measure_passkeys(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Count the passkeys that are still retrieved among those that the full cache retrieves."""
    results, plans = (
        {},
        {
            ranking: load_or_make_plan(model, ranking, options)
            for ranking in (*options.ranking, *("random",) * bool(options.seeds))
        },
    )
    for length in options.lengths:
        cases = make_passkey_cases(model, DATA / "test.txt", length, options.cases, options.pass_seed)
        baseline = run_passkeys(model, cases)
        counts = results[str(length)] = {"cases": len(cases), "whole": sum(baseline.correct)}
        print(f"{length} tokens: {baseline}", flush=True)
        answered = tuple(case for case, right in zip(cases, baseline.correct, strict=True) if right)
        for name, plan in plans.items():
            spec = plan.cache_spec()
            counts[name] = sum(run_passkeys(model, answered, partial(ModelCache, spec)).correct)
            print(f"{length} tokens, {name}: {counts[name]} of {len(answered)} kept", flush=True)
    return results


def measure_prompt_memory(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the peak memory of prompts in MB, without weights and cache, at once and in chunks, in separate processes."""
    results: dict[str, Any] = {}
    for length in options.prompts:
        entry = results[str(length)] = {}
        for name, chunk in (("whole", length), ("in chunks of 2048", 2048)):
            call = [sys.executable, "-m", "bench.spend", "cache", "--out", options.out, "--peak", str(chunk)]
            done = subprocess.run(
                [*map(str, call), "--lengths", str(length)], capture_output=True, text=True, check=True
            )
            entry[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{length} tokens, {name}: {entry[name]:.0f} MB", flush=True)
    return results


def print_prompt_peak(options: argparse.Namespace) -> None:
    """Print the peak memory of a prompt in MB, without weights and cache. Runs in a separate process."""
    small = hw.preset("smollm2-135m").resized(layers=2, context=1 << 16)  # the peak is that of one layer and the output
    model = Transformer(small)
    ids = torch.arange(options.lengths[0])[None] % 1000
    cache = model.cache()
    model.generate(ids[:, :64], 1, prompt_chunk=options.peak)
    memory = peak_memory(
        lambda: model.generate(ids, 1, cache=cache, prompt_chunk=options.peak)
    )  # the peak of a child starts at that of its parent
    print(memory - cache.nbytes / (1 << 20))


OTHER_BENCHMARKS = {
    "bits": ("-m", "bench.bits"),
    "generate": ("-m", "bench.generate"),
    "products": ("-m", "bench.products"),
    "claim": ("-m", "headwise", "claims", "26"),
}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in OTHER_BENCHMARKS:
        sys.exit(subprocess.run([sys.executable, *OTHER_BENCHMARKS[sys.argv[1]], *sys.argv[2:]]).returncode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cache", *OTHER_BENCHMARKS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ranking", nargs="+", default=["output"], help="ranking methods; the first is timed")
    parser.add_argument("--fraction", type=float, default=0.5, help="fraction of the KV heads that stream")
    parser.add_argument("--window", type=int, default=128, help="most recent tokens cached by streaming heads")
    parser.add_argument("--rounds", type=int, default=1, help="number of selection rounds")
    parser.add_argument(
        "--protected-fraction", type=float, default=0.0, help="fraction of the KV heads that never streams"
    )
    parser.add_argument("--pass-seed", type=int, default=0, help="seed of the passkeys")
    parser.add_argument("--selection-texts", type=int, default=6, help="texts on which heads are ranked")
    parser.add_argument("--selection-length", type=int, default=2048, help="tokens per selection text")
    parser.add_argument("--seeds", type=int, default=2, help="number of random plans")
    parser.add_argument("--steps", type=int, default=60, help="training steps of gates")
    parser.add_argument("--evaluation-texts", type=int, default=4, help="evaluation texts per length")
    parser.add_argument(
        "--other-texts", action="store_true", help="use other evaluation texts, halfway between the default ones"
    )
    parser.add_argument("--tokens", type=int, default=24, help="generated tokens of the speed test")
    parser.add_argument("--cases", type=int, default=10, help="passkeys per length")
    parser.add_argument("--cache-memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cache_memory_of or options.peak:
        print_cache_bytes(options) if options.cache_memory_of else print_prompt_peak(options)
        return
    model = load_model()
    print(machine())
    measurements = {
        "loss": measure_loss,
        "bytes": measure_bytes,
        "speed": measure_speed,
        "passkeys": measure_passkeys,
        "prompt": measure_prompt_memory,
    }
    for part in options.only:
        result = measurements[part](model, options)
        lengths = "-".join(map(str, options.prompts if part == "prompt" else options.lengths))
        write_atomic(options.out / f"{part}-{lengths}.json", json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
