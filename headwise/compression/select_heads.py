"""Select the heads to prune from their scores, at once or in rounds, and fold their mean outputs into biases."""

import torch
from torch import Tensor

from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, selected_hook_points
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.rankers import RankingInput, Scores, get_ranker
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import Address, LayerAddress


def rank_heads(
    model: ModelProtocol,
    corpus: TokenizedCorpus | None,
    ranking: str,
    *,
    keep: float = 0.5,
    means: MeanActivations | None = None,
    seed: int = 0,
    gate_steps: int = 200,
    progress: Progress | None = None,
    progress_label: str = "",
) -> Scores:
    """Return the score of each head by one method of `RANKERS`. Heads with the lowest scores are pruned first."""
    if corpus is not None and not reads_calls(model):
        # Raise if texts do not reach some heads: their scores could not be compared with those of other heads.
        reachable_hook_points(model, model.spec.head_addresses)
    inputs = RankingInput(corpus, keep, means, seed, gate_steps, progress, progress_label or f"ranking by {ranking}")
    return get_ranker(ranking).rank(model, inputs)


def select_heads_to_prune(
    model: ModelProtocol,
    corpus: TokenizedCorpus | None,
    keep: float,
    ranking: str,
    *,
    means: MeanActivations | None = None,
    rounds: int = 1,
    seed: int = 0,
    gate_steps: int = 200,
    progress: Progress | None = None,
) -> tuple[tuple[Address, ...], Scores]:
    """Return the heads to prune so that the fraction `keep` remains, and the last score of every head.

    A single ranking underestimates heads with backups: another head takes over their function, until it is pruned as well.
    With `rounds`, a part of the heads is pruned at a time and the remaining heads are ranked again in the smaller model.
    """
    all_heads = model.spec.head_addresses
    kept_count = head_count_for_fraction(len(all_heads), keep)
    pruned: tuple[Address, ...] = ()
    scores: Scores = {}
    layers = len(model.spec.layer_addresses) if model.spec.shared_layers else 1
    kept_count = max(1, round(kept_count / layers)) * layers  # a head of shared layers is pruned in all of them
    rounds = min(rounds, (len(all_heads) - kept_count) // layers)
    for round_number in range(1, rounds + 1):
        target = (len(all_heads) - kept_count) // layers * round_number // rounds * layers
        current_model = model.prune(pruned, compute_folded_biases(model, pruned, means)) if pruned else model
        fraction = (len(all_heads) - target) / len(current_model.spec.head_addresses)
        progress_label = f"ranking by {ranking}" + (f", round {round_number} of {rounds}" if rounds > 1 else "")
        scores |= rank_heads(
            current_model,
            corpus,
            ranking,
            keep=fraction,
            means=means,
            seed=seed,
            gate_steps=gate_steps,
            progress=progress,
            progress_label=progress_label,
        )
        pruned = (*pruned, *_lowest_scoring_heads(current_model, scores, target - len(pruned)))
    return tuple(head for head in all_heads if head in pruned), scores


def _lowest_scoring_heads(model: ModelProtocol, scores: Scores, count: int) -> tuple[Address, ...]:
    """Return the heads with the lowest scores. A head of shared layers has the mean score of its copies."""
    heads = model.spec.head_addresses
    if not model.spec.shared_layers:
        return lowest_scoring(heads, scores, count)
    copies = {head: [scores[copy] for copy in model.spec.with_shared_copies([head])] for head in heads}
    by_head = sorted(heads, key=lambda head: (sum(copies[head]) / len(copies[head]), head.head))
    return tuple(by_head[:count])


@torch.no_grad()
def compute_folded_biases(
    model: ModelProtocol, heads: HeadPattern, means: MeanActivations | None
) -> dict[LayerAddress, Tensor]:
    """Return Σ_h mean(z[h]) W_O[h] over these heads, (D,) for each layer, in float64. Empty if `means` is None."""
    if means is None:
        return {}
    if means.granularity != "global":
        raise ArgumentError(
            "means: only position-independent means can be folded into a bias. "
            f"Got granularity={means.granularity!r}. Compute the means with granularity='global'."
        )
    biases = {}
    for hook_point, selected in selected_hook_points(model, heads):
        W_O = to_float64(hook_point.W_O[[hook_point.head_index(head) for head in selected]])  # (n, e, D)
        biases[hook_point.address] = torch.einsum("ne,ned->d", means.means_of_heads(selected).to(W_O), W_O)
    if model.spec.shared_layers and biases:  # one bias serves all layers
        mean_bias = torch.stack(list(biases.values())).mean(0)
        biases = dict.fromkeys(model.spec.layer_addresses, mean_bias)
    return biases


def lowest_scoring(heads: tuple[Address, ...], scores: Scores, count: int) -> tuple[Address, ...]:
    """Return the `count` heads with the lowest scores. Ties are broken by the order of `heads`."""
    return tuple(sorted(heads, key=lambda head: scores[head])[:count])


def head_count_for_fraction(total: int, keep: float) -> int:
    """Return the number of heads that a fraction keeps, at least one.

    >>> head_count_for_fraction(270, 0.5), head_count_for_fraction(270, 0.001), head_count_for_fraction(270, 1)
    (135, 1, 270)
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ArgumentError(
            f"keep: the fraction of remaining heads must be above 0 and at most 1. Got {keep!r}. Use keep=0.5."
        )
    if not total:
        raise UnsupportedModelError("model: it has no heads left to prune. Use a model with heads.")
    return max(1, round(keep * total))
