"""The book: everything the page shows, as plain data. The live server and the one-file report read the same one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from headwise.analysis.ablation.sensitivity import Cost, Sensitivity
from headwise.analysis.metrics.offsets import OFFSET
from headwise.analysis.metrics.relation_metrics import HITS, Question
from headwise.analysis.metrics.role_examples import Example
from headwise.analysis.metrics.top_contexts import Context
from headwise.analysis.recording.text_buckets import REPORTING
from headwise.analysis.roles.best_heads import Best, best_heads
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.analysis.roles.roles import Support
from headwise.compression.plan import Plan
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.ui.claims_view import VERSION, tell
from headwise.ui.cost_view import tell_prices
from headwise.ui.glossary import WORDS
from headwise.ui.head_facts import Facts, Less, Missed, Wrote, cached, nearest, partners, shares, short, wrote
from headwise.ui.head_summary import story
from headwise.ui.role_badges import sign
from headwise.ui.role_descriptions import role_meaning
from headwise.ui.sentence_view import make_sentence

__all__ = ["make_book", "make_sentence", "page_files"]

BACK = 32  # offsets shown, each way
CONTEXTS = 5  # of each head
FEWEST = 20  # arcs on the half for reporting, below which a relation is not told


def make_book(
    profile: Profile, model: AnyModel | None = None, *, name: str = "", sentences: Iterable[Any] = (),
    importance: Any = None, history: Any = None, curve: Any = None, claims: Iterable[Any] = (),
    sensitivity: Sensitivity | None = None, plan: Plan | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Everything the page shows of a profile, ready for JSON.

    With the model itself: its sizes, what its heads write, which look alike. `sentences` are texts, for which the model is
    run, or what `make_sentence` gave. `importance`, `history` and `curve` are what the functions of these names give;
    `curve` may also be a list of curves as plain data: title, x, y and series of [x, y, low, high]. `claims` are results of
    `headwise.experiments.run.claims`, or what `headwise.ui.claims_view.tell` gave. `sensitivity` tells what few bits cost each head, a
    `plan` for this model what is to be done to them.
    """
    worth = {} if importance is None else {one["head"]: one for one in importance.to_dict()["heads"]}
    lives = {} if history is None else _lives(history)
    prices, planned = tell_prices(profile.addresses, None if model is None else model.spec, sensitivity, plan)
    known = _known(model, profile, importance, sensitivity)
    heads = [
        {
            **_head(profile, head),
            **_beside(profile, head, known.get(str(head.address))),
            "importance": worth.get(str(head.address)),
            "history": lives.get(str(head.address)),
            "price": prices.get(str(head.address)),
        }
        for head in profile
    ]
    made = {
        "version": VERSION,
        "model": _model(profile, model, name),
        "about": {**profile.about, "family": profile.family},
        "measures": _labels(profile),
        "words": {name: list(one) for name, one in WORDS.items()},
        "signs": {
            role: [*sign(role), role_meaning(role, relation=relation, pictures=bool(profile.about.get("pictures")))]
            for role, relation in sorted({(one.role, one.relation) for head in profile for one in head.roles})
        },
        "heads": heads,
        "relations": _relations(profile),
        "importance": None if importance is None else {k: v for k, v in importance.to_dict().items() if k != "heads"},
        "history": None if history is None else {"steps": list(history.steps), "measures": list(history.names)},
        "curves": _curves(curve),
        "plan": planned,
        "claims": [dict(one) if isinstance(one, Mapping) else tell([one])[0] for one in claims],
        "sentences": [_sentence(model, one) for one in sentences],
    }
    return _plain(made)


def page_files() -> dict[str, bytes]:
    """The page, file by file: name → content. Nothing in it refers to anything outside.

    >>> sorted(name for name in page_files() if name.endswith((".html", ".css")))
    ['index.html', 'style.css']
    """
    folder = files("headwise.ui") / "page"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.endswith((".html", ".css", ".js"))}


