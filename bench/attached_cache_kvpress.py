"""kvpress' DuoAttention press on the texts and KV heads of `bench.attached_cache continuation`, without Headwise.

kvpress needs an older transformers, so this runs in an environment of its own (CPU torch, `pip install kvpress==0.5.5`):

    ENV/bin/python bench/attached_cache_kvpress.py --folder F --plan P50.json --ids ids.json --text 0

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

CONTINUATION = 128


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--folder", "--ids"):
        options.add_argument(name, type=Path, required=True)
    options.add_argument("--plan", type=Path, help="without it: the full cache")
    options.add_argument("--text", type=int, default=0)
    args = options.parse_args()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    config, press = model.config, None
    if args.plan is not None:
        press = make_press(json.loads(args.plan.read_text()), config.num_hidden_layers, config.num_key_value_heads)
    ids = torch.tensor(json.loads(args.ids.read_text()))[args.text]
    loss, nbytes = continuation(model, press, ids[None])
    print(json.dumps({
        "part": "continuation", "length": len(ids), "text": args.text, "loss": loss, "cache bytes": nbytes,
        "cache": f"kvpress, {args.plan.stem}" if args.plan else "dynamic, kvpress",
        "compression_ratio": None if press is None else press.compression_ratio, "transformers": transformers.__version__,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
