"""Each head is a low-rank bilinear form."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis import TokenizedCorpus, default_corpus, effective_rank
from headwise.errors import ArgumentError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.compared_head_counts import head_counts
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import AttentionCall, Circuit
from headwise.kernels import raw_scores, repeat_kv
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address

TOKENS = 128  # or twice head_dim, if that is more
RANK_TOLERANCE = 1e-9  # smaller singular values, relative to the largest, are rounding errors in float64
MAX_UNEXPLAINED = 1e-3  # largest relative residual of the bilinear form: x is known in float32
ENERGY = "energy in the first half of directions"


@dataclass(frozen=True)
class HeadRank:
    """Rank of the scores of one head, and the relative residual after subtracting x W_Q W_Kᵀ xᵀ."""

    head: Address
    head_dim: int
    tokens: int
    rank: int
    unexplained: float


@torch.no_grad()
def head_score_ranks(model: ModelProtocol, corpus: Any = None) -> list[HeadRank]:
    """Measure every head on a text with more tokens than head_dim: its scores before mask, bias and softmax, in float64.

    The rank of q kᵀ is at most head_dim for any number of tokens. The scores are one bilinear form of the layer input, the
    same for all pairs of tokens (a bias counts as a constant input channel). This fails with rotary positions, which rotate
    the form with the offset, and with norms on q and k.
    """
    ids = _token_stretch(model, corpus)
    ranks: list[HeadRank] = []
    inputs: list[Tensor] = []

    def on_call(call: AttentionCall) -> None:
        x = inputs[-1][0].double()  # (T, D)
        k = repeat_kv(call.k, call.params.kv_of_head)
        scores = raw_scores(call.q.double(), k.double(), call.params)[0]  # (H, T, T)
        for address, head_scores in zip(call.hook_point.head_addresses, scores, strict=True):
            head = model.heads[address]
            predicted = _project(x, head.W_Q, head.b_Q) @ _project(x, head.W_K, head.b_K).mT * call.params.scale
            unexplained = float((head_scores - predicted).norm() / head_scores.norm())
            ranks.append(HeadRank(address, call.q.shape[-1], len(x), numerical_rank(head_scores), unexplained))

    with eval_mode(model), ExitStack() as stack:
        for layer in model.attention_layers():
            hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
            stack.callback(hook.remove)
            stack.enter_context(layer.hook_point.listen(on_call))
        model(ids, hidden=True)
    return ranks


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = x @ weight.double()  # (T, d)
    return projected if bias is None else projected + bias.double()


def numerical_rank(matrix: Tensor) -> int:
    """Return the number of singular values above rounding errors.

    >>> numerical_rank(torch.ones(5, 7).double())
    1
    """
    sigma = torch.linalg.svdvals(matrix)
    return int((sigma > RANK_TOLERANCE * sigma[0]).sum())


def energy_in_first_half(circuit: Circuit) -> float:
    """Return the fraction of Σσ² in the first half of a circuit's directions."""
    power = circuit.singular_values().double().square()  # (d,)
    return float(power[: -(-len(power) // 2)].sum() / power.sum())


def _token_stretch(model: ModelProtocol, corpus: Any) -> Tensor:
    """Concatenate texts to more tokens than head_dim, within the context of the model: (1, T)."""
    spec = model.spec
    max_length = min(max(TOKENS, 2 * spec.attention.head_dim), spec.context)
    ids: list[int] = []
    for sample in TokenizedCorpus.of(model, corpus):
        ids += sample.ids
        if len(ids) >= max_length:
            break
    if len(ids) <= spec.attention.head_dim or max_length <= spec.attention.head_dim:
        raise ArgumentError(
            f"text: the rank can only be measured on more tokens than head_dim={spec.attention.head_dim}. "
            f"Got {min(len(ids), max_length)} tokens. Use a longer text."
        )
    return torch.tensor([ids[:max_length]], device=model.device)


@torch.no_grad()
def _mean_effective_ranks(model: ModelProtocol) -> dict[str, float]:
    """Return means over heads, and the values for random weights of the same shape."""
    circuits = {"W_QK": [head.QK for head in model.heads], "W_OV": [head.OV for head in model.heads]}
    circuits = {name: [Circuit(c.left.float(), c.right.float()) for c in items] for name, items in circuits.items()}
    D, d = circuits["W_QK"][0].left.shape
    generator = torch.Generator().manual_seed(0)
    circuits["random weights"] = [
        Circuit(
            torch.randn(D, d, generator=generator, device="cpu"), torch.randn(d, D, generator=generator, device="cpu")
        )
        for _ in range(8)
    ]
    spectra = {}
    for name, items in circuits.items():
        spectra[f"effective rank of {name}"] = sum(map(effective_rank, items)) / len(items)
        spectra[f"{ENERGY}, {name}"] = sum(map(energy_in_first_half, items)) / len(items)
    return spectra


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return every head count."""
    return [
        experiment.make_config(seed, heads) for heads in head_counts(experiment.size.width) for seed in experiment.seeds
    ]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure trained models of every head_dim."""
    statistics = StatisticTable()
    for heads in reversed(head_counts(experiment.size.width)):
        models = [
            experiment.train_or_load(experiment.make_config(seed, heads)).load_model() for seed in experiment.seeds
        ]
        _add_ranks(
            statistics,
            [(model, experiment.held_out_corpus(seed)) for model, seed in zip(models, experiment.seeds, strict=True)],
        )
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure a given model."""
    return _add_ranks(StatisticTable(), [(model, default_corpus(model) if text is None else text)])


def _add_ranks(statistics: StatisticTable, models: list[tuple[ModelProtocol, Any]]) -> StatisticTable:
    ranks = [head_score_ranks(model, corpus) for model, corpus in models]
    d = ranks[0][0].head_dim
    statistics.add(
        "rank of the scores",
        d,
        [sum(head_rank.rank for head_rank in model_ranks) / len(model_ranks) for model_ranks in ranks],
    )
    statistics.add(
        "largest rank over head_dim",
        d,
        [max(head_rank.rank / head_rank.head_dim for head_rank in model_ranks) for model_ranks in ranks],
    )
    statistics.add("tokens", d, [model_ranks[0].tokens for model_ranks in ranks])
    statistics.add(
        "unexplained by one form", d, [max(head_rank.unexplained for head_rank in model_ranks) for model_ranks in ranks]
    )
    spectra = [_mean_effective_ranks(model) for model, _ in models]
    for name in spectra[0]:
        statistics.add(name, d, [spectrum[name] for spectrum in spectra])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    if any(max(statistic.values) > 1 for statistic in statistics.by_condition("largest rank over head_dim").values()):
        return Verdict("does not hold")
    worst = max(max(statistic.values) for statistic in statistics.by_condition("unexplained by one form").values())
    if worst > MAX_UNEXPLAINED:
        details = f"rank is at most head_dim, but one form misses the scores of a head by {worst:.2g} of their size"
        return Verdict("depends", f"on positions: {details}; rotary positions rotate it with the offset")
    return Verdict("true by construction")


CLAIM = Claim(
    number=21,
    name="low-rank",
    statement="Each head compares tokens by a bilinear form of low rank, at most head_dim.",
    counterevidence="A head whose scores on a long text have a rank above head_dim, or are not a bilinear form of its input.",
    setup=f"Models of every head count at one width, on a text of {TOKENS} tokens: the rank of each head's scores before "
    "mask and softmax, and the residual after subtracting x W_Q W_Kᵀ xᵀ (the largest of all heads). The spectra of "
    "W_Q W_Kᵀ and W_V W_O are also reported: effective rank, energy in the first half, and random weights of that shape. "
    "With one head, head_dim is the width, and the bound is trivial.",
    rule="Does not hold if the rank of some head is above head_dim. True by construction if also one form explains the "
    f"scores of every head within {MAX_UNEXPLAINED:g}. Otherwise depends on positions, or on other operations on q and k. "
    "The spectra are reported but not judged.",
    identity="q kᵀ is a product of matrices with head_dim columns: its rank cannot be more",
    possible_verdicts=("true by construction", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        ("rank of the scores", "effective rank of W_QK", "effective rank of W_OV", "effective rank of random weights"),
        x="head_dim", y="rank", log_x=True,
    ),
    training_configs=training_configs,
    measure_model=measure_model,
)  # fmt: skip
