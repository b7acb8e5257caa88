"""Heads beside each other: which see the same, which write the same, which are one too many.

Every pair is compared by its weights (weights.py) and by what it does on a fixed sample of rows: a few texts, a few
places in each, the same places in texts of about the same length. So the same place in another text is at hand, and that
is the null: how alike two heads are whatever the words.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from headwise.analysis.recording.batching import read_sites
from headwise.analysis.similarity.attention_similarity import Sums, cka_matrix, look, permuted_cka, sample
from headwise.analysis.similarity.weight_similarity import (
    COMPOSITIONS,
    compare_weights,
    effective_rank,
    folded_heads,
    ov_copying,
    shared,
)
from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import Circuit, Pattern
from headwise.model import AnyModel, quiet
from headwise.spec import Address, SiteAddress, select

THROUGH_NORMS = ("read_q", "read_k", "read_v", *COMPOSITIONS)  # what is read of the stream, through the norm before it
# What each number is measured against.
NULLS = {
    "js": "the same head, same places, another text",
    "map_cosine": "same places, another text",
    "position": "same places, another text",
    "subspace": "same places, another text",
    "output": "same places, another text",
    "cka": "95 % of pairs with rows permuted lie below",
    **dict.fromkeys(("read_q", "read_k", "read_v", "write"), "d/D"),
    **dict.fromkeys(("q_composition", "k_composition", "v_composition"), "1/√D"),
    "ov_copying": "standard deviation of random weights, about 1.5/d",
    **dict.fromkeys(("ov_rank", "qk_rank"), "random weights of the same shape"),
}


class HeadPair(NamedTuple):
    """Two heads, how alike they are by some measure, and its null."""

    a: Address
    b: Address
    value: float
    null: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """All pairs of heads. `matrices` by name, (H, H); `scores` of single heads, (H,); `nulls` to hold them against.

    js: Jensen–Shannon divergence of attention rows, in nats. map_cosine: of whole maps. position, subspace, output: mean
    cosine of attention rows, of values and of what is written (https://arxiv.org/abs/1810.10183, whose disagreement is
    their negative mean over the pairs of a layer). cka: of z, debiased. The rest is about weights.
    """

    addresses: tuple[Address, ...]
    matrices: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    nulls: dict[str, np.ndarray]  # broadcastable to what they stand beside
    rows: int  # rows sampled
    texts: int  # of so many texts
    notes: dict[str, str] = field(default_factory=dict)  # why some numbers are missing

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.matrices | self.scores:
            raise HeadwiseError(f"{name!r} is not measured; {close_names(name, self.matrices | self.scores)}")
        return (self.matrices | self.scores)[name]

    def nearest(self, address: Address | str, k: int = 5, by: str = "js") -> list[HeadPair]:
        """The k heads most like this one."""
        (head,) = select(Address.parse(address) if isinstance(address, str) else address, self.addresses)
        a = self.addresses.index(head)
        pairs = [self._pair(a, b, by) for b in range(len(self.addresses)) if b != a]
        return _most_alike(pairs, by)[:k]

    def redundant(self, k: int = 10, by: str = "js") -> list[HeadPair]:
        """The k pairs most alike, the null beside each; a composition is not symmetric and lists both ways."""
        H, directed = len(self.addresses), by.endswith("composition")
        pairs = [self._pair(a, b, by) for a in range(H) for b in range(0 if directed else a + 1, H) if a != b]
        return _most_alike(pairs, by)[:k]

    def clusters(self, n: int | None = None) -> list[tuple[Address, ...]]:
        """Heads that look at the same, in n clusters; if n is left out, as near as one head is to itself on other text.

        Average linkage on √js, which is a distance (https://doi.org/10.1109/TIT.2003.813506). The largest cluster first.
        """
        tree = linkage(squareform(np.sqrt(self["js"]), checks=False), "average")
        near = float(np.sqrt(np.median(self.nulls["js"])))
        if n is None and np.isnan(near):
            raise HeadwiseError(
                "one text gives no null to cut at; say how many clusters, or compare heads on more texts."
            )
        found = fcluster(tree, near, "distance") if n is None else fcluster(tree, n, "maxclust")
        members = [tuple(a for a, one in zip(self.addresses, found, strict=True) if one == c) for c in np.unique(found)]
        return sorted(members, key=lambda some: (-len(some), some))

    def embedding(self, dims: int = 2) -> np.ndarray:
        """A place for every head, (H, dims), whose distances are √js as nearly as may be: classical scaling."""
        squared = self["js"]
        centred = squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()
        values, vectors = np.linalg.eigh(-centred / 2)
        places = np.zeros((len(squared), dims))
        kept = min(dims, len(squared))
        places[:, :kept] = (vectors * np.sqrt(values.clip(min=0)))[:, ::-1][:, :kept]
        largest = np.abs(places).argmax(0)
        return places * np.where(
            places[largest, range(dims)] < 0, -1.0, 1.0
        )  # a map has no sign of its own: choose one

    def by_layer(self) -> dict[SiteAddress, dict[str, float]]:
        """The mean of every measure over the pairs inside each layer; NaN where there are none."""
        layers = {
            address.site: [i for i, a in enumerate(self.addresses) if a.site == address.site]
            for address in self.addresses
        }
        return {
            site: {name: self._mean_inside(name, inside) for name in self.matrices} for site, inside in layers.items()
        }

    def _mean_inside(self, name: str, heads: list[int]) -> float:
        found = [x for a in heads for b in heads if a != b and not np.isnan(x := self.matrices[name][a, b])]
        return float(np.mean(found)) if found else float("nan")

    def _pair(self, a: int, b: int, by: str) -> HeadPair:
        if by not in self.matrices:
            raise HeadwiseError(f"pairs are not measured by {by!r}; {close_names(by, self.matrices)}")
        null = np.broadcast_to(self.nulls[by], self.matrices[by].shape)
        return HeadPair(
            self.addresses[a], self.addresses[b], float(self.matrices[by][a, b]), float((null[a, b] + null[b, a]) / 2)
        )


def compare(
    model: AnyModel, corpus: Any = None, *, rows: int = 512, longest: int = 256, heads: Pattern = "*", seed: int = 0
) -> Comparison:
    """Compare all heads, or some, pair by pair, on `rows` rows of texts of at most `longest` tokens; None: the probe set.

    An encoder-decoder reads each text as its source and as its target. Documents longer than that are left out.
    """
    if rows < 2:
        raise HeadwiseError(f"heads are compared on at least 2 rows, got {rows}.")
    everywhere = tuple(address for site in read_sites(model, heads) for address in site.addresses)
    addresses = everywhere if isinstance(heads, str) and heads == "*" else select(heads, everywhere)
    towers = {address.stack for address in addresses} if model.spec.stacks else set()
    if len(towers) > 1:
        raise HeadwiseError(
            f"heads of {', '.join(sorted(towers))} read different things, so they cannot be compared; say one of them: "
            f"heads='{min(towers)}.*'."
        )
    if len(addresses) < 2:
        raise HeadwiseError(f"it takes two heads to compare, got {', '.join(map(str, addresses)) or 'none'}.")
    z, texts = [], 0
    with quiet(model), torch.no_grad():
        weighed = folded_heads(model, addresses)
        sums = Sums(torch.stack([head.weights["o"] for head in weighed]))
        for units, places in sample(model, corpus, rows, longest, len(addresses), seed):
            some = look(model, units, places, set(addresses))
            sums.add(some)
            z.append(some.z)
            texts += len(units)
        features = torch.cat(z, 1)  # (H, rows, e)
        matrices = sums.matrices() | {"cka": cka_matrix(features)} | compare_weights(weighed)
        nulls = sums.nulls() | {"cka": permuted_cka(features, seed)} | _weight_nulls(model, seed)
    matrices["subspace"][shared(weighed)] = np.nan
    if model.norms() is None:
        for name in THROUGH_NORMS:
            matrices[name][:] = np.nan
    scores = {
        "ov_copying": np.array([ov_copying(head) for head in weighed]),
        "ov_rank": np.array([effective_rank(head.OV) for head in weighed]),
        "qk_rank": np.array([effective_rank(head.QK) for head in weighed]),
    }
    return Comparison(addresses, matrices, scores, nulls, features.shape[1], texts, _notes(model))


def _weight_nulls(model: AnyModel, seed: int) -> dict[str, np.ndarray]:
    """What random weights of the same shapes would give."""
    spec, dice = model.spec.attention, torch.Generator().manual_seed(seed)
    D, d, e = spec.width, spec.head_dim, spec.value_dim

    def random_rank(inner: int) -> float:
        made = (torch.randn(2, D, inner, generator=dice) for _ in range(4))
        return float(np.mean([effective_rank(Circuit(left, right.mT)) for left, right in made]))

    nulls = {"read_q": d / D, "read_k": d / D, "read_v": e / D, "write": e / D, "ov_copying": 1.5 / e}
    nulls |= dict.fromkeys(("q_composition", "k_composition", "v_composition"), D**-0.5)
    nulls |= {"ov_rank": random_rank(e), "qk_rank": random_rank(d)}
    return {name: np.array(value) for name, value in nulls.items()}


def _notes(model: AnyModel) -> dict[str, str]:
    """Why numbers are missing."""
    spec, notes = model.spec.attention, {}
    if spec.rotary is not None:
        why = "rotary positions turn q and k with the offset, so one number for all offsets would say nothing"
        notes |= dict.fromkeys(("q_composition", "k_composition"), why)
    if spec.kv_heads != spec.heads:
        why = "heads of a group share W_K and W_V, so they agree by construction: such pairs are left out"
        notes |= dict.fromkeys(("read_k", "read_v", "subspace"), why)
    if model.norms() is None:
        why = "what norms stand between the stream and these heads is not known for this architecture"
        notes |= dict.fromkeys(THROUGH_NORMS, why)
    elif model.spec.form == "post":
        why = "norms stand in the stream itself and are not folded: it is compared as if they were not there"
        notes |= {name: f"{notes[name]}; {why}" if name in notes else why for name in COMPOSITIONS}
    return notes


def _most_alike(pairs: list[HeadPair], by: str) -> list[HeadPair]:
    there = (pair for pair in pairs if not np.isnan(pair.value))
    return sorted(there, key=lambda pair: pair.value if by == "js" else -pair.value)
