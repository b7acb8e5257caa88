"""Compare all pairs of heads of a model: similar attention, similar outputs, redundant heads.

Pairs are compared by their weights (weight_similarity.py) and on a fixed sample of attention rows. The sample uses the same
positions in texts of similar length. The baseline compares the same positions of different texts: it measures how similar two
heads are independent of the words.
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
    sample_texts_and_query_positions,
)
from headwise.analysis.similarity.weight_similarity import (
    COMPOSITIONS,
    compare_weights,
    effective_rank,
    fold_norms_into_heads,
    ov_copying,
    shared_kv_mask,
)
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.head import Circuit, HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address, LayerAddress, select

THROUGH_NORMS = ("read_q", "read_k", "read_v", *COMPOSITIONS)  # metrics that need the norms before the heads


class HeadPair(NamedTuple):
    """Two heads with their value of a metric.

    Attributes:
        a: First head.
        b: Second head.
        value: Value of the metric.
        baseline: Value expected by chance.
    """

    a: Address
    b: Address
    value: float
    baseline: float


@dataclass(frozen=True, eq=False)
class HeadSimilarityResult:
    """Similarity of all pairs of heads. `comparison["js"]` returns a matrix or the scores by name.

    Metrics on sampled rows: "js" is the Jensen–Shannon divergence of attention rows in nats. "map_cosine" is the cosine of
    full maps. "position", "subspace" and "output" are mean cosines of attention rows, values and outputs
    (https://arxiv.org/abs/1810.10183; its disagreement is the negative mean over the pairs of a layer). "cka" is the
    debiased CKA of z. Metrics on weights: "read_q", "read_k", "read_v", "write" and the compositions.

    Attributes:
        addresses: Compared heads.
        matrices: Metrics of pairs by name, (H, H).
        scores: Metrics of single heads by name, (H,).
        baselines: Baseline of each metric, broadcastable to its values.
        rows: Number of sampled rows.
        texts: Number of texts with sampled rows.
        notes: Reason for missing values, by metric.
    """

    addresses: tuple[Address, ...]
    matrices: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    baselines: dict[str, np.ndarray]
    rows: int
    texts: int
    notes: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_similarity_table

        return head_similarity_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import head_similarity_table

        return head_similarity_table(self).as_html()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.matrices | self.scores:
            raise ArgumentError(f"name={name!r}: unknown metric; {suggest_names(name, self.matrices | self.scores)}")
        return (self.matrices | self.scores)[name]

    def nearest_heads(self, address: Address | str, k: int = 5, metric: str = "js") -> list[HeadPair]:
        """Return the k heads most similar to a head.

        Args:
            address: Address of the head.
            k: Number of heads.
            metric: Name of a pair metric.
        """
        (head,) = select(Address.parse(address) if isinstance(address, str) else address, self.addresses)
        a = self.addresses.index(head)
        pairs = [self._pair(a, b, metric) for b in range(len(self.addresses)) if b != a]
        return _most_similar(pairs, metric)[:k]

    def most_similar_pairs(self, k: int = 10, metric: str = "js") -> list[HeadPair]:
        """Return the k most similar pairs with their baselines. Compositions are directed, so both directions are listed.

        Args:
            k: Number of pairs.
            metric: Name of a pair metric.
        """
        H, directed = len(self.addresses), metric.endswith("composition")
        pairs = [self._pair(a, b, metric) for a in range(H) for b in range(0 if directed else a + 1, H) if a != b]
        return _most_similar(pairs, metric)[:k]

    def clusters(self, n: int | None = None) -> list[tuple[Address, ...]]:
        """Cluster heads by similarity of attention, largest cluster first.

        Average linkage on √js, which is a distance (https://doi.org/10.1109/TIT.2003.813506).

        Args:
            n: Number of clusters. None merges heads that are closer than the same head on two texts (median baseline).
        """
        tree = linkage(squareform(np.sqrt(self["js"]), checks=False), "average")
        threshold = float(np.sqrt(np.median(self.baselines["js"])))
        if n is None and np.isnan(threshold):
            raise ArgumentError(
                "n: required, because the heads were compared on a single text. The default threshold for clusters is the "
                "distance of one head on two texts. Pass n=, the number of clusters, or compare heads on more texts."
            )
        labels = fcluster(tree, threshold, "distance") if n is None else fcluster(tree, n, "maxclust")
        members = [
            tuple(a for a, label in zip(self.addresses, labels, strict=True) if label == c) for c in np.unique(labels)
        ]
        return sorted(members, key=lambda cluster: (-len(cluster), cluster))

    def head_coordinates(self, dims: int = 2) -> np.ndarray:
        """Return coordinates of the heads, (H, dims), whose distances approximate √js (classical scaling)."""
        squared = self["js"]
        centered = squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()
        values, vectors = np.linalg.eigh(-centered / 2)
        coordinates = np.zeros((len(squared), dims))
        num_kept = min(dims, len(squared))
        coordinates[:, :num_kept] = (vectors * np.sqrt(values.clip(min=0)))[:, ::-1][:, :num_kept]
        largest = np.abs(coordinates).argmax(0)
        # the sign of an axis is arbitrary: make its largest coordinate positive
        return coordinates * np.where(coordinates[largest, range(dims)] < 0, -1.0, 1.0)

    def mean_by_layer(self) -> dict[LayerAddress, dict[str, float]]:
        """Return the mean of every metric over the pairs inside each layer. NaN for a layer without pairs."""
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
            raise ArgumentError(f"metric={metric!r}: unknown pair metric; {suggest_names(metric, self.matrices)}")
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
) -> HeadSimilarityResult:
    """Compare all pairs of heads by attention, outputs and weights.

    Args:
        model: The model. An encoder-decoder uses each text as source and as target.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the probe set.
        rows: Number of sampled attention rows, at least 2.
        max_length: Maximum number of tokens per text. Longer documents are skipped.
        heads: Head pattern. "*" selects all heads.
        seed: Seed of the sample.

    Returns:
        Matrices of all metrics with their baselines.

    Raises:
        ArgumentError: If fewer than two heads are selected, or heads of different stacks.

    >>> from dataclasses import replace
    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(replace(preset("nano").resized(layers=2, heads=2), vocab=257))
    >>> model.tokenizer = byte_tokenizer()
    >>> comparison = compare_heads(model, ["To be or not to be", "that is the question"], rows=8)
    >>> comparison["js"].shape
    (4, 4)
    """
    if rows < 2:
        raise ArgumentError(f"rows: must be at least 2. Got {rows}.")
    available = tuple(
        address for hook_point in reachable_hook_points(model, heads) for address in hook_point.head_addresses
    )
    addresses = available if isinstance(heads, str) and heads == "*" else select(heads, available)
    stacks = {address.stack for address in addresses} if model.spec.stacks else set()
    if len(stacks) > 1:
        raise ArgumentError(
            f"heads: heads of different stacks read different inputs and cannot be compared. "
            f"Got {', '.join(sorted(stacks))}. Choose one stack, for example heads='{min(stacks)}.*'."
        )
    if len(addresses) < 2:
        raise ArgumentError(
            f"heads: at least two heads are needed. Got {', '.join(map(str, addresses)) or 'no heads'}. "
            f"Use a pattern that selects more, for example heads='*'."
        )
    z, texts = [], 0
    with eval_mode(model), torch.no_grad():
        head_weights = fold_norms_into_heads(model, addresses)
        sums = PairwiseAccumulator(torch.stack([head.weights["o"] for head in head_weights]))
        for samples, positions in sample_texts_and_query_positions(
            model, corpus, rows, max_length, len(addresses), seed
        ):
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
    return HeadSimilarityResult(addresses, matrices, scores, baselines, features.shape[1], texts, _missing_notes(model))


def _weight_baselines(model: ModelProtocol, seed: int) -> dict[str, np.ndarray]:
    """Return the values of random weights of the same shapes."""
    spec, generator = model.spec.attention, torch.Generator().manual_seed(seed)
    D, d, e = spec.width, spec.head_dim, spec.value_dim

    def random_rank(inner: int) -> float:
        factors = (torch.randn(2, D, inner, generator=generator, device="cpu", dtype=torch.float32) for _ in range(4))
        return float(np.mean([effective_rank(Circuit(left, right.mT)) for left, right in factors]))

    baselines = {"read_q": d / D, "read_k": d / D, "read_v": e / D, "write": e / D, "ov_copying": 1.5 / e}
    baselines |= dict.fromkeys(("q_composition", "k_composition", "v_composition"), D**-0.5)
    baselines |= {"ov_rank": random_rank(e), "qk_rank": random_rank(d)}
    return {name: np.array(value) for name, value in baselines.items()}


def _missing_notes(model: ModelProtocol) -> dict[str, str]:
    """Explain why values are missing, by metric."""
    spec, notes = model.spec.attention, {}
    if spec.rotary is not None:
        reason = "rotary embeddings rotate q and k by position, so a single value for all offsets is not meaningful"
        notes |= dict.fromkeys(("q_composition", "k_composition"), reason)
    if spec.kv_heads != spec.heads:
        reason = "heads of a group share W_K and W_V, so these pairs are equal by construction and are excluded"
        notes |= dict.fromkeys(("read_k", "read_v", "subspace"), reason)
    if model.input_norms() is None:
        reason = "the norms before these heads are not known for this architecture"
        notes |= dict.fromkeys(THROUGH_NORMS, reason)
    elif model.spec.norm_placement == "post":
        reason = "norms inside the residual stream (post-norm) are not folded into the weights and are ignored"
        notes |= {name: f"{notes[name]}; {reason}" if name in notes else reason for name in COMPOSITIONS}
    return notes


def _most_similar(pairs: list[HeadPair], metric: str) -> list[HeadPair]:
    measured = (pair for pair in pairs if not np.isnan(pair.value))
    return sorted(measured, key=lambda pair: pair.value if metric == "js" else -pair.value)
