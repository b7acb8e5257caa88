"""Short text and HTML of result objects: `repr` in a Python shell, `_repr_html_` in a notebook.

Each function returns a `ResultTable` of one result class: a title with the main numbers, the most important rows, and the
methods that show more.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.analysis.ablation.importance import Importance
    from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
    from headwise.analysis.attribution.score_attribution import ScoreAttribution
    from headwise.analysis.circuits.redundancy import RedundancyResult
    from headwise.analysis.evaluation.evaluate import EvaluationResult
    from headwise.analysis.finding.head_search_result import HeadSearchResult
    from headwise.analysis.recording.attention_maps import AttentionView
    from headwise.analysis.recording.recording import HeadCall, ModelRecording, SingleHeadRecording
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.analysis.roles.head_profile import HeadProfile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.roles.roles import RoleEvidence
    from headwise.analysis.similarity.compare_heads import HeadSimilarityResult
    from headwise.analysis.similarity.match_heads import NearestHeadMatches
    from headwise.attached.attached_model import AttachedModel
    from headwise.compression.allocate_bits import BitAllocation
    from headwise.compression.plan_report import PlanReport
    from headwise.compression.prune_study import PruneStudyResult
    from headwise.compression.prune_to_circuit_study import CircuitPruningResult
    from headwise.compression.pruning_curve import PruningCurves
    from headwise.distributed.parallel_strategy_cost import ParallelStrategyCost
    from headwise.heads.head import Head, Heads
    from headwise.spec import Plan
    from headwise.training.train_result import TrainResult
    from headwise.ui.head_summary import HeadSummary

MAX_ROWS = 14
MAX_LINES = 25
MAX_LINE_CHARACTERS = 140
MAX_CELL_CHARACTERS = 60
MAX_TITLE_CHARACTERS = 400
MAX_EDGE_WEIGHTS = 2_000_000  # attention weights to search for the largest ones in a repr


@dataclass(frozen=True)
class ResultTable:
    """A title, a table and a hint.

    Attributes:
        title: Kind of result and main numbers.
        columns: Column names. Empty names without rows give a title only.
        rows: Cells. Only the first `MAX_ROWS` are shown.
        hint: Attributes and methods that show more.

    >>> print(ResultTable("2 heads", ("head", "score"), (("0.0", 0.5), ("0.1", 12.25)), "More: .table()").as_text())
    2 heads
    head  score
    0.0     0.5
    0.1   12.25
    More: .table()
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()
    hint: str = ""

    def as_text(self) -> str:
        """Return at most `MAX_LINES` lines of plain text. Columns are aligned, numbers to the right."""
        lines = _wrap(self.title)
        if self.rows:
            cells = [list(self.columns), *(list(map(_format_cell, row)) for row in self.rows[:MAX_ROWS])]
            widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
            right = [all(_is_number_or_none(row[i]) for row in self.rows[:MAX_ROWS]) for i in range(len(self.columns))]
            lines += [_align(row, widths, right) for row in cells]
            lines += [f"… {len(self.rows) - MAX_ROWS:,} more rows"] if len(self.rows) > MAX_ROWS else []
        hint_lines = _wrap(self.hint) if self.hint else []
        lines = [*lines[: MAX_LINES - len(hint_lines)], *hint_lines]
        return "\n".join(_truncate(line, MAX_LINE_CHARACTERS) for line in lines)

    def as_html(self) -> str:
        """Return the title, a table and the hint as HTML. All text is escaped."""
        parts = [f"<p>{escape(_truncate(' '.join(self.title.split()), MAX_TITLE_CHARACTERS))}</p>"]
        if self.rows:
            head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
            body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in self.rows[:MAX_ROWS])
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if len(self.rows) > MAX_ROWS:
            parts.append(f"<p>… {len(self.rows) - MAX_ROWS:,} more rows</p>")
        if self.hint:
            parts.append(f"<p><code>{escape(self.hint)}</code></p>")
        return f"<div>{''.join(parts)}</div>"


