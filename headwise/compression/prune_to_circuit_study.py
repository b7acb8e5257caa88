"""From a circuit to a model: prune the heads outside a circuit, recover, and evaluate on the task and on other text.

Query heads outside the circuit are pruned with their means folded into the output biases. KV heads stay if a remaining head
reads them; MLPs and the embedding always stay. Next to it are random plans that prune as many heads in each layer.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.analysis.circuits.circuit_result import CircuitEstimate, CircuitResult
from headwise.analysis.circuits.circuit_statistics import TemplateBootstrapSampler
from headwise.analysis.circuits.circuit_task import PromptEncoder, PromptPair
from headwise.analysis.circuits.prompt_batch import make_prompt_batches
from headwise.analysis.recording.batching import tokenizer_of
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.prune_request import PruneRequest
from headwise.compression.recovery_finetune import recover
from headwise.errors import ArgumentError
from headwise.io.atomic_write import write_atomic
from headwise.model import ModelProtocol, check_model, eval_mode
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address, Plan

BATCH_TOKENS = 2048
PROGRESS_LABEL = "circuit study"


@dataclass(frozen=True)
class PlanEvaluation:
    """One model on the task and on other text.

    Attributes:
        name: "full", "circuit" or "random", with " recovered" after recovery fine-tuning.
        heads: Number of query heads.
        parameters: Number of parameters.
        metric: Mean metric on the judged prompts, with its interval over templates.
        accuracy: Share of the judged prompts with a metric above 0.
        loss_increase: Loss on the other text minus that of the full model, in nats per token, with its interval over texts.
            For several random plans, their mean, with the smallest and the largest value in place of the interval.
    """

    name: str
    heads: int
    parameters: int
    metric: CircuitEstimate
    accuracy: float
    loss_increase: CircuitEstimate


@dataclass(frozen=True, eq=False)
class CircuitPruningResult:
    """A model pruned to a circuit, next to random plans.

    Attributes:
        plan: Plan of the pruned model. `hw.apply(plan, model)` returns it without recovery.
        model: The pruned model, after recovery if it was requested.
        rows: The full model, the circuit and the random plans.
        prompts: Number of judged prompts.
        random_plans: Number of random plans.
        recover_steps: Steps of recovery fine-tuning. 0 means none.
    """

    plan: Plan
    model: Any
    rows: tuple[PlanEvaluation, ...]
    prompts: int
    random_plans: int
    recover_steps: int

    def __repr__(self) -> str:
        from headwise.ui.result_text import circuit_study_table

        return circuit_study_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import circuit_study_table

        return circuit_study_table(self).as_html()

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the figures as JSON, without the model, and write them to a file if a path is given.

        Args:
            path: Output file.
        """
        counts = {name: getattr(self, name) for name in ("prompts", "random_plans", "recover_steps")}
        data = {**counts, "pruned_heads": list(self.plan.pruned_heads), "rows": [asdict(row) for row in self.rows]}
        text = json.dumps(data, indent=1)
        if path is not None:
            write_atomic(path, text.encode())
        return text


def plan_circuit(
    model: ModelProtocol, circuit: CircuitResult | Sequence[str], *, corpus: Any = None, means: Any = None
) -> Plan:
    """Plan the model that has only the query heads of a circuit.

    Args:
        model: The model that the circuit was found in.
        circuit: Result of `find_circuit`, or names of the nodes. Nodes that are not query heads are ignored.
        corpus: Texts over which the means of pruned heads are taken, to fold them into the output biases. None: no folding.
        means: Means of the heads over the corpus, if they were computed before.

    Returns:
        A plan for `hw.apply`.

    Raises:
        ArgumentError: If the circuit has no query head of this model.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> len(plan_circuit(Transformer(preset("nano")), ["5.1", "3.2", "mlp.4"]).pruned_heads)
    34
    """
    check_model(model)
    nodes = circuit.circuit.nodes if isinstance(circuit, CircuitResult) else tuple(circuit)
    names = {str(head) for head in model.spec.head_addresses}
    members = names & set(nodes)
    if not members:
        raise ArgumentError(
            f"circuit: needs at least one query head of the model, because a model cannot consist of other nodes alone. "
            f"Got {', '.join(nodes[:6]) or 'no nodes'}."
        )
    pruned = tuple(head for head in model.spec.head_addresses if str(head) not in members)
    if not pruned:
        raise ArgumentError("circuit: contains all heads of the model, so there is nothing to prune.")
    request = PruneRequest(heads=pruned, fold_mean=corpus is not None, corpus=corpus)
    return plan_pruning(model, request, means=means, progress=False)


