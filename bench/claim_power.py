"""Number of seeds that each claim needs, from the four seeds already seen (100 to 103). Written before any new seed.

    python -m bench.claim_power

For the primary quantity of a claim: the smallest number of seeds n at which the half width of its interval,
t(n − 1) · sd / √n, is at most half the distance between the mean seen and the threshold. Standard deviations follow from
the published intervals of four seeds (docs/research/claims): sd = half width · √4 / t(3) at the level of that interval. A
mean and a standard deviation of four seeds are themselves uncertain (the sd by a factor of 0.57 to 3.7, 95%), so n is a plan
and not a promise.
"""

import sys
from dataclasses import dataclass

from scipy.special import stdtrit

SEEN = 4  # seeds of each figure
MAX_SEEDS = 40  # a claim that needs more is not decidable at this size


@dataclass(frozen=True)
class SeenFigure:
    """A figure of four seeds: mean and interval, and the number of quantities for which the interval was corrected."""

    claim: str
    quantity: str
    mean: float
    low: float
    high: float
    corrected_for: int
    threshold: float

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds."""
        quantile = float(stdtrit(SEEN - 1, 1 - 0.025 / self.corrected_for))
        return (self.high - self.low) / 2 * SEEN**0.5 / quantile

    def seeds_needed(self, limit: int = 10_000) -> int | None:
        """Return the number of seeds at which the half width is half the distance to the threshold."""
        target = abs(self.mean - self.threshold) / 2
        for n in range(2, limit):
            if float(stdtrit(n - 1, 0.975)) * self.deviation / n**0.5 <= target:
                return n
        return None


FIGURES = (
    SeenFigure("one-head-blends", "all look-ups right with one head", 0.000651, -0.0003266, 0.001629, 1, 0.5),
    SeenFigure("saturation", "entropy per doubling of head_dim, scaled", -0.05084, -0.06288, -0.03879, 2, -0.01),
    SeenFigure("specialization", "fraction of heads with a role", 0.7031, 0.4755, 0.9308, 3, 0.5),
    SeenFigure("identical-init", "distance of half twins", 0.5761, 0.5269, 0.6252, 2, 0.1),
    SeenFigure("input-slices", "loss by slices at equal parameters", 0.09711, 0.01804, 0.1762, 3, 0.02),
    SeenFigure("output-projection", "loss by a frozen random W_O", 0.05219, -0.08187, 0.1862, 2, 0.02),
    SeenFigure("output-projection", "loss by the identity", 0.01541, -0.0921, 0.1229, 2, 0.02),
    SeenFigure("output-mixing", "interaction in the loss without W_O", 0.1702, 0.06168, 0.2787, 2, 0.05),
    SeenFigure("head-dropout", "cost of the worst head, with over without", 0.06806, 0.04866, 0.08745, 2, 0.8),
    SeenFigure("pruning", "prunable fraction at 1% more loss", 0.1875, 0.07266, 0.3023, 1, 0.25),
    SeenFigure("depth", "fewer heads above fewer layers, threshold 0.01", 0.002392, -0.02302, 0.02781, 2, 0.01),
    SeenFigure("depth", "fewer heads above fewer layers, threshold 0.02", 0.002392, -0.02302, 0.02781, 2, 0.02),
    SeenFigure("gradients", "cosine of W_V W_O gradients, end of training", 0.6418, 0.5616, 0.7219, 10, 0.3),
    SeenFigure("stability", "nats spared by 8 heads at high rates", 0.528, -0.06295, 1.119, 4, 0.1),
    SeenFigure("ensemble", "above narrow members averaged", -0.0489, -0.1462, 0.04841, 2, -0.02),
    SeenFigure("ensemble", "above wide members averaged", 0.02231, -0.075, 0.1196, 2, 0.02),
    SeenFigure("quantization", "spread of costs over heads", 1.171, -0.1999, 2.542, 3, 0.5),
    SeenFigure("distillation", "maps by order above logits", -0.01958, -0.04701, 0.007847, 4, -0.01),
    SeenFigure("loss-vs-head-count", "one head behind the best count", 0.03576, -0.09385, 0.1654, 2, 0.01),
    SeenFigure("loss-vs-head-count", "64 heads behind the best count", 0.02562, -0.02, 0.07124, 2, 0.01),
    SeenFigure("early-late", "local early, trained", 0.0316, -0.03274, 0.09594, 8, 0.05),
    SeenFigure("early-late", "syntactic early, trained", -0.01153, -0.4262, 0.4031, 8, 0.05),
    SeenFigure("early-late", "long range late, trained", 0.0191, -0.009442, 0.04763, 8, 0.05),
    SeenFigure("early-late", "semantic late, trained", 0.1179, -0.1571, 0.3928, 8, 0.05),
)


def main() -> int:
    """Print the table in Markdown."""
    print("| claim | quantity | mean of 4 seeds | sd | threshold | seeds needed |\n|---|---|---|---|---|---|")
    for figure in FIGURES:
        n = figure.seeds_needed()
        needed = "more than 10,000" if n is None else f"{n}" if n <= MAX_SEEDS else f"**{n}**"
        print(
            f"| {figure.claim} | {figure.quantity} | {figure.mean:.4g} | {figure.deviation:.3g} | {figure.threshold:g} "
            f"| {needed} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