def profile_roles_table(profile: "Profile") -> ResultTable:
    """Roles of a profile with their number of heads and their best head."""
    best: dict[str, tuple[Any, RoleEvidence, int]] = {}
    for address, evidence in zip(profile.addresses, profile.evidence, strict=True):
        for entry in evidence:
            if entry.is_supported:
                head, strongest, count = best.get(entry.role, (address, entry, 0))
                if entry.sort_key > strongest.sort_key:
                    head, strongest = address, entry
                best[entry.role] = (head, strongest, count + 1)
    num_with_role = sum(any(entry.is_supported for entry in evidence) for evidence in profile.evidence)
    metadata = profile.metadata
    noun = "images" if metadata.get("image_grid") else "texts"
    size = f"{metadata.get('texts', 0):,} {noun}, {metadata.get('tokens', 0):,} tokens of {metadata.get('corpus', '')}"
    rows = tuple(
        (_role_name_with_detail(entry), count, str(head), *_evidence_cells(entry))
        for head, entry, count in sorted(best.values(), key=lambda item: -item[2])
    )
    example = profile.addresses[0] if profile.addresses else "0.0"
    return ResultTable(
        f"Profile: {num_with_role} of {len(profile)} heads have a role ({size})",
        ("role", "heads", "best head", *EVIDENCE_COLUMNS),
        rows,
        f'More: profile["{example}"], profile.summary("{example}"), profile.table(), profile.plot.roles(), '
        'profile.report("report.html")',
    )


EVIDENCE_COLUMNS = ("evidence", "score", "95% CI", "baseline", "p")


def head_roles_table(head: "HeadProfile") -> ResultTable:
    """Roles of one head with their evidence."""
    from headwise.ui.head_summary import IDLE_PATTERNS

    idle = (
        f"; idle pattern: {', '.join(IDLE_PATTERNS[name][0] for name in head.idle_pattern)}"
        if head.idle_pattern
        else ""
    )
    label = f"{head.role_label} ({head.evidence_label})" if head.roles else "no role found"
    rows = tuple((_role_name_with_detail(entry), entry.rows, *_evidence_cells(entry)) for entry in head.roles)
    return ResultTable(
        f"Head {head.address}: {label}{idle}",
        ("role", "cases", *EVIDENCE_COLUMNS),
        rows,
        f'More: .roles, .examples, .metrics; profile.summary("{head.address}")',
    )


def role_evidence_text(evidence: "RoleEvidence") -> str:
    """One line: role, evidence level, score, interval, baseline and p."""
    level, score, interval, baseline, p = map(_format_cell, _evidence_cells(evidence))
    return (
        f"RoleEvidence({_role_name_with_detail(evidence)}: {level}, score {score} (95% CI {interval}), "
        f"baseline {baseline}, p = {p}, {evidence.rows:,} cases)"
    )


def last_step_best_heads_table(history: "HeadHistory") -> ResultTable:
    """Best head of each metric at the last step."""
    if not history.steps:
        return ResultTable(
            "HeadHistory: no steps yet", hint="Record: hw.train(…, callback=history, callback_every=100)"
        )
    first, last = history.values[0], history.values[-1]  # (heads, metrics)
    rows = []
    for index, metric in enumerate(history.metric_names):
        values = [(float(value), head) for value, head in zip(last[:, index], history.addresses, strict=True)]
        finite = [pair for pair in values if math.isfinite(pair[0])]
        initial = [float(value) for value in first[:, index] if math.isfinite(value)]
        if finite:
            value, head = max(finite)
            rows.append((metric, head, value, max(initial, default=math.nan)))
    steps = history.steps
    example = f'history.curve("{history.addresses[0]}", "{history.metric_names[0]}")' if history.metric_names else ""
    return ResultTable(
        f"HeadHistory: {len(steps)} steps from {steps[0]:,} to {steps[-1]:,}, {len(history.addresses)} heads",
        ("metric", "best head", f"step {steps[-1]:,}", f"best at step {steps[0]:,}"),
        tuple(rows),
        f"More: {example}, history.metric_emergence(), history.values",
    )


def importance_table(importance: "Importance") -> ResultTable:
    """Heads with the highest importance."""
    mean, (low, high) = importance.mean, importance.interval
    order = sorted(range(len(importance)), key=lambda i: -mean[i])
    method = f"{importance.ablation} ablation" if importance.ranking == "ablation" else importance.ranking
    loss = f"; loss of the full model {importance.clean_loss:.4g}" if math.isfinite(importance.clean_loss) else ""
    check = "" if importance.check is None else f"; correlation with ablation {importance.check.correlation:.2f}"
    rows = tuple(
        (str(importance.addresses[i]), float(mean[i]), _interval(float(low[i]), float(high[i]))) for i in order
    )
    return ResultTable(
        f"Importance of {len(importance)} heads by {method} on {importance.texts:,} texts{loss}{check}",
        ("head", "importance", "95% CI"),
        rows,
        f'More: importance["{importance.ranked[0] if rows else "0.0"}"], .ranked, .table_rows(), .to_dict()',
    )


