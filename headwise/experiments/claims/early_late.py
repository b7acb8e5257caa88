"""Early layers are local and syntactic, later layers long-range and semantic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.analysis.metrics.offsets import WINDOW
from headwise.analysis.metrics.statistics import FEWEST, bootstrap_difference
from headwise.analysis.recording.text_buckets import CHOOSING, REPORTING
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import make_cases
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict, every, listed
from headwise.experiments.depth import LAYERS, deep
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.pretrained_model import BUNDLE, bundled, installed
from headwise.model import AnyModel
from headwise.text.corpus import Corpus
from headwise.text.documents import Document

THIRDS = ("first third", "middle third", "last third")
SYNTAX = (
    "determiner-noun", "adjective-noun", "subject-verb", "verb-object", "possessive",
    "det", "amod", "nsubj", "obj", "nmod:poss",
)  # fmt: skip
MEANING = ("semantic", "coreference")  # as roles are told
EARLY, LATE = ("local", "syntactic"), ("long range", "semantic")
LEAST = 0.05  # of the weight, or in accuracy
TEXTS, SENTENCES = 8, 15  # where documents are short, so many texts are made of so many of them each


@dataclass(frozen=True, eq=False)
class Thirds:
    """One measure in the first, the middle and the last third of the layers: sums and counts by bucket of texts."""

    sums: np.ndarray  # (buckets, 3)
    counts: np.ndarray  # (buckets, 3)

    @property
    def values(self) -> list[float]:
        """The three numbers."""
        return (self.sums.sum(0) / self.counts.sum(0)).tolist()

    def gap(self, one: int, other: int) -> Figure:
        """How much more there is in one third than in another; the interval is over texts, of one text there is none."""
        parts = (table[:, part] for part in (one, other) for table in (self.sums, self.counts))
        (low, high), more = bootstrap_difference(*parts), self.values[one] - self.values[other]
        return Figure.known(more, float(low), float(high)) if np.isfinite(low) else Figure.over(more)


def thirds(model: AnyModel, text: Any = None) -> dict[str, Thirds]:
    """What heads do in each third of the layers, over a text (None: the model's usual one).

    `local` and `long range` are the weight 1 to 3 tokens away and 32 or more, as shares of what does not rest on the first
    token; `syntactic` and `semantic` how often the best head of the third follows a relation, above the best fixed offset:
    the head is chosen on half of the documents and judged by the other. What a text has no relations for is left out.
    """
    if model.spec.layers < 3:
        raise HeadwiseError(f"thirds need at least three layers; this model has {model.spec.layers}.")
    read, related = _reading(model) if text is None else (text, None)
    return _thirds(profile(model, read, relations=related, causal=False))


def points(lab: Lab) -> Iterator[Point]:
    """The deeper model of every seed."""
    return (deep(lab).point(seed) for seed in lab.seeds)


def measure(lab: Lab) -> Figures:
    """Trained models of six layers, and SmolLM2's thirty if it is installed."""
    figures = Figures()
    _tell(figures, "trained", [thirds(lab.made(point).model(), lab.documents()) for point in points(lab)])
    real = installed()
    if real is not None:
        _tell(figures, BUNDLE, [thirds(real)])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """The same with a model and its text."""
    figures = Figures()
    _tell(figures, "given", [thirds(model, text)])
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    gaps = {str(at): gap for at, gap in figures.at(GAP).items()}
    shown = [at for at, gap in gaps.items() if gap.above(LEAST)]
    missed = [at for at, gap in gaps.items() if gap.below(LEAST)]
    unsure = [at for at in gaps if at not in (*shown, *missed)]
    told = listed({"shown": shown, "not so": missed, "open": unsure})
    if len(shown) == len(gaps):
        return Verdict("holds")
    if 2 * len(missed) > len(gaps):
        return Verdict("does not hold", listed({"shown": shown, "open": unsure}))
    return Verdict("depends", f"on {'what is meant, and where' if missed else 'the seed, or the text'}; {told}")


GAP = "the way the claim has it"  # early − late for what is said to be early, late − early for the rest


def _reading(model: AnyModel) -> tuple[Any, Any]:
    """The model's usual documents; short ones are laid end to end as well, so that something is far away."""
    documents = [item for item in documents_for(model).items() if isinstance(item, Document)]
    if np.median([len(document.words) for document in documents]) > 2 * WINDOW:
        return Corpus.of(documents), None
    apart = max(1, len(documents) // SENTENCES)  # sentences of a text are of all kinds
    texts = [" ".join(document.text for document in documents[start::apart]) for start in range(min(TEXTS, apart))]
    return texts, documents


def _thirds(made: Profile) -> dict[str, Thirds]:
    layers = {name: place for place, name in enumerate(made.about["layers"])}
    place = np.array([3 * layers[str(address.site)] // len(layers) for address in made.addresses])
    if len({*place.tolist()}) < 3:
        raise HeadwiseError("a third of the layers of this model has no heads left; give the whole model.")
    third = np.eye(3)[place]  # (heads, 3)
    first, rows = made.tally.per_bucket("first")  # (buckets, heads)
    awake = (rows - first) @ third  # (buckets, 3)
    near = made.tally.per_bucket("local")[0]
    far, reaching = made.tally.per_bucket("long range")
    if not reaching.sum():
        raise HeadwiseError(
            f"no token of this text has another {WINDOW} or more before it, the first left out; give longer texts."
        )
    back = made.tally.per_bucket("signed distance")[0]
    found = {
        "local": Thirds(near @ third, awake),
        "long range": Thirds(far @ third, awake),
        "syntactic": _accuracy(made, SYNTAX, place),
        "semantic": _accuracy(made, MEANING, place),
        "mean distance back, the first token included": Thirds(back @ third, rows @ third),
        "weight on the first token": Thirds(first @ third, rows @ third),
    }
    return {name: value for name, value in found.items() if value is not None}


def _accuracy(made: Profile, names: Sequence[str], place: np.ndarray) -> Thirds | None:
    """How often the best head of each third follows a relation, above the best fixed offset: the mean of relations."""
    best: dict[tuple[str, int], tuple[float, np.ndarray]] = {}  # (relation, third): on one half, and sums on the other
    for case in make_cases(made.tally, made.relations):
        if case.role.name not in names or min(case.half(half).sum() for half in (0, 1)) < FEWEST:
            continue
        chosen = case.mean(CHOOSING) - case.null(CHOOSING)  # (heads,)
        told = case.half(REPORTING)[:, None]  # (buckets, 1)
        above, arcs = (case.scores - case.nulls) * told, case.counts * told  # (buckets, heads)
        for part in range(3):
            head = max(np.flatnonzero(place == part), key=lambda one: chosen[one])
            # each relation counts alike, however many arcs it has
            sums = np.stack((above[:, head], arcs[:, head])) / arcs[:, head].sum()  # (2, buckets)
            key = case.role.name, part
            if key not in best or chosen[head] > best[key][0]:  # the better of both directions
                best[key] = float(chosen[head]), sums
    if not best:
        return None
    told = [np.sum([sums for (_, part), (_, sums) in best.items() if part == one], 0) for one in range(3)]
    return Thirds(*np.stack(told, -1))  # (2, buckets, 3)


def _tell(figures: Figures, whose: str, found: Sequence[Mapping[str, Thirds]]) -> None:
    """Of several seeds the interval is over them; of a single model over texts."""
    for name in found[0]:
        for part, third in enumerate(THIRDS):
            figures.add(name, f"{whose}: {third}", [one[name].values[part] for one in found])
    for name in (*EARLY, *LATE):
        if name in found[0]:
            when, ends = ("early", (0, 2)) if name in EARLY else ("late", (2, 0))
            gaps = [one[name].gap(*ends) for one in found]
            figures.add(GAP, f"{name} {when} ({whose})", gaps[0] if len(gaps) == 1 else [gap.mean for gap in gaps])


CLAIM = Claim(
    number=19,
    name="early-late",
    says="Early layers are local and syntactic, later layers long-range and semantic.",
    against="A model whose last third of layers is as local or as syntactic as its first, or whose first is as "
    "long-range or as semantic as its last.",
    setup=f"Trained models of {LAYERS} layers on held-out documents, and SmolLM2's 30 layers on the probe set where "
    f"it is installed, by thirds: the weight 1 to 3 tokens away and {WINDOW} or more away, of what does not rest on the "
    "first token; and how often the best head follows syntactic relations, or related words and pronouns, above the best "
    "fixed offset.",
    rule="Four things are said of each model: local early, syntactic early, long range late, semantic late. Each "
    f"is shown where the first and the last third surely differ that way by more than {LEAST:g} (share of weight, "
    "or accuracy), not so where surely by less or the other way, and open else. Holds if all are shown, does not hold "
    "if more than half are not so. Else depends: on which if any is not so, on the seed or the text if some are open "
    "and none is not so.",
    asks=every(GAP),
    measure=measure,
    judge=judge,
    picture=Picture((*EARLY, *LATE), y="share of weight, or accuracy above the best offset"),
    points=points,
    on=on,
    also=bundled,
)
