"""Report data: the content of the page as plain data, for the live server and the single-file report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
from headwise.analysis.head_facts import HeadFacts, OVSummary, collect_facts, round6
from headwise.analysis.metrics.directed_relations import HITS, DirectedRelation
from headwise.analysis.metrics.offsets import OFFSET_SPECS
from headwise.analysis.metrics.role_example_positions import ObservedAttentionExample
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.analysis.roles.best_relation_heads import BestHead, best_relation_heads
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import RoleEvidence
from headwise.compression.head_compression_cost import HeadCompressionCost, collect_costs, head_cost_data
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.spec import Plan
from headwise.ui.claims_page_data import REPORT_VERSION, claim_dicts
from headwise.ui.glossary import GLOSSARY
from headwise.ui.head_summary import summary_lines
from headwise.ui.role_badges import role_badge
from headwise.ui.role_descriptions import describe_role_name
from headwise.ui.sentence_page_data import make_sentence_data

__all__ = ["make_report_data", "make_sentence_data", "page_files"]

MAX_OFFSET = 32  # largest offset shown in either direction
CONTEXTS_PER_HEAD = 5
MIN_ARCS = 20  # minimum number of held-out arcs of a relation that is shown


def make_report_data(
    profile: Profile, model: ModelProtocol | None = None, *, name: str = "", sentences: Iterable[Any] = (),
    importance: Any = None, history: Any = None, curve: Any = None, claims: Iterable[Any] = (),
    sensitivity: SensitivityResult | None = None, plan: Plan | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Build the report data of a profile, ready for JSON.

    Args:
        profile: The profile.
        model: The model. Adds sizes, head outputs and similar heads, and is required for sentences given as text.
        name: Name of the model on the page.
        sentences: Texts (the model is run on each), or results of `make_sentence_data`.
        importance: Result of `hw.importance`.
        history: Result of `hw.head_history`.
        curve: A pruning curve, or curves as plain data: title, x, y and series of [x, y, low, high].
        claims: Results of `headwise.experiments.run_claims.claims`, or of `headwise.ui.claims_page_data.claim_dicts`.
        sensitivity: Result of `hw.sensitivity`: quantization cost of each head.
        plan: A plan for this model.

    Returns:
        Dicts, lists, strings and finite numbers. A number that is not finite becomes None.
    """
    importance_by_head = {} if importance is None else {item["head"]: item for item in importance.to_dict()["heads"]}
    histories = {} if history is None else _metric_histories(history)
    costs, plan_data = head_cost_data(profile.addresses, None if model is None else model.spec, sensitivity, plan)
    facts = {} if model is None else collect_facts(model, profile, importance)
    cost_summaries = {} if model is None else collect_costs(model.spec, profile.addresses, sensitivity)
    heads = [
        {
            **_head_data(profile, head),
            **_summary_and_facts(profile, head, facts.get(str(head.address)), cost_summaries.get(str(head.address))),
            "importance": importance_by_head.get(str(head.address)),
            "history": histories.get(str(head.address)),
            "cost": costs.get(str(head.address)),
        }
        for head in profile
    ]
    data = {
        "version": REPORT_VERSION,
        "model": _model_data(profile, model, name),
        "metadata": {**profile.metadata, "family_size": profile.family_size},
        "metrics": _metric_labels(profile),
        "glossary": {name: list(item) for name, item in GLOSSARY.items()},
        "role_badges": {
            role: [
                *role_badge(role),
                describe_role_name(role, is_relation=relation, pictures=bool(profile.metadata.get("image_grid"))),
            ]
            for role, relation in sorted({(item.role, item.is_relation) for head in profile for item in head.roles})
        },
        "heads": heads,
        "relations": _relations_data(profile),
        "importance": None if importance is None else {k: v for k, v in importance.to_dict().items() if k != "heads"},
        "history": None if history is None else {"steps": list(history.steps), "metrics": list(history.metric_names)},
        "curves": _curve_data(curve),
        "plan": plan_data,
        "claims": [dict(item) if isinstance(item, Mapping) else claim_dicts([item])[0] for item in claims],
        "sentences": [_sentence_data(model, item) for item in sentences],
    }
    return _to_json_value(data)


