"""What caches by head bring and cost: half of SmolLM2's key heads streaming, the first 4 tokens and the last 128 (--last).

python -m bench.spend cache --out F               everything below; the better part of two hours on one core
python -m bench.spend cache --out F --only loss   past what is kept, whole and by each way to choose, at --lengths
  also: bytes (of a cache, and what the process grew by), speed (of writing on), passkeys, prompt (peak memory of a long one)
python -m bench.spend bits smollm2 --out F        what few bits cost (bench.bits, with its options)
python -m bench.spend generate                    what is written a second, here and elsewhere (bench.generate)
python -m bench.spend products                    torch's products of one row (bench.products)
python -m bench.spend claim --full                claim 26: few bits and heads (headwise claims 26)
Reads $HEADWISE_DATA/wikitext-2: heads are chosen on the validation text, judged by the test text. In F: plans and figures;
what is there already is not done again.

The aim at 4096 tokens is 1.8 times fewer bytes for at most .03 nats. The rule by which it is tried, set before it was run:
--last 384, the largest multiple of 128 that leaves 1.8 (1 / (.5 + .5 · 388 / 4096) = 1.83); --by writes in --rounds 5, on
--choose 2 texts of the validation text of --choose-length 2048; judged by --judge 2 texts of the test text past token 388,
beside --seeds 2 random plans, and by --cases 5 pass keys of 4096 tokens, counted where the whole model has them. The mean
over the texts decides.

So chosen, 1 of 5 pass keys was kept. A second rule, set before it was run: the same with --spare .25, so that the quarter of
the key heads which finds most of what is repeated or to be copied never streams, and with other pass keys, --pass-seed 1.

So chosen, the loss was .0302 more and 3 of 3 pass keys were kept. A third rule, set before it was run: the same with --last
448, the largest multiple of 64 that leaves 1.8 (1 / (.5 + .5 · 452 / 4096) = 1.801); judged by texts nobody has looked at,
--judge 4 --between (one, three, five and seven eighths into the test text), past token 452, without random plans, and by
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
from headwise.compression.passkey import ask_passkeys, make_cases
from headwise.compression.streaming_selection import streaming_now
from headwise.experiments.engine.memory import rise
from headwise.experiments.engine.statistic import Figure
from headwise.heads import HeadCache
from headwise.heads.layer_cache import WholeCache
from headwise.io.atomic_write import whole_file
from headwise.model import ModelCache, Transformer
from headwise.spec import Address, ModelSpec
from headwise.ui.progress import show_progress

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "wikitext-2"
FIRST = 4
CHUNK = 256  # tokens of a prompt at a time
PARTS = ("loss", "bytes", "speed", "passkeys", "prompt")


def whole_model() -> Transformer:
    model = hw.load("smollm2")
    assert isinstance(model, Transformer)
    return model


def tokens_of(model: Transformer, part: str) -> torch.Tensor:
    """All tokens of a part of the corpus: (N,)"""
    assert model.tokenizer is not None
    return torch.tensor(model.tokenizer.encode((DATA / part).read_text(encoding="utf-8")))


def texts(model: Transformer, part: str, length: int, count: int, between: bool = False) -> list[torch.Tensor]:
    """So many texts, spread evenly: (1, length) each. `between`: those that begin half way from one to the next."""
    ids = tokens_of(model, part)
    return [ids[None, (2 * i + between) * (len(ids) - length) // (2 * count) :][:, :length] for i in range(count)]


def plan_file(options: argparse.Namespace, by: str, seed: int = 0) -> Path:
    named = f"{by}{seed}" if by == "random" else f"{by} in {options.rounds} rounds" if options.rounds > 1 else by
    named += f", {options.spare} spared" if options.spare and by != "random" else ""
    return options.out / f"{named}-{options.share}-{options.last}.json"


def plan_by(model: Transformer, by: str, options: argparse.Namespace, seed: int = 0) -> hw.Plan:
    """The plan, made once."""
    saved = plan_file(options, by, seed)
    if not saved.is_file():
        assert model.tokenizer is not None
        chosen_on = [
            model.tokenizer.decode(one[0].tolist())
            for one in texts(model, "valid.txt", options.choose_length, options.choose)
        ]
        start = time.perf_counter()
        with show_progress() as progress:
            made = hw.Plan.streaming(
                model, options.share, first=FIRST, last=options.last, by=by, on=chosen_on, seed=seed, steps=options.steps,
                longest=2 * options.choose_length, rounds=1 if by == "random" else options.rounds,
                spare=0.0 if by == "random" else options.spare, progress=progress,
            )  # fmt: skip
        made.save(saved)
        print(f"chosen by {by} in {time.perf_counter() - start:.0f} s")
    return hw.Plan.load(saved)


def streams(plan: hw.Plan) -> tuple[Address, ...]:
    return tuple(Address.parse(head) for rule in plan.cache for head in rule.heads)


@torch.no_grad()
def loss(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Loss of the tokens past what streaming heads keep, text by text, and what each plan adds, with 95 % intervals.

    Each loss is kept as soon as it is known, so that a run which stops goes on.
    """
    made, told = {}, {}
    plans: dict[str, hw.Plan | None] = {"whole": None, **{by: plan_by(model, by, options) for by in options.by}}
    plans |= {f"random {seed}": plan_by(model, "random", options, seed) for seed in range(options.seeds)}
    for length in options.lengths:
        named = f"losses-{length}-{options.judge}-{options.share}-{options.last}-{options.rounds}"
        named += f"-{options.spare}" * bool(options.spare) + "-between" * options.between
        kept = options.out / f"{named}.json"
        made = json.loads(kept.read_text()) if kept.is_file() else {}
        for place, ids in enumerate(texts(model, "test.txt", length, options.judge, options.between)):
            for name, plan in plans.items():
                if len(made.setdefault(name, [])) == place:
                    made[name].append(_loss_of(model, ids, plan, FIRST + options.last))
                    whole_file(kept, json.dumps(made, indent=1).encode())
                    print(
                        f"{length} tokens, text {place}, {name}: {made[name][-1] - made['whole'][place]:+.4f}",
                        flush=True,
                    )
        told[str(length)] = {name: _gained(made[name], made["whole"]) for name in plans}
        for name, (mean, low, high) in told[str(length)].items():
            print(f"{length} tokens, {name}: {mean:+.4f} ({low:+.4f} to {high:+.4f})", flush=True)
    return told


