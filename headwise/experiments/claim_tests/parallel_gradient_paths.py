"""Concatenated heads are parallel paths for gradients, like the branches of a grouped convolution."""

import copy
from itertools import chain, islice
from typing import Any

import torch

from headwise.analysis import TokenizedCorpus, default_corpus
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.gradient_independence import (
    convolution_branches,
    head_branches,
    measure_gradient_independence,
)
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol, Transformer
from headwise.spec import AttentionSpec, ModelSpec

TOLERANCE = 1e-9  # relative rounding error in float64
SHARED_KEYS = "heads, shared keys"
KINDS: dict[str, dict[str, Any]] = {  # kinds of layers
    "heads": {},
    "heads, sliced input": {"head_input": "slice"},
    SHARED_KEYS: {"kv_heads": 2},
}
CONVOLUTION = "grouped convolution"
TOKENS = 12  # tokens per text


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure small untrained layers of several kinds, and a grouped convolution, in float64."""
    results: dict[str, list[dict[str, float]]] = {}
    for seed in experiment.seeds:
        for kind, fields in KINDS.items():
            torch.manual_seed(seed)
            spec = ModelSpec(vocab=13, context=8, layers=1, attention=AttentionSpec(width=24, heads=4, **fields))
            model = Transformer(spec).double()
            layer = next(model.attention_layers())
            ids = torch.randint(13, (1, 6))
            results.setdefault(kind, []).append(measure_gradient_independence(head_branches(model, layer, ids), seed))
        results.setdefault(CONVOLUTION, []).append(
            measure_gradient_independence(convolution_branches(24, 4, 6, seed), seed)
        )
    return _summarize(results)


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure three layers of a float64 copy of the model on the start of a text, and a grouped convolution."""
    model_copy: Any = copy.deepcopy(model).eval()
    model_copy.double().requires_grad_(True)
    corpus = TokenizedCorpus.of(model_copy, default_corpus(model_copy) if text is None else text)
    ids = torch.tensor(
        [list(islice(chain.from_iterable(sample.ids for sample in corpus), TOKENS))], device=model_copy.device
    )
    results: dict[str, list[dict[str, float]]] = {}
    layers = [layer for layer in model_copy.attention_layers() if layer.spec.head_ids]
    for index in sorted({0, len(layers) // 2, len(layers) - 1}):
        layer = layers[index]
        kv_of_head = layer.spec.kv_of_head
        kind = SHARED_KEYS if len(set(kv_of_head)) < len(kv_of_head) else "heads"
        results.setdefault(kind, []).append(measure_gradient_independence(head_branches(model_copy, layer, ids)))
    results[CONVOLUTION] = [measure_gradient_independence(convolution_branches(24, 4, 6))]
    return _summarize(results)


def _summarize(results: dict[str, list[dict[str, float]]]) -> StatisticTable:
    statistics = StatisticTable()
    for kind, entries in results.items():
        for name in entries[0]:
            statistics.add(name, kind, [entry[name] for entry in entries])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    leftover, moved = (
        {str(k): max(statistic.values) for k, statistic in statistics.by_condition(name).items()}
        for name in ("left over", "moved by others")
    )
    independent = [kind for kind in moved if kind not in (SHARED_KEYS, CONVOLUTION)]
    if not max(leftover.values()) <= TOLERANCE or any(
        not moved[kind] <= TOLERANCE for kind in (*independent, CONVOLUTION)
    ):
        return Verdict("does not hold", "which contradicts the chain rule: the code is wrong")
    if not independent:
        return Verdict("does not hold", "because heads share keys and values, by construction too")
    if SHARED_KEYS not in moved:
        return Verdict("true by construction")
    details = f"if they share keys, paths are coupled ({moved[SHARED_KEYS]:.2g} of a gradient), by construction too"
    return Verdict("true by construction", f"for heads with weights of their own; {details}")


CLAIM = Claim(
    number=25,
    name="jacobians",
    statement="Concatenated heads are parallel paths for gradients, like the branches of a grouped convolution.",
    counterevidence="A layer whose Jacobian is not the sum of its heads' Jacobians, or heads whose gradients depend on the "
    "weights of other heads.",
    setup="Layers with 4 heads of several kinds, and a grouped convolution with 4 branches, in float64: the full Jacobian "
    "minus the sum of the branch Jacobians, the change of a branch's own gradient when all other branches are resampled "
    "(with a fixed output gradient and through a squared loss), and the fraction of input channels that a branch reads.",
    rule=f"True by construction if, within {TOLERANCE:g}, the Jacobians add up and no head with separate weights changes "
    "its gradient at a fixed output gradient. Does not hold if one of these fails, or if the heads of every layer share "
    "keys. The change through a loss and the channels read are reported but not judged: a head reads every channel, a "
    "branch only its own.",
    identity="a layer is a sum over heads, and the derivative of a sum is the sum of derivatives",
    possible_verdicts=("true by construction", "does not hold"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("moved by others", "moved through a loss", "channels read"), y="share"),
    measure_model=measure_model,
)