def page_files() -> dict[str, bytes]:
    """Return the files of the page by name. They contain no external references.

    >>> sorted(name for name in page_files() if name.endswith((".html", ".css")))
    ['index.html', 'style.css']
    """
    folder = files("headwise.ui") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".html", ".css", ".js"))}


def _model_data(profile: Profile, model: ModelProtocol | None, name: str) -> dict[str, Any]:
    layers = [
        {"address": layer, "heads": [str(a) for a in profile.addresses if str(a.layer_address) == layer]}
        for layer in profile.metadata["layers"]
    ]
    data: dict[str, Any] = {"name": name, "layers": layers, "heads": len(profile)}
    if model is None:
        return data
    spec = model.spec
    return {
        **data, "kind": spec.kind, "width": spec.width, "heads_per_layer": spec.attention.heads,
        "kv_heads": spec.attention.kv_heads, "head_dim": spec.attention.head_dim, "vocab": spec.vocab,
        "context": spec.context, "output": spec.output, "parameters": spec.num_parameters,
    }  # fmt: skip


def _head_data(profile: Profile, head: HeadProfile) -> dict[str, Any]:
    metrics = head.metrics
    # metrics of a series have their own figure or table, except distances, which are few
    listed = [name for name in metrics if profile.metric_specs[name].series in ("", "distance")]
    finite_names = [name for name in listed if np.isfinite(metrics[name])]
    looks_ahead = any(metrics.get(OFFSET_SPECS[-o].name, 0.0) > 0 for o in range(1, MAX_OFFSET))
    offsets = [
        o for o in range(MAX_OFFSET - 1, -MAX_OFFSET if looks_ahead else -1, -1) if OFFSET_SPECS[o].name in metrics
    ]
    return {
        "address": str(head.address), "layer": str(head.address.layer_address), "head": head.address.head,
        "role": head.role, "detail": head.detail, "evidence_level": head.evidence_level, "score": head.score,
        "baseline": head.baseline,
        "interval": head.interval, "effect": head.effect, "idle_patterns": list(head.idle_pattern),
        "evidence": [_evidence_data(item) for item in head.roles],
        "metrics": {name: round6(metrics[name]) for name in finite_names},
        "offsets": [[offset, round6(metrics[OFFSET_SPECS[offset].name])] for offset in offsets],
        "corpus_label": head.corpus_label, "roles": [item.role for item in head.roles],
        "examples": [_role_examples(item, head.examples_by_role[item.role]) for item in head.roles],
        "top_contexts": [_attention_context_data(item) for item in head.top_contexts[:CONTEXTS_PER_HEAD]],
    }  # fmt: skip


def _summary_and_facts(
    profile: Profile, head: HeadProfile, facts: HeadFacts | None, cost: HeadCompressionCost | None
) -> dict[str, Any]:
    """Return the summary of a head and the facts measured on the model."""
    data = {"summary": [list(line) for line in summary_lines(profile, head, facts, cost)]}
    if facts is None:
        return {**data, "ov": None, "similar_heads": [], "partners": None}
    directions = {"reads_from": facts.reads_from, "read_by": facts.read_by}
    partner_data = {
        direction: [partner.head, round6(partner.score), round6(partner.random_score)]
        for direction, partner in directions.items()
        if partner is not None
    }
    return {
        **data,
        "ov": _ov_data(facts.ov_summary),
        "similar_heads": facts.similar_heads,
        "partners": {**partner_data, "kv_siblings": facts.kv_siblings},
    }


def _metric_labels(profile: Profile) -> dict[str, dict[str, str]]:
    """Return label, unit and interpretation of each metric."""
    listed = {
        name: metric_spec
        for name, metric_spec in profile.metric_specs.items()
        if metric_spec.displayed and metric_spec.series in ("", "distance")
    }
    return {
        name: {"label": metric_spec.label, "unit": metric_spec.unit, "more": metric_spec.high_means}
        for name, metric_spec in listed.items()
    }


