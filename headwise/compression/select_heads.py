"""Select the heads to prune from their scores, at once or in rounds, and fold their mean outputs into biases."""

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import MeanActivations, selected_hook_points
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.rankers import RankingInput, Scores, get_ranker
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
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
    """What each head is worth by one of `headwise.compression.rankers.RANKERS`: those with the least are cut first."""
    if corpus is not None:
        # Heads that texts do not reach cannot be ranked beside those they do.
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
    """The heads that go so that the share `keep` stays, and every head's score; in rounds, each as it last was ranked.

    One ablation is a lower bound: another head takes over, until it is cut as well. So with `rounds` only a part goes at a
    time, and what is left is ranked anew in the smaller model.
    """
    all_heads = model.spec.head_addresses
    kept_count = kept_head_count(len(all_heads), keep)
    pruned: tuple[Address, ...] = ()
    scores: Scores = {}
    rounds = min(rounds, len(all_heads) - kept_count)
    for round_number in range(1, rounds + 1):
        target = (len(all_heads) - kept_count) * round_number // rounds
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
        pruned = (*pruned, *lowest_scoring(current_model.spec.head_addresses, scores, target - len(pruned)))
    return tuple(head for head in all_heads if head in pruned), scores


@torch.no_grad()
def compute_folded_biases(
    model: ModelProtocol, heads: HeadPattern, means: MeanActivations | None
) -> dict[LayerAddress, Tensor]:
    """Return the mean output of these heads by layer, in float64: Σ_h mean(z[h]) W_O[h], (D,) each; none without means."""
    if means is None:
        return {}
    if means.granularity != "global":
        raise HeadwiseError("a bias is the same at every position; take means with granularity='global' to fold them.")
    biases = {}
    for hook_point, selected in selected_hook_points(model, heads):
        W_O = hook_point.W_O[[hook_point.head_index(head) for head in selected]].double()  # (n, e, D)
        biases[hook_point.address] = torch.einsum("ne,ned->d", means.means_of_heads(selected).to(W_O), W_O)
    return biases


def lowest_scoring(heads: tuple[Address, ...], scores: Scores, count: int) -> tuple[Address, ...]:
    """So many heads with the lowest scores; among equals the first."""
    return tuple(sorted(heads, key=lambda head: scores[head])[:count])


def kept_head_count(total: int, keep: float) -> int:
    """How many heads a share is, at least one.

    >>> kept_head_count(270, 0.5), kept_head_count(270, 0.001), kept_head_count(270, 1)
    (135, 1, 270)
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise HeadwiseError(f"keep is the share of heads that stay, above 0 and at most 1; got {keep!r}.")
    if not total:
        raise HeadwiseError("this model has no heads left to cut.")
    return max(1, round(keep * total))
