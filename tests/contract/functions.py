"""Every function that analyzes a model or changes a copy of it, as one call on any model of the contract suite."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.recorded_head_outputs import mean_activations, record_z
from headwise.analysis.attribution.head_output_scores import (
    output_shares,
    ov_eigenvalue_scores,
    token_effects,
    value_weighted_map,
)
from headwise.analysis.attribution.linear_probes import linear_probe
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.metrics.retrieval import RetrievalMetric
from headwise.analysis.metrics.variability import variability
from headwise.analysis.roles.best_relation_heads import best_coreference_head
from headwise.compression import PruneRequest, PruneStudy, StreamingRequest
from headwise.compression.l0_gates import learn_gates
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.paired_timing import PairedTiming
from headwise.compression.plan_report import report
from headwise.compression.pruning_curve import pruning_curve
from headwise.compression.recovery_finetune import recover
from headwise.model import eval_mode
from headwise.spec import Address
from headwise.text.annotated_document import Document, Relation
from headwise.text.annotated_documents import GAPExample
from headwise.text.corpus import TextPair
from tests.contract.attached_models import ENCODER_DECODERS, TEXTS, batch, logits, sample_heads

GOLD = [
    Document.of(words, [Relation("det", i + 1, i) for i, word in enumerate(words[:-1]) if word in ("the", "a")])
    for words in (text.split() for text in TEXTS)
]
PRONOUNS = [
    GAPExample(Document.of(text.split()), pronoun=5, a=(1,), b=(3,), answer="AB"[index % 2])
    for index, text in enumerate(TEXTS)
]
ModelFunction = Callable[[Any, str], object]


def corpus(name: str) -> list[Any]:
    """Return texts, or pairs of texts for an encoder-decoder."""
    return (
        [TextPair(text, other) for text, other in zip(TEXTS, TEXTS[::-1], strict=True)]
        if name in ENCODER_DECODERS
        else TEXTS
    )


def _head(model: Any) -> str:
    return str(sample_heads(model)[0])


def _logits_within(model: Any, name: str, context: AbstractContextManager[Any]) -> Tensor:
    """Return the logits inside a context that changes heads. The test runs the forward pass, so it sets evaluation mode."""
    with context, eval_mode(model):
        return logits(model, batch(name))


def _other_run(model: Any, name: str) -> Any:
    """Return head outputs on other texts with the same number of tokens."""
    inputs: dict[str, Any] = {part: ids.flip(0).to(model.device) for part, ids in batch(name).items()}
    return record_z(model, **inputs)


def _maps(model: Any, name: str) -> list[Tensor]:
    view = hw.attention_maps(model, TEXTS[0], source=TEXTS[1] if name in ENCODER_DECODERS else None)
    return [view.map(head) for head in view.heads]


def _z(model: Any, inputs: dict[str, Any]) -> object:
    return record_z(model, **{part: ids.to(model.device) for part, ids in inputs.items()}).z


def _scan(model: Any, name: str) -> list[float]:
    result = hw.scan(model, TEXTS[0], source=TEXTS[1] if name in ENCODER_DECODERS else None, max_heads=4)
    return [result.loss, *(head.loss for head in result.heads), *(item.probability for item in result.layers)]


def _means(profile: hw.Profile) -> list[np.ndarray]:
    return [profile.metric(metric) for metric in profile.accumulator.fields]


ANALYSIS_FUNCTIONS: dict[str, ModelFunction] = {
    "attention_maps": _maps,
    "profile": lambda model, name: _means(
        hw.profile(model, TEXTS, relations=GOLD, metrics=[RetrievalMetric()], causal=False)
    ),
    "profile, prompts": lambda model, name: _means(
        hw.profile(model, TEXTS, relations=False, prompts=True, causal=False)
    ),
    "compare_heads": lambda model, name: hw.compare_heads(model, TEXTS, rows=24),
    "match_heads": lambda model, name: hw.match_heads(model, model, TEXTS),
    "variability": lambda model, name: variability(model, TEXTS, length=5),
    "importance": lambda model, name: hw.importance(model, corpus(name)),
    "importance, resample": lambda model, name: hw.importance(model, corpus(name), ablation="resample"),
    "importance, gradient": lambda model, name: hw.importance(model, corpus(name), ranking="gradient"),
    "importance, attribution": lambda model, name: hw.importance(
        model, corpus(name), ranking="attribution", check_heads=2
    ),
    "sensitivity": lambda model, name: hw.sensitivity(model, corpus(name), heads=_head(model)),
    "mean_activations": lambda model, name: mean_activations(model, corpus(name)),
    "record_z": lambda model, name: _z(model, batch(name)),
    "ablated": lambda model, name: _logits_within(model, name, hw.ablated(model, _head(model), corpus=corpus(name))),
    "patched": lambda model, name: _logits_within(
        model, name, hw.patched(model, _head(model), _other_run(model, name))
    ),
    "linear_probe": lambda model, name: linear_probe(model, TEXTS * 4, targets="position"),
    "scan": _scan,
    "logit_attribution": lambda model, name: logit_attribution(model, TEXTS[0], 3).parts,
    "ov_eigenvalue_scores": lambda model, name: ov_eigenvalue_scores(model),
    "token_effects": lambda model, name: token_effects(model, _head(model), TEXTS[0]),
    "value_weighted_map": lambda model, name: (
        value_weighted_map(
            model, TEXTS[0], _head(model), source=TEXTS[1] if name in ENCODER_DECODERS else None
        ).weighted
    ),
    "output_shares": lambda model, name: output_shares(model, TEXTS),
    "coreference": lambda model, name: best_coreference_head(model, PRONOUNS),
    "HeadHistory": lambda model, name: _history(model),
}
COMPRESSION_FUNCTIONS: dict[str, ModelFunction] = {
    "prune": lambda model, name: logits(hw.prune(model, heads=_head(model), corpus=corpus(name)).eval(), batch(name)),
    "plan_pruning": lambda model, name: hw.plan_pruning(model, PruneRequest(keep=0.5, corpus=corpus(name))).head_scores,
    "plan_pruning, gradient": lambda model, name: hw.plan_pruning(
        model, PruneRequest(keep=0.5, ranking="gradient", corpus=corpus(name))
    ).head_scores,
    "learn_gates": lambda model, name: learn_gates(model, corpus(name), keep=0.5, steps=2),
    "PairedEvaluator": lambda model, name: PairedEvaluator.of(model, corpus(name)).full_losses_per_text,
    "report": lambda model, name: report(
        model, model.prune(_head(model)), corpus(name), seeds=1, repeats=1, length=8
    ),
    "curve": lambda model, name: pruning_curve(
        model, corpus(name), keep_fractions=(0.5,), rankings=("gradient", "random"), seeds=1
    ),
    "prune_study": lambda model, name: hw.prune_study(
        model, PruneStudy(PruneRequest(keep=0.5, ranking="gradient", corpus=corpus(name)), seeds=1, max_length=16)
    ).report,
    "quantize": lambda model, name: logits(hw.quantize(model, 8).eval(), batch(name)),
    "plan_streaming": lambda model, name: hw.plan_streaming(
        model, StreamingRequest(0.5, sink_tokens=1, window=2, corpus=" ".join(TEXTS * 3))
    ).cache,
    "recover": lambda model, name: recover(
        copy.deepcopy(model), corpus(name), steps=1, batch_size=2, rows="texts", holdout=0.0, progress=False
    ).loss,
}  # fmt: skip
FUNCTIONS = ANALYSIS_FUNCTIONS | COMPRESSION_FUNCTIONS


def _history(model: Any) -> object:
    history = hw.HeadHistory(GOLD)
    history(model, 0)
    return history.values


def flatten_numbers(value: Any) -> list[float]:
    """Return all numbers of a result in order, without timings."""
    return list(_iter_numbers(value))


def _iter_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Tensor):
        yield from value.detach().cpu().double().flatten().tolist()
    elif isinstance(value, np.ndarray):
        yield from value.astype(float).ravel().tolist() if value.dtype.kind in "fiub" else ()
    elif isinstance(value, bool | int | float):
        yield float(value)
    elif isinstance(value, Mapping):
        for key in value:
            yield from _iter_numbers(value[key])
    elif isinstance(value, str | Address | PairedTiming) or value is None:
        return
    elif is_dataclass(value):
        for field in fields(value):
            yield from _iter_numbers(getattr(value, field.name))
    elif isinstance(value, Sequence | set | frozenset):
        for item in value:
            yield from _iter_numbers(item)
