"""One large projection is much faster than one small projection per head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.model import ModelProtocol
from headwise.spec import AttentionSpec

MIN_SLOWDOWN = 1.5  # time ratio
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
    """A layer with separate projections per head, computed in a loop over heads."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.kv_of_head, self.scale = layer.spec.kv_of_head, layer.spec.head_dim**-0.5
        self.q, self.k, self.v = (_per_head_parameters(layer.qkv.weight_by_head(projection)) for projection in "qkv")
        self.out = nn.Parameter(layer.output_projection.weight.detach().clone())

    def project(self, x: Tensor) -> list[Tensor]:
        """Return q of every head, then k, then v: (B, T, D) → (B, T, d) each."""
        return [F.linear(x, weight) for weight in (*self.q, *self.k, *self.v)]

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
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
    """Return the time of a loop over heads relative to one product, for the projections and for the full layer.

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
        for pass_name, make_step in zip(PASSES, (_make_forward_step, _backward), strict=True):
            calls = {"one": make_step(single, layer, x), "loop": make_step(looped, loop, x)}
            with one_thread():
                ratios[f"{part} {pass_name}"] = interleaved_timing(calls, "one", rounds, min_seconds)["loop"]
    return ratios


def _per_head_parameters(weight: Tensor) -> nn.ParameterList:
    """Split (heads, channels, width) into one parameter per head."""
    return nn.ParameterList(nn.Parameter(head_weight.detach().clone()) for head_weight in weight)


def _make_forward_step(function: Callable[[Tensor], Any], module: nn.Module, x: Tensor) -> Callable[[], None]:
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
    experiment: TrainedModelProvider, sizes: Sequence[tuple[int, int, int]] = SIZES, rounds: int = ROUNDS
) -> StatisticTable:
    """Measure random layers of several sizes: width, heads, tokens."""
    statistics = StatisticTable()
    for width, heads, tokens in sizes:
        _add_slowdown(statistics, AttentionSpec(width=width, heads=heads), tokens, rounds)
    return statistics


def measure_model(model: ModelProtocol, text: Any = None, rounds: int = ROUNDS) -> StatisticTable:
    """Measure layers of the model's sizes on 1 token, 64 tokens and its context length, at most 512."""
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
    """Apply the rule of CLAIM."""
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
    if not (confirmed and refuted):
        return Verdict("undecided", details)
    return Verdict("depends", f"on the size (width x heads x tokens); {details}")


CLAIM = Claim(
    number=2,
    name="one-projection",
    statement="One large projection for all heads is much faster than a small one for each head.",
    counterevidence="A size at which a loop over the projections of each head takes about as long as one product.",
    setup="Layers of several widths, head counts and lengths on one thread of this machine: q, k and v computed by one "
    "product, and by one product per head and projection, forward and with the backward pass, in interleaved runs. The full "
    "layer is also timed, batched and as a loop over heads. Numbers are the time of the loop relative to one product: "
    "medians over rounds, with intervals by ranks.",
    rule=f"Much faster means that the loop takes significantly more than {MIN_SLOWDOWN:g} times as long. Holds if this is "
    "true of the projections at every size in both passes. Does not hold if the loop takes significantly less than that at "
    "every size. Otherwise depends: on the size if some sizes are significantly above and some below, else "
    "undecided. The full layer is reported but not judged.",
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