def _loss_of(model: Transformer, ids: torch.Tensor, plan: hw.Plan | None, room: int) -> float:
    with nullcontext() if plan is None else streaming_now(model, streams(plan), plan.cache[0].keeps):
        hidden = model(ids, hidden=True)[0]
    assert model.output is not None
    return model.output.cross_entropy(hidden[room:-1], ids[0, room + 1 :]).item()


def _gained(some: list[float], whole: list[float]) -> tuple[float, float, float]:
    """The mean of what texts lose more, with Student's interval over them."""
    made = Figure.over([one - other for one, other in zip(some, whole, strict=True)])
    low, high = (float("nan") if end is None else end for end in (made.low, made.high))
    return made.mean, low, high


def resident() -> int:
    """Bytes of memory the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def filled(spec: ModelSpec, length: int) -> ModelCache:
    """A cache that holds so many tokens, random ones: neither bytes nor seconds depend on what they say."""
    made = ModelCache(spec)
    for site, cache in made.layers.items():
        layer = spec.attention_at(site)
        assert isinstance(cache, HeadCache | WholeCache)
        take = cache.keep if isinstance(cache, HeadCache) else cache.extend
        for start in range(0, length, CHUNK):
            size = (1, len(layer.kv_ids), min(CHUNK, length - start), layer.head_dim)
            take(torch.randn(size), torch.randn(size))
    made.length = length
    return made


def held(options: argparse.Namespace) -> None:
    """In a process of its own: the bytes of a cache, and what the process grew by while it was filled."""
    model = whole_model()
    spec = model.spec if options.held == "plain" else hw.Plan.load(options.held).cache_spec(model)
    ctypes.CDLL(None).malloc_trim(0)  # what loading has freed goes back, else the cache would be put there unnoticed
    before = resident()
    cache = filled(spec, options.lengths[0])
    print(json.dumps({"cache": cache.bytes, "process": resident() - before}))


def bytes_held(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    made: dict[str, Any] = {}
    plan_by(model, options.by[0], options)
    for length in options.lengths:
        here = made[str(length)] = {}
        for name, which in (("plain", "plain"), ("half", plan_file(options, options.by[0]))):
            call = [sys.executable, "-m", "bench.spend", "cache", "--out", options.out, "--held", which]
            done = subprocess.run(
                [*map(str, call), "--lengths", str(length)], capture_output=True, text=True, check=True
            )
            here[name] = json.loads(done.stdout.splitlines()[-1])
        for what in ("cache", "process"):
            ratio = here["plain"][what] / here["half"][what]
            print(
                f"{length} tokens, {what}: {here['plain'][what]:,} → {here['half'][what]:,}, {ratio:.2f}×", flush=True
            )
    return made


@torch.no_grad()
def speed(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a token, both caches in turn; `cpu` counts what this process alone took."""
    made, plan = {}, plan_by(model, options.by[0], options)
    for length in options.lengths:
        caches = {"plain": filled(model.spec, length), "half": filled(plan.cache_spec(model), length)}
        wall: dict[str, list[float]] = {name: [] for name in caches}
        cpu: dict[str, list[float]] = {name: [] for name in caches}
        token = torch.tensor([[1]])
        for turn in range(options.tokens + 2):
            for name in sorted(caches, reverse=bool(turn % 2)):
                began, counted = time.perf_counter(), time.process_time()
                model(token, cache=caches[name])
                if turn > 1:  # the first makes room
                    wall[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - counted)
        here = made[str(length)] = {"wall": ratio_of(wall), "cpu": ratio_of(cpu)}
        for kind, figures in here.items():
            print(f"{length} tokens, {kind}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    return made


def ratio_of(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and how many times quicker, turn by turn."""
    ratios = [plain / half for plain, half in zip(seconds["plain"], seconds["half"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    told = {name: median(several) for name, several in seconds.items()}
    return told | {
        "times": middle,
        "low": low,
        "high": high,
        "of the least": min(seconds["plain"]) / min(seconds["half"]),
    }


def passkeys(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Of the cases the whole model answers, how many it still answers."""
    made, plans = {}, {by: plan_by(model, by, options) for by in (*options.by, *("random",) * bool(options.seeds))}
    for length in options.lengths:
        cases = make_cases(model, DATA / "test.txt", length, options.cases, options.pass_seed)
        whole = ask_passkeys(model, cases)
        here = made[str(length)] = {"cases": len(cases), "whole": sum(whole.right)}
        print(f"{length} tokens: {whole}", flush=True)
        asked = tuple(case for case, right in zip(cases, whole.right, strict=True) if right)
        for name, plan in plans.items():
            spec = plan.cache_spec(model)
            here[name] = sum(ask_passkeys(model, asked, partial(ModelCache, spec)).right)
            print(f"{length} tokens, {name}: {here[name]} of {len(asked)} kept", flush=True)
    return made


def prompt(model: Transformer, options: argparse.Namespace) -> dict[str, Any]:
    """Megabytes beside weights and cache at the peak of reading prompts, whole and in chunks, each in its own process."""
    made: dict[str, Any] = {}
    for length in options.prompts:
        here = made[str(length)] = {}
        for name, chunk in (("whole", length), ("in chunks of 2048", 2048)):
            call = [sys.executable, "-m", "bench.spend", "cache", "--out", options.out, "--peak", str(chunk)]
            done = subprocess.run(
                [*map(str, call), "--lengths", str(length)], capture_output=True, text=True, check=True
            )
            here[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{length} tokens, {name}: {here[name]:.0f} MB", flush=True)
    return made


def peak(options: argparse.Namespace) -> None:
    """In a process of its own: megabytes at the peak of reading a prompt, beside what was there before and the cache."""
    small = hw.preset("smollm2-135m").resized(
        layers=2, context=1 << 16
    )  # what is measured is one layer's, and the output's
    model = Transformer(small)
    ids = torch.arange(options.lengths[0])[None] % 1000
    cache = model.cache()
    model.generate(ids[:, :64], 1, prompt_chunk=options.peak)
    risen = rise(
        lambda: model.generate(ids, 1, cache=cache, prompt_chunk=options.peak)
    )  # a child's own peak begins with ours
    print(risen - cache.bytes / (1 << 20))


ELSEWHERE = {
    "bits": ("-m", "bench.bits"),
    "generate": ("-m", "bench.generate"),
    "products": ("-m", "bench.products"),
    "claim": ("-m", "headwise", "claims", "26"),
}


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ELSEWHERE:
        sys.exit(subprocess.run([sys.executable, *ELSEWHERE[sys.argv[1]], *sys.argv[2:]]).returncode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cache", *ELSEWHERE))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--by", nargs="+", default=["writes"], help="ways to choose; the first is timed")
    parser.add_argument("--share", type=float, default=0.5, help="of the key heads that stream")
    parser.add_argument("--last", type=int, default=128, help="tokens at the end that streaming heads keep")
    parser.add_argument("--rounds", type=int, default=1, help="in which key heads are chosen")
    parser.add_argument("--spare", type=float, default=0.0, help="of the key heads: those that find what is repeated")
    parser.add_argument("--pass-seed", type=int, default=0, help="other pass keys")
    parser.add_argument("--choose", type=int, default=6, help="texts that heads are chosen on")
    parser.add_argument("--choose-length", type=int, default=2048, help="tokens of each")
    parser.add_argument("--seeds", type=int, default=2, help="random plans")
    parser.add_argument("--steps", type=int, default=60, help="of gates")
    parser.add_argument("--judge", type=int, default=4, help="texts of each length")
    parser.add_argument("--between", action="store_true", help="other texts, half way between those")
    parser.add_argument("--tokens", type=int, default=24, help="written on, for speed")
    parser.add_argument("--cases", type=int, default=10, help="pass keys of each length")
    parser.add_argument("--held", help=argparse.SUPPRESS)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.held or options.peak:
        held(options) if options.held else peak(options)
        return
    model = whole_model()
    print(machine())
    measures = {"loss": loss, "bytes": bytes_held, "speed": speed, "passkeys": passkeys, "prompt": prompt}
    for part in options.only:
        told = measures[part](model, options)
        lengths = "-".join(map(str, options.prompts if part == "prompt" else options.lengths))
        whole_file(options.out / f"{part}-{lengths}.json", json.dumps(told, indent=1).encode())


if __name__ == "__main__":
    main()