def head_search_table(result: "HeadSearchResult") -> ResultTable:
    """Heads that do a job, best first."""
    from headwise.ui.print_head_search import search_title

    rows = tuple(
        (
            item.address, item.evidence_level, round(item.score, 3), _interval(*item.interval), round(item.baseline, 3),
            item.baseline_name, float(f"{item.p:.2g}"),
        )
        for item in result
    )  # fmt: skip
    return ResultTable(
        search_title(result),
        ("head", "evidence", "score", "95% CI", "baseline", "baseline is", "p"),
        rows,
        'More: .supported_heads, .by_layer(), .control, .plot().save("heads.svg"), .to_json("heads.json"), .role()',
    )


def evaluation_table(result: "EvaluationResult") -> ResultTable:
    """Metrics of each task, with the differences to the reference if there is one."""
    hint = 'More: result["task"]["metric"].by_group, .to_dict()'
    title = f"Evaluation: {len({item.task for item in result.metrics})} tasks, 95% intervals over items"
    if not result.differences:
        rows = tuple(
            (item.task, item.metric, item.value, _interval(item.low, item.high), item.items) for item in result.metrics
        )
        return ResultTable(title, ("task", "metric", "value", "95% CI", "items"), rows, hint)
    rows = tuple(
        (
            item.task, item.metric, item.value, item.reference, item.difference, _interval(item.low, item.high),
            item.items,
        )
        for item in result.differences
    )  # fmt: skip
    columns = ("task", "metric", "value", "reference", "difference", "95% CI (paired)", "items")
    return ResultTable(title, columns, rows, hint)


def redundancy_table(result: "RedundancyResult") -> ResultTable:
    """Return the effects of single heads and of pairs."""
    effects = [
        *((item, "") for item in result.heads),
        *((pair.joint, str(pair.redundant_share)) for pair in result.pairs),
    ]
    rows = [
        (
            "+".join(item.heads),
            str(item.live),
            str(item.heads_frozen),
            str(item.direct),
            str(item.repaired_by_heads),
            share,
        )
        for item, share in effects
    ]
    return ResultTable(
        f"Redundancy on {result.task!r}: {result.prompts} prompts of {result.templates} templates, {result.ablation} "
        f"ablation. Effect: decrease of the metric, which is {result.clean_metric:.2f} for the model. Intervals: 95%, over "
        f"templates",
        ("heads", "live", "later heads frozen", "direct", "repaired by heads", "redundant share"),
        tuple(rows),
        'More: .heads, .pairs, .pair("18.6", "18.7"), .to_json("redundancy.json")',
    )


def circuit_study_table(result: "CircuitPruningResult") -> ResultTable:
    """Return the full model, the circuit and the random plans."""
    rows = [
        (row.name, row.heads, row.parameters, str(row.metric), f"{row.accuracy:.0%}", str(row.loss_increase))
        for row in result.rows
    ]
    recovery = f", {result.recover_steps} steps of recovery" if result.recover_steps else ""
    return ResultTable(
        f"Model of a circuit: {result.prompts} judged prompts, {result.random_plans} random plans with as many heads in each "
        f"layer{recovery}. Intervals: 95%, over templates and over texts; for the loss of random plans, smallest and largest",
        ("model", "heads", "parameters", "metric", "right", "loss increase on other text"),
        tuple(rows),
        'More: .plan, .model, .rows, .to_json("study.json")',
    )


