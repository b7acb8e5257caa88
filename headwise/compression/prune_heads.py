"""Cutting: a new model without some heads. Their slices are gone, and so are keys and values nobody reads any more.

A layer writes Σ_h z[h] W_O[h] + b_O. Cutting a head takes its term out of the sum. Folding leaves its mean behind: what
it gave on average over a corpus goes into the bias, b_O + mean(z[h]) W_O[h], and costs nothing.
"""

from typing import TypeVar

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import Means, chosen_sites
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.model import AnyModel, check_model
from headwise.model.prune import Biases
from headwise.spec import SiteAddress
from headwise.spec.cache_policy import Treatments

M = TypeVar("M", bound=AnyModel)


@torch.no_grad()
def cut(model: M, heads: Pattern, folded: Biases | None = None, cache: Treatments | None = None) -> M:
    """A smaller model without these heads, sharing no memory with this one, which stays as it is.

    `folded` is added to the output biases of layers, as `fold` makes it; a model that had no such biases gets them. `cache`
    says what key heads keep; None: what they kept.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = cut(model, "5.1,3.*")
    >>> len(small.spec.addresses), model.spec.parameters - small.spec.parameters  # four matrices of 384 × 64, seven times
    (29, 688128)
    """
    check_model(model)
    return model.without(heads, folded, cache)


@torch.no_grad()
def fold(model: AnyModel, heads: Pattern, means: Means) -> dict[SiteAddress, Tensor]:
    """What these heads write on average, summed by layer, in float64: mean(z[h]) W_O[h], (D,) each."""
    if means.by != "global":
        raise HeadwiseError("a bias is the same at every position; take means by='global' to fold them.")
    made = {}
    for site, chosen in chosen_sites(model, heads):
        W_O = site.W_O[[site.index(head) for head in chosen]].double()  # (n, e, D)
        made[site.address] = torch.einsum("ne,ned->d", means.of(chosen).to(W_O), W_O)
    return made
