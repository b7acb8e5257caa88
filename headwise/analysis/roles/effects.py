"""Results of causal tests: what an ablation costs on one set of tokens or prompts."""

from dataclasses import dataclass

RANDOM_TOKENS, RUNNING_TEXT = "random tokens", "running text"  # the token sets of tests on tokens said twice


@dataclass(frozen=True)
class Effect:
    """Cost of ablating a head on one token set, in nats per answer. A number that was not asked for any more is None.

    Attributes:
        cost: Mean loss of the answers; of a role that is judged by leads, mean loss of the lead.
        bar: Bound that the cost must exceed.
        control: Cost where the same answers are reached another way. None if no such place was found.
        matched: Cost of the answers that have a control, if not all have one.
        beyond: 95% interval of the cost (the matched cost, if there is one) minus the control.
        single: Cost in single-name prompts, of roles about two names.
        single_beyond: 95% interval of cost − the required share of `single`.
        more: Cost minus the mean cost of the other heads of the layer.
        interval: 95% interval of `more`.
        mean_cost: Cost with the head's mean in its place.
        p: Largest p-value of the conditions, corrected over the family; 1 for a head that fails one of them.
        on: Token set or prompts of the test.
    """

    cost: float
    bar: float
    control: float | None = None
    matched: float | None = None
    beyond: tuple[float, float] | None = None
    single: float | None = None
    single_beyond: tuple[float, float] | None = None
    more: float | None = None
    interval: tuple[float, float] | None = None
    mean_cost: float | None = None
    p: float = 1.0
    on: str = ""

    @property
    def causal(self) -> bool:
        """Whether the role's answers depend on the head, and not just any answers."""
        return self.p < 0.05

    @staticmethod
    def load(stored: dict) -> "Effect":
        """Rebuild an effect from its JSON form."""
        pairs = ("beyond", "single_beyond", "interval")
        return Effect(**{**stored, **{name: tuple(stored[name]) for name in pairs if stored[name] is not None}})
