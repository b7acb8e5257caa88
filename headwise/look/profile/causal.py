"""The last rung: a head is taken away, and the model is asked what the head's role is good for.

What is asked is the log-probability of certain tokens: the second copy of a list for heads that look back at the first, the
closing bracket for heads that look at the opening one, and so on; and the same tokens where they are reached another way
(trials.py). A head is taken away by what it gives on another case of the same kind: what all cases share stays, such as that
a list is being repeated, and only what it says about this one goes. A head is causal if its loss

    is above what the same answers lose where they are reached another way: the 95 % interval over cases lies above 0;
    is above what the other heads of its layer cost on average: the 95 % interval over cases lies above 0;
    is above what three in four of those others cost: beside idle ones any head would be above the average;
    is .01 nats an answer at least, and a hundredth of what an answer costs the whole model: so much that it matters;
    is so much, and its interval above 0, with the mean over the cases in the head's place: another case's answer misleads,
    and a head that others could do without would be told for that alone;

and if these are no accident: p < .05 by sign flips over cases, corrected for all heads and roles that are tried (Holm).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from headwise.look.measure.statistics import bootstrap, holm, sign_flips
from headwise.look.profile.roles import Effect, Support
from headwise.look.profile.trials import Prompt, Trial, list_trial, target_batches, word_trial
from headwise.look.record.units import Unit, make_batch
from headwise.look.worth.ablate import How, stand_in
from headwise.look.worth.outputs import mean_of, record_z
from headwise.look.worth.sweep import sweep
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
    """The same with the last rung tried for every head whose best role is effective and has a probe.

    `related` are documents with relations, `texts` those in which answers are looked for that a list can be made of.
    """
    made = [list(supports) for supports in found]
    wanted: dict[tuple[str, str], list[int]] = {}  # a probe and its role: the heads
    for head, supports in enumerate(found):
        if supports and supports[0].rung == "effective" and supports[0].probe:
            probe = supports[0].probe
            wanted.setdefault((probe, "" if probe == "repeats" else supports[0].role), []).append(head)
    effects: dict[int, Effect] = {}
    for number, ((probe, role), heads) in enumerate(wanted.items()):
        progress("ablations", number, len(wanted))
        lists = probe == "repeats"
        trial = list_trial(model, texts, seed) if lists else word_trial(model, related, texts, role, probe)
        if len(trial.cases) < 2:
            continue
        layers = {addresses[head].site for head in heads}
        beside = [address for address in addresses if address.site in layers]
        costs = costs_of(model, beside, [addresses[head] for head in heads], trial)
        for head in heads:
            mates = [place for place, other in enumerate(beside) if other.site == addresses[head].site]
            effects[head] = costs.of(beside.index(addresses[head]), mates, heads.index(head))
        standing = [head for head in heads if effects[head].stands]
        means = lost_without(model, [addresses[head] for head in standing], trial.cases, "mean")[0]
        for place, head in enumerate(standing):
            effects[head] = costs.by_mean(effects[head], means[:, place])
    tried = [head for head, effect in effects.items() if effect.control is not None]
    for head, p in zip(tried, holm([effects[head].p for head in tried]), strict=True):
        effects[head] = effects[head]._replace(p=float(p))
    for head, effect in effects.items():
        made[head][0] = made[head][0].with_effect(effect)
    progress("ablations", len(wanted), len(wanted))
    return made


@dataclass(frozen=True, eq=False)
class Costs:
    """What taking away each of some heads costs: lost log-probability by case, and over how many answers."""

    sums: np.ndarray  # (cases, heads)
    counts: np.ndarray  # (cases,)
    clean: float  # what an answer costs the whole model, in nats
    control: np.ndarray | None = None  # (cases, tried heads): the same answers reached another way

    def of(self, place: int, layer: Sequence[int], tried: int = 0) -> Effect:
        """One head beside the others of its layer, and beside its control, in nats an answer.

        >>> lost = np.zeros((20, 5))
        >>> lost[:, 0] = 0.5
        >>> effect = Costs(lost, np.ones(20), clean=2.0, control=np.full((20, 1), 0.25)).of(0, range(5))
        >>> effect.more, effect.cost, effect.bar, effect.control, effect.beyond
        (0.5, 0.5, 0.02, 0.25, (0.25, 0.25))
        """
        mine, others = self.sums[:, place], self.sums[:, [one for one in layer if one != place]]
        answers = max(1.0, self.counts.sum())
        more = mine - (others.mean(1) if others.shape[1] else 0.0)
        low, high = bootstrap(more, self.counts)
        most = float(np.quantile(others.sum(0) / answers, MOST)) if others.shape[1] else 0.0
        cost = float(mine.sum() / answers)
        effect = Effect(float(more.sum() / answers), float(low), float(high), cost, max(most, self.least))
        if self.control is None:
            return effect
        beyond = mine - self.control[:, tried]
        ends = bootstrap(beyond, self.counts)
        control = cost - float(beyond.sum() / answers)
        # All must be so, and the largest p is that of all: a head that fails one is found by it as rarely as told.
        p = max(self._p(more), self._p(beyond))
        return effect._replace(control=control, beyond=(float(ends[0]), float(ends[1])), p=p)

    def by_mean(self, effect: Effect, lost: np.ndarray) -> Effect:
        """The same with what the cases lose when the head's mean stands in its place, (cases,)."""
        cost, low = float(lost.sum() / max(1.0, self.counts.sum())), float(bootstrap(lost, self.counts)[0])
        return effect._replace(mean_cost=cost, mean_low=low, least=self.least, p=max(effect.p, self._p(lost)))

    @property
    def least(self) -> float:
        """The least loss that counts."""
        return max(NATS, SHARE * self.clean)

    def _p(self, differences: np.ndarray) -> float:
        return float(sign_flips(differences, self.counts, draws=FLIPS))


def costs_of(model: AnyModel, heads: Sequence[Address], tried: Sequence[Address], trial: Trial) -> Costs:
    """What taking away each head costs the cases, and each of those tried the controls."""
    sums, clean = lost_without(model, heads, trial.cases)
    counts = np.array([float(len(row.wanted)) for row in trial.cases])
    control = trial.by_case(lost_without(model, tried, trial.controls)[0]) if trial.controls else None
    return Costs(sums, counts, float(clean.sum() / max(1.0, counts.sum())), control)


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
            donors = make_batch([rows[number - 1].read for number in numbers], device=model.device)
            other = record_z(model, donors.ids, heads, padding=None if donors.whole else donors.real)
        stands = partial(stand_in, how=how, means=means, other=other, real=asked.real)
        made, untouched = sweep(model, asked, heads, stands)  # (heads, B), (B,)
        lost[numbers], clean[numbers] = made.T.double().cpu().numpy(), untouched.double().cpu().numpy()
    return lost, clean
