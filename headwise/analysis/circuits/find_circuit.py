"""Find the set of heads, MLPs and embeddings that carries a task, and judge it on prompts that did not choose it.

The rule, fixed before any figure: templates are split into three parts. The score split ranks the nodes. The size split
chooses the smallest size whose faithfulness reaches the target. The judge split gives all reported figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.circuits.circuit_result import (
    CircuitEstimate,
    CircuitEvaluation,
    CircuitExample,
    CircuitResult,
    CircuitSettings,
    EdgeEffect,
    EvaluatedCircuit,
    FaithfulnessCurve,
    FaithfulnessDrop,
    FaithfulnessPoint,
    NodeScore,
    RandomSetTest,
    RankingCheck,
)
from headwise.analysis.circuits.circuit_statistics import (
    FaithfulnessSums,
    TemplateBootstrapSampler,
    choose_size,
    faithfulness_curve,
    mib_sizes,
    size_grid,
    stability_shares,
)
from headwise.analysis.circuits.circuit_statistics import (
    random_sets as draw_random_sets,
)
from headwise.analysis.circuits.circuit_task import (
    SPLITS,
    CircuitTask,
    EncodedPrompt,
    PromptEncoder,
    PromptPair,
    add_partners,
    read_task,
    split_three_ways_by_template,
)
from headwise.analysis.circuits.measure_edge_effects import circuit_edges
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator, NodeMeans
from headwise.analysis.circuits.node_ranking import RANKINGS, exact_effects, gate_scores, gradient_effects
from headwise.analysis.circuits.shipped_tasks import SHIPPED_TASKS, make_shipped_task
from headwise.analysis.metrics.statistics import holm_correction
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.steering.resumable_steps import ResumableStepRunner
from headwise.errors import ArgumentError, suggest_names
from headwise.model import ModelProtocol, check_model
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress

ABLATIONS = ("resample", "mean", "zero")
DEFAULT_PROMPTS = 80
MIN_ACCURACY = 0.7
SETS_PER_STEP = 10  # sets that are stored together in the file of finished steps
LAYERS_PER_STEP = 3  # layers of the sweep that are stored together
MAX_DROPS = 64  # members whose drop is measured
PROGRESS_LABEL = "circuit"


@dataclass(frozen=True)
class CircuitConfig:
    """Settings of a search. `find_circuit` documents them."""

    size: int | None
    random_sets: int
    ranking: str
    steps: int
    target: float
    min_accuracy: float
    alternative: bool
    seed: int


@dataclass(frozen=True, eq=False)
class SplitData:
    """One split of the prompts.

    Attributes:
        prompts: The prompts.
        templates: Template of each prompt.
        evaluator: Evaluates sets of nodes on the prompts.
        clean: Metric of the model on each prompt, (P,).
        sampler: Bootstrap over the templates.
    """

    prompts: tuple[EncodedPrompt, ...]
    templates: tuple[str, ...]
    evaluator: NodeEvaluator
    clean: np.ndarray
    sampler: TemplateBootstrapSampler


@dataclass(frozen=True, eq=False)
class CircuitSearchState:
    """A search in progress.

    Attributes:
        model: The model.
        nodes: Its nodes.
        config: Settings.
        runner: Finished steps.
        splits: The score, size and judge splits.
    """

    model: ModelProtocol
    nodes: ModelNodes
    config: CircuitConfig
    runner: ResumableStepRunner
    splits: tuple[SplitData, SplitData, SplitData]

    def evaluate(self, split: int, step: str, kept_nodes: np.ndarray, ablation: str = "resample") -> np.ndarray:
        """Return the metrics of sets of nodes on one split, (S, P), as stored steps."""
        parts = []
        for start in range(0, len(kept_nodes), SETS_PER_STEP):
            rows = kept_nodes[start : start + SETS_PER_STEP]

            def compute(rows: np.ndarray = rows) -> list[list[float]]:
                means = NodeMeans(self.splits[0].evaluator) if ablation == "mean" else None
                return self.splits[split].evaluator.evaluate(rows, ablation, means).tolist()

            parts.append(np.array(self.runner.run(f"{step} {SPLITS[split]} {ablation} {start}", compute)))
        return np.concatenate(parts)

    def node_mask(self, members: Sequence[int]) -> np.ndarray:
        """Return a row that is True at the members, (N,)."""
        row = np.zeros(len(self.nodes), bool)
        row[list(members)] = True
        return row


@dataclass(frozen=True, eq=False)
class RankedNodes:
    """Nodes in the order of a ranking.

    Attributes:
        order: Indices of the nodes, best first. Excluded nodes are not in it.
        scores: Mean score of every node, (N,).
        effects: Effect of every node on every prompt of the score split, (N, P). None for gates.
    """

    order: list[int]
    scores: np.ndarray
    effects: np.ndarray | None


@shows_progress
def find_circuit(
    model: ModelProtocol,
    task: str | Path | CircuitTask | Sequence[PromptPair | Mapping[str, Any]],
    size: int | None = None,
    random_sets: int = 99,
    num_prompts: int | None = None,
    *,
    ranking: str = "exact",
    ig_steps: int = 5,
    target: float = 0.85,
    min_accuracy: float = MIN_ACCURACY,
    alternative: bool = True,
    edges: int = 0,
    seed: int = 0,
    out: str | Path | None = None,
    progress: ProgressOption = None,
) -> CircuitResult:
    """Find the circuit of a task: heads, KV heads, MLPs and the embedding that carry it, judged on held-out prompts.

    Nodes outside the circuit have their value on the corrupted prompt. Templates are split into three parts: one ranks the
    nodes, one chooses the size, and one gives the reported figures.

    Args:
        model: A decoder: a headwise model or an attached model.
        task: Name of a shipped task (induction, indirect-object, agreement, greater-than, brackets, key-value, successor), a
            JSON Lines file, a `CircuitTask`, or a list of prompts.
        size: Number of nodes. None: the smallest size whose faithfulness on the size split reaches `target`.
        random_sets: Number of random sets to compare with, each with as many nodes of each kind in each layer.
        num_prompts: Number of prompts. None: 80, or all prompts of your own task.
        ranking: "exact" (each node is replaced in turn), "attribution" (one backward pass), "eap-ig" (integrated gradients)
            or "gates" (learned gates).
        ig_steps: Number of inputs of "eap-ig".
        target: Faithfulness that the size must reach on the size split.
        min_accuracy: Share of prompts that the model must answer correctly. Below it, a circuit has no meaning.
        alternative: Search again without the heads of the circuit.
        edges: Number of members, best first, between which edges are measured by exact path patching. The number of edges
            grows with its square.
        seed: Seed of words, splits, random sets and bootstrap.
        out: File of finished steps. Repeat an interrupted call to resume.
        progress: Called with a label, done and total. None shows one line in a terminal or notebook, False nothing.

    Returns:
        The circuit with faithfulness, random sets, completeness, minimality, stability and the alternative circuit.

    Raises:
        ArgumentError: If the task is unknown, has too few templates, or is not done by the model.
    """
    config = CircuitConfig(size, random_sets, ranking, ig_steps, target, min_accuracy, alternative, seed)
    if edges < 0:
        raise ArgumentError(
            f"edges: must be 0 or more, the number of members between which edges are measured. Got {edges}."
        )
    search, name, accuracy = _prepare(model, task, num_prompts, config, out, callback_of(progress))
    base = np.ones(len(search.nodes), bool)
    ranked = _rank(search, base, "first")
    members, size_points, notes = _choose_members(search, ranked, config.size, "first")
    search.runner.expect(_count_steps(search.nodes, config, len(members)) + (edges > 0))
    circuit = _judge(search, members, "first", ())
    other = None
    if alternative:
        excluded = [node for node in members if search.nodes.kinds[node] in ("head", "kv")]
        other, other_notes = _find_alternative(search, excluded)
        notes += other_notes
    circuit, other = _adjust_p(circuit, other)
    measured_edges = _edges(search, members[:edges]) if edges > 0 else ()
    judged = search.splits[2]
    empty = search.evaluate(2, "empty", search.node_mask(())[None])[0]
    alone = search.evaluate(2, "first set", search.node_mask(members)[None])[0]
    if not FaithfulnessSums(judged.clean, empty, judged.sampler).effect_is_shown():
        notes.append("The interval of the total effect of all nodes contains 0, so faithfulness has no meaning here.")
    if accuracy is not None and accuracy < 1:
        notes.append("Prompts that the model answers wrongly are included in all figures.")
    examples = [
        CircuitExample(
            p.pair.clean, p.pair.corrupted, p.pair.right[:3], p.pair.wrong[:3], p.pair.template, *map(float, values)
        )
        for p, *values in zip(judged.prompts, judged.clean, empty, alone, strict=True)
    ]
    return CircuitResult(
        _settings(search, name, task), accuracy, float(judged.clean.mean()), float(empty.mean()),
        _node_scores(search, ranked, len(members)), circuit, other, _curves(search, ranked), size_points,
        _compare_ranking_with_exact(search, ranked, len(members)), tuple(examples), measured_edges, tuple(notes),
    )  # fmt: skip


def _prepare(
    model: ModelProtocol, task: Any, num_prompts: int | None, config: CircuitConfig, out: str | Path | None,
    progress: Progress | None,
) -> tuple[CircuitSearchState, str, float | None]:  # fmt: skip
    """Check the arguments, make and split the prompts, and check that the model does the task."""
    check_model(model)
    nodes = ModelNodes.of(model)
    _check_config(config, len(nodes))
    encoder = PromptEncoder(tokenizer_of(model))
    resolved = resolve_task(task, num_prompts, encoder, config.seed)
    pairs = add_partners(resolved.prompts, encoder)
    is_scored = resolved.metric is None
    encoded = [
        encoder.encode(pair if is_scored else replace(pair, right=(), wrong=()), f"prompts[{i}]")
        for i, pair in enumerate(pairs)
    ]
    indices = split_three_ways_by_template(pairs, config.seed)
    identity = [asdict(pair) for pair in pairs]
    digest = weights_digest(model)[:16] if out is not None else ""
    runner = ResumableStepRunner(
        out, {"prompts": identity, "config": asdict(config), "model": digest}, progress,
        _count_steps(nodes, config, config.size or MAX_DROPS), PROGRESS_LABEL,
    )  # fmt: skip
    splits = []
    for number, members in enumerate(indices):
        chosen = tuple(encoded[i] for i in members)
        evaluator = NodeEvaluator(model, nodes, chosen, resolved.metric)
        clean = np.array(runner.run(f"clean {SPLITS[number]}", lambda e=evaluator: e.clean_metrics().tolist()))
        templates = tuple(prompt.pair.template for prompt in chosen)
        sampler = TemplateBootstrapSampler(templates, config.seed + 1 + number)
        splits.append(SplitData(chosen, templates, evaluator, clean, sampler))
    accuracy = float(np.mean(np.concatenate([split.clean for split in splits]) > 0)) if is_scored else None
    if accuracy is not None and accuracy < config.min_accuracy:
        raise ArgumentError(
            f"task={resolved.name!r}: the model prefers the right answer on {accuracy:.0%} of {len(pairs)} prompts, and "
            f"{config.min_accuracy:.0%} are required, because a circuit of a task that the model cannot do has no meaning. "
            f"Use another model or task, or set min_accuracy."
        )
    return CircuitSearchState(model, nodes, config, runner, (splits[0], splits[1], splits[2])), resolved.name, accuracy


def _check_config(config: CircuitConfig, num_nodes: int) -> None:
    if config.ranking not in RANKINGS:
        raise ArgumentError(f"ranking={config.ranking!r}: unknown; {suggest_names(config.ranking, RANKINGS)}")
    if config.size is not None and not 1 <= config.size <= num_nodes:
        raise ArgumentError(
            f"size: must be from 1 to {num_nodes}, the number of nodes of the model (query heads, KV heads, MLPs, "
            f"embedding). Got {config.size}."
        )
    if config.random_sets < 0 or config.steps < 1 or not 0 <= config.min_accuracy <= 1 or not config.target > 0:
        raise ArgumentError(
            "random_sets must be 0 or more, ig_steps at least 1, min_accuracy from 0 to 1, and target above 0. Got "
            f"random_sets={config.random_sets}, ig_steps={config.steps}, min_accuracy={config.min_accuracy}, "
            f"target={config.target}."
        )


def resolve_task(task: Any, num_prompts: int | None, encoder: PromptEncoder, seed: int) -> CircuitTask:
    """Return a task by name, from a file, or from a list of prompts, with at most this number of prompts."""
    if num_prompts is not None and num_prompts < 1:
        raise ArgumentError(f"num_prompts: must be at least 1. Got {num_prompts}.")
    if isinstance(task, str) and task in SHIPPED_TASKS:
        return make_shipped_task(task, num_prompts or DEFAULT_PROMPTS, encoder, seed)
    if isinstance(task, str | Path):
        if Path(task).suffix != ".jsonl" and not Path(task).is_file():
            raise ArgumentError(
                f"task={str(task)!r}: unknown task; {suggest_names(str(task), tuple(SHIPPED_TASKS))} Or pass a JSON Lines "
                f"file with the fields clean, corrupted, right, wrong and template."
            )
        task = read_task(Path(task))
    elif not isinstance(task, CircuitTask):
        task = CircuitTask("task", task)
    if not task.prompts:
        raise ArgumentError("task: has no prompts. Add prompts with at least four templates.")
    if num_prompts is None or num_prompts >= len(task.prompts):
        return task
    return CircuitTask(task.name, _first_of_each_template(task.prompts, num_prompts), task.metric)


def _first_of_each_template(pairs: Sequence[PromptPair], count: int) -> list[PromptPair]:
    """Return `count` prompts, as evenly over the templates as possible."""
    used: dict[str, int] = {}
    rank = []
    for pair in pairs:
        rank.append(used.get(pair.template, 0))
        used[pair.template] = rank[-1] + 1
    order = sorted(range(len(pairs)), key=lambda i: rank[i])
    return [pairs[i] for i in sorted(order[:count])]


def _count_steps(nodes: ModelNodes, config: CircuitConfig, size: int) -> int:
    """Return the number of steps of a search whose circuits have this size, for the progress line."""

    def chunks(count: int) -> int:
        return -(-count // SETS_PER_STEP)

    sweep = (len(nodes.blocks) + LAYERS_PER_STEP) // LAYERS_PER_STEP
    rank, grid = sweep if config.ranking == "exact" else 1, size_grid(len(nodes))
    judge = 2 * len(ABLATIONS) + chunks(min(size, MAX_DROPS)) + chunks(config.random_sets)
    search = rank + chunks(len(grid)) + judge
    check = sweep if config.ranking in ("attribution", "eap-ig") else 0
    curves = chunks(len({*grid, *mib_sizes(len(nodes))}) - 2) + 2
    empty = 1 + len(ABLATIONS)  # all nodes replaced, on the size split and on the judged prompts
    return len(SPLITS) + empty + search * (1 + config.alternative) + curves + check


def _rank(search: CircuitSearchState, base: np.ndarray, tag: str) -> RankedNodes:
    """Rank the nodes of the base on the score split."""
    config, evaluator, P = search.config, search.splits[0].evaluator, len(search.splits[0].prompts)
    candidates = [int(node) for node in np.flatnonzero(base)]
    if config.ranking == "gates":
        scores = np.array(
            search.runner.run(f"{tag} gates", lambda: gate_scores(evaluator, base, seed=config.seed).tolist())
        )
        return RankedNodes(sorted(candidates, key=lambda node: -scores[node]), scores, None)
    if config.ranking == "exact":
        effects = np.zeros((len(search.nodes), P))
        effects[candidates] = _exact_effects_in_steps(search, candidates, base, f"{tag} exact")
    else:
        count = config.steps if config.ranking == "eap-ig" else 1
        effects = np.array(
            search.runner.run(f"{tag} gradients", lambda: gradient_effects(evaluator, base, count).tolist())
        )
    scores = effects.mean(1)
    return RankedNodes(sorted(candidates, key=lambda node: -abs(scores[node])), scores, effects)


def _exact_effects_in_steps(
    search: CircuitSearchState, candidates: Sequence[int], base: np.ndarray, step: str
) -> np.ndarray:
    """Return exact effects of nodes, (candidates, P), stored by groups of layers."""
    effects = np.zeros((len(candidates), len(search.splits[0].prompts)))
    groups: dict[int, list[int]] = {}
    for row, node in enumerate(candidates):
        groups.setdefault((search.nodes.layers[node] + 1) // LAYERS_PER_STEP, []).append(row)
    for group, rows in sorted(groups.items()):

        def compute(rows: list[int] = rows) -> list[list[float]]:
            return exact_effects(search.splits[0].evaluator, [candidates[row] for row in rows], base).tolist()

        effects[rows] = search.runner.run(f"{step} {group}", compute)
    return effects


def _choose_members(
    search: CircuitSearchState, ranked: RankedNodes, size: int | None, tag: str
) -> tuple[list[int], tuple[FaithfulnessPoint, ...], list[str]]:
    """Return the members of the circuit, faithfulness on the size split, and notes."""
    split = search.splits[1]
    sizes = size_grid(len(ranked.order))
    metrics = search.evaluate(1, f"{tag} sizes", np.stack([search.node_mask(ranked.order[:count]) for count in sizes]))
    empty = search.evaluate(1, "empty", search.node_mask(())[None])[0]
    sums = FaithfulnessSums(split.clean, empty, split.sampler)
    points = tuple(FaithfulnessPoint(count, sums.estimate(row)) for count, row in zip(sizes, metrics, strict=True))
    notes: list[str] = []
    if size is None:
        size, reached = choose_size(sizes, [sums.value(row) for row in metrics], search.config.target)
        if not reached:
            label = "circuit" if tag == "first" else "alternative circuit"
            notes.append(
                f"No size of the {label} reaches F = {search.config.target:g} on the size split. The size with the largest F "
                f"is used."
            )
    return ranked.order[:size], points, notes


def _judge(search: CircuitSearchState, members: list[int], tag: str, excluded: Sequence[int]) -> EvaluatedCircuit:
    """Evaluate a circuit on the judged prompts."""
    split, config = search.splits[2], search.config
    alone, without = search.node_mask(members), ~search.node_mask(members)
    effects = []
    for ablation in ABLATIONS:
        empty = search.evaluate(2, "empty", search.node_mask(())[None], ablation)[0]
        sums = FaithfulnessSums(split.clean, empty, split.sampler)
        inside = search.evaluate(2, f"{tag} set", alone[None], ablation)[0]
        outside = search.evaluate(2, f"{tag} complement", without[None], ablation)[0]
        effects.append(CircuitEvaluation(ablation, sums.estimate(inside), sums.estimate(outside)))
    empty = search.evaluate(2, "empty", search.node_mask(())[None])[0]
    metrics = search.evaluate(2, f"{tag} set", alone[None])[0]
    sums = FaithfulnessSums(split.clean, empty, split.sampler)
    removed = [search.node_mask([other for other in members if other != node]) for node in members[:MAX_DROPS]]
    reduced = search.evaluate(2, f"{tag} drops", np.stack(removed))
    drops = [
        FaithfulnessDrop(search.nodes.names[node], sums.difference(metrics, row))
        for node, row in zip(members, reduced, strict=False)
    ]
    test = None
    if config.random_sets:
        rng = np.random.default_rng([config.seed, 7, len(excluded)])
        sampled = draw_random_sets(search.nodes, members, config.random_sets, rng, excluded)
        random_metrics = search.evaluate(2, f"{tag} random", sampled)
        values = [sums.value(row) for row in random_metrics]
        own = sums.value(metrics)
        p = (sum(value >= own for value in values) + 1) / (len(values) + 1)
        shared = float(sampled[:, members].mean())
        test = RandomSetTest(tuple(values), p, p, sums.difference(metrics, random_metrics.mean(0)), shared)
    names = tuple(search.nodes.names[node] for node in members)
    return EvaluatedCircuit(names, tuple(effects), test, tuple(sorted(drops, key=lambda item: -item.drop.value)))


def _find_alternative(search: CircuitSearchState, excluded: list[int]) -> tuple[EvaluatedCircuit | None, list[str]]:
    """Search again with the heads of the circuit replaced, and judge the result."""
    base = ~search.node_mask(excluded)
    if not excluded or not any(
        kind == "head" and allowed for kind, allowed in zip(search.nodes.kinds, base, strict=True)
    ):
        return None, ["An alternative circuit was not searched, because the circuit has no heads or all of them."]
    ranked = _rank(search, base, "second")
    members, _, notes = _choose_members(search, ranked, None, "second")
    return _judge(search, members, "second", excluded), notes


def _edges(search: CircuitSearchState, members: list[int]) -> tuple[EdgeEffect, ...]:
    """Measure the edges between members on the judged prompts, largest first."""
    split = search.splits[2]

    def compute() -> list[Any]:
        table = circuit_edges(
            search.model, [search.nodes.names[node] for node in members], split.prompts, split.evaluator.metric
        )
        return [table.edges, table.effects.tolist()]

    names, effects = search.runner.run(f"edges {len(members)}", compute)

    def estimate(values: np.ndarray) -> CircuitEstimate:
        return split.sampler.estimate(lambda weights: weights @ values / weights.sum(1), len(values))

    rows = []
    for (sender, receiver), row in zip(names, effects, strict=True):
        largest = int(np.argmax(np.abs(row)))
        example = split.prompts[largest].pair.clean
        rows.append(EdgeEffect(sender, receiver, estimate(np.array(row)), example, float(row[largest])))
    return tuple(sorted(rows, key=lambda item: -abs(item.effect.value)))


def _adjust_p(
    circuit: EvaluatedCircuit, other: EvaluatedCircuit | None
) -> tuple[EvaluatedCircuit, EvaluatedCircuit | None]:
    """Apply the Holm correction to the p-values of the circuit and its alternative."""
    tests = [item.random_sets for item in (circuit, other) if item is not None and item.random_sets is not None]
    if not tests or circuit.random_sets is None:
        return circuit, other
    adjusted = holm_correction([test.p_value for test in tests]).tolist()
    circuit = replace(circuit, random_sets=replace(circuit.random_sets, adjusted_p=adjusted[0]))
    if other is not None and other.random_sets is not None:
        other = replace(other, random_sets=replace(other.random_sets, adjusted_p=adjusted[1]))
    return circuit, other


def _curves(search: CircuitSearchState, ranked: RankedNodes) -> tuple[FaithfulnessCurve, ...]:
    """Return faithfulness over sizes on the judged prompts, for each ablation."""
    N, split = len(search.nodes), search.splits[2]
    curves = []
    for ablation in ABLATIONS:
        grid = size_grid(N) if ablation == "resample" else []
        sizes = sorted({0, *mib_sizes(N), *grid, N})
        inner = [size for size in sizes if 0 < size < N]
        empty = search.evaluate(2, "empty", search.node_mask(())[None], ablation)[0]
        measured = search.evaluate(
            2, "curve", np.stack([search.node_mask(ranked.order[:size]) for size in inner or [N]]), ablation
        )
        metrics = {0: empty, N: split.clean, **dict(zip(inner, measured, strict=False))}
        sums = FaithfulnessSums(split.clean, empty, split.sampler)
        curves.append(faithfulness_curve(ablation, sizes, np.stack([metrics[size] for size in sizes]), sums, N))
    return tuple(curves)


def _compare_ranking_with_exact(search: CircuitSearchState, ranked: RankedNodes, size: int) -> RankingCheck | None:
    """Compare a gradient-based ranking with exact patching on the top 2k nodes and k random others."""
    if search.config.ranking in ("exact", "gates"):
        return None
    top, others = ranked.order[: 2 * size], ranked.order[2 * size :]
    rng = np.random.default_rng([search.config.seed, 11])
    sampled = [others[int(i)] for i in rng.permutation(len(others))[:size]]
    checked = sorted([*top, *sampled])
    exact = _exact_effects_in_steps(search, checked, np.ones(len(search.nodes), bool), "check").mean(1)
    scores = ranked.scores[checked]
    worst = int(np.argmax(np.abs(scores - exact)))
    correlation = float(np.corrcoef(scores, exact)[0, 1]) if len(checked) > 2 else float("nan")
    return RankingCheck(
        correlation,
        len(top),
        len(sampled),
        search.nodes.names[checked[worst]],
        float(scores[worst]),
        float(exact[worst]),
    )


def _node_scores(search: CircuitSearchState, ranked: RankedNodes, size: int) -> tuple[NodeScore, ...]:
    nodes, split, config = search.nodes, search.splits[0], search.config
    if ranked.effects is None:
        shares = np.full(len(nodes), np.nan)
    else:
        shares = stability_shares(ranked.effects, split.templates, size, config.seed)
    is_exact = config.ranking == "exact"

    def example(node: int) -> tuple[str, float]:
        if ranked.effects is None:
            return "", float("nan")
        largest = int(np.argmax(np.abs(ranked.effects[node])))
        return split.prompts[largest].pair.clean, float(ranked.effects[node, largest])

    return tuple(
        NodeScore(
            nodes.names[node], nodes.kinds[node], nodes.layers[node], float(ranked.scores[node]),
            float(ranked.scores[node]) if is_exact else None, float(shares[node]), *example(node),
        )
        for node in ranked.order
    )  # fmt: skip


def _settings(search: CircuitSearchState, name: str, task: Any) -> CircuitSettings:
    config, spec = search.config, search.model.spec
    metric = "metric of the user" if isinstance(task, CircuitTask) and task.metric is not None else (
        "log-probability of the right answers minus that of the wrong answers"
    )  # fmt: skip
    rule = (
        "given" if config.size is not None else f"smallest size with F of at least {config.target:g} on the size split"
    )
    prompts = [len(split.prompts) for split in search.splits]
    templates = [len(set(split.templates)) for split in search.splits]
    heads = len(spec.head_addresses)
    return CircuitSettings(
        name, f"{search.model.family or spec.kind}, {spec.layers} layers, {heads} heads", metric, config.ranking, rule,
        config.target, (prompts[0], prompts[1], prompts[2]), (templates[0], templates[1], templates[2]),
        len(search.nodes), config.seed,
    )  # fmt: skip