def _role_examples(evidence: RoleEvidence, role_examples: Sequence[ObservedAttentionExample]) -> dict[str, Any]:
    names = ("hit", "weight", "attended", "max_weight", "segments")
    examples = [{name: getattr(example, name) for name in names} for example in role_examples]
    return {
        "role": evidence.role,
        "detail": evidence.detail,
        "corpus_label": evidence.corpus_label,
        "examples": examples,
    }


def _evidence_data(evidence: RoleEvidence) -> dict[str, Any]:
    names = (
        "role", "detail", "corpus_label", "evidence_level", "score", "baseline", "interval", "p", "rows", "coverage",
        "probe", "effect", "cost",
        "cost_threshold", "control_cost", "family_size", "causal_on",
    )  # fmt: skip
    return {name: getattr(evidence, name) for name in names}


def _attention_context_data(context: AttentionContext) -> dict[str, Any]:
    """Return a context with a large attention weight; the text is split into segments, with query and key marked."""
    query_mark, key_mark = (
        (context.row, "token", f"[{context.token}]", context.token),
        (context.column, "attended", f"*{context.attended}*", context.attended),
    )
    segments, remaining = [], context.text
    for _, kind, marker, token in sorted((query_mark, key_mark)):
        before, matched, after = remaining.partition(marker)
        if matched:
            segments += [["", before], [kind, token]]
            remaining = after
    segments.append(["", remaining])
    return {
        "token": context.token, "attended": context.attended, "weight": context.weight, "sample": context.sample,
        "segments": [segment for segment in segments if segment[1]],
    }  # fmt: skip


def _ov_data(summary: OVSummary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {
        "copying": summary.copying, "random_std": summary.random_std,
        "token_effects": [effect._asdict() for effect in summary.token_effects],
        "effect": None if summary.effect is None else asdict(summary.effect),
    }  # fmt: skip


def _relations_data(profile: Profile) -> dict[str, Any] | None:
    """Return, for each relation, its best head, the best fixed offset and the accuracy of every head."""
    if profile.relation_metric is None:
        return None
    best = best_relation_heads(profile, MIN_ARCS)
    return (
        {"heads": [str(a) for a in profile.addresses], "rows": [_relation_row(profile, row) for row in best]}
        if best
        else None
    )


def _relation_row(profile: Profile, best: BestHead) -> dict[str, Any]:
    scores = profile.accumulator.mean(
        DirectedRelation(best.relation, best.direction).metric_specs[HITS].name, REPORTING
    )  # (heads,)
    return {**best._asdict(), "scores": [round6(score) for score in scores]}


def _metric_histories(history: Any) -> dict[str, list[list[float | None]]]:
    """Return, for each head and metric, one number per step."""
    values = np.asarray(history.values, dtype=float)  # (steps, heads, metrics)
    return {
        head: [[round6(x) for x in values[:, index, m]] for m in range(values.shape[2])]
        for index, head in enumerate(history.addresses)
    }


def _curve_data(curve: Any) -> list[dict[str, Any]]:
    if curve is None:
        return []
    if isinstance(curve, Mapping):
        return [dict(curve)]
    if isinstance(curve, Sequence):
        return [dict(item) for item in curve]
    rankings = dict.fromkeys(point.ranking for point in curve.points)
    series = [
        {
            "name": ranking,
            "points": [
                [p.kept_fraction, p.loss.mean, p.loss.low, p.loss.high] for p in curve.points_by_ranking(ranking)
            ],
        }
        for ranking in rankings
    ]
    return [
        {
            "title": "Pruning",
            "x": "fraction of heads kept",
            "y": curve.metric,
            "base": curve.full_loss.mean,
            "series": series,
        }
    ]


def _sentence_data(model: ModelProtocol | None, sentence: Any) -> dict[str, Any]:
    if isinstance(sentence, Mapping):
        return dict(sentence)
    if model is None:
        raise ArgumentError(
            f"sentences: showing {sentence!r} requires the model. Pass it: make_report_data(profile, model, …)."
        )
    return make_sentence_data(model, sentence)


def _to_json_value(value: Any) -> Any:
    """Convert to dicts, lists and numbers that JSON supports. NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