def _model(profile: Profile, model: AnyModel | None, name: str) -> dict[str, Any]:
    layers = [
        {"address": layer, "heads": [str(a) for a in profile.addresses if str(a.site) == layer]}
        for layer in profile.about["layers"]
    ]
    told: dict[str, Any] = {"name": name, "layers": layers, "heads": len(profile)}
    if model is None:
        return told
    spec = model.spec
    return {
        **told, "kind": spec.kind, "width": spec.width, "heads_per_layer": spec.attention.heads,
        "kv_heads": spec.attention.kv_heads, "head_dim": spec.attention.head_dim, "vocab": spec.vocab,
        "context": spec.context, "output": spec.output, "parameters": spec.parameters,
    }  # fmt: skip


def _head(profile: Profile, head: HeadProfile) -> dict[str, Any]:
    measures = head.measures
    # what belongs to a series has a picture or a table of its own; powers of two are few enough to be listed
    listed = [name for name in measures if profile.numbers[name].series in ("", "distance")]
    shown = [name for name in listed if np.isfinite(measures[name])]
    ahead = any(measures.get(OFFSET[-o].name, 0.0) > 0 for o in range(1, BACK))
    offsets = [o for o in range(BACK - 1, -BACK if ahead else -1, -1) if OFFSET[o].name in measures]
    return {
        "address": str(head.address), "layer": str(head.address.site), "head": head.address.head,
        "role": head.role, "detail": head.detail, "rung": head.rung, "score": head.score, "null": head.null,
        "interval": head.interval, "effect": head.effect, "rest": list(head.rest),
        "supports": [_support(one) for one in head.roles],
        "measures": {name: short(measures[name]) for name in shown},
        "offsets": [[offset, short(measures[OFFSET[offset].name])] for offset in offsets],
        "on": head.on, "roles": [one.role for one in head.roles],
        "cases": [_cases(one, head.cases[one.role]) for one in head.roles],
        "hardest": [_context(one) for one in head.hardest[:CONTEXTS]],
    }  # fmt: skip


def _beside(profile: Profile, head: HeadProfile, known: Facts | None) -> dict[str, Any]:
    """Its story, and what only the model could tell."""
    made = {"story": [list(line) for line in story(profile, head, known)]}
    if known is None:
        return {**made, "writes": None, "nearest": [], "partners": None}
    ways = {"reads": known.before, "read by": known.behind}
    others = {way: [one.head, short(one.score), short(one.chance)] for way, one in ways.items() if one is not None}
    return {
        **made,
        "writes": _wrote(known.wrote),
        "nearest": known.alike,
        "partners": {**others, "shares": known.shares},
    }


def _labels(profile: Profile) -> dict[str, dict[str, str]]:
    """How each measure is told: a few words, its unit, what more of it means."""
    listed = {name: one for name, one in profile.numbers.items() if one.shown and one.series in ("", "distance")}
    return {name: {"label": one.label, "unit": one.unit, "more": one.more} for name, one in listed.items()}


def _cases(role: Support, cases: Sequence[Example]) -> dict[str, Any]:
    names = ("hit", "weight", "attended", "most", "parts")
    examples = [{name: getattr(one, name) for name in names} for one in cases]
    return {"role": role.role, "detail": role.detail, "on": role.on, "examples": examples}


def _support(one: Support) -> dict[str, Any]:
    names = (
        "role", "detail", "on", "rung", "score", "null", "interval", "p", "rows", "coverage", "probe", "effect", "cost",
        "bar", "control", "family", "causal_on",
    )  # fmt: skip
    return {name: getattr(one, name) for name in names}


