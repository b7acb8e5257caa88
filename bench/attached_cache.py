"""Per-head cache of SmolLM2 in transformers, half of the KV heads streaming, beside transformers' DynamicCache and kvpress.

python -m bench.attached_cache plan --folder F --out P.json            rank KV heads on the WikiText-2 validation text
python -m bench.attached_cache memory --folder F --plan P.json --length 4096
python -m bench.attached_cache bytes --folder F --plan P.json --length 8192   bytes of the caches, on small weights
python -m bench.attached_cache loss --folder F --plan P.json --length 4096 --texts 8
python -m bench.attached_cache passkeys --folder F --plan P.json --length 4096 --count 5
python -m bench.attached_cache speed --folder F --plan P.json --length 4096
python -m bench.attached_cache continuation --folder F --text 0 [--plan P50.json] --ids-out ids.json
ENV/bin/python bench/attached_cache_kvpress.py …        the same continuation with kvpress, in another environment
python -m bench.attached_cache summary --folder F --results cache.jsonl        compares all results of continuation

`--folder` is SmolLM2 as transformers reads it: `hw.export(hw.load("smollm2"), folder)`. Each part prints one line of JSON.
Losses are on WikiText-2 test texts that follow each other. Intervals are 95% bootstrap intervals over texts, paired by text.
Memory is that of a fresh process above its memory after loading, in which the prompt comes in chunks of 512 tokens.

Rules, set before the figures were seen:

- Texts are taken from the start of the test split, and seeds and depths are the defaults of the options. No text is left out.
- The goal is a cache of at most 1/1.8 of the bytes of `DynamicCache` with half of the KV heads streaming. Loss differences
  are stated with their intervals, without correction for several of them.
- `continuation` measures the loss of the last 128 tokens of texts 0 to 4, one text and one cache per process, with plans of
  25%, 50% and 75% of the KV heads streaming. kvpress runs the same KV heads. *Equal kept fraction* compares bytes and
  loss differences of both at 50%.
- *Equal loss* takes the loss difference of kvpress at 50% of the KV heads, and gives the bytes at which the per-head cache
  has that difference, by linear interpolation between plans; the full cache is the plan with difference 0.
- At 8,192 tokens, `loss` (8 texts) and `passkeys` (5, seed 0) run once with the plan of 50% and the options of 4,096 tokens.
  Losses and hits are stated for both lengths, whichever is worse.
- kvpress at 25% and 75% takes texts 0 to 4 too, next to the per-head cache with the same plan, as at 50%.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import headwise as hw
from bench.distil import DATA
from headwise.analysis.metrics.statistics import bootstrap_difference_interval
from headwise.compression import StreamingRequest
from headwise.compression.passkey_test import make_passkey_cases, run_passkeys
from headwise.experiments.engine.peak_process_memory import peak_memory

SINK_TOKENS, WINDOW = 4, 128
CHUNK = 512  # tokens of a prompt per call
CONTINUATION = 128  # tokens after the prompt in `continuation`
DECODED = 12  # tokens per round of `speed`
ROUNDS = 9
Caches = dict[str, Callable[[], Any]]


def load(folder: Path) -> Any:
    """Load the model in float32 and attach to it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return hw.attach(model, transformers.AutoTokenizer.from_pretrained(folder))


def make_caches(attached: Any, plans: list[Path]) -> Caches:
    """Return functions that make the caches: transformers' own, and one per plan."""
    caches: Caches = {"dynamic": lambda: transformers.DynamicCache(config=attached.model.config)}
    for plan in plans:
        rules = json.loads(plan.read_text())["cache"]
        policies = {",".join(rule["heads"]): hw.CachePolicy(**rule["policy"]) for rule in rules}
        name = "per head" if len(plans) == 1 else f"per head, {plan.stem}"
        caches[name] = partial(hw.per_head_cache, attached, policies)
    return caches


def cache_nbytes(cache: Any) -> int:
    """Return the bytes that a cache holds."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def wikitext(attached: Any, split: str, length: int, texts: int) -> Tensor:
    """Return consecutive texts of WikiText-2, (texts, length)."""
    text = (DATA / "wikitext-2" / f"{split}.txt").read_text(encoding="utf-8")
    ids = attached.tokenizer.encode(text[: 8 * length * texts], add_special_tokens=False)
    if len(ids) < length * texts:
        raise ValueError(f"{split}: {len(ids)} tokens are fewer than {texts} texts of {length}")
    return torch.tensor(ids[: length * texts]).view(texts, length)


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Pass a prompt, (1, T), to a cache in chunks. Return the logits of its last token."""
    logits = torch.empty(0)
    for start in range(0, ids.shape[1], CHUNK):
        logits = model(ids[:, start : start + CHUNK], past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1]


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, cache: Any, skip: int) -> np.ndarray:
    """Return the loss of each token after `skip` tokens, in nats; the text, (1, T), comes in chunks."""
    losses = []
    for start in range(0, ids.shape[1] - 1, CHUNK):
        chunk = ids[:, start : min(start + CHUNK, ids.shape[1] - 1)]
        logits = model(chunk, past_key_values=cache).logits[0]
        targets = ids[0, start + 1 : start + 1 + chunk.shape[1]]
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses)[skip:].double().numpy()