@shows_progress
def circuit_study(
    model: ModelProtocol,
    circuit: CircuitResult,
    corpus: Any,
    *,
    recover_on: Any = None,
    recover_steps: int = 0,
    random_plans: int = 5,
    seed: int = 0,
    progress: ProgressOption = None,
    **recipe_fields: Any,
) -> CircuitPruningResult:
    """Prune a model to a circuit and evaluate it on the task and on other text, next to random plans.

    Args:
        model: The model that the circuit was found in.
        circuit: Result of `find_circuit`. Its judged prompts, with at most three right and wrong answers each, are evaluated.
        corpus: Other text: a text, a list of texts, a path or a `Corpus`. One half gives the means that are folded, the other
            half is evaluated.
        recover_on: Texts of recovery fine-tuning, with the full model as teacher. None: the half that gives the means.
        recover_steps: Steps of recovery fine-tuning of the circuit and of each random plan. 0: none.
        random_plans: Number of random plans, each with as many heads in each layer as the circuit.
        seed: Seed of the random plans.
        progress: Called with a label, done and total. None shows one line in a terminal or notebook, False nothing.
        **recipe_fields: Fields of `Recipe` for the recovery.

    Returns:
        The pruned model, its plan, and one row per kind of model.

    Raises:
        ArgumentError: If the result has no judged prompts with answers, or the circuit has no query heads.
    """
    check_model(model)
    if random_plans < 1 or recover_steps < 0:
        raise ArgumentError(
            f"random_plans, recover_steps: must be at least 1 and 0. Got {random_plans} and {recover_steps}."
        )
    tokenized = eval_corpus(model, corpus)
    half, held_out = tokenized.halves()
    means = mean_activations(model, half)
    study = _Study(model, _TaskEvaluator.of(model, circuit), PairedEvaluator.of(model, held_out), callback_of(progress))
    study.total = (1 + random_plans) * (1 + bool(recover_steps)) + 1
    full = study.evaluate("full", [model])
    plan = plan_circuit(model, circuit, corpus=half, means=means)
    models = [apply(plan, model, check=False)]
    random_models = [_apply_random_plan(model, plan, (half, means), seed + draw) for draw in range(random_plans)]
    rows = [full, study.evaluate("circuit", models), study.evaluate("random", random_models)]
    if recover_steps:
        texts = "\n\n".join(sample.text for sample in half) if recover_on is None else recover_on
        for changed in (*models, *random_models):
            recover(changed, texts, steps=recover_steps, teacher=model, progress=False, **recipe_fields)
        rows += [study.evaluate("circuit recovered", models), study.evaluate("random recovered", random_models)]
    return CircuitPruningResult(plan, models[0], tuple(rows), len(circuit.examples), random_plans, recover_steps)


def _apply_random_plan(
    model: ModelProtocol, plan: Plan, texts_and_means: tuple[Any, MeanActivations], seed: int
) -> ModelProtocol:
    """Return the model without random heads, as many in each layer as a plan prunes."""
    rng = np.random.default_rng([seed, 17])
    counts: dict[int, int] = {}
    for head in plan.pruned_addresses:
        counts[head.layer] = counts.get(head.layer, 0) + 1
    pruned: list[Address] = []
    for layer, count in sorted(counts.items()):
        candidates = [head for head in model.spec.head_addresses if head.layer == layer]
        pruned += [candidates[int(i)] for i in sorted(rng.permutation(len(candidates))[:count])]
    corpus, means = texts_and_means
    request = PruneRequest(heads=tuple(pruned), corpus=corpus)
    return apply(plan_pruning(model, request, means=means, progress=False), model, check=False)


@dataclass(frozen=True, eq=False)
class _TaskEvaluator:
    """Evaluates models on the judged prompts of a circuit."""

    prompts: tuple[Any, ...]
    sampler: TemplateBootstrapSampler

    @staticmethod
    def of(model: ModelProtocol, circuit: CircuitResult) -> "_TaskEvaluator":
        """Encode the judged prompts."""
        examples = circuit.examples
        if not examples or not all(example.right and example.wrong for example in examples):
            raise ArgumentError(
                "circuit: the result has no judged prompts with right and wrong answers, so the task cannot be evaluated. "
                "Use a result of find_circuit with the metric of answers."
            )
        encoder = PromptEncoder(tokenizer_of(model))
        pairs = [PromptPair(item.clean, item.corrupted, item.right, item.wrong, item.template) for item in examples]
        prompts = tuple(encoder.encode(pair, f"examples[{i}]") for i, pair in enumerate(pairs))
        return _TaskEvaluator(
            prompts, TemplateBootstrapSampler([pair.template for pair in pairs], circuit.settings.seed + 3)
        )

    @torch.no_grad()
    def metrics(self, model: ModelProtocol) -> np.ndarray:
        """Return the metric of each prompt, (P,)."""
        result = np.zeros(len(self.prompts))
        with eval_mode(model):
            for batch in make_prompt_batches(self.prompts, BATCH_TOKENS, model.device, None):
                hidden = model(batch.ids, hidden=True)
                result[list(batch.indices)] = batch.scores(model, hidden)[0].cpu().numpy()
        return result


@dataclass(eq=False)
class _Study:
    """Evaluations in progress."""

    full: ModelProtocol
    task: _TaskEvaluator
    text: PairedEvaluator
    progress: Progress | None
    done: int = 0
    total: int = 0

    def evaluate(self, name: str, models: Sequence[ModelProtocol]) -> PlanEvaluation:
        """Return the row of one model, or the mean over random plans."""
        metrics, losses = [], []
        for model in models:
            metrics.append(self.task.metrics(model))
            losses.append(self.text.losses_per_text(model))
            self.done += 1
            if self.progress is not None:
                self.progress(PROGRESS_LABEL, self.done, self.total)
        values = np.mean(metrics, 0)  # (P,)
        metric = self.task.sampler.estimate(lambda weights: weights @ values / weights.sum(1), len(values))
        increases = [self.text.difference(loss, self.text.full_losses_per_text) for loss in losses]
        increase = CircuitEstimate(increases[0].mean, increases[0].low, increases[0].high)
        if len(models) > 1:
            each = [item.mean for item in increases]
            increase = CircuitEstimate(float(np.mean(each)), min(each), max(each))
        parameters = sum(parameter.numel() for parameter in models[0].parameters())
        accuracy = float(np.mean(np.stack(metrics) > 0))
        return PlanEvaluation(name, len(models[0].spec.head_addresses), parameters, metric, accuracy, increase)
