"""Statistics of circuits: faithfulness with a bootstrap over templates, areas, random sets and stability."""

from collections.abc import Callable, Sequence

import numpy as np

from headwise.analysis.circuits.circuit_result import CircuitEstimate, FaithfulnessCurve, FaithfulnessPoint
from headwise.analysis.circuits.model_nodes import ModelNodes

DRAWS = 1000  # resamples of the templates
STABILITY_DRAWS = 200
# Fractions of the nodes at which MIB evaluates CPR and CMD (https://arxiv.org/abs/2504.13151)
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class TemplateBootstrapSampler:
    """Bootstrap over templates: draws templates with replacement, and each with all its prompts.

    Args:
        templates: Template of each prompt.
        seed: Seed.
        draws: Number of resamples.
    """

    def __init__(self, templates: Sequence[str], seed: int, draws: int = DRAWS) -> None:
        names, index = np.unique(np.array(templates), return_inverse=True)
        self.num_templates = len(names)
        shares = np.full(len(names), 1 / len(names))
        times = np.random.default_rng(seed).multinomial(len(names), shares, size=draws)
        self.weights = times[:, index].astype(float)  # (draws, P)

    def estimate(self, statistic: Callable[[np.ndarray], np.ndarray], num_prompts: int) -> CircuitEstimate:
        """Return a statistic of all prompts with its 95% percentile interval.

        Args:
            statistic: Function from the weights of prompts, (draws, P), to values (draws,).
            num_prompts: Number of prompts.
        """
        value = float(statistic(np.ones((1, num_prompts)))[0])
        if self.num_templates < 2:
            return CircuitEstimate(value)
        draws = statistic(self.weights)
        draws = draws[np.isfinite(draws)]
        if not len(draws):
            return CircuitEstimate(value)
        low, high = np.quantile(draws, [0.025, 0.975])
        return CircuitEstimate(value, float(low), float(high))


