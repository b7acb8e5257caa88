"""Cutting: a new model without some heads. Their slices are gone, and so are keys and values nobody reads any more.

A layer writes Σ_h z[h] W_O[h] + b_O. Cutting a head takes its term out of the sum. Folding leaves its mean behind: what
it gave on average over a corpus goes into the bias, b_O + mean(z[h]) W_O[h], and costs nothing.
"""

from typing import TypeVar

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import MeanActivations, selected_hook_points
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, check_model
from headwise.model.prune import Biases
from headwise.spec import LayerAddress
from headwise.spec.cache_policy import CachePolicies

M = TypeVar("M", bound=ModelProtocol)


@torch.no_grad()
def prune_heads(
    model: M, heads: HeadPattern, folded_biases: Biases | None = None, cache: CachePolicies | None = None
) -> M:
    """A smaller model without these heads, sharing no memory with this one, which stays as it is.

    `folded_biases` is added to the output biases of layers, as `compute_folded_biases` makes it; a model that had no such
    biases gets them. `cache` says what key heads keep; None: what they kept.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = prune_heads(model, "5.1,3.*")
    >>> len(small.spec.head_addresses), model.spec.num_parameters - small.spec.num_parameters
    (29, 688128)
    """
    check_model(model)
    return model.without(heads, folded_biases, cache)


@torch.no_grad()
def compute_folded_biases(
    model: ModelProtocol, heads: HeadPattern, means: MeanActivations
) -> dict[LayerAddress, Tensor]:
    """What these heads write on average, summed by layer, in float64: mean(z[h]) W_O[h], (D,) each."""
    if means.granularity != "global":
        raise HeadwiseError("a bias is the same at every position; take means with granularity='global' to fold them.")
    biases = {}
    for hook_point, selected in selected_hook_points(model, heads):
        W_O = hook_point.W_O[[hook_point.head_index(head) for head in selected]].double()  # (n, e, D)
        biases[hook_point.address] = torch.einsum("ne,ned->d", means.means_of_heads(selected).to(W_O), W_O)
    return biases