def make_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Rank KV heads on validation text and let half of them stream."""
    attached = load(args.folder)
    text = (DATA / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")[:24000]
    request = StreamingRequest(
        args.fraction, sink_tokens=SINK_TOKENS, window=WINDOW, ranking=args.ranking, corpus=text, max_length=1024,
        protected_fraction=args.protected_fraction,
    )  # fmt: skip
    start = time.process_time()
    plan = hw.plan_streaming(attached, request)
    plan.save(args.out)
    return {"part": "plan", "fraction": args.fraction, "ranking": args.ranking, "protected": args.protected_fraction,
            "streaming": sum(len(rule.heads) for rule in plan.cache), "seconds": time.process_time() - start}  # fmt: skip


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes of both caches and the peak memory of a process with each."""
    result: dict[str, Any] = {"part": "memory", "length": args.length}
    for name in ("dynamic", "per head"):
        command = [sys.executable, "-m", "bench.attached_cache", "memory-of", "--folder", str(args.folder)]
        command += ["--plan", str(args.plan[0]), "--length", str(args.length), "--cache", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result[name] = json.loads(done.stdout.splitlines()[-1])
    result["bytes ratio"] = result["dynamic"]["cache bytes"] / result["per head"]["cache bytes"]
    return result


@torch.no_grad()
def measure_bytes(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the bytes of both caches after a prompt and 16 tokens, on a model with these KV heads and small weights.

    Bytes depend neither on weights nor on tokens. One query head per KV head makes long prompts fast.
    """
    config = transformers.AutoConfig.from_pretrained(args.folder)
    kv_heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    small = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=16, num_hidden_layers=config.num_hidden_layers, num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=97, max_position_embeddings=args.length + 16,
    )  # fmt: skip
    attached = hw.attach(transformers.LlamaForCausalLM(small).eval())
    result: dict[str, Any] = {"part": "bytes", "length": args.length}
    for name, make in make_caches(attached, args.plan).items():
        cache, ids = make(), torch.arange(args.length)[None] % 90 + 3
        prefill(attached.model, ids, cache)
        for _ in range(16):
            attached.model(ids[:, :1], past_key_values=cache)
        result[name] = cache_nbytes(cache)
    return result | {"ratio": result["dynamic"] / list(result.values())[-1]}


def measure_memory_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cache, in this process: a prompt and 16 tokens."""
    attached = load(args.folder)
    make = make_caches(attached, args.plan)[args.cache]
    ids, caches = wikitext(attached, "test", args.length, 1), []
    prefill(attached.model, ids[:, :600], make())  # one-time setup

    def run() -> None:
        cache = make()
        logits = prefill(attached.model, ids, cache)
        for _ in range(16):
            token = logits.argmax(-1, keepdim=True)
            with torch.no_grad():
                logits = attached.model(token, past_key_values=cache).logits[:, -1]
        caches.append(cache)

    peak = peak_memory(run)
    return {"cache bytes": cache_nbytes(caches[0]), "peak MB above loaded model": round(peak, 1)}


def measure_loss(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the loss of tokens after the first eviction with both caches."""
    attached = load(args.folder)
    caches, texts = make_caches(attached, args.plan), wikitext(attached, "test", args.length, args.texts)
    losses = {name: [] for name in caches}
    for ids in texts:
        for name, make in caches.items():
            losses[name].append(token_losses(attached.model, ids[None], make(), SINK_TOKENS + WINDOW).sum())
    return {"part": "loss", "length": args.length, "texts": args.texts} | summarize(
        losses, args.length - 1 - SINK_TOKENS - WINDOW
    )


def summarize(losses: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return mean losses per token, and the difference of each cache from the first one with its interval over texts."""
    full = np.array(losses["dynamic"])
    counts = np.full(len(full), tokens)
    result: dict[str, Any] = {"dynamic": float(full.sum() / counts.sum())}
    for name in list(losses)[1:]:
        small = np.array(losses[name])
        low, high = bootstrap_difference_interval(small, counts, full, counts)
        result[name] = {
            "loss": float(small.sum() / counts.sum()), "difference": float((small - full).sum() / counts.sum()),
            "interval": [float(low), float(high)], "per text": ((small - full) / tokens).round(4).tolist(),
        }  # fmt: skip
    return result


def measure_passkeys(args: argparse.Namespace) -> dict[str, Any]:
    """Count the pass keys that are found with both caches."""
    attached = load(args.folder)
    text = (DATA / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    cases = make_passkey_cases(attached, text[: 16 * args.length], args.length, args.count, args.seed)
    caches = make_caches(attached, args.plan)
    correct = {name: list(run_passkeys(attached, cases, make).correct) for name, make in caches.items()}
    return {"part": "passkeys", "length": args.length, "depths": [case.depth for case in cases]} | correct


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure processor time per token with both caches, taking turns."""
    attached = load(args.folder)
    ids = wikitext(attached, "test", args.length, 1)
    caches, tokens = {name: make() for name, make in make_caches(attached, args.plan).items()}, {}
    for name, cache in caches.items():
        tokens[name] = prefill(attached.model, ids, cache).argmax(-1, keepdim=True)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(args.rounds + 1):
        for name in list(caches) if turn % 2 else reversed(caches):
            start = time.process_time()
            for _ in range(DECODED):
                with torch.no_grad():
                    logits = attached.model(tokens[name], past_key_values=caches[name]).logits[:, -1]
                tokens[name] = logits.argmax(-1, keepdim=True)
            if turn:  # the first round is a warm-up
                seconds[name].append((time.process_time() - start) / DECODED)
    ratios = sorted(a / b for a, b in zip(seconds["dynamic"], seconds["per head"], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    speeds = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {"part": "speed", "length": args.length, "tokens per CPU second": speeds}
    return result | {"speed-up": middle, "quartiles": [low, high]}


def measure_continuation(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the loss of the last tokens of one text after a prompt, with one cache."""
    attached = load(args.folder)
    texts = wikitext(attached, "test", args.length, args.texts)
    if args.ids_out is not None:
        args.ids_out.write_text(json.dumps(texts.tolist()))
    make = list(make_caches(attached, args.plan).values())[-1]
    cache, ids = make(), texts[args.text][None]
    start = ids.shape[1] - CONTINUATION
    logits = prefill(attached.model, ids[:, :start], cache)
    with torch.no_grad():
        rest = attached.model(ids[:, start:-1], past_key_values=cache).logits[0]
    loss = torch.nn.functional.cross_entropy(torch.cat([logits, rest]), ids[0, start:], reduction="sum")
    return {
        "part": "continuation", "length": args.length, "text": args.text, "loss": float(loss),
        "cache": f"per head, {args.plan[0].stem}" if args.plan else "dynamic", "cache bytes": cache_nbytes(cache),
    }  # fmt: skip


def summarize_continuations(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the losses of all results of `continuation` with those of the full cache."""
    rows = [json.loads(line) for line in args.results.read_text().splitlines() if line.startswith("{")]
    rows = [row for row in rows if row["part"] == "continuation"]
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["cache"], {})[row["text"]] = row["loss"]
    nbytes = {row["cache"]: row["cache bytes"] for row in rows}
    result: dict[str, Any] = {"part": "summary"}
    for name, by_text in losses.items():
        full = losses["dynamic"]  # its losses equal those of transformers in the other environment
        texts = sorted(by_text.keys() & full.keys())
        pair = {"dynamic": [full[text] for text in texts], name: [by_text[text] for text in texts]}
        compared = {} if name.startswith("dynamic") else summarize(pair, CONTINUATION)[name]
        mean = sum(by_text.values()) / len(by_text) / CONTINUATION
        result[name] = {"texts": texts, "cache bytes": nbytes[name], "loss": mean} | compared
    return result


PARTS = {"plan": make_plan, "memory": measure_memory, "memory-of": measure_memory_of, "bytes": measure_bytes,
         "loss": measure_loss, "passkeys": measure_passkeys, "speed": measure_speed, "continuation": measure_continuation,
         "summary": summarize_continuations}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=PARTS)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--plan", type=Path, nargs="+", default=[])
    options.add_argument("--fraction", type=float, default=0.5, help="fraction of the KV heads that stream, for `plan`")
    options.add_argument("--out", type=Path)
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--texts", type=int, default=8)
    options.add_argument("--text", type=int, default=0, help="text of `continuation`")
    options.add_argument("--results", type=Path, help="file with the results of `continuation`")
    options.add_argument("--count", type=int, default=5)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--cache", default="dynamic")
    options.add_argument("--ranking", default="output")
    options.add_argument("--protected-fraction", type=float, default=0.25)
    options.add_argument(
        "--ids-out", type=Path, help="write the token ids of the texts, for bench/attached_cache_kvpress.py"
    )
    args = options.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps(PARTS[args.part](args)), flush=True)


if __name__ == "__main__":
    main()