class FaithfulnessSums:
    """Metrics of a split from which faithfulness is computed: of the model and of the model with all nodes replaced.

    Args:
        clean: Metric of the full model on each prompt, (P,).
        empty: Metric with all nodes replaced, (P,).
        sampler: Bootstrap over the templates of the prompts.
    """

    def __init__(self, clean: np.ndarray, empty: np.ndarray, sampler: TemplateBootstrapSampler) -> None:
        self.clean, self.empty, self.sampler = clean, empty, sampler

    def ratio(self, metrics: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return F for weights of prompts: metrics (P,), weights (draws, P) → (draws,). NaN if no effect is left."""
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weights @ (self.clean - self.empty)
            return np.where(np.abs(total) > 1e-12, (weights @ (metrics - self.empty)) / total, np.nan)

    def value(self, metrics: np.ndarray) -> float:
        """Return F of a set of nodes from its metrics, (P,)."""
        return float(self.ratio(metrics, np.ones((1, len(metrics))))[0])

    def estimate(self, metrics: np.ndarray) -> CircuitEstimate:
        """Return F of a set of nodes with its interval."""
        return self.sampler.estimate(lambda weights: self.ratio(metrics, weights), len(metrics))

    def difference(self, metrics: np.ndarray, other: np.ndarray) -> CircuitEstimate:
        """Return F from `metrics` minus F from `other`, with its interval: (P,) each."""
        shifted = metrics - other + self.empty  # F is linear in the metrics
        return self.estimate(shifted)

    def effect_is_shown(self) -> bool:
        """Return whether the interval of the total effect is above 0."""
        effect = self.clean - self.empty
        estimate = self.sampler.estimate(lambda weights: weights @ effect / weights.sum(1), len(effect))
        return estimate.value > 0 and not estimate.low <= 0


def faithfulness_curve(
    ablation: str, sizes: Sequence[int], metrics: np.ndarray, sums: FaithfulnessSums, num_nodes: int
) -> FaithfulnessCurve:
    """Return faithfulness over sizes, and the areas as MIB computes them, with intervals.

    Args:
        ablation: Name of the ablation.
        sizes: Sizes in ascending order, from 0 to the number of nodes.
        metrics: Metric of each prompt for each size, (sizes, P).
        sums: Metrics of the full and of the empty model.
        num_nodes: Number of nodes.
    """
    mib_rows = [list(sizes).index(size) for size in mib_sizes(num_nodes)]

    def areas(weights: np.ndarray, index: int) -> np.ndarray:
        values = np.stack([sums.ratio(metrics[row], weights) for row in mib_rows], 1)  # (draws, fractions)
        return mib_areas(values)[index]

    estimates = [
        sums.sampler.estimate(lambda weights, index=index: areas(weights, index), metrics.shape[1])
        for index in range(4)
    ]
    points = tuple(
        FaithfulnessPoint(size, sums.estimate(row)) for size, row in zip(sizes, metrics, strict=True) if size
    )
    return FaithfulnessCurve(ablation, points, *estimates)


def mib_sizes(num_nodes: int) -> list[int]:
    """Return the sizes at which MIB evaluates a circuit, rounded down.

    >>> mib_sizes(391)
    [0, 0, 1, 3, 7, 19, 39, 78, 195, 391]
    """
    return [int(fraction * num_nodes) for fraction in MIB_FRACTIONS]


def mib_areas(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return CPR, CMD, and both over the logarithm of the fraction, from F at MIB's fractions: (…, 10) → (…) each.

    CPR and CMD use the trapezoidal rule over the fraction from 0.001 to 1. The logarithmic versions are divided by the length
    of the axis, so that a faithful circuit of any size has 1 and 0.

    >>> cpr, cmd, log_cpr, log_cmd = mib_areas(np.ones(10))
    >>> [round(float(area), 3) for area in (cpr, cmd, log_cpr, log_cmd)]
    [0.999, 0.0, 1.0, 0.0]
    """
    fractions = np.array(MIB_FRACTIONS)
    log_fractions = np.log(fractions) / -np.log(fractions[0])
    distance = np.abs(1 - values)
    return (
        _area(values, fractions), _area(distance, fractions), _area(values, log_fractions), _area(distance, log_fractions)
    )  # fmt: skip


def _area(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the area under values (…, n) at x (n,) by the trapezoidal rule."""
    return ((values[..., 1:] + values[..., :-1]) / 2 * np.diff(x)).sum(-1)


def size_grid(num_nodes: int) -> list[int]:
    """Return the sizes that are tried on the size split: 1, 2, 3, then in steps of about 1.4.

    >>> size_grid(30)
    [1, 2, 3, 4, 6, 8, 11, 16, 23, 30]
    """
    grid = [1, 2, 3]
    while grid[-1] < num_nodes:
        grid.append(min(num_nodes, round(2 ** (len(grid) / 2 + 0.5))))
    return [size for size in grid if size <= num_nodes]


def choose_size(sizes: Sequence[int], faithfulness: Sequence[float], target: float) -> tuple[int, bool]:
    """Return the smallest size that reaches the target. If none does: the size with the largest F, and False."""
    for size, value in zip(sizes, faithfulness, strict=True):
        if value >= target:
            return size, True
    return sizes[int(np.nanargmax(faithfulness))], False


def random_sets(
    nodes: ModelNodes, members: Sequence[int], count: int, rng: np.random.Generator, excluded: Sequence[int] = ()
) -> np.ndarray:
    """Draw sets with as many nodes of each kind in each layer as a circuit, (count, N), True at the members.

    Args:
        nodes: Nodes of the model.
        members: Indices of the circuit.
        count: Number of sets.
        rng: Random generator.
        excluded: Nodes that may not be drawn.
    """
    masks = np.zeros((count, len(nodes)), bool)
    groups: dict[tuple[int, str], list[int]] = {}
    for node in range(len(nodes)):
        if node not in set(excluded):
            groups.setdefault((nodes.layers[node], nodes.kinds[node]), []).append(node)
    for key, candidates in groups.items():
        size = sum((nodes.layers[node], nodes.kinds[node]) == key for node in members)
        for row in range(count):
            masks[row, rng.permutation(candidates)[:size]] = True
    return masks


def stability_shares(effects: np.ndarray, templates: Sequence[str], size: int, seed: int) -> np.ndarray:
    """Return the share of bootstrap discoveries of a size that contain each node: effects (N, P) → (N,).

    Each discovery draws the templates of the score split with replacement and takes the nodes with the largest absolute mean.
    """
    sampler = TemplateBootstrapSampler(templates, seed, STABILITY_DRAWS)
    means = np.abs(sampler.weights @ effects.T)  # (draws, N)
    order = np.argsort(-means, 1, kind="stable")[:, :size]
    shares = np.zeros(len(effects))
    np.add.at(shares, order.flatten(), 1 / STABILITY_DRAWS)
    return shares
