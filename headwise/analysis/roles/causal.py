"""The last rung: a head is taken away, and the model is asked what the head's role is good for.

What is asked is the log-probability of certain tokens: the second copy of a list for heads that look back at the first, the
closing bracket for heads that look at the opening one, and so on; and the same tokens where they are reached another way
(trials.py). A head is taken away by what it gives on another case of the same kind: what all cases share stays, such as that
a list is being repeated, and only what it says about this one goes. A head is causal if its loss

    is above what the same answers lose where they are reached another way: the 95 % interval over cases lies above 0;
    is .01 nats an answer at least, and a hundredth of what an answer costs the whole model: so much that it matters;
    is above what the other heads of its layer cost on average: the 95 % interval over cases lies above 0;
    is above what three in four of those others cost: beside idle ones any head would be above the average;
    is so much, and its interval above 0, with the mean over the cases in the head's place: another case's answer misleads,
    and a head that others could do without would be told for that alone;

and if these are no accident: p < .05 by sign flips over cases, corrected for all heads and token sets that are tried (Holm);
roles on prompts are corrected by themselves. What comes later is not asked of heads that fail, and their p is 1. Of a head
that holds answers back all this is asked of what they gain without it.

Roles about two names are judged by the lead: log-probability of the name due minus that of the other. A head that lifts any
earlier name changes the lead only if the other name is absent. So single-name prompts are a second control: the loss must be
above a share of the loss there (prompt_trials.py), with its 95% interval above 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import How, stand_in
from headwise.analysis.ablation.head_outputs import Run, mean_of, record_z
from headwise.analysis.ablation.sweep import sweep
from headwise.analysis.metrics.statistics import bootstrap, holm, sign_flips
from headwise.analysis.recording.batching import Unit, make_batch
from headwise.analysis.roles.causal_cases import Prompt, Trial, list_trial, target_batches, text_trial, word_trial
from headwise.analysis.roles.effects import RANDOM_TOKENS, RUNNING_TEXT, Effect
from headwise.analysis.roles.prompt_cases import lead_trial, prompt_trial
from headwise.analysis.roles.roles import DUE, HELD, LEAD, REPEATS, Support, in_order
from headwise.model import AnyModel
from headwise.progress import Progress
from headwise.spec import Address

MOST = 0.75  # the share of the layer's other heads that must cost less
NATS, SHARE = 0.01, 0.01  # the least loss that counts: in nats an answer, and as a share of the whole model's surprise
FLIPS = (1 << 16) - 1  # of signs; up to sixteen cases all of them are made


def climb(
    model: AnyModel,
    addresses: Sequence[Address],
    found: Sequence[Sequence[Support]],
    related: Iterable[Unit],
    texts: Sequence[Unit],
    seed: int,
    progress: Progress,
) -> list[list[Support]]:
    """The same with the last rung tried for every head whose best role is effective and has a probe, and for every role on
    prompts that is and has: these are a family of their own, so that the others' verdicts are the same without them. Roles
    on tokens said twice are tried on two token sets, random tokens and running text.

    `related` are documents with relations, `texts` those in which answers are looked for that a list can be made of.
    """
    wanted: dict[tuple[str, str], list[tuple[int, Support]]] = {}  # a probe and its role: the heads
    sets: dict[tuple[str, str], int] = {}  # a probe and its role: the number of token sets
    for head, supports in enumerate(found):
        best = [one for one in supports if not one.family][:1]
        for one in (*best, *(one for one in supports if one.family)):
            if one.rung == "effective" and one.probe:
                lists = one.probe in (REPEATS, HELD)
                wanted.setdefault((one.probe, "" if lists else one.role), []).append((head, one))
    effects: dict[tuple[int, str], list[Effect]] = {}  # a head and its role: for each token set that was tried
    for number, (key, tried) in enumerate(wanted.items()):
        progress("ablations", number, len(wanted))
        trials = _trials(model, related, texts, *key, seed)
        sets[key] = len(trials)
        heads = list(dict.fromkeys(head for head, _ in tried))  # one may have two roles that are tried alike
        for tokens, trial in trials.items():
            if len(trial.cases) > 1:
                results = try_heads(model, addresses, [addresses[head] for head in heads], trial)
                by_head = dict(zip(heads, results, strict=True))
                for head, one in tried:
                    effects.setdefault((head, one.role), []).append(replace(by_head[head], on=tokens))
    for apart in (False, True):
        family = [(head, one.role) for tried in wanted.values() for head, one in tried if bool(one.family) == apart]
        _correct([effects[key] for key in family if key in effects])
    progress("ablations", len(wanted), len(wanted))
    count = {(head, one.role): sets[key] for key, tried in wanted.items() for head, one in tried}
    told = [
        [
            one.with_effects(effects[head, one.role], count[head, one.role]) if (head, one.role) in effects else one
            for one in supports
        ]
        for head, supports in enumerate(found)
    ]
    return [in_order(supports) for supports in told]


def _correct(effects: Sequence[list[Effect]]) -> None:
    """Correct the p-values of one family by Holm, in place: heads × roles × token sets that have a control."""
    tests = [(some, i) for some in effects for i, effect in enumerate(some) if effect.control is not None]
    for (some, i), p in zip(tests, holm([some[i].p for some, i in tests]), strict=True):
        some[i] = replace(some[i], p=float(p))


def _trials(
    model: AnyModel, related: Iterable[Unit], texts: Sequence[Unit], probe: str, role: str, seed: int
) -> dict[str, Trial]:
    """Trials of a role by token set; of a role with cases of its own there is one, without a name."""
    if probe in (REPEATS, HELD):
        return {
            tokens: replace(make(model, texts, seed), held=probe == HELD)
            for tokens, make in ((RANDOM_TOKENS, list_trial), (RUNNING_TEXT, text_trial))
        }
    if probe == LEAD:
        return {"": lead_trial(model, role, seed)}
    return {"": prompt_trial(model, role, seed) if probe == DUE else word_trial(model, related, texts, role, probe)}


def try_heads(model: AnyModel, addresses: Sequence[Address], heads: Sequence[Address], trial: Trial) -> list[Effect]:
    """What some heads cost the cases; their controls; then, of those that may still be causal, the others of their layer, and
    their means. p is not corrected yet."""

    def ask(which: Sequence[Address], rows: Sequence[Prompt], how: How = "resample") -> tuple[np.ndarray, np.ndarray]:
        lost, clean = lost_without(model, which, rows, how)
        return -lost if trial.held else lost, clean

    lost, clean = ask(heads, trial.cases)
    costs = Costs(_counts(trial.cases), float(clean.sum()), _counts(trial.matched) if trial.matched else None)
    control = trial.by_case(ask(heads, trial.controls)[0]) if trial.controls else None
    matched = ask(heads, trial.matched)[0] if trial.matched else None
    singles = ask(heads, trial.singles)[0] if trial.singles else None
    made = []
    for i in range(len(heads)):
        beside = [None if some is None else some[:, i] for some in (control, matched)]
        effect = costs.beyond(lost[:, i], *beside)
        made.append(effect if singles is None else costs.beyond_single(effect, lost[:, i], singles[:, i], trial.share))
    left = [i for i, one in enumerate(made) if one.causal]
    layers = {heads[i].site for i in left}
    others = [address for address in addresses if address.site in layers and address not in heads]
    everyone, all_lost = [*heads, *others], np.concatenate((lost, ask(others, trial.cases)[0]), 1)
    for i in left:
        mates = [k for k, other in enumerate(everyone) if other.site == heads[i].site and k != i]
        made[i] = costs.beside(made[i], lost[:, i], all_lost[:, mates])
    left = [i for i in left if made[i].causal]
    means = ask([heads[i] for i in left], trial.cases, "mean")[0]
    for place, i in enumerate(left):
        made[i] = costs.by_mean(made[i], means[:, place])
    return made


def _counts(rows: Sequence[Prompt]) -> np.ndarray:
    """Number of answers of each row, (rows,)."""
    return np.array([float(len(row.wanted)) for row in rows])


@dataclass(frozen=True, eq=False)
class Costs:
    """How what a head costs is judged: over how many answers of each case, and what all of them cost the whole model."""

    counts: np.ndarray  # (cases,)
    clean: float  # nats
    matched: np.ndarray | None = None  # (cases,): answers that have a control; None: all have one

    def beyond(self, lost: np.ndarray, control: np.ndarray | None, matched: np.ndarray | None = None) -> Effect:
        """What the cases lose by a head, summed over their answers, beside what their controls do: (cases,) each. `matched`:
        what the answers lose that have a control, if not all have one.

        >>> effect = Costs(np.ones(20), clean=40.0).beyond(np.full(20, 0.5), np.full(20, 0.25))
        >>> effect.cost, effect.bar, effect.control, effect.beyond, effect.p < 0.001
        (0.5, 0.02, 0.25, (0.25, 0.25), True)
        """
        effect = Effect(self._mean(lost), self.least)
        if control is None:
            return effect
        paired = self if self.matched is None else Costs(self.matched, self.clean)
        more = (lost if matched is None else matched) - control
        ends, stands = paired._interval(more), effect.cost > self.least
        p = paired._p(more) if stands and ends[0] > 0 else 1.0
        told = None if matched is None else paired._mean(matched)
        return replace(effect, control=paired._mean(control), matched=told, beyond=ends, p=p)

    def beyond_single(self, effect: Effect, lost: np.ndarray, single: np.ndarray, share: float) -> Effect:
        """Compare the loss with a share of the loss in single-name prompts, (cases,) each."""
        more = lost - share * single
        ends = self._interval(more)
        p = max(effect.p, self._p(more)) if effect.causal and ends[0] > 0 else 1.0
        return replace(effect, single=self._mean(single), single_beyond=ends, p=p)

    def beside(self, effect: Effect, lost: np.ndarray, others: np.ndarray) -> Effect:
        """The same beside what the cases lose by the other heads of its layer, (cases, heads).

        All must be so, and the largest p is that of all: a head that fails one is found by it as rarely as told.
        """
        more = lost - (others.mean(1) if others.shape[1] else 0.0)
        most = float(np.quantile(others.sum(0) / self._answers, MOST)) if others.shape[1] else 0.0
        ends, bar = self._interval(more), max(most, self.least)
        p = max(effect.p, self._p(more)) if ends[0] > 0 and effect.cost > bar else 1.0
        return replace(effect, more=self._mean(more), interval=ends, bar=bar, p=p)

    def by_mean(self, effect: Effect, lost: np.ndarray) -> Effect:
        """The same with what the cases lose when the head's mean stands in its place, (cases,)."""
        cost, stands = self._mean(lost), self._interval(lost)[0] > 0
        p = max(effect.p, self._p(lost)) if stands and cost > self.least else 1.0
        return replace(effect, mean_cost=cost, p=p)

    @property
    def least(self) -> float:
        """The least loss that counts; of leads, the surprises minus those of the rivals, `clean` is negative."""
        return max(NATS, SHARE * abs(self.clean) / self._answers)

    @property
    def _answers(self) -> float:
        return max(1.0, float(self.counts.sum()))

    def _mean(self, sums: np.ndarray) -> float:
        return float(sums.sum() / self._answers)

    def _interval(self, sums: np.ndarray) -> tuple[float, float]:
        low, high = bootstrap(sums, self.counts)
        return float(low), float(high)

    def _p(self, differences: np.ndarray) -> float:
        return float(sign_flips(differences, self.counts, draws=FLIPS))


