"""One large projection is much faster than one small one for each head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.heads import MultiHeadAttention
from headwise.model import ModelProtocol
from headwise.spec import AttentionSpec

MIN_SLOWDOWN = 1.5  # times as long
SIZES = (
    (64, 8, 64),
    (64, 64, 64),
    (256, 8, 64),
    (256, 8, 512),
    (512, 8, 1),
    (768, 12, 1),
    (768, 12, 64),
    (768, 12, 512),
)
PASSES = ("forward", "with backward")
ROUNDS = 15


class LoopedHeads(nn.Module):
    """The same layer as beginners write it: every head has projections of its own, and comes after the one before it."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.kv_of_head, self.scale = layer.spec.kv_of_head, layer.spec.head_dim**-0.5
        self.q, self.k, self.v = (_per_head_parameters(layer.qkv.weight_by_head(projection)) for projection in "qkv")
        self.out = nn.Parameter(layer.output_projection.weight.detach().clone())

    def project(self, x: Tensor) -> list[Tensor]:
        """Every head's q, then every k, then every v: (B, T, D) → (B, T, d) each."""
        return [F.linear(x, weight) for weight in (*self.q, *self.k, *self.v)]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)"""
        projected = self.project(x)
        q, k, v = projected[: len(self.q)], projected[len(self.q) : -len(self.v)], projected[-len(self.v) :]
        z = []
        for head, kv_index in enumerate(self.kv_of_head):
            probs = (q[head] * self.scale @ k[kv_index].mT).softmax(-1)  # (B, T, T)
            z.append(probs @ v[kv_index])  # (B, T, e)
        return F.linear(torch.cat(z, -1), self.out)


def loop_slowdowns(
    spec: AttentionSpec, tokens: int, batch_size: int = 1, rounds: int = ROUNDS, min_seconds: float = 0.01
) -> dict[str, Statistic]:
    """How many times as long a loop over heads takes as one product: projections alone, and the whole layer, each pass.

    >>> slowdowns = loop_slowdowns(AttentionSpec(width=8, heads=2), 4, rounds=3, min_seconds=0.001)
    >>> list(slowdowns)
    ['projections forward', 'projections with backward', 'layer forward', 'layer with backward']
    """
    torch.manual_seed(0)
    layer = MultiHeadAttention(spec, backend="batched")
    loop, x = LoopedHeads(layer), torch.randn(batch_size, tokens, spec.width)
    pairs: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
        "projections": (layer.qkv, loop.project),
        "layer": (layer, loop),
    }
    ratios = {}
    for part, (single, looped) in pairs.items():
        for pass_name, make_step in zip(PASSES, (_forward, _backward), strict=True):
            calls = {"one": make_step(single, layer, x), "loop": make_step(looped, loop, x)}
            with one_thread():
                ratios[f"{part} {pass_name}"] = interleaved_timing(calls, "one", rounds, min_seconds)["loop"]
    return ratios


def _per_head_parameters(weight: Tensor) -> nn.ParameterList:
    """(heads, channels, width) → a weight of its own for each head."""
    return nn.ParameterList(nn.Parameter(head_weight.detach().clone()) for head_weight in weight)


def _forward(function: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode():
            function(x)

    return step


def _backward(function: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()
    output = function(x)
    grad_outputs = [torch.randn_like(tensor) for tensor in ([output] if isinstance(output, Tensor) else output)]

    def step() -> None:
        module.zero_grad()
        x.grad = None
        outputs = function(x)
        torch.autograd.backward([outputs] if isinstance(outputs, Tensor) else list(outputs), grad_outputs)

    return step


def measure(
    experiment: ExperimentContext, sizes: Sequence[tuple[int, int, int]] = SIZES, rounds: int = ROUNDS
) -> StatisticTable:
    """Random layers of several sizes: width, heads, tokens."""
    statistics = StatisticTable()
    for width, heads, tokens in sizes:
        _add_slowdown(statistics, AttentionSpec(width=width, heads=heads), tokens, rounds)
    return statistics


def measure_model(model: ModelProtocol, text: Any = None, rounds: int = ROUNDS) -> StatisticTable:
    """Layers of the model's sizes, for one token, for 64 and for as many as it reads, at most 512."""
    attention = model.spec.attention
    spec = AttentionSpec(attention.width, attention.heads, attention.head_dim, attention.value_dim, attention.kv_heads)
    statistics = StatisticTable()
    for tokens in sorted({1, min(64, model.spec.context), min(512, model.spec.context)}):
        _add_slowdown(statistics, spec, tokens, rounds)
    return statistics


def _add_slowdown(statistics: StatisticTable, spec: AttentionSpec, tokens: int, rounds: int) -> None:
    for name, ratio in loop_slowdowns(spec, tokens, rounds=rounds).items():
        statistics.add(name, f"{spec.width}x{spec.heads}x{tokens}", ratio)


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    ratios = {pass_name: statistics.by_condition(f"projections {pass_name}") for pass_name in PASSES}
    all_ratios = [
        (f"{condition} {pass_name}", ratio) for pass_name, group in ratios.items() for condition, ratio in group.items()
    ]
    confirmed = [name for name, ratio in all_ratios if ratio.is_interval_above(MIN_SLOWDOWN)]
    refuted = [name for name, ratio in all_ratios if ratio.is_interval_below(MIN_SLOWDOWN)]
    unsure = [name for name, _ in all_ratios if name not in (*confirmed, *refuted)]
    if len(confirmed) == len(all_ratios):
        return Verdict("holds")
    if len(refuted) == len(all_ratios):
        return Verdict("does not hold")
    details = "; ".join(
        f"{label}: {', '.join(group)}" for label, group in (("not so", refuted), ("open", unsure)) if group
    )
    factor = "the size (width x heads x tokens)" if confirmed and refuted else "the turn of the clock"
    return Verdict("depends", f"on {factor}; {details}")


CLAIM = Claim(
    number=2,
    name="one-projection",
    statement="One large projection for all heads is much faster than a small one for each head.",
    counterevidence="A size at which a loop over the heads' own projections takes about as long as one product.",
    setup="Layers of several widths, head counts and lengths on one thread of this machine: q, k and v by one product "
    "and by one for each head and letter, forward and with the backward pass, in turns; and the whole layer, batched "
    "and as a loop over heads. Figures say how many times as long the loop takes: medians over turns, with intervals "
    "by ranks.",
    rule=f"Much faster: the loop surely takes more than {MIN_SLOWDOWN:g} times as long. Holds if that is so of the "
    "projections at every size in both passes; does not hold if at every size it surely takes less; else depends, on "
    "the size if some surely do and some surely do not, else on the turn of the clock. The whole layer is told beside "
    "it and not judged.",
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        ("projections forward", "projections with backward", "layer forward", "layer with backward"),
        x="width x heads x tokens",
        y="time of the loop, one product = 1",
    ),
    judged=statistic_key_selector(*(f"projections {pass_name}" for pass_name in PASSES)),
    timed=True,
    measure_model=measure_model,
)