def head_similarity_table(comparison: "HeadSimilarityResult") -> ResultTable:
    """Most similar pairs of heads by Jensen–Shannon divergence."""
    import numpy as np

    heads, divergence = comparison.addresses, np.asarray(comparison["js"], dtype=float)
    baseline = np.broadcast_to(np.asarray(comparison.baselines["js"], dtype=float), divergence.shape)
    first, second = np.triu_indices(len(heads), 1)
    order = np.argsort(divergence[first, second], kind="stable")[:MAX_ROWS]
    rows = tuple(
        (str(heads[a]), str(heads[b]), float(divergence[a, b]), float((baseline[a, b] + baseline[b, a]) / 2))
        for a, b in zip(first[order], second[order], strict=True)
    )
    return ResultTable(
        f"Comparison of {len(heads)} heads on {comparison.rows:,} rows of {comparison.texts:,} texts; most similar pairs",
        ("head", "other head", "JS divergence (nats)", "same head, other text"),
        rows,
        f'More: .nearest_heads("{heads[0]}"), .most_similar_pairs(), .clusters(), .matrices["js"]',
    )


def matching_table(matching: "NearestHeadMatches") -> ResultTable:
    """Heads of the second model with their match in the first; matches first."""
    matches = sorted(matching.matches, key=lambda match: (not match.is_match, match.distance))
    rows = tuple(
        (str(match.head), str(match.partner), match.distance, match.untrained_distance, match.p, match.is_match)
        for match in matches
    )
    return ResultTable(
        f"{len(matching.matched)} of {len(matching)} heads have a match in the other model "
        f"({matching.texts[0]} texts to select, {matching.texts[1]} to evaluate)",
        ("head", "match", "distance", "untrained model", "p", "significant"),
        rows,
        f'More: matching["{matches[0].head if matches else "0.0"}"], .matched, .to_dict()',
    )


def quantization_sensitivity_table(sensitivity: "SensitivityResult") -> ResultTable:
    """Parts of heads with the largest quantization cost."""
    import numpy as np

    increase, (low, high) = sensitivity.loss_increase, sensitivity.interval
    order = np.argsort(-increase, kind="stable")
    rows = tuple(
        (" ".join(target.heads), target.part, target.bits, float(increase[i]), _interval(float(low[i]), float(high[i])))
        for i in order
        for target in [sensitivity.targets[i]]
    )
    loss = "" if sensitivity.clean_loss is None else f"; loss of the full model {sensitivity.clean_loss:.4g}"
    return ResultTable(
        f"Quantization cost of {len(sensitivity)} parts on {len(sensitivity.counts):,} texts, "
        f"{_format_unit(sensitivity.metric)}{loss}",
        ("heads", "part", "bits", "loss increase", "95% CI"),
        rows,
        "More: .table_rows(), .to_dict(), hw.allocate_bits(model, sensitivity, mean_bits=4)",
    )


def plan_table(plan: "Plan") -> ResultTable:
    """Changes of a plan: pruned heads by layer, cache policies, weight bits."""
    by_layer: dict[str, list[str]] = {}
    for address in plan.pruned_addresses:
        by_layer.setdefault(str(address.layer_address), []).append(str(address))
    rows = [(f"prune in layer {layer}", " ".join(heads)) for layer, heads in by_layer.items()]
    rows += [(f"cache: {rule.policy}", " ".join(rule.heads)) for rule in plan.cache]
    rows += [
        (f"{rule.bits} bits: {rule.part}", f"{len(rule.heads)} heads" if rule.heads else "all")
        for rule in plan.weight_rules
    ]
    num_cache = sum(len(rule.heads) for rule in plan.cache)
    parts = [f"{len(plan.pruned_heads)} of {len(plan.spec.head_addresses)} heads pruned (ranking: {plan.ranking})"]
    parts += [f"{num_cache} KV heads with a reduced cache (ranking: {plan.cache_ranking})"] if num_cache else []
    parts += ["quantized weights"] if plan.weight_rules else []
    parts += ["mean outputs folded into biases"] if plan.folded_biases else []
    return ResultTable(
        f"Plan: {'; '.join(parts)}",
        ("change", "heads"),
        tuple(rows),
        'More: print(plan), plan.to_dict(), plan.save("plan.json"), hw.apply(plan, model)',
    )


