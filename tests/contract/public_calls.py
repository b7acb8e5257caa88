"""A call of each public function that `functions.py` leaves out, for tests on the pretend device and under autocast.

`PUBLIC_CALLS` has one call per public name. `NO_DEVICE` and `TESTED_ELSEWHERE` list the other names, each with a reason.
`tests/devices/test_coverage.py` compares all of them with `hw.__all__`.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise as hw
from headwise.compression import PruneRequest
from headwise.kernels import Mask
from headwise.model import eval_mode
from tests.contract.attached_models import TEXTS, TOKENIZER, WORDS, batch, logits, sample_heads
from tests.contract.functions import ModelFunction, corpus

POLICIES = {"*.0": hw.CachePolicy(sink_tokens=1, window=3)}
NO_DEVICE = {
    "HeadwiseError": "an exception",
    "Address": "data", "AttentionSpec": "data", "CachePolicy": "data", "ModelSpec": "data", "Plan": "data",
    "Rotary": "data", "RotaryScaling": "data", "Latent": "data", "QKNorm": "data", "QueryScaling": "data",
    "preset": "returns a spec", "presets": "returns specs", "Recipe": "data",
    "Role": "data", "layout": "estimates from a spec", "Corpus": "text", "Tokenizer": "text",
    "Profile": "arrays on the host", "Scan": "numbers on the host",
    "shard": "needs a process group, and torch has none for a device made in Python; gloo runs it in tests/distributed",
}  # fmt: skip
TESTED_ELSEWHERE = {"selftest": "test_selftest.py"}
EXPENSIVE = {"export, onnx", "export, transformers", "export, torch", "describe"}  # in the slow grid only


def _tensor(*shape: int, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, int(np.prod(shape))).sin().reshape(shape).to(device)


def _ids(model: Any) -> Tensor:
    return batch("decoder")["ids"].to(model.device)


def _first(model: Any, head: Any = None) -> str:
    return str(sample_heads(model)[0] if head is None else head)


def _attention(device: torch.device, mask: Mask | None = None) -> Tensor:
    q, k, v = (_tensor(2, 2, 5, 4, device=device) + shift for shift in (0.0, 0.3, 0.7))
    return hw.attention(q, k, v, mask=mask)


def _layer(device: torch.device) -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(width=12, heads=3).to(device)


def _to_torch(model: Any, name: str) -> list[Tensor]:
    module = hw.to_torch(_layer(model.device))
    x = _tensor(2, 5, 12, device=model.device)
    return [module(x, x, x)[0], hw.from_torch(module)(x)]


def _to_native(model: Any, name: str) -> Tensor:
    return logits(hw.to_native(model).eval(), batch(name))


def _record(model: Any, name: str) -> list[Tensor]:
    with hw.record(model, _first(model)) as recording, torch.no_grad(), eval_mode(model):
        logits(model, batch(name))
    head = recording[_first(model)]
    return [head.q, head.k, head.v, head.z, head.output, head.map()]


def _metric(model: Any, metric: Any) -> np.ndarray:
    return hw.profile(model, TEXTS, relations=False, metrics=[metric], causal=False).metric(metric.names[0])


def _describe(model: Any, name: str) -> list[float]:
    text = " ".join(line.text for line in hw.describe(model, _first(model), TEXTS, store=False).lines)
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def _examples() -> list[dict[str, Any]]:
    rows, words = np.random.default_rng(0), [word for word in WORDS if word != "."]
    texts = [rows.permutation(words)[:6] for _ in range(14)]
    return [{"text": " ".join(text), "pairs": [[4, 1], [3, 0]]} for text in texts]


def _find_heads(model: Any, name: str) -> list[float]:
    return [score.score for score in hw.find_heads(model, _examples()).heads]


def _steering(model: Any) -> hw.Steering:
    size = model.heads[_first(model)].layer.spec.value_dim
    return hw.Steering({_first(model): torch.linspace(-1, 1, size)}).for_model(model)


def _steered(model: Any, name: str) -> Tensor:
    with _steering(model).applied(model), torch.no_grad(), eval_mode(model):
        return logits(model, batch(name))


def _find_steering(model: Any, name: str) -> list[float]:
    positive = [f"the {word} cat saw a red dog" for word in WORDS[:9]]
    negative = [f"the {word} man ran and sat ." for word in WORDS[:9]]
    result = hw.find_steering(
        model, positive, negative, num_heads=2, num_random=2, strengths=(1.0,), max_kl=99.0, corpus=TEXTS, max_texts=2
    )
    return [result.effect.mean, *result.random_effects]


def _evaluate(model: Any, name: str) -> list[float]:
    result = hw.evaluate(model, max_items=6, progress=False)
    return [metric.value for metric in result.metrics]


def _harness_model(model: Any, name: str) -> list[Any]:
    from lm_eval.api.instance import Instance

    harness = hw.HarnessModel(model)
    requests = [Instance("loglikelihood", {}, (TEXTS[0], " the dog"), 0)]
    return [harness.loglikelihood(requests)[0][0]]


def _circuit_task() -> hw.CircuitTask:
    rows, words = np.random.default_rng(0), [word for word in WORDS if word != "."]
    texts = [rows.permutation(words)[:4] for _ in range(8)]
    prompts: Any = [
        {
            "clean": f"{a} {b} {c} {a}",
            "corrupted": f"{a} {d} {c} {a}",
            "right": f" {b}",
            "wrong": f" {d}",
            "template": str(i % 4),
        }
        for i, (a, b, c, d) in enumerate(texts)
    ]
    return hw.CircuitTask("recall", prompts)


def _find_circuit(model: Any, name: str) -> Any:
    options: Any = {"random_sets": 3, "min_accuracy": 0.0, "alternative": False, "progress": False}
    return hw.find_circuit(model, _circuit_task(), 3, **options).to_dict()


def _redundancy(model: Any, name: str) -> Any:
    return hw.redundancy(model, _circuit_task(), "0.0,1.1", progress=False)


def _path_patched(model: Any, name: str) -> Tensor:
    other = _ids(model)[:1].flip(1)
    with hw.patched(model, path=("0.1", "1.0.k"), other=other), eval_mode(model):
        return logits(model, {"ids": _ids(model)[:1]})


def _per_head_cache(model: Any, name: str) -> Tensor:
    cache = hw.per_head_cache(model, POLICIES)
    return model.generate(_ids(model), max_new_tokens=4, past_key_values=cache)


def _cached(model: Any, name: str) -> Tensor:
    with hw.cached(model, POLICIES):
        return model.generate(_ids(model), max_new_tokens=4)


def _apply(model: Any, name: str) -> Tensor:
    return logits(
        hw.apply(hw.plan_pruning(model, PruneRequest(heads=_first(model), corpus=corpus(name))), model).eval(),
        batch(name),
    )


def _quantized(model: Any, name: str) -> Tensor:
    with hw.quantized(model, 8), torch.no_grad():
        return logits(model, batch(name))


def _dequantize(model: Any, name: str) -> Tensor:
    return logits(hw.dequantize(hw.quantize(model, 8)).eval(), batch(name))


def _allocate_bits(model: Any, name: str) -> Any:
    costs = hw.sensitivity(model, corpus(name), heads="*", bits=(8, 4), parts=("qk", "vo"))
    return hw.allocate_bits(model, costs, mean_bits=6, choices=(8, 4))


def _load(model: Any, name: str) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        return logits(hw.load(Path(folder) / "model", device=model.device).eval(), batch(name))


SUFFIXES = {"torch": "pt2"}
OPTIONS: dict[str, Any] = {"gguf": {"tokenizer": False}}


def _export(to: str) -> ModelFunction:
    def run(model: Any, name: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path, options = Path(folder) / f"model.{SUFFIXES.get(to, to)}", OPTIONS.get(to, {})
            return hw.export(model, path, to=to, check=True, **options).parity

    return run


def _spec() -> hw.ModelSpec:
    attention = hw.AttentionSpec(width=12, heads=3)
    return hw.ModelSpec(vocab=len(TOKENIZER), context=48, layers=1, mlp_width=16, attention=attention)


RECIPE: Any = {"steps": 2, "batch_size": 2, "seed": 1, "warmup": 0}


def _train(model: Any, name: str) -> list[float]:
    recipe = hw.Recipe(**RECIPE)
    result = hw.train(_spec(), TEXTS * 8, recipe, tokenizer=TOKENIZER, device=model.device, progress=False)
    return [float(weight.detach().cpu().double().square().sum()) for weight in result.model.parameters()]


def _distill(model: Any, name: str) -> list[float]:
    recipe = hw.Recipe(**RECIPE)
    result = hw.distill(_spec(), model, TEXTS * 8, recipe, device=model.device, progress=False)
    return [float(weight.detach().cpu().double().square().sum()) for weight in result.model.parameters()]


PUBLIC_CALLS: dict[str, ModelFunction] = {
    "attention": lambda model, name: _attention(model.device),
    "Mask": lambda model, name: _attention(
        model.device, Mask.of((torch.arange(25).reshape(5, 5) % 3 > 0).to(model.device))
    ),
    "causal": lambda model, name: _attention(model.device, hw.causal()),
    "window": lambda model, name: _attention(model.device, hw.window(2) & hw.causal()),
    "document_mask": lambda model, name: _attention(
        model.device, hw.document_mask(torch.tensor([[0, 0, 1, 1, 1]]).to(model.device))
    ),
    "padding_mask": lambda model, name: _attention(
        model.device, hw.padding_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool().to(model.device))
    ),
    "per_head": lambda model, name: _attention(model.device, hw.per_head([hw.causal(), hw.window(3)])),
    "MultiHeadAttention": lambda model, name: _layer(model.device)(_tensor(2, 5, 12, device=model.device)),
    "to_torch": _to_torch,
    "from_torch": _to_torch,
    "Transformer": lambda model, name: logits(model, batch(name, "right")),
    "attach": lambda model, name: logits(model, batch(name, "right")),  # attached by the fixture, on the device
    "to_native": _to_native,
    "embed": lambda model, name: hw.embed(model, TEXTS),
    "load": _load,
    "export, transformers": _export("transformers"),
    "export, gguf": _export("gguf"),
    "export, onnx": _export("onnx"),
    "export, torch": _export("torch"),
    "train": _train,
    "distill": _distill,
    "TokenizedCorpus": lambda model, name: hw.importance(model, hw.TokenizedCorpus.of(model, TEXTS)),
    "record": _record,
    "AttentionToPosition": lambda model, name: _metric(
        model, hw.AttentionToPosition("second", lambda sample: [1] * len(sample.ids))
    ),
    "AttentionToTokens": lambda model, name: _metric(
        model, hw.AttentionToTokens("the", lambda sample: [token == "the" for token in sample.token_texts])
    ),
    "Head": lambda model, name: [
        model.heads[_first(model)].OV.dense(),
        model.heads[_first(model)].QK.singular_values(),
    ],
    "Heads": lambda model, name: [*model.heads[f"{_first(model)[0]}.*"].gates(0.5).values()],
    "describe": _describe,
    "explain": lambda model, name: hw.explain(model, TEXTS[1], _first(model), query=4).pair_scores,
    "find_heads": _find_heads,
    "find_circuit": _find_circuit,
    "CircuitTask": lambda model, name: hw.redundancy(model, _circuit_task(), "0.1", ablation="zero", progress=False),
    "redundancy": _redundancy,
    "patched, path": _path_patched,
    "HarnessModel": _harness_model,
    "evaluate": _evaluate,
    "Steering": _steered,
    "find_steering": _find_steering,
    "fold_steering": lambda model, name: logits(hw.fold_steering(model, _steering(model)).eval(), batch(name)),
    "per_head_cache": _per_head_cache,
    "cached": _cached,
    "apply": _apply,
    "quantized": _quantized,
    "dequantize": _dequantize,
    "allocate_bits": _allocate_bits,
    "generate, sampled": lambda model, name: model.generate(_ids(model), max_new_tokens=4, temperature=1.0, seed=2),
}
