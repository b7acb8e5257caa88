"""Heads beside each other: which see the same, which write the same, which are one too many.

Every pair is compared by its weights (weight_similarity.py) and by what it does on a fixed sample of rows: a few texts, a few
places in each, the same places in texts of about the same length. So the same place in another text is at hand, and that
is the baseline: how alike two heads are whatever the words.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.similarity.attention_similarity import (
    PairwiseAccumulator,
    cka_matrix,
    permuted_cka_threshold,
    record_rows,
    sample_row_positions,
)
from headwise.analysis.similarity.weight_similarity import (
    COMPOSITIONS,
    compare_weights,
    effective_rank,
    fold_norms_into_heads,
    ov_copying,
    shared_kv_mask,
)
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.head import Circuit, HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address, LayerAddress, select

THROUGH_NORMS = ("read_q", "read_k", "read_v", *COMPOSITIONS)  # what is read of the stream, through the norm before it


class HeadPair(NamedTuple):
    """Two heads, how alike they are by some metric, and its baseline."""

    a: Address
    b: Address
    value: float
    baseline: float


@dataclass(frozen=True, eq=False)
class HeadComparison:
    """All pairs of heads. `matrices` by name, (H, H); `scores` of single heads, (H,); `baselines` to hold them against.

    js: Jensen–Shannon divergence of attention rows, in nats. map_cosine: of whole maps. position, subspace, output: mean
    cosine of attention rows, of values and of what is written (https://arxiv.org/abs/1810.10183, whose disagreement is
    their negative mean over the pairs of a layer). cka: of z, debiased. The rest is about weights.
    """

    addresses: tuple[Address, ...]
    matrices: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    baselines: dict[str, np.ndarray]  # broadcastable to what they stand beside
    rows: int  # rows sampled
    texts: int  # of so many texts
    notes: dict[str, str] = field(default_factory=dict)  # why some numbers are missing

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.matrices | self.scores:
            raise HeadwiseError(f"{name!r} is not measured; {suggest_names(name, self.matrices | self.scores)}")
        return (self.matrices | self.scores)[name]

    def nearest_heads(self, address: Address | str, k: int = 5, metric: str = "js") -> list[HeadPair]:
        """The k heads most like this one."""
        (head,) = select(Address.parse(address) if isinstance(address, str) else address, self.addresses)
        a = self.addresses.index(head)
        pairs = [self._pair(a, b, metric) for b in range(len(self.addresses)) if b != a]
        return _most_similar(pairs, metric)[:k]

    def most_similar_pairs(self, k: int = 10, metric: str = "js") -> list[HeadPair]:
        """The k pairs most alike, the baseline beside each; a composition is not symmetric and lists both ways."""
        H, directed = len(self.addresses), metric.endswith("composition")
        pairs = [self._pair(a, b, metric) for a in range(H) for b in range(0 if directed else a + 1, H) if a != b]
        return _most_similar(pairs, metric)[:k]

    def clusters(self, n: int | None = None) -> list[tuple[Address, ...]]:
        """Heads that look at the same, in n clusters; if n is left out, as near as one head is to itself on other text.

        Average linkage on √js, which is a distance (https://doi.org/10.1109/TIT.2003.813506). The largest cluster first.
        """
        tree = linkage(squareform(np.sqrt(self["js"]), checks=False), "average")
        threshold = float(np.sqrt(np.median(self.baselines["js"])))
        if n is None and np.isnan(threshold):
            raise HeadwiseError(
                "one text gives no baseline to cut at; say how many clusters, or compare heads on more texts."
            )
        labels = fcluster(tree, threshold, "distance") if n is None else fcluster(tree, n, "maxclust")
        members = [
            tuple(a for a, label in zip(self.addresses, labels, strict=True) if label == c) for c in np.unique(labels)
        ]
        return sorted(members, key=lambda cluster: (-len(cluster), cluster))

    def head_coordinates(self, dims: int = 2) -> np.ndarray:
        """A place for every head, (H, dims), whose distances are √js as nearly as may be: classical scaling."""
        squared = self["js"]
        centered = squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()
        values, vectors = np.linalg.eigh(-centered / 2)
        coordinates = np.zeros((len(squared), dims))
        num_kept = min(dims, len(squared))
        coordinates[:, :num_kept] = (vectors * np.sqrt(values.clip(min=0)))[:, ::-1][:, :num_kept]
        largest = np.abs(coordinates).argmax(0)
        # a map has no sign of its own: choose one
        return coordinates * np.where(coordinates[largest, range(dims)] < 0, -1.0, 1.0)

    def mean_by_layer(self) -> dict[LayerAddress, dict[str, float]]:
        """The mean of every measure over the pairs inside each layer; NaN where there are none."""
        layers = {
            address.layer_address: [i for i, a in enumerate(self.addresses) if a.layer_address == address.layer_address]
            for address in self.addresses
        }
        return {
            layer_address: {name: self._mean_inside(name, indices) for name in self.matrices}
            for layer_address, indices in layers.items()
        }

    def _mean_inside(self, name: str, heads: list[int]) -> float:
        values = [x for a in heads for b in heads if a != b and not np.isnan(x := self.matrices[name][a, b])]
        return float(np.mean(values)) if values else float("nan")

    def _pair(self, a: int, b: int, metric: str) -> HeadPair:
        if metric not in self.matrices:
            raise HeadwiseError(f"pairs are not measured by {metric!r}; {suggest_names(metric, self.matrices)}")
        baseline = np.broadcast_to(self.baselines[metric], self.matrices[metric].shape)
        return HeadPair(
            self.addresses[a],
            self.addresses[b],
            float(self.matrices[metric][a, b]),
            float((baseline[a, b] + baseline[b, a]) / 2),
        )


def compare_heads(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    rows: int = 512,
    max_length: int = 256,
    heads: HeadPattern = "*",
    seed: int = 0,
) -> HeadComparison:
    """Compare all heads, or some, pair by pair, on `rows` rows of texts of at most `max_length` tokens; None: the probe set.

    An encoder-decoder reads each text as its source and as its target. Documents longer than that are left out.
    """
    if rows < 2:
        raise HeadwiseError(f"heads are compared on at least 2 rows, got {rows}.")
    available = tuple(
        address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses
    )
    addresses = available if isinstance(heads, str) and heads == "*" else select(heads, available)
    stacks = {address.stack for address in addresses} if model.spec.stacks else set()
    if len(stacks) > 1:
        raise HeadwiseError(
            f"heads of {', '.join(sorted(stacks))} read different things, so they cannot be compared; say one of them: "
            f"heads='{min(stacks)}.*'."
        )
    if len(addresses) < 2:
        raise HeadwiseError(f"it takes two heads to compare, got {', '.join(map(str, addresses)) or 'none'}.")
    z, texts = [], 0
    with eval_mode(model), torch.no_grad():
        head_weights = fold_norms_into_heads(model, addresses)
        sums = PairwiseAccumulator(torch.stack([head.weights["o"] for head in head_weights]))
        for samples, positions in sample_row_positions(model, corpus, rows, max_length, len(addresses), seed):
            sampled = record_rows(model, samples, positions, set(addresses))
            sums.add(sampled)
            z.append(sampled.z)
            texts += len(samples)
        features = torch.cat(z, 1)  # (H, rows, e)
        matrices = sums.matrices() | {"cka": cka_matrix(features)} | compare_weights(head_weights)
        baselines = sums.baselines() | {"cka": permuted_cka_threshold(features, seed)} | _weight_baselines(model, seed)
    matrices["subspace"][shared_kv_mask(head_weights)] = np.nan
    if model.input_norms() is None:
        for name in THROUGH_NORMS:
            matrices[name][:] = np.nan
    scores = {
        "ov_copying": np.array([ov_copying(head) for head in head_weights]),
        "ov_rank": np.array([effective_rank(head.OV) for head in head_weights]),
        "qk_rank": np.array([effective_rank(head.QK) for head in head_weights]),
    }
    return HeadComparison(addresses, matrices, scores, baselines, features.shape[1], texts, _missing_notes(model))


def _weight_baselines(model: ModelProtocol, seed: int) -> dict[str, np.ndarray]:
    """What random weights of the same shapes would give."""
    spec, generator = model.spec.attention, torch.Generator().manual_seed(seed)
    D, d, e = spec.width, spec.head_dim, spec.value_dim

    def random_rank(inner: int) -> float:
        factors = (torch.randn(2, D, inner, generator=generator) for _ in range(4))
        return float(np.mean([effective_rank(Circuit(left, right.mT)) for left, right in factors]))

    baselines = {"read_q": d / D, "read_k": d / D, "read_v": e / D, "write": e / D, "ov_copying": 1.5 / e}
    baselines |= dict.fromkeys(("q_composition", "k_composition", "v_composition"), D**-0.5)
    baselines |= {"ov_rank": random_rank(e), "qk_rank": random_rank(d)}
    return {name: np.array(value) for name, value in baselines.items()}


def _missing_notes(model: ModelProtocol) -> dict[str, str]:
    """Why numbers are missing."""
    spec, notes = model.spec.attention, {}
    if spec.rotary is not None:
        reason = "rotary positions turn q and k with the offset, so one number for all offsets would say nothing"
        notes |= dict.fromkeys(("q_composition", "k_composition"), reason)
    if spec.kv_heads != spec.heads:
        reason = "heads of a group share W_K and W_V, so they agree by construction: such pairs are left out"
        notes |= dict.fromkeys(("read_k", "read_v", "subspace"), reason)
    if model.input_norms() is None:
        reason = "what norms stand between the stream and these heads is not known for this architecture"
        notes |= dict.fromkeys(THROUGH_NORMS, reason)
    elif model.spec.norm_placement == "post":
        reason = "norms stand in the stream itself and are not folded: it is compared as if they were not there"
        notes |= {name: f"{notes[name]}; {reason}" if name in notes else reason for name in COMPOSITIONS}
    return notes


def _most_similar(pairs: list[HeadPair], metric: str) -> list[HeadPair]:
    measured = (pair for pair in pairs if not np.isnan(pair.value))
    return sorted(measured, key=lambda pair: pair.value if metric == "js" else -pair.value)