def parts_per_bits_table(allocation: "BitAllocation") -> ResultTable:
    """Number of matrix pairs per bit width."""
    rows = []
    for bits, count in allocation.parts_per_bits().items():
        names = [
            f"{kv_head}:{part}"
            for (kv_head, part), own in zip(allocation.pairs, allocation.bits, strict=True)
            if own == bits
        ]
        rows.append((bits, count, ", ".join(names)))
    return ResultTable(
        f"Bit allocation: {allocation.mean_bits:.3g} bits per weight on average (budget {allocation.budget:.3g}), expected "
        f"loss increase {allocation.expected_cost:.3g}",
        ("bits", "matrix pairs", "KV heads and parts"),
        tuple(rows),
        "More: .bits_by_head_and_part, hw.quantize(model, allocation.bits_by_head_and_part)",
    )


def score_attribution_table(attribution: "ScoreAttribution") -> ResultTable:
    """Pairs of components with the largest contribution to one attention score."""
    relative = " relative to the mean over visible keys" if attribution.relative_to_mean else ""
    rows = tuple((pair.query, pair.key, pair.score, pair.fraction) for pair in attribution.pairs)
    return ResultTable(
        f"Head {attribution.head} attends from {attribution.query_token!r} to {attribution.key_token!r} with weight "
        f"{attribution.weight:.3g}; score {attribution.score:.3g}{relative}",
        ("component at query", "component at key", "score", "fraction"),
        rows,
        'More: .pairs, .side_totals("key"), .path, .to_dict()',
    )


def recording_table(recording: "ModelRecording") -> ResultTable:
    """Layers of a recording with their calls and shapes."""
    rows = []
    for address, record in recording._records.items():
        queries, keys = record.calls[-1].sizes if record.calls else (0, 0)
        rows.append(
            (str(address), len(record.heads), len(record.calls), queries, keys, " ".join(sorted(record.tensor_names)))
        )
    example = recording.addresses[0] if recording.addresses else "0.0"
    return ResultTable(
        f"Recording of {len(recording)} heads, {recording.nbytes / 1e6:.3g} MB",
        ("layer", "heads", "calls", "queries", "keys", "tensors"),
        tuple(rows),
        f'More: recording["{example}"].q, .k, .v, .z, .output, .map(); with several calls .call(0)',
    )


def recorded_calls_table(recording: "SingleHeadRecording") -> ResultTable:
    """Calls of one recorded head."""
    rows = tuple((index, *call._call.sizes) for index, call in enumerate(recording.calls))
    hint = "More: .q, .k, .v, .z, .output, .map()" if len(rows) == 1 else "More: .call(0).z, .call(-1).map()"
    return ResultTable(
        f"Recording of head {recording.address}: {len(rows)} call{'s' * (len(rows) != 1)}",
        ("call", "queries", "keys"),
        rows,
        hint,
    )


def head_call_repr(call: "HeadCall") -> str:
    """One line: head, number of queries and keys."""
    queries, keys = call._call.sizes
    return f"HeadCall({call.address}: {queries} queries, {keys} keys; .q, .k, .v, .z, .output, .map())"


def largest_weights_table(view: "AttentionView") -> ResultTable:
    """Largest attention weights of a text, outside idle attention. Large views only get a title."""
    words = len(view.words)
    rows: tuple[tuple[object, ...], ...] = ()
    if len(view.heads) * words * words <= MAX_EDGE_WEIGHTS:
        try:
            rows = tuple((edge.head, edge.word, edge.attended, edge.weight) for edge in view.top_edges(MAX_ROWS))
        except HeadwiseError:  # a layer that is called several times needs call_index
            rows = ()
    content = "image" if view.image is not None else f"{_truncate(view.text, MAX_CELL_CHARACTERS)!r}"
    return ResultTable(
        f"Attention maps of {len(view.heads)} heads on {content} ({words} words)",
        ("head", "query", "key", "weight"),
        rows,
        f'More: view.map("{view.heads[0] if view.heads else "0.0"}"), .attention_from_word(word), .top_edges(), '
        ".top_heads_for_pair(query, key)",
    )


def train_result_table(result: "TrainResult") -> ResultTable:
    """Loss, steps and time of a training or distillation run."""
    rows = [
        ("steps", result.step),
        ("tokens", result.tokens),
        ("training loss", float(result.loss)),
        ("held-out loss", result.valid_loss),
        ("best step", result.best_step),
        ("parameters", result.model.spec.num_parameters),
        ("heads", len(result.model.spec.head_addresses)),
        ("seconds", float(result.seconds)),
        ("stop reason", result.stop_reason),
        ("folder", "" if result.folder is None else str(result.folder)),
    ]
    loss = result.loss if result.valid_loss is None else result.valid_loss
    name = "training loss" if result.valid_loss is None else "held-out loss"
    return ResultTable(
        f"TrainResult: {result.stop_reason} after {result.step:,} steps, {name} {loss:.4g}",
        ("", "value"),
        tuple(row for row in rows if row[1] not in ("", None)),
        "More: .model, .history (one row per log entry), .recipe, .to_dict()",
    )


