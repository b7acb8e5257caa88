"""Every verb that looks at a model or changes a copy of it, as one call on any model of the contract suite, and what it gives
as plain numbers."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.head_outputs import mean_activations, record_z
from headwise.analysis.attribution.linear_probes import decodable
from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.attribution.ov_analysis import copying, value_weighted, vocabulary, write_share
from headwise.analysis.metrics.retrieval import Retrieval
from headwise.analysis.metrics.variability import variability
from headwise.analysis.roles.best_heads import coreference
from headwise.compression.curve import curve
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.l0_gates import learn_gates
from headwise.compression.recovery import heal
from headwise.compression.report import report
from headwise.compression.timing import Timing
from headwise.model import quiet
from headwise.spec import Address
from headwise.text.corpus import Pair
from headwise.text.documents import Document, Relation
from headwise.text.treebank import Pronoun
from tests.contract.attached_models import PAIRED, TEXTS, batch, logits, some_heads

GOLD = [
    Document.of(words, [Relation("det", i + 1, i) for i, word in enumerate(words[:-1]) if word in ("the", "a")])
    for words in (text.split() for text in TEXTS)
]
CASES = [
    Pronoun(Document.of(text.split()), pronoun=5, a=(1,), b=(3,), answer="AB"[number % 2])
    for number, text in enumerate(TEXTS)
]
Verb = Callable[[Any, str], object]


def corpus(name: str) -> list[Any]:
    """Texts, or for an encoder-decoder pairs of them."""
    return [Pair(text, other) for text, other in zip(TEXTS, TEXTS[::-1], strict=True)] if name in PAIRED else TEXTS


def _head(model: Any) -> str:
    return str(some_heads(model)[0])


def _said(model: Any, name: str, how: AbstractContextManager[Any]) -> Tensor:
    """What a model says while heads are changed. That pass is the caller's own, so it is made in eval mode here."""
    with how, quiet(model):
        return logits(model, batch(name))


def _other(model: Any, name: str) -> Any:
    """What heads give on other texts of as many tokens."""
    given: dict[str, Any] = {part: ids.flip(0) for part, ids in batch(name).items()}
    return record_z(model, **given)


def _maps(model: Any, name: str) -> list[Tensor]:
    seen = hw.attend(model, TEXTS[0], source=TEXTS[1] if name in PAIRED else None)
    return [seen.map(head) for head in seen.heads]


def _z(model: Any, given: dict[str, Any]) -> object:
    return record_z(model, **given).z


def _means(seen: hw.Profile) -> list[np.ndarray]:
    return [seen.measure(measure) for measure in seen.tally.fields]


LOOKS: dict[str, Verb] = {
    "attend": _maps,
    "profile": lambda model, name: _means(
        hw.profile(model, TEXTS, relations=GOLD, measures=[Retrieval()], causal=False)
    ),
    "profile, light": lambda model, name: _means(
        hw.profile(model, TEXTS, relations=False, detail="light", causal=False)
    ),
    "profile, prompts": lambda model, name: _means(
        hw.profile(model, TEXTS, relations=False, prompts=True, causal=False)
    ),
    "compare": lambda model, name: hw.compare(model, TEXTS, rows=24),
    "match": lambda model, name: hw.match(model, model, TEXTS),
    "variability": lambda model, name: variability(model, TEXTS, length=5),
    "importance": lambda model, name: hw.importance(model, corpus(name)),
    "importance, resample": lambda model, name: hw.importance(model, corpus(name), how="resample"),
    "importance, gradient": lambda model, name: hw.importance(model, corpus(name), by="gradient"),
    "importance, attribution": lambda model, name: hw.importance(model, corpus(name), by="attribution", check=2),
    "sensitivity": lambda model, name: hw.sensitivity(model, corpus(name), heads=_head(model)),
    "mean_activations": lambda model, name: mean_activations(model, corpus(name)),
    "record_z": lambda model, name: _z(model, batch(name)),
    "ablated": lambda model, name: _said(model, name, hw.ablated(model, _head(model), on=corpus(name))),
    "patched": lambda model, name: _said(model, name, hw.patched(model, _head(model), _other(model, name))),
    "decodable": lambda model, name: decodable(model, TEXTS * 4, what="position"),
    "logit_attribution": lambda model, name: logit_attribution(model, TEXTS[0], 3).parts,
    "copying": lambda model, name: copying(model),
    "vocabulary": lambda model, name: vocabulary(model, _head(model), TEXTS[0]),
    "value_weighted": lambda model, name: (
        value_weighted(model, TEXTS[0], _head(model), source=TEXTS[1] if name in PAIRED else None).weighted
    ),
    "write_share": lambda model, name: write_share(model, TEXTS),
    "coreference": lambda model, name: coreference(model, CASES),
    "HeadHistory": lambda model, name: _history(model),
}
CHANGES: dict[str, Verb] = {
    "prune": lambda model, name: logits(hw.prune(model, heads=_head(model), on=corpus(name)).eval(), batch(name)),
    "Plan.make": lambda model, name: hw.Plan.make(model, keep=0.5, on=corpus(name)).worth,
    "Plan.make, gradient": lambda model, name: hw.Plan.make(model, keep=0.5, by="gradient", on=corpus(name)).worth,
    "learn_gates": lambda model, name: learn_gates(model, corpus(name), keep=0.5, steps=2),
    "trial": lambda model, name: PairedEvaluation.of(model, corpus(name)).full,
    "report": lambda model, name: report(
        model, model.without(_head(model)), corpus(name), seeds=1, turns=1, length=8
    ),
    "curve": lambda model, name: curve(model, corpus(name), keeps=(0.5,), bys=("gradient", "random"), seeds=1),
    "prune_study": lambda model, name: hw.prune_study(
        model, hw.PruneStudy(hw.PruneRequest(keep=0.5, by="gradient", on=corpus(name)), seeds=1, length=16)
    ).report,
    "quantise": lambda model, name: logits(hw.quantise(model, 8).eval(), batch(name)),
    "Plan.streaming": lambda model, name: hw.Plan.streaming(model, 0.5, first=1, last=2, on=" ".join(TEXTS * 3)).cache,
    "heal": lambda model, name: heal(
        copy.deepcopy(model), corpus(name), steps=1, batch=2, rows="texts", holdout=0.0, progress=False
    ).loss,
}  # fmt: skip
VERBS = LOOKS | CHANGES


def _history(model: Any) -> object:
    history = hw.HeadHistory(GOLD)
    history(model, 0)
    return history.values


def flat(made: Any) -> list[float]:
    """All numbers in what a verb gave, in order; what was timed is left out."""
    return list(_flat(made))


def _flat(made: Any) -> Iterator[float]:
    if isinstance(made, Tensor):
        yield from made.detach().double().flatten().tolist()
    elif isinstance(made, np.ndarray):
        yield from made.astype(float).ravel().tolist() if made.dtype.kind in "fiub" else ()
    elif isinstance(made, bool | int | float):
        yield float(made)
    elif isinstance(made, Mapping):
        for key in made:
            yield from _flat(made[key])
    elif isinstance(made, str | Address | Timing) or made is None:
        return
    elif is_dataclass(made):
        for field in fields(made):
            yield from _flat(getattr(made, field.name))
    elif isinstance(made, Sequence | set | frozenset):
        for one in made:
            yield from _flat(one)
