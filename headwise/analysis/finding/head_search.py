"""`find_heads`: from examples of a job to the heads that do it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.ablate import AblationMethod
from headwise.analysis.finding.ablation_costs import (
    HeadAblator,
    Metric,
    check_ablation,
    check_metric,
    measure_metric,
    other_head_costs,
)
from headwise.analysis.finding.bundled_examples_path import bundled_examples_path
from headwise.analysis.finding.class_probes import class_features, fit_class_probes
from headwise.analysis.finding.gold_pair_scores import ExampleScores, score_pairs
from headwise.analysis.finding.head_search_result import HeadSearchResult
from headwise.analysis.finding.head_search_results_file import FORMAT, HeadSearchResultsWriter
from headwise.analysis.finding.job_examples import (
    examples_digest,
    read_examples,
    split_examples,
)
from headwise.analysis.finding.monotonic_alignment_scores import score_monotonic_alignment
from headwise.analysis.finding.per_input_scores import (
    ALPHA,
    LEVELS,
    AllHeadsTestResult,
    JobEvidence,
    PerInputScores,
    assess_heads,
    sum_scores_by_input,
)
from headwise.analysis.finding.prepared_example import PreparedExample, prepare_example
from headwise.analysis.metrics.statistics import (
    bootstrap_difference_interval,
    bootstrap_interval,
    max_t_test,
)
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.attached.whisper_io import convert_audio_example
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import HookPoint
from headwise.model import ModelProtocol, eval_mode
from headwise.model.protocols import check_model
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address

THRESHOLD = 0.1  # minimum gain over the baseline on both halves
MAX_ABLATED = 8  # heads whose effect is tested after a search by attention
OTHER_HEADS = 4  # other heads of the layer that each of them is compared with


@shows_progress
@torch.no_grad()
def find_heads(
    model: ModelProtocol,
    examples: Any = None,
    *,
    job: str = "pairs",
    heads: HeadPattern = "*",
    metric: Metric | None = None,
    ablation: AblationMethod = "mean",
    threshold: float | None = None,
    seed: int = 0,
    out: Any = None,
    progress: ProgressOption = None,
) -> HeadSearchResult:
    """Find the heads that do a job, from examples of the job.

    Heads are chosen on one half of the examples and judged on the other. p-values are corrected for all heads that were
    tried. docs/tasks/find-heads.md describes the examples.

    Args:
        model: A `Transformer` or an attached model.
        examples: A JSON Lines file or a list of dicts. None uses the examples that come with the model (RXNMapper's atom
            maps).
        job: "pairs" (a query attends to its gold keys), "alignment" (cross-attention follows the source in order, or gold
            pairs), "classes" (a head tells two classes of inputs apart), or "effect" (ablating the head lowers a metric).
        heads: Heads to try, by address or pattern. p-values are corrected for their number.
        metric: Metric for the job "effect", and for the causal test of the other jobs: "loss", "answer", or a function of
            (output, example) that returns a number, larger is better. None skips the causal test.
        ablation: Replacement of the head output: "mean" over the examples, or "zero".
        threshold: Minimum gain over the baseline on both halves: (score − baseline) / (1 − baseline). Default 0.1; for the
            job "effect" the gain is in units of the metric, and the default is 0.
        seed: Seed of bootstrap, permutations and random controls.
        out: File to which each result is appended. Repeat the call with the same file to resume an interrupted search.
        progress: Called with a label, the number of items done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The heads, best first, with scores on the reporting half, intervals and evidence levels.

    Raises:
        ArgumentError: If examples are missing, too few, or do not fit the model.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=64, layers=1, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> words = "cat dog pen sun hat box car cup bed key".split()
    >>> examples = [{"text": f"a {word} is a {word}", "pairs": [[4, 1]]} for word in words]
    >>> result = find_heads(model, examples)
    >>> len(result), result.job
    (2, 'pairs')
    """
    progress = callback_of(progress)
    check_model(model)
    _check_options(job, metric, ablation, threshold, seed)
    source = bundled_examples_path(model) if examples is None else examples
    parsed = read_examples(source, job, partial(convert_audio_example, model))
    with eval_mode(model):
        prepared = [prepare_example(model, item) for item in parsed]
        search = _Search(
            model, prepared, SearchOptions(job, heads, metric, ablation, seed, out, progress or _ignore_progress)
        )
        return search.run(threshold if threshold is not None else 0.0 if job == "effect" else THRESHOLD)


def _check_options(
    job: str, metric: Metric | None, ablation: AblationMethod, threshold: float | None, seed: int
) -> None:
    check_metric(metric)
    check_ablation(ablation)
    if job == "effect" and metric is None:
        raise ArgumentError(
            "metric: the job 'effect' needs one. Use 'loss', 'answer' or a function of (output, example)."
        )
    if threshold is not None and not isinstance(threshold, int | float):
        raise ArgumentError(f"threshold={threshold!r}: must be a number.")
    if threshold is not None and not 0 <= threshold < 1 and job != "effect":
        raise ArgumentError(f"threshold={threshold}: must be at least 0 and below 1.")
    if type(seed) is not int or seed < 0:
        raise ArgumentError(f"seed={seed!r}: must be an integer of at least 0.")


def _ignore_progress(label: str, done: int, total: int | None) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class SearchOptions:
    """Options of `find_heads`, as documented there."""

    job: str
    heads: HeadPattern
    metric: Metric | None
    ablation: AblationMethod
    seed: int
    out: Any
    progress: Progress


class _Search:
    """One run of `find_heads`: the heads that are tried, and the file of results."""

    def __init__(self, model: ModelProtocol, prepared: Sequence[PreparedExample], options: SearchOptions) -> None:
        self.model, self.prepared, self.job, heads = model, prepared, options.job, options.heads
        self.metric, self.seed = options.metric, options.seed
        self.ablation: AblationMethod = options.ablation
        self.progress = options.progress
        self.examples = [item.example for item in prepared]
        self.half_of = split_examples(self.examples)
        self.hook_points = _select_hook_points(model, prepared, heads, self.job)
        self.all_addresses = [address for point in self.hook_points for address in point.head_addresses]
        self.selected = select_heads(heads, self.all_addresses)
        if not self.selected:
            raise ArgumentError(f"heads={heads!r}: selects no head that reads these examples. Select other heads.")
        self.columns = [self.all_addresses.index(address) for address in self.selected]
        self.header = self._make_header(digest=options.out is not None)
        self.file = HeadSearchResultsWriter(options.out, self.header)

    def _make_header(self, *, digest: bool) -> dict[str, Any]:
        metric = self.metric if isinstance(self.metric, str | None) else getattr(self.metric, "__name__", "function")
        return {
            "format": FORMAT, "job": self.job, "model": weights_digest(self.model)[:16] if digest else "",
            "examples_digest": examples_digest(self.examples), "num_examples": len(self.examples),
            "num_inputs": len({item.key for item in self.examples}),
            "addresses": [str(address) for address in self.selected],
            "settings": {"metric": metric, "ablation": self.ablation, "seed": self.seed},
        }  # fmt: skip

    def run(self, threshold: float) -> HeadSearchResult:
        """Measure, test and return the result."""
        if self.metric is not None and self.job != "effect" and not self.file.records:
            measure_metric(self.model, self.prepared[0], self.metric)  # raises before the search, not after it
        if self.job == "effect":
            return self._ablate_each_head(threshold)
        skipped = 0
        if self.job == "classes":
            table, details = self._probe_class_examples()
            heads = [*self.selected] * (len(details) // len(self.selected))
            test = _keep_best_feature_per_head(assess_heads(table, heads, threshold, seed=self.seed, details=details))
        else:
            rows = self._score_examples()
            skipped = sum(row.skipped for row in rows)
            table = sum_scores_by_input(rows, self.half_of)
            self._check_halves(table)
            test = assess_heads(table, self.selected, threshold, seed=self.seed)
        if self.metric is not None:
            test = replace(test, evidence=self._causal_test(test.evidence))
        return self._result(table, test, threshold, skipped)

    def _check_halves(self, table: PerInputScores) -> None:
        for half in (0, 1):
            count = int(table.in_half(half).sum())
            if count < 5:
                raise ArgumentError(
                    f"examples: only {count} inputs of one half have a pair that can be scored, and at least 5 are needed. "
                    "Pairs with a gold key that the query cannot see are left out (in a decoder: later tokens and the first "
                    "token)."
                )

    def _score_examples(self) -> list[ExampleScores]:
        """Score every example, continuing with those in the result file."""
        stored = self.file.stored_example_scores()
        causal = self.model.spec.kind == "decoder" and not self.prepared[0].is_cross
        allow_self = any(_is_self_pair(item) for item in self.prepared)
        rows: list[ExampleScores] = []
        for index, item in enumerate(self.prepared):
            self.progress("examples", index, len(self.prepared))
            row = stored.get(index)
            if row is None:
                if self.job == "alignment" and not item.example.pairs:
                    row = score_monotonic_alignment(self.model, item, self.hook_points)
                else:
                    row = score_pairs(self.model, item, self.hook_points, causal=causal, allow_self=allow_self)
                row = _select_heads(row, self.columns)
                self.file.append_example_scores(index, row)
            rows.append(row)
        self.progress("examples", len(self.prepared), len(self.prepared))
        return rows

    def _probe_class_examples(self) -> tuple[PerInputScores, list[str]]:
        """Compute the features of every example, continuing with those in the result file, and test the probes."""
        stored = self.file.stored_features(len(self.columns))
        features = []
        for index, item in enumerate(self.prepared):
            self.progress("examples", index, len(self.prepared))
            row = stored.get(index)
            if row is None:
                row = class_features(self.model, item, self.hook_points).select(self.columns)
                self.file.append({"features": index} | row.to_record())
            features.append(row)
        self.progress("examples", len(self.prepared), len(self.prepared))
        return fit_class_probes(self.examples, features, self.half_of, self.seed)

    def _ablate_each_head(self, threshold: float) -> HeadSearchResult:
        """Ablate every head. The baseline is the mean cost of the other heads of its layer."""
        assert self.metric is not None
        stored = self.file.stored_costs("ablated")
        ablator = None
        costs = []
        for index, address in enumerate(self.selected):
            self.progress("heads", index, len(self.selected))
            values = stored.get(str(address))
            if values is None:
                ablator = ablator or HeadAblator(
                    self.model, self.prepared, self.hook_points, self.metric, self.ablation
                )
                values = ablator.costs(str(address))
                self.file.append({"ablated": str(address), "values": values})
            costs.append(values)
        self.progress("heads", len(self.selected), len(self.selected))
        by_example = np.array(costs).T  # (examples, H)
        others = other_head_costs(by_example, [address.layer_address for address in self.selected])
        rows = [
            ExampleScores(
                item.key, 1, 0, cost.tolist(), [float("nan")] * len(cost), [float("nan")] * len(cost),
                {"other heads of the layer": other.tolist()}, {"no effect": 0.0},
            )
            for item, cost, other in zip(self.examples, by_example, others, strict=True)
        ]  # fmt: skip
        table = sum_scores_by_input(rows, self.half_of, is_bounded=False)
        test = assess_heads(table, self.selected, threshold, seed=self.seed)
        evidence = [replace(item, evidence_level="causal") if item.is_supported else item for item in test.evidence]
        return self._result(table, replace(test, evidence=evidence), threshold, 0)

    def _causal_test(self, evidence: list[JobEvidence]) -> list[JobEvidence]:
        """Ablate the supported heads, and for each some other heads of its layer, on the reporting half."""
        assert self.metric is not None
        candidates = sorted(
            (item for item in evidence if item.is_supported), key=lambda item: item.sort_key, reverse=True
        )
        candidates = candidates[:MAX_ABLATED]
        if not candidates:
            return evidence
        reporting = [item for item in self.prepared if self.half_of[item.example.key] == REPORTING]
        stored, ablator = self.file.stored_costs("causal test"), None
        rng = np.random.default_rng(self.seed)
        supported = {item.address for item in candidates}
        costs, others = [], []
        for index, item in enumerate(candidates):
            self.progress("causal test", index, len(candidates))
            layer = Address.parse(item.address).layer_address
            pool = [str(a) for a in self.all_addresses if a.layer_address == layer and str(a) not in supported]
            pool = pool or [str(a) for a in self.all_addresses if str(a) not in supported]
            control_heads = [pool[i] for i in rng.permutation(len(pool))[:OTHER_HEADS]]
            for address in (item.address, *control_heads):
                if address not in stored:
                    ablator = ablator or HeadAblator(
                        self.model, reporting, self.hook_points, self.metric, self.ablation
                    )
                    stored[address] = ablator.costs(address)
                    self.file.append({"causal test": address, "values": stored[address]})
            costs.append(stored[item.address])
            control_costs = [stored[address] for address in control_heads] or [[0.0] * len(reporting)]
            others.append(np.mean(control_costs, 0))
        self.progress("causal test", len(candidates), len(candidates))
        by_input, others_by_input = (_mean_by_input(np.array(values).T, reporting) for values in (costs, others))
        tested = _causal_evidence(candidates, by_input, others_by_input, self.seed)
        return [tested.get(item.address, item) for item in evidence]

    def _result(
        self, table: PerInputScores, test: AllHeadsTestResult, threshold: float, skipped: int
    ) -> HeadSearchResult:
        metadata = self.header | {
            "threshold": threshold, "alpha": ALPHA, "family_size": test.family_size, "num_heads": len(self.selected),
            "skipped_pairs": skipped, "rows": float(table.counts[table.in_half(REPORTING)].sum()),
            "family": self.model.family, "shared_layers": self.model.spec.shared_layers,
        }  # fmt: skip
        return HeadSearchResult(
            metadata, tuple(sorted(test.evidence, key=lambda item: item.sort_key, reverse=True)), test.control, table,
            tuple(self.examples),
        )  # fmt: skip


def _select_hook_points(
    model: ModelProtocol, prepared: Sequence[PreparedExample], heads: HeadPattern, job: str
) -> list[HookPoint]:
    """Return the layers that read the examples: cross-attention for pairs of two texts, else self-attention."""
    if len({item.is_cross for item in prepared}) > 1:
        raise ArgumentError("examples: some have a source and others do not. Search them separately.")
    cross = prepared[0].is_cross
    if job == "alignment" and not cross:
        raise UnsupportedModelError(
            "job='alignment': searches cross-attention, but examples[0] has neither a source nor audio frames. Use "
            "job='pairs' for heads of self-attention."
        )
    points = [point for point in model.gathered_hook_points() if point.head_ids]
    if model.spec.kind == "encoder-decoder":
        stack = "cross" if cross else "enc"
        points = [point for point in points if point.address.stack == stack]
    elif cross:
        raise UnsupportedModelError("examples: have keys in another input, but this model has no cross-attention.")
    if not (isinstance(heads, str) and heads.strip() == "*"):
        addresses = [address for point in points for address in point.head_addresses]
        layers = {address.layer_address for address in select_heads(heads, addresses)}
        points = [point for point in points if point.address in layers]
    if not points:
        raise UnsupportedModelError("model: has no attention layer that reads these examples. Use another model.")
    return points


def _is_self_pair(item: PreparedExample) -> bool:
    """Return whether a gold key of an example is its own query."""
    return not item.is_cross and any(query in keys for query, keys in item.example.pairs)


def _select_heads(row: ExampleScores, columns: Sequence[int]) -> ExampleScores:
    """Keep the scores of the selected heads."""
    keep = {name: [getattr(row, name)[c] for c in columns] for name in ("scores", "value_weighted", "weights")}
    return replace(row, **keep, baselines={name: [v[c] for c in columns] for name, v in row.baselines.items()})


def _keep_best_feature_per_head(test: AllHeadsTestResult) -> AllHeadsTestResult:
    """Keep the better feature of each head, chosen on the selection half."""
    best: dict[str, JobEvidence] = {}
    for item in test.evidence:
        if item.address not in best or item.selection_gain > best[item.address].selection_gain:
            best[item.address] = item
    return replace(test, evidence=list(best.values()))


def _mean_by_input(values: np.ndarray, prepared: Sequence[PreparedExample]) -> np.ndarray:
    """Average examples with equal inputs: (examples, heads) → (inputs, heads)."""
    keys = [item.example.key for item in prepared]
    return np.stack([values[[key == other for other in keys]].mean(0) for key in dict.fromkeys(keys)])


def _causal_evidence(
    candidates: Sequence[JobEvidence], costs: np.ndarray, others: np.ndarray, seed: int
) -> dict[str, JobEvidence]:
    """Test the cost of each candidate against 0 and against the other heads of its layer."""
    ones = np.ones_like(costs)
    low, high = bootstrap_interval(costs, ones, seed=seed)
    excess = bootstrap_difference_interval(costs, ones, others, ones, seed=seed)
    p, _ = max_t_test(costs, others, ones, seed=seed)
    tested = {}
    for h, item in enumerate(candidates):
        is_causal = item.evidence_level == LEVELS[2] and low[h] > 0 and excess[0][h] > 0 and p[h] < ALPHA
        tested[item.address] = replace(
            item, evidence_level=LEVELS[3] if is_causal else item.evidence_level, cost=float(costs[:, h].mean()),
            cost_interval=(float(low[h]), float(high[h])), other_cost=float(others[:, h].mean()),
            cost_excess_interval=(float(excess[0][h]), float(excess[1][h])),
        )  # fmt: skip
    return tested