def lost_without(
    model: AnyModel, heads: Sequence[Address], rows: Sequence[Prompt], how: How = "resample"
) -> tuple[np.ndarray, np.ndarray]:
    """What each row loses by each head, summed over its answers, (rows, heads); and what they cost the whole model, (rows,).

    resample: a head gives what it gives on the row before, at the same places; the first borrows from the last.
    mean: it gives its mean over all tokens of the rows.
    """
    lost, clean = np.zeros((len(rows), len(heads))), np.zeros(len(rows))
    if not heads:
        return lost, clean
    means = (
        mean_of(asked.record(model, heads) for asked in target_batches(rows, model.device)) if how == "mean" else None
    )
    for asked in target_batches(rows, model.device):
        numbers, other = list(asked.units), None
        if how == "resample":
            other = _donors(model, heads, rows, [(number - 1) % len(rows) for number in numbers], numbers)
        stands = partial(stand_in, how=how, means=means, other=other, real=asked.real)
        made, untouched = sweep(model, asked, heads, stands)  # (heads, B), (B,)
        lost[numbers], clean[numbers] = made.T.double().cpu().numpy(), untouched.double().cpu().numpy()
    return lost, clean


def _donors(
    model: AnyModel, heads: Sequence[Address], rows: Sequence[Prompt], wanted: list[int], beside: list[int]
) -> Tensor | Run:
    """The rows to borrow from: their places where all are read in the same batch, otherwise what heads give on them."""
    if {*wanted} <= {*beside}:
        return torch.tensor([beside.index(number) for number in wanted], device=model.device)
    donors = make_batch([rows[number].read for number in wanted], device=model.device)
    return record_z(model, donors.ids, heads, padding=None if donors.whole else donors.real)
