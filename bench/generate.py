"""Tokens per second of processor time while generating, one thread, batch 1, beside transformers' float32.

python -m bench.generate                      256 tokens behind 64: SmolLM2, and GPT-2 small's size with random weights
python -m bench.generate smollm2 --rounds 3   one of the two
python -m bench.generate overhead             a step of SmolLM2 with its products left out
python -m bench.generate engines --gguf F     llama.cpp (xllamacpp), where it is installed, on GGUF files
Everyone takes a turn each round; what is compared is the best round's processor time, which other work on the machine moves
least. With --out F.json each model's figures are kept, and one that is there is not done again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import headwise as hw
import headwise.heads.projections as projections
import headwise.kernels.linear as products
from bench.measure import machine
from headwise.files.whole import whole_file
from headwise.show.tables import make_table

BITS = (16, 8, 4)
PROMPT, TOKENS = 64, 256


def gpt2() -> tuple[hw.Transformer, Any]:
    """GPT-2 small's size, random weights, the same in both models."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    return _loaded(theirs), theirs


def smollm2() -> tuple[hw.Transformer, Any]:
    """SmolLM2-135M: ours, written for transformers and read by it."""
    from transformers import AutoModelForCausalLM

    ours = hw.load("smollm2")
    assert isinstance(ours, hw.Transformer)
    with tempfile.TemporaryDirectory() as folder:
        theirs = AutoModelForCausalLM.from_pretrained(ours.export(Path(folder) / "theirs"), dtype=torch.float32).eval()
        for one in theirs.parameters():
            one.data = one.data.clone()  # the folder goes away
    return ours, theirs


def _loaded(theirs: Any) -> hw.Transformer:
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hw.load(folder)
    assert isinstance(ours, hw.Transformer)
    return ours


MODELS = {"smollm2": smollm2, "gpt2": gpt2}


def bandwidth() -> float:
    """Gigabytes a second of processor time that are read, best of many: the sum of a tensor far larger than any cache."""
    big, best = torch.ones(2**26), float("inf")  # 256 MB
    for _ in range(12):
        start = time.process_time()
        big.sum()
        best = min(best, time.process_time() - start)
    return big.nbytes / best / 1e9


def compare(name: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Each contestant's best seconds for the tokens behind the prompt, the prompt itself taken off."""
    ours, theirs = MODELS[name]()
    prompt = torch.arange(PROMPT)[None] + 100
    small = {bits: hw.quantise(ours, bits) for bits in BITS}

    def others(count: int) -> Any:
        return theirs.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, use_cache=True
        )

    made: dict[str, Callable[[int], Any]] = {"transformers float32": others}
    made["headwise float32"] = lambda count: ours.generate(prompt, count)
    for bits, model in small.items():
        made[f"headwise {bits} bits"] = lambda count, model=model: model.generate(prompt, count)
    firsts: dict[str, list[float]] = {who: [] for who in made}
    wholes: dict[str, list[float]] = {who: [] for who in made}
    same: dict[str, bool] = {}
    want = others(tokens)
    for who, write in made.items():
        same[who] = torch.equal(write(tokens) if who == "headwise float32" else want, want)
    for turn in range(rounds):
        names = list(made)[turn % len(made) :] + list(made)[: turn % len(made)]
        for who in names:
            began = time.process_time()
            made[who](1)
            firsts[who].append(time.process_time() - began)
            began = time.process_time()
            made[who](tokens + 1)
            wholes[who].append(time.process_time() - began)
    seconds = {who: [(one - min(firsts[who])) / tokens for one in wholes[who]] for who in made}
    weights = sum(p.numel() * p.element_size() for p in ours.parameters()) / 1e9
    return {
        "per token": {who: min(some) for who, some in seconds.items()},
        "ratios": {
            who: sorted(b / own for b, own in zip(seconds["transformers float32"], some, strict=True))
            for who, some in seconds.items()
        },
        "same": same["headwise float32"],
        "tokens": tokens,
        "bound": bandwidth() / weights,
        "weights": weights,
        "chosen": {f"{s.outputs}×{s.inputs}, by {s.lies}": which for s, which in products.chosen().items() if s.rows == 1},
    }  # fmt: skip


def overhead(rounds: int, steps: int = 32) -> float:
    """Milliseconds of a step of SmolLM2 whose products give numbers that are there already; the best round."""
    model, there = hw.load("smollm2"), {}
    assert isinstance(model, hw.Transformer)

    def nothing(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        key = (x.shape, weight.shape[0])
        if key not in there:
            there[key] = torch.randn(*x.shape[:-1], weight.shape[0])
        return there[key]

    best, usual = float("inf"), products.linear
    products.linear = projections.linear = nothing
    try:
        for _ in range(rounds):
            cache = model.cache()
            list(model.stream(torch.arange(PROMPT)[None], 4, cache=cache))
            began = time.process_time()
            list(model.stream(torch.tensor([[5]]), steps, cache=cache))
            best = min(best, (time.process_time() - began) / steps)
    finally:
        products.linear = projections.linear = usual
    return 1e3 * best


def engine(file: Path, rounds: int, tokens: int) -> float:
    """Seconds of processor time a token takes llama.cpp, one thread, the prompt taken off."""
    import xllamacpp

    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    params.model.path, params.n_ctx, params.n_predict = str(file), 1024, tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_parallel = 1
    server, best = xllamacpp.Server(params), float("inf")  # pyright: ignore[reportAttributeAccessIssue]
    asked = {"prompt": list(range(100, 100 + PROMPT)), "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    for _ in range(rounds):
        spent = []
        for count in (1, tokens + 1):
            began = time.process_time()
            server.handle_completions({**asked, "n_predict": count, "max_tokens": count})
            spent.append(time.process_time() - began)
        best = min(best, (spent[1] - spent[0]) / tokens)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["smollm2", "gpt2"], choices=[*MODELS, "overhead", "engines"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files for llama.cpp")
    parser.add_argument("--out", type=Path, help="keep figures in this JSON file, and do not make again what is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=120)
    kept = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    for what in given.what:
        if what == "overhead":
            console.print(f"A step of SmolLM2 without its products: {overhead(given.rounds):.1f} ms; {machine()}.")
        elif what == "engines":
            for file in given.gguf:
                console.print(
                    f"llama.cpp, {file.name}: {1 / engine(file, given.rounds, given.tokens):.1f} tokens a second"
                )
        else:
            if what not in kept:
                kept[what] = compare(what, given.rounds, given.tokens)
                if given.out:
                    whole_file(given.out, json.dumps(kept, indent=1).encode())
            tell(console, what, kept[what])


def tell(console: Console, name: str, found: dict[str, Any]) -> None:
    rows = []
    for who, seconds in found["per token"].items():
        ratios, base = found["ratios"][who], found["per token"]["transformers float32"]
        spread = f"{ratios[0]:.2f} – {ratios[-1]:.2f}"
        rows.append([who, 1e3 * seconds, 1 / seconds, base / seconds, spread, 1 / seconds / found["bound"]])
    columns = ["who", "ms", "tokens/s", "times transformers", "least – most", "share of float32's bound"]
    told = f"{name}, {machine()}; weights {found['weights']:.2f} GB, bound {found['bound']:.1f} tokens/s"
    console.print(f"{told}; float32 the same tokens as transformers: {'yes' if found['same'] else 'no'}")
    console.print("products:", ", ".join(f"{shape}: {which}" for shape, which in found["chosen"].items()))
    console.print(make_table(f"Processor time, one thread, {found['tokens']} tokens behind {PROMPT}", columns, rows))


if __name__ == "__main__":
    main()