def plan_report_table(report: "PlanReport") -> ResultTable:
    """Loss and size before and after a plan."""
    rows = [(str(name), *_to_floats(values)) for name, *values in report.loss_rows()]
    heads = f"{report.before.heads} → {report.after.heads} heads"
    return ResultTable(
        f"Plan report: {heads}, loss {report.loss_before.mean:.4g} → {report.loss_after.mean:.4g} "
        f"({report.loss_increase.mean:+.3g}) on {report.texts:,} texts, {_format_unit(report.metric)}",
        ("loss", "mean", "low", "high"),
        tuple(rows),
        "More: .loss_rows(), .footprint_rows(), .to_dict()",
    )


def pruning_curve_table(curve: "PruningCurves") -> ResultTable:
    """Loss increase of each ranking method at each fraction of heads."""
    rows = tuple(
        (
            point.ranking,
            point.kept_fraction,
            point.heads,
            point.loss_increase.mean,
            _interval(point.loss_increase.low, point.loss_increase.high),
        )
        for point in curve.points
    )
    return ResultTable(
        f"Pruning curve: {len(rows)} points on {curve.texts:,} texts, loss of the full model {curve.full_loss.mean:.4g}, "
        f"{_format_unit(curve.metric)}",
        ("ranking", "kept", "heads", "loss increase", "95% CI"),
        rows,
        'More: .points_by_ranking("gradient"), .rows(), profile.plot.pruning(curve)',
    )


def prune_study_table(result: "PruneStudyResult") -> ResultTable:
    """Plan, loss and curve of a prune study."""
    titles, rows = [], []
    if result.plan is not None:
        titles.append(f"{len(result.plan.pruned_heads)} of {len(result.plan.spec.head_addresses)} heads pruned")
    if result.report is not None:
        report = result.report
        titles.append(
            f"loss {report.loss_before.mean:.4g} → {report.loss_after.mean:.4g} ({report.loss_increase.mean:+.3g})"
        )
        rows += [(str(name), *_to_floats(values)) for name, *values in report.loss_rows()]
    if result.curve is not None:
        titles.append(f"curve with {len(result.curve.points)} points")
        rows += [
            (f"{point.ranking}, {point.heads} heads", point.loss.mean, point.loss.low, point.loss.high)
            for point in result.curve.points
        ]
    return ResultTable(
        f"Prune study: {'; '.join(titles) or 'no result'}",
        ("loss", "mean", "low", "high"),
        tuple(rows),
        "More: .plan, .model, .report, .curve, .to_dict()",
    )


def parallel_cost_table(cost: "ParallelStrategyCost") -> ResultTable:
    """Memory and traffic per process of one layout."""
    rows = [
        ("weights", cost.weight_bytes),
        ("KV cache", cost.cache_bytes),
        ("training state", cost.training_bytes),
        ("gathered weights", cost.gathered_bytes),
        ("forward traffic", cost.forward_traffic),
        ("step traffic", cost.step_traffic),
    ]
    title = f"Layout {cost.name}: {cost.processes} processes, mesh {cost.mesh_shape}"
    if cost.error:
        return ResultTable(f"{title}: not possible. {cost.error}")
    table_rows = tuple((name, _format_bytes(nbytes)) for name, nbytes in rows)
    return ResultTable(title, ("per process", "size"), table_rows, "More: .weight_bytes, .cache_bytes, .training_bytes")


def parallel_cost_text(cost: "ParallelStrategyCost") -> str:
    """One line, because `hw.layout` returns a tuple."""
    if cost.error:
        return f"ParallelStrategyCost({cost.name}: not possible. {_truncate(cost.error, MAX_LINE_CHARACTERS)})"
    return (
        f"ParallelStrategyCost({cost.name}, {cost.processes} processes, mesh {cost.mesh_shape}: weights "
        f"{_format_bytes(cost.weight_bytes)}, KV cache {_format_bytes(cost.cache_bytes)}, training state "
        f"{_format_bytes(cost.training_bytes)} per process)"
    )


