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
import headwise.kernels.autotuned_linear as products
from bench import engines
from bench.measure import machine
from headwise.io.atomic_write import whole_file
from headwise.ui.tables import make_table

BITS = (16, 8, 4)
PROMPT, TOKENS = 64, 256
IDS = list(range(100, 100 + PROMPT))


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


def turn(write: Callable[[int], Any], tokens: int) -> float:
    """Seconds of processor time a token behind the prompt takes, the prompt itself taken off."""
    began = time.process_time()
    write(1)
    first = time.process_time() - began
    write(tokens + 1)
    return (time.process_time() - began - 2 * first) / tokens


def compare(name: str, rounds: int, tokens: int, others: dict[str, Callable[[], float]]) -> dict[str, Any]:
    """Each contestant's best seconds, and in each round how many times as quick as transformers."""
    ours, theirs = MODELS[name]()
    prompt = torch.tensor([IDS])

    def elsewhere(count: int) -> Any:
        return theirs.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, use_cache=True
        )

    made: dict[str, Callable[[int], Any]] = {"transformers float32": elsewhere}
    made["headwise float32"] = lambda count: ours.generate(prompt, count)
    for bits in BITS:
        made[f"headwise {bits} bits"] = partial(hw.quantise(ours, bits).generate, prompt)
    same = torch.equal(made["headwise float32"](64), elsewhere(64))
    for write in made.values():
        write(2)  # products are chosen, forms made
    turns = {who: partial(turn, write, tokens) for who, write in made.items()} | others
    seconds: dict[str, list[float]] = {who: [] for who in turns}
    for number in range(rounds):
        names = list(turns)[number % len(turns) :] + list(turns)[: number % len(turns)]
        for who in names:
            seconds[who].append(turns[who]())
            print(f"round {number + 1}, {who}: {1e3 * seconds[who][-1]:.1f} ms a token", file=sys.stderr, flush=True)
    weights = sum(p.numel() * p.element_size() for p in ours.parameters()) / 1e9
    return {
        "per token": {who: min(some) for who, some in seconds.items()},
        "ratios": {
            who: sorted(b / own for b, own in zip(seconds["transformers float32"], some, strict=True))
            for who, some in seconds.items()
        },
        "same": same,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=["smollm2", "gpt2", "overhead"], choices=[*MODELS, "overhead", "engines"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--folder", type=Path, help="where other engines and their models lie, or are put")
    parser.add_argument("--out", type=Path, help="keep figures in this JSON file, and do not make again what is there")
    given = parser.parse_args()
    if "engines" in given.what and given.folder is None:
        parser.error("engines are installed somewhere: give --folder")
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=120)
    kept = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    for what in given.what:
        if what not in kept:
            if what == "overhead":
                kept[what] = overhead(given.rounds)
            else:
                there = engines.ready(given.folder) if what == "engines" else {}
                others = {name: partial(engines.seconds, one, IDS, given.tokens) for name, one in there.items()}
                kept[what] = compare("smollm2" if there else what, given.rounds, given.tokens, others)
            if given.out:
                whole_file(given.out, json.dumps(kept, indent=1).encode())
        if what == "overhead":
            console.print(f"A step of SmolLM2 without its products: {kept[what]:.1f} ms; {machine()}.")
        else:
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
