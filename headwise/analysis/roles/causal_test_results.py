"""Results of causal tests: the cost of ablating a head on one set of tokens or prompts."""

from dataclasses import dataclass

RANDOM_TOKENS, RUNNING_TEXT = "random tokens", "running text"  # token sets of tests on repeated tokens


@dataclass(frozen=True)
class CausalEffect:
    """Cost of ablating a head on one token set, in nats per answer. Values of conditions that were not tested are None.

    Attributes:
        cost: Mean loss increase of the answers; for roles about two names, mean decrease of the lead.
        cost_threshold: Bound that the cost must exceed.
        control_cost: Cost in the control texts, which have the same answers for another reason. None without controls.
        matched: Cost of the answers that have a control, if not all have one.
        excess_interval: 95% interval of the cost (the matched cost, if there is one) minus the control.
        single_name_cost: Cost in single-name prompts, for roles about two names.
        single_name_excess_interval: 95% interval of the cost minus the required fraction of `single_name_cost`.
        effect: Cost minus the mean cost of the other heads of the layer.
        effect_interval: 95% interval of `effect`.
        mean_ablation_cost: Cost under mean ablation.
        p: Largest p-value of the conditions, corrected over the family. 1 for a head that fails a condition.
        corpus_label: Token set or prompts of the test.
    """

    cost: float
    cost_threshold: float
    control_cost: float | None = None
    matched: float | None = None
    excess_interval: tuple[float, float] | None = None
    single_name_cost: float | None = None
    single_name_excess_interval: tuple[float, float] | None = None
    effect: float | None = None
    effect_interval: tuple[float, float] | None = None
    mean_ablation_cost: float | None = None
    p: float = 1.0
    corpus_label: str = ""

    @property
    def is_causal(self) -> bool:
        """Whether the role's answers depend on the head more than the control answers do."""
        return self.p < 0.05

    @staticmethod
    def load(stored: dict) -> "CausalEffect":
        """Rebuild an effect from its JSON form."""
        pairs = ("excess_interval", "single_name_excess_interval", "effect_interval")
        return CausalEffect(**{**stored, **{name: tuple(stored[name]) for name in pairs if stored[name] is not None}})