def attached_model_table(attached: "AttachedModel") -> ResultTable:
    """Sizes of an attached model, and the heads of each layer."""
    name, heads = type(attached.model).__name__, attached.heads
    state = "" if attached.is_attached else ", detached"
    family = "" if attached.family is None else f" ({attached.family})"
    rows = _layer_rows(heads.addresses)
    try:
        spec = attached.spec
        sizes = f", {spec.kind}, width {spec.width}"
    except HeadwiseError:
        sizes = ""
    return ResultTable(
        f"Attached model: {name}{family}{state}, {len(heads)} heads in {len(rows)} layers{sizes}",
        ("layer", "count", "heads"),
        rows,
        "More: .heads, .spec, .model, hw.profile(attached)",
    )


def heads_by_layer_table(heads: "Heads") -> ResultTable:
    """Heads by layer."""
    rows = _layer_rows(heads.addresses)
    example = heads.addresses[0] if heads.addresses else "0.0"
    return ResultTable(
        f"{len(heads)} heads in {len(rows)} layers",
        ("layer", "count", "heads"),
        rows,
        f'More: heads["{example}"], heads["{str(example).rpartition(".")[0]}.*"], heads.silenced(), heads.scaled(0.5)',
    )


def head_repr(head: "Head") -> str:
    """One line: address, size, and the heads with the same KV head."""
    spec = head.layer.spec
    group = [spec.head_ids[i] for i, kv_index in enumerate(spec.kv_of_head) if kv_index == head.kv_index]
    note = f", KV head shared by heads {group}" if len(group) > 1 else ""
    return f"Head({head.address}, head_dim={spec.head_dim}{note}; .W_Q, .W_K, .W_V, .W_O, .QK, .OV, .silenced())"


def head_summary_text(summary: "HeadSummary") -> str:
    """The sentences of a summary, wrapped and limited to `MAX_LINES` lines."""
    hint = "More: print(summary)"
    lines = [line for sentence in summary.lines for line in _wrap(sentence.text, 1200)]
    if len(lines) < MAX_LINES:
        return "\n".join(lines)
    return "\n".join([*lines[: MAX_LINES - 2], f"… {len(lines) - MAX_LINES + 2} more lines", hint])


def _layer_rows(addresses: Iterable[Any]) -> tuple[tuple[object, ...], ...]:
    by_layer: dict[str, list[int]] = {}
    for address in addresses:
        by_layer.setdefault(str(address.layer_address), []).append(address.head)
    return tuple((layer, len(heads), _ranges(heads)) for layer, heads in by_layer.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Compact list of numbers, for example `0–3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _role_name_with_detail(evidence: "RoleEvidence") -> str:
    return f"{evidence.role} {evidence.detail}".rstrip()


def _evidence_cells(evidence: "RoleEvidence") -> tuple[str, float, str, float, float]:
    return (
        evidence.evidence_level,
        evidence.score,
        f"{evidence.interval[0]:.2f}–{evidence.interval[1]:.2f}",
        evidence.baseline,
        evidence.p,
    )


def _interval(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}" if math.isfinite(low) and math.isfinite(high) else "–"


def _to_floats(values: Iterable[object]) -> tuple[float, ...]:
    return tuple(float(value) if isinstance(value, int | float) else math.nan for value in values)


def _format_unit(metric: str) -> str:
    return metric.replace(" a ", " per ")


def _format_bytes(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _is_number_or_none(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _format_cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else _truncate(" ".join(str(value).split()), MAX_CELL_CHARACTERS)


def _html_cell(value: object) -> str:
    style = ' style="text-align:right"' if _is_number_or_none(value) else ""
    return f"<td{style}>{escape(_format_cell(value))}</td>"


def _align(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(row, widths, right, strict=True)
    )
    return "  ".join(cells).rstrip()


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _wrap(text: str, length: int = MAX_TITLE_CHARACTERS) -> list[str]:
    """Break a text between words into lines of at most `MAX_LINE_CHARACTERS` characters."""
    from textwrap import wrap

    return wrap(_truncate(" ".join(text.split()), length), MAX_LINE_CHARACTERS - 20, break_on_hyphens=False)
