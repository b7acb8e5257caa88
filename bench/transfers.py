"""Device-to-host copies per batch and layer of analysis, and per token of generation, on a pretend device.

python -m bench.transfers
python -m bench.transfers --sites profile    the lines of the package that copy

After each copy the host waits for the device, so copies cost more than the numbers that they carry. The pretend device
computes on the CPU and counts the copies of this package and of the model: `.cpu()`, `.item()`, `.tolist()`, comparisons that
return one value, and operations whose result has a size that depends on the data (`nonzero`, an index that is a mask).
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

import headwise as hw
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.synthetic import VOCABULARY
from headwise.ui.terminal_table import make_table
from tests.devices.pretend_device import DeviceState, pretend_device

LAYERS, TEXTS, TOKENS = 6, 12, 8
TOKENIZER = word_tokenizer(VOCABULARY)
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": len(TOKENIZER), "max_position_embeddings": 256,
}  # fmt: skip
GENERATIONS = {
    "generate": {},
    "generate, sampled": {"temperature": 1.0, "seed": 3},
    "generate, per-head cache": {"plan": hw.CachePolicy(sink_tokens=1, window=4)},
    "generate, 8-bit cache": {"plan": hw.CachePolicy(bits=8)},
}


@dataclass(frozen=True)
class TransferCount:
    """Copies of one function, and the number of attention calls or tokens that they belong to."""

    copies: int
    units: int
    unit: str
    sites: dict[str, int]

    @property
    def ratio(self) -> float:
        """Copies per attention call, or per token after the first."""
        return self.copies / self.units


def make_model(name: str) -> Any:
    """Return a model of six layers on the pretend device."""
    torch.manual_seed(0)
    if name == "native":
        attention = hw.AttentionSpec(width=16, heads=4, kv_heads=2)
        model: Any = hw.Transformer(hw.ModelSpec(vocab=len(TOKENIZER), context=256, layers=LAYERS, attention=attention))
        model = model.eval().to("pretend")
        model.tokenizer = TOKENIZER
        return model
    import transformers

    llama: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    return hw.attach(llama.to("pretend"), TOKENIZER)


def functions(texts: list[Any]) -> dict[str, Callable[[Any], object]]:
    """Return the functions that read a corpus in batches."""
    plain = [document.text for document in texts]
    return {
        "profile": lambda model: hw.profile(model, plain, relations=False, causal=False),
        "profile, relations": lambda model: hw.profile(model, plain, relations=texts, causal=False),
        "profile, prompts": lambda model: hw.profile(model, plain, relations=False, prompts=True, causal=False),
        "importance": lambda model: hw.importance(model, plain),
        "importance, gradient": lambda model: hw.importance(model, plain, ranking="gradient"),
        "compare_heads": lambda model: hw.compare_heads(model, plain, rows=64),
    }


def count_per_call(device: DeviceState, model: Any, function: Callable[[Any], object]) -> TransferCount:
    """Count the copies of a function and the attention calls in it."""
    calls = 0

    def count(_: object) -> None:
        nonlocal calls
        calls += 1

    with ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(count))
        device.reset_counts()
        function(model)
    return TransferCount(device.transfers, max(1, calls), "batch and layer", dict(device.sites))


def count_per_token(device: DeviceState, model: Any, options: dict[str, Any]) -> TransferCount:
    """Count the copies that `TOKENS` more tokens cause."""
    counts, sites = [], {}
    for tokens in (TOKENS, 2 * TOKENS):
        device.reset_counts()
        arguments = dict(options)
        policy = arguments.pop("plan", None)
        if policy is not None:
            arguments["cache"] = model.cache(hw.plan_pruning(model, cache={"*.0": policy}))
            device.reset_counts()
        model.generate(torch.tensor([[3, 4, 5]]).to("pretend"), max_new_tokens=tokens, **arguments)
        counts.append(device.transfers)
        sites = dict(device.sites)
    return TransferCount(counts[1] - counts[0], TOKENS, "token", sites)


def measure(device: DeviceState, name: str, selected: str = "") -> dict[str, TransferCount]:
    """Count the copies of every function on one model, or of one function."""
    texts = list(hw.Corpus.synthetic("held-out", documents=TEXTS, seed=3).items())
    counts = {
        label: count_per_call(device, make_model(name), function)
        for label, function in functions(texts).items()
        if selected in ("", label)
    }
    for label, options in GENERATIONS.items():
        if selected in ("", label) and not (name != "native" and "plan" in options):
            counts[label] = count_per_token(device, make_model(name), options)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="", help="print the lines that copy in one function")
    options = parser.parse_args()
    console = Console(width=120)
    rows = []
    for name in ("native", "attached Llama"):
        for float64 in (True, False):
            with pretend_device(float64=float64) as device:
                counts = measure(device, name, options.sites)
            kind = "allowed" if float64 else "forbidden"
            for label, count in counts.items():
                rows.append((name, kind, label, count.copies, count.units, f"{count.ratio:.2f}", count.unit))
                if options.sites:
                    for site, copies in sorted(count.sites.items(), key=lambda item: -item[1]):
                        console.print(f"{name}, float64 {kind}: {copies:5} {site}", highlight=False)
    columns = ["model", "float64", "function", "copies", "units", "copies per unit", "unit"]
    console.print(make_table(f"Copies from the device to the host; {LAYERS} layers, {TEXTS} texts", columns, rows))


if __name__ == "__main__":
    main()