def _context(one: Context) -> dict[str, Any]:
    """A place where a head looked hardest; the text in parts, the one who looks and the one looked at marked."""
    looks, seen = (
        (one.row, "token", f"[{one.token}]", one.token),
        (one.column, "attended", f"*{one.attended}*", one.attended),
    )
    parts, rest = [], one.text
    for _, kind, mark, shown in sorted((looks, seen)):
        before, found, behind = rest.partition(mark)
        if found:
            parts += [["", before], [kind, shown]]
            rest = behind
    parts.append(["", rest])
    return {
        "token": one.token, "attended": one.attended, "weight": one.weight, "unit": one.unit,
        "parts": [part for part in parts if part[1]],
    }  # fmt: skip


def _wrote(one: Wrote | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "copying": one.copying, "spread": one.spread, "words": [word._asdict() for word in one.words],
        "effect": None if one.effect is None else asdict(one.effect),
    }  # fmt: skip


def _known(
    model: AnyModel | None, profile: Profile, importance: Any, sensitivity: Sensitivity | None
) -> dict[str, Facts]:
    """What is known of each head beside its profile, by its address."""
    if model is None:
        return {}
    texts = {} if sensitivity is None else {"unit": sensitivity.metric, "texts": len(sensitivity.counts)}
    costs: dict[str, list[Cost]] = {}
    for cost in sensitivity or ():
        for head in cost.heads.split():
            costs.setdefault(head, []).append(cost)
    unit = "nats a token" if model.output is not None else "1 − cosine"
    writes, alike, others, made = wrote(model, profile), nearest(model), partners(model), {}
    told = set() if importance is None else {str(address) for address in importance.addresses}
    for address in profile.addresses:
        head, loss = str(address), None
        if importance is not None and head in told:
            loss = Missed(importance[head], importance.by, importance.how, unit, importance.texts)
        before, behind = others.get(head, (None, None))
        held, key = cached(model.spec, address)
        less = Less(tuple(costs.get(head, ())), cache=held, key=key, **texts)
        made[head] = Facts(
            writes.get(head), loss, less, shares(model.spec, address), before, behind,
            tuple((other, far) for other, far in alike.get(head, []) if far is not None),
        )  # fmt: skip
    return made


def _relations(profile: Profile) -> dict[str, Any] | None:
    """For each relation its best head beside the best fixed offset, and every head's accuracy in that direction."""
    if profile.relations is None:
        return None
    best = best_heads(profile, FEWEST)
    return (
        {"heads": [str(a) for a in profile.addresses], "rows": [_relation(profile, one) for one in best]}
        if best
        else None
    )


def _relation(profile: Profile, best: Best) -> dict[str, Any]:
    scores = profile.tally.mean(Question(best.relation, best.way).numbers[HITS].name, REPORTING)  # (heads,)
    return {**best._asdict(), "scores": [short(score) for score in scores]}


def _lives(history: Any) -> dict[str, list[list[float | None]]]:
    """Of each head, for each measure, a number for each step."""
    values = np.asarray(history.values, dtype=float)  # (steps, heads, measures)
    return {
        head: [[short(x) for x in values[:, place, m]] for m in range(values.shape[2])]
        for place, head in enumerate(history.addresses)
    }


def _curves(curve: Any) -> list[dict[str, Any]]:
    if curve is None:
        return []
    if isinstance(curve, Mapping):
        return [dict(curve)]
    if isinstance(curve, Sequence):
        return [dict(one) for one in curve]
    bys = dict.fromkeys(point.by for point in curve.points)
    series = [
        {"name": by, "points": [[p.kept, p.loss.mean, p.loss.low, p.loss.high] for p in curve.of(by)]} for by in bys
    ]
    return [
        {"title": "Pruning", "x": "share of heads kept", "y": curve.metric, "base": curve.full.mean, "series": series}
    ]


def _sentence(model: AnyModel | None, given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if model is None:
        raise HeadwiseError(f"to show the sentence {given!r} its model is needed; give make_book(profile, model, …).")
    return make_sentence(model, given)


def _plain(value: Any) -> Any:
    """The same as lists, dicts and numbers that JSON has; what is not a number is None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
