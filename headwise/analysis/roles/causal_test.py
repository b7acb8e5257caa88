"""Causal test, the last evidence level: ablate a head and measure the loss of the answers that need its role.

The answers are tokens that depend on the role: the second copy of a list for heads that attend to the first copy, the closing
bracket for heads that attend to the opening one, and so on. Controls are the same tokens in texts in which they follow for
another reason (build_causal_trials.py). The ablated head outputs its z of another case of the same kind (resample ablation):
common information, such as that a list is repeated, is preserved, and only the information about the current case is removed.

A head is causal if its cost (the loss increase of the answers)

    exceeds the cost of the same answers in the controls: the 95% interval over cases is above 0;
    is at least 0.01 nats per answer and 1% of the loss of an answer in the unmodified model;
    exceeds the mean cost of the other heads of its layer: the 95% interval over cases is above 0;
    exceeds the cost of 75% of the other heads of its layer, because any head exceeds the mean of mostly idle heads;
    reaches the same minimum, with an interval above 0, under mean ablation: z of another case misleads the model, so
    resample ablation alone can report a head that the model does not need;

and if the result is significant: p < 0.05 by sign flips over cases, corrected for all tested heads and token sets (Holm).
Roles on prompts are a separate family. Later conditions are not tested for heads that fail an earlier one; their p is 1.
For roles that suppress answers, the cost is the loss decrease.

Roles about two names are measured by the lead: log-probability of the correct name minus that of the other name. A head that
promotes any earlier name changes the lead only if the other name is absent. So single-name prompts are a second control: the
cost must exceed a fraction of the cost there (prompt_trials.py), with its 95% interval above 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import AblationMethod, make_replacement_fn
from headwise.analysis.ablation.ablation_sweep import ablation_sweep
from headwise.analysis.ablation.recorded_head_outputs import HeadOutputs, mean_of_outputs, record_z
from headwise.analysis.metrics.statistics import bootstrap_interval, holm_correction, sign_flip_test
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.roles.build_causal_trials import (
    CausalTrial,
    TrialPrompt,
    relation_trial,
    repeated_list_trial,
    repeated_text_trial,
    target_batches,
)
from headwise.analysis.roles.causal_test_results import RANDOM_TOKENS, RUNNING_TEXT, CausalEffect
from headwise.analysis.roles.prompt_trials import name_lead_trial, prompt_trial
from headwise.analysis.roles.roles import (
    LEAD,
    PROMPT_PROBE,
    REPEATS_PROBE,
    SUPPRESSION_PROBE,
    EvidencePerHead,
    RoleEvidence,
    sort_evidence,
)
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import Address

LAYER_QUANTILE = 0.75  # fraction of the layer's other heads that must have a lower cost
# Minimum cost: in nats per answer, and as a fraction of the unmodified model's loss.
MIN_LOSS, MIN_LOSS_FRACTION = 0.01, 0.01
SIGN_FLIPS = (1 << 16) - 1  # random sign flips; exhaustive for up to 16 cases


def supports_causal_test(model: ModelProtocol) -> bool:
    """Whether a model predicts next tokens, so that ablations can be measured."""
    return model.spec.kind == "decoder" and model.output is not None


def causal_test(
    model: ModelProtocol,
    addresses: Sequence[Address],
    evidence: EvidencePerHead,
    documents: Iterable[TextSample],
    texts: Sequence[TextSample],
    seed: int,
    progress: Progress,
    *,
    only: int | None = None,
) -> list[list[RoleEvidence]]:
    """Return the evidence with causal tests added.

    A head is tested on its best role if that has the level `value-weighted` and a probe, and on each of its roles on prompts
    that has both. Roles on prompts are a separate family of tests. Roles on repeated tokens are tested on two token sets:
    random tokens and running text.

    Args:
        model: A decoder with an output layer.
        addresses: All heads.
        evidence: Evidence for the roles of each head, in the order of `addresses`.
        documents: Documents with relations.
        texts: Texts for repeated-token cases and their controls.
        seed: Seed of the cases.
        progress: Progress callback.
        only: Index of the single head to test. Its p-values are multiplied by the number of tests of all heads (Bonferroni).
    """
    heads_by_probe: dict[tuple[str, str], list[tuple[int, RoleEvidence]]] = {}  # (probe, role) → heads
    sets: dict[tuple[str, str], int] = {}  # (probe, role) → number of token sets
    for head, head_evidence in enumerate(evidence):
        best = [entry for entry in head_evidence if not entry.family_size][:1]
        for entry in (*best, *(entry for entry in head_evidence if entry.family_size)):
            if entry.evidence_level == "value-weighted" and entry.probe:
                uses_lists = entry.probe in (REPEATS_PROBE, SUPPRESSION_PROBE)
                heads_by_probe.setdefault((entry.probe, "" if uses_lists else entry.role), []).append((head, entry))
    effects: dict[tuple[int, str], list[CausalEffect]] = {}  # (head, role) → one effect per tested token set
    num_tests = _count_tests(heads_by_probe)
    if only is not None:
        selected = {key: [item for item in items if item[0] == only] for key, items in heads_by_probe.items()}
        heads_by_probe = {key: items for key, items in selected.items() if items}
    for index, (key, candidates) in enumerate(heads_by_probe.items()):
        progress("ablations", index, len(heads_by_probe))
        trials = _trials_by_token_set(model, documents, texts, *key, seed)
        sets[key] = len(trials)
        heads = list(dict.fromkeys(head for head, _ in candidates))  # a head can have two roles with the same trial
        for tokens, trial in trials.items():
            if len(trial.cases) > 1:
                results = ablation_effects(model, addresses, [addresses[head] for head in heads], trial)
                by_head = dict(zip(heads, results, strict=True))
                for head, entry in candidates:
                    effects.setdefault((head, entry.role), []).append(replace(by_head[head], corpus_label=tokens))
    for separate in (False, True):
        family_keys = [
            (head, entry.role)
            for candidates in heads_by_probe.values()
            for head, entry in candidates
            if bool(entry.family_size) == separate
        ]
        _correct([effects[key] for key in family_keys if key in effects], None if only is None else num_tests[separate])
    progress("ablations", len(heads_by_probe), len(heads_by_probe))
    count = {(head, entry.role): sets[key] for key, candidates in heads_by_probe.items() for head, entry in candidates}
    updated = [
        [
            entry.with_effects(effects[head, entry.role], count[head, entry.role])
            if (head, entry.role) in effects
            else entry
            for entry in head_evidence
        ]
        for head, head_evidence in enumerate(evidence)
    ]
    return [sort_evidence(head_evidence) for head_evidence in updated]


def _count_tests(heads_by_probe: Mapping[tuple[str, str], Sequence[tuple[int, RoleEvidence]]]) -> dict[bool, int]:
    """Return the largest possible number of tests, heads × roles × token sets, of the main and of the separate family."""
    counts = {False: 0, True: 0}
    for (probe, _), candidates in heads_by_probe.items():
        for _, entry in candidates:
            counts[bool(entry.family_size)] += 2 if probe in (REPEATS_PROBE, SUPPRESSION_PROBE) else 1
    return counts


def _correct(effects: Sequence[list[CausalEffect]], num_tests: int | None = None) -> None:
    """Correct the p-values of one family in place: heads × roles × token sets that have a control.

    Args:
        effects: Effects of the tested heads.
        num_tests: Number of tests for a correction by Bonferroni. None corrects these tests by Holm.
    """
    tests = [(of_head, i) for of_head in effects for i, effect in enumerate(of_head) if effect.control_cost is not None]
    uncorrected = [of_head[i].p for of_head, i in tests]
    corrected = (
        holm_correction(uncorrected) if num_tests is None else np.minimum(1.0, np.multiply(uncorrected, num_tests))
    )
    for (of_head, i), p in zip(tests, corrected, strict=True):
        of_head[i] = replace(of_head[i], p=float(p))


def _trials_by_token_set(
    model: ModelProtocol, related: Iterable[TextSample], texts: Sequence[TextSample], probe: str, role: str, seed: int
) -> dict[str, CausalTrial]:
    """Return the trials of a role by token set. A role with its own cases has one trial, with an empty name."""
    if probe in (REPEATS_PROBE, SUPPRESSION_PROBE):
        return {
            tokens: replace(make(model, texts, seed), is_suppression=probe == SUPPRESSION_PROBE)
            for tokens, make in ((RANDOM_TOKENS, repeated_list_trial), (RUNNING_TEXT, repeated_text_trial))
        }
    if probe == LEAD:
        return {"": name_lead_trial(model, role, seed)}
    return {
        "": prompt_trial(model, role, seed)
        if probe == PROMPT_PROBE
        else relation_trial(model, related, texts, role, probe)
    }


def ablation_effects(
    model: ModelProtocol, addresses: Sequence[Address], heads: Sequence[Address], trial: CausalTrial
) -> list[CausalEffect]:
    """Measure the effect of ablating heads: on cases and controls, then, for heads that may still be causal, compared with
    the other heads of the layer and under mean ablation. p is not corrected yet."""

    def measure_loss(
        ablated_heads: Sequence[Address], rows: Sequence[TrialPrompt], ablation: AblationMethod = "resample"
    ) -> tuple[np.ndarray, np.ndarray]:
        lost, clean = loss_increase_by_head(model, ablated_heads, rows, ablation)
        return -lost if trial.is_suppression else lost, clean

    lost, clean = measure_loss(heads, trial.cases)
    costs = CausalEffectEstimator(
        _answers_per_row(trial.cases), float(clean.sum()), _answers_per_row(trial.matched) if trial.matched else None
    )
    control = trial.sum_controls_by_case(measure_loss(heads, trial.controls)[0]) if trial.controls else None
    matched = measure_loss(heads, trial.matched)[0] if trial.matched else None
    single_name = measure_loss(heads, trial.single_name_prompts)[0] if trial.single_name_prompts else None
    effects = []
    for i in range(len(heads)):
        compared = [None if losses is None else losses[:, i] for losses in (control, matched)]
        effect = costs.compare_with_control(lost[:, i], *compared)
        if single_name is not None:
            effect = costs.compare_with_single_name(effect, lost[:, i], single_name[:, i], trial.single_name_fraction)
        effects.append(effect)
    remaining = [i for i, effect in enumerate(effects) if effect.is_causal]
    layers = {heads[i].layer_address for i in remaining}
    others = [address for address in addresses if address.layer_address in layers and address not in heads]
    all_heads, all_lost = [*heads, *others], np.concatenate((lost, measure_loss(others, trial.cases)[0]), 1)
    for i in remaining:
        layer_mates = [
            k for k, other in enumerate(all_heads) if other.layer_address == heads[i].layer_address and k != i
        ]
        effects[i] = costs.compare_with_layer(effects[i], lost[:, i], all_lost[:, layer_mates])
    remaining = [i for i in remaining if effects[i].is_causal]
    means = measure_loss([heads[i] for i in remaining], trial.cases, "mean")[0]
    for column, i in enumerate(remaining):
        effects[i] = costs.with_mean_ablation(effects[i], means[:, column])
    return effects


def _answers_per_row(rows: Sequence[TrialPrompt]) -> np.ndarray:
    """Number of answers of each row, (rows,)."""
    return np.array([float(len(row.targets)) for row in rows])


@dataclass(frozen=True, eq=False)
class CausalEffectEstimator:
    """Conditions of the causal test for one trial.

    Attributes:
        counts: Number of answers of each case, (cases,).
        clean_loss: Summed loss of the answers in the unmodified model, in nats.
        matched: Number of answers with a control, (cases,). None if all have one.
    """

    counts: np.ndarray
    clean_loss: float
    matched: np.ndarray | None = None

    def compare_with_control(
        self, lost: np.ndarray, control: np.ndarray | None, matched: np.ndarray | None = None
    ) -> CausalEffect:
        """Compare the loss increase of the cases with that of their controls, summed over answers: (cases,) each.

        `matched` is the loss increase of the answers that have a control, if not all have one.

        >>> test = CausalEffectEstimator(np.ones(20), clean_loss=40.0)
        >>> effect = test.compare_with_control(np.full(20, 0.5), np.full(20, 0.25))
        >>> effect.cost, effect.cost_threshold, effect.control_cost, effect.excess_interval, effect.p < 0.001
        (0.5, 0.02, 0.25, (0.25, 0.25), True)
        """
        effect = CausalEffect(self._mean(lost), self.min_loss)
        if control is None:
            return effect
        paired = self if self.matched is None else CausalEffectEstimator(self.matched, self.clean_loss)
        excess = (lost if matched is None else matched) - control
        interval, is_large = paired._interval(excess), effect.cost > self.min_loss
        p = paired._p(excess) if is_large and interval[0] > 0 else 1.0
        matched_cost = None if matched is None else paired._mean(matched)
        return replace(effect, control_cost=paired._mean(control), matched=matched_cost, excess_interval=interval, p=p)

    def compare_with_single_name(
        self, effect: CausalEffect, lost: np.ndarray, single: np.ndarray, fraction: float
    ) -> CausalEffect:
        """Compare the loss with a fraction of the loss in single-name prompts, (cases,) each."""
        excess = lost - fraction * single
        interval = self._interval(excess)
        p = max(effect.p, self._p(excess)) if effect.is_causal and interval[0] > 0 else 1.0
        return replace(effect, single_name_cost=self._mean(single), single_name_excess_interval=interval, p=p)

    def compare_with_layer(self, effect: CausalEffect, lost: np.ndarray, others: np.ndarray) -> CausalEffect:
        """Compare the loss increase with that of the other heads of the layer, (cases, heads).

        All conditions must be met. The result's p is the largest p, so the false positive rate is at most that of one test.
        """
        excess = lost - (others.mean(1) if others.shape[1] else 0.0)
        quantile = float(np.quantile(others.sum(0) / self._answers, LAYER_QUANTILE)) if others.shape[1] else 0.0
        interval, cost_threshold = self._interval(excess), max(quantile, self.min_loss)
        p = max(effect.p, self._p(excess)) if interval[0] > 0 and effect.cost > cost_threshold else 1.0
        return replace(effect, effect=self._mean(excess), effect_interval=interval, cost_threshold=cost_threshold, p=p)

    def with_mean_ablation(self, effect: CausalEffect, lost: np.ndarray) -> CausalEffect:
        """Add the loss increase under mean ablation, (cases,)."""
        cost, is_positive = self._mean(lost), self._interval(lost)[0] > 0
        p = max(effect.p, self._p(lost)) if is_positive and cost > self.min_loss else 1.0
        return replace(effect, mean_ablation_cost=cost, p=p)

    @property
    def min_loss(self) -> float:
        """Minimum cost in nats per answer. `clean_loss` can be negative for leads, so its absolute value is used."""
        return max(MIN_LOSS, MIN_LOSS_FRACTION * abs(self.clean_loss) / self._answers)

    @property
    def _answers(self) -> float:
        return max(1.0, float(self.counts.sum()))

    def _mean(self, sums: np.ndarray) -> float:
        return float(sums.sum() / self._answers)

    def _interval(self, sums: np.ndarray) -> tuple[float, float]:
        low, high = bootstrap_interval(sums, self.counts)
        return float(low), float(high)

    def _p(self, differences: np.ndarray) -> float:
        return float(sign_flip_test(differences, self.counts, draws=SIGN_FLIPS))


def loss_increase_by_head(
    model: ModelProtocol, heads: Sequence[Address], rows: Sequence[TrialPrompt], ablation: AblationMethod = "resample"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss increase of each row and head, summed over answers, (rows, heads), and the clean loss, (rows,).

    resample: z is that of the previous row at the same positions; the first row uses the last row.
    mean: z is its mean over all tokens of the rows.
    """
    lost, clean = np.zeros((len(rows), len(heads))), np.zeros(len(rows))
    if not heads:
        return lost, clean
    means = (
        mean_of_outputs(batch.record_head_outputs(model, heads) for batch in target_batches(rows, model.device))
        if ablation == "mean"
        else None
    )
    for batch in target_batches(rows, model.device):
        indices, other = list(batch.sample_ids), None
        if ablation == "resample":
            other = _donors(model, heads, rows, [(index - 1) % len(rows) for index in indices], indices)
        make_replacement = partial(
            make_replacement_fn, ablation=ablation, means=means, other=other, attention_mask=batch.real_tokens
        )
        loss_per_head, untouched = ablation_sweep(model, batch, heads, make_replacement)  # (heads, B), (B,)
        lost[indices], clean[indices] = to_float64(loss_per_head.T).cpu().numpy(), to_float64(untouched).cpu().numpy()
    return lost, clean


def _donors(
    model: ModelProtocol,
    heads: Sequence[Address],
    rows: Sequence[TrialPrompt],
    donor_ids: list[int],
    batch_ids: list[int],
) -> Tensor | HeadOutputs:
    """Return the donors: row indices if all donors are in the batch, otherwise the recorded z of the heads on them."""
    if {*donor_ids} <= {*batch_ids}:
        return torch.tensor([batch_ids.index(index) for index in donor_ids], device=model.device)
    donors = make_batch([rows[index].truncated_sample for index in donor_ids], device=model.device)
    return record_z(model, donors.ids, heads, attention_mask=None if donors.is_unpadded else donors.real_tokens)
