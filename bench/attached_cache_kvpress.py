"""kvpress' DuoAttention press on the texts and KV heads of `bench.attached_cache continuation`, without Headwise.

kvpress needs an older transformers, so this runs in an environment of its own (CPU torch, `pip install kvpress==0.5.5`):

    ENV/bin/python bench/attached_cache_kvpress.py --folder F --plan P25.json P50.json P75.json --ids ids.json

The streaming KV heads are those of the plan (`load_attention_pattern` returns them instead of a downloaded pattern), with the
same sink tokens and window. The press attends to all tokens of the prompt, then hides evicted ones by replaced keys.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

CONTINUATION = 256


def process_memory(name: str) -> float:
    """Return a value of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def make_press(plan: dict[str, Any], layers: int, kv_heads: int) -> Any:
    """Return a press whose streaming KV heads are those of a plan."""
    from kvpress import DuoAttentionPress  # pyright: ignore[reportMissingImports]

    (rule,) = plan["cache"]
    scores = np.ones((layers, kv_heads))
    for head in rule["heads"]:
        layer, number = map(int, head.split("."))
        scores[layer, number] = 0
    policy = rule["policy"]

    class PlanPress(DuoAttentionPress):
        """Press with the KV heads of the plan."""

        @staticmethod
        def load_attention_pattern(model: Any) -> Any:
            return policy["sink_tokens"], policy["window"], scores

    return PlanPress(head_compression_ratio=float((scores == 0).mean()))


@torch.no_grad()
def continuation(model: Any, press: Any, ids: torch.Tensor) -> tuple[float, int]:
    """Return the summed loss of the last tokens of a text, (1, T), and the bytes of the cache."""
    start, cache = ids.shape[1] - CONTINUATION, transformers.DynamicCache()
    if press is None:
        logits = model(ids[:, :start], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    else:
        with press(model):
            logits = model(ids[:, :start], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    loss = 0.0
    for position in range(start, ids.shape[1]):
        loss += float(torch.nn.functional.cross_entropy(logits, ids[:, position]))
        logits = model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1]
    layers: list[Any] = cache.layers
    tensors = [x for layer in layers for x in (layer.keys, layer.values)]
    return loss, sum(x.numel() * x.element_size() for x in tensors)


def bootstrap_interval(differences: np.ndarray) -> list[float]:
    """Return the 95% bootstrap interval of a mean over texts."""
    rows = np.random.default_rng(0).integers(0, len(differences), (2000, len(differences)))
    return np.quantile(differences[rows].mean(1), (0.025, 0.975)).tolist()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--folder", "--ids"):
        options.add_argument(name, type=Path, required=True)
    options.add_argument("--plan", type=Path, nargs="+", required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    config = model.config
    presses: dict[str, Any] = {"dynamic": None}
    for plan in args.plan:
        presses[plan.stem] = make_press(
            json.loads(plan.read_text()), config.num_hidden_layers, config.num_key_value_heads
        )
    texts = torch.tensor(json.loads(args.ids.read_text()))
    losses: dict[str, list[float]] = {}
    results: dict[str, Any] = {}
    for name, press in presses.items():
        Path("/proc/self/clear_refs").write_text("5")
        before, nbytes = process_memory("VmRSS"), 0
        losses[name] = []
        for ids in texts:
            loss, nbytes = continuation(model, press, ids[None])
            losses[name].append(loss)
        difference = (np.array(losses[name]) - np.array(losses["dynamic"])) / CONTINUATION
        results[name] = {
            "compression_ratio": None if press is None else press.compression_ratio, "cache bytes": nbytes,
            "peak MB above loaded model": round(process_memory("VmHWM") - before, 1),
            "loss": float(np.mean(losses[name])) / CONTINUATION, "difference": float(difference.mean()),
            "interval": bootstrap_interval(difference), "per text": difference.round(4).tolist(),
        }  # fmt: skip
    print(json.dumps({"part": "kvpress", "transformers": transformers.__version__, "texts": len(texts)} | results))


if __name__ == "__main__":
    main()
