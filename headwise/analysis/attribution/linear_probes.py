"""Linear probes: predict position, word and part of speech from q, k and z of each head.

The baseline is the same probe on a random projection of the layer input with the same size. Only accuracy above the
baseline shows that the head selects the information.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.recording.batching import TextSample, TokenBatch, forward_batch, make_batches
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.kernels.score_params import repeat_kv
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.text.token_alignment import Alignment

TARGETS = ("position", "word", "class")
PROBED_TENSORS = ("q", "k", "z")
POSITION_BINS = 8  # quantile bins of token positions
NUM_WORDS = 50  # most frequent words
NUM_PROJECTIONS = 4  # random projections per layer
RIDGE = 1e-3  # relative to the mean variance of the features
ProbeKey = tuple[Any, str]  # (head address, "q", "k" or "z") or (layer address, index of a random projection)


class ProbeAccuracy(NamedTuple):
    """Accuracy of a linear probe on held-out texts.

    Attributes:
        head: Address of the head.
        tensor: "q", "k" or "z".
        target: "position", "word" or "class".
        accuracy: Fraction of correct predictions.
        baseline: Mean accuracy on random projections of the layer input with the same size.
        baseline_sd: Standard deviation over the random projections.
        majority: Accuracy of always predicting the most frequent class.
        rows: Number of test rows.
    """

    head: str
    tensor: str
    target: str
    accuracy: float
    baseline: float
    baseline_sd: float
    majority: float
    rows: int


@dataclass(frozen=True, eq=False)
class ProbeLabels:
    """Labels of one text, at the last token of each word.

    Attributes:
        positions: Token positions, (n,).
        targets: Class index for each target name, (n,). −1 means no label.
    """

    positions: np.ndarray
    targets: dict[str, np.ndarray]


@dataclass(eq=False)
class RidgeAccumulator:
    """Sums over batches for a closed-form ridge regression on one-hot targets."""

    n: float = 0.0
    x: np.ndarray | float = 0.0  # (d,)
    y: np.ndarray | float = 0.0  # (c,)
    xx: np.ndarray | float = 0.0  # (d, d)
    xy: np.ndarray | float = 0.0  # (d, c)
    hits: int = 0
    tested: int = 0
    _solution: tuple[np.ndarray, np.ndarray] | None = field(default=None)

    def add(self, features: np.ndarray, labels: np.ndarray, classes: int) -> None:
        """Add training rows: features (n, d), labels (n,)."""
        onehot = np.eye(classes)[labels]
        self.n, self.x, self.y = self.n + len(features), self.x + features.sum(0), self.y + onehot.sum(0)
        self.xx, self.xy = self.xx + features.T @ features, self.xy + features.T @ onehot

    def add_test_rows(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Add test rows and count correct predictions."""
        weight, bias = self.solution()
        self.hits += int(((features @ weight + bias).argmax(1) == labels).sum())
        self.tested += len(labels)

    def solution(self, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray]:
        """Return weights (d, c) and biases (c,). The bias is not regularized."""
        if self._solution is None:
            mean, rate = np.asarray(self.x) / self.n, np.asarray(self.y) / self.n
            covariance = np.asarray(self.xx) / self.n - np.outer(mean, mean)
            cross_covariance = np.asarray(self.xy) / self.n - np.outer(mean, rate)
            shrink = ridge * max(np.trace(covariance) / len(mean), 1e-12) * np.eye(len(mean))
            weight = np.linalg.solve(covariance + shrink, cross_covariance)
            self._solution = weight, rate - mean @ weight
        return self._solution


def linear_probe(
    model: ModelProtocol, corpus: Any = None, heads: HeadPattern = "*", targets: str | Sequence[str] = ("position", "class"),
    tensors: str | Sequence[str] = PROBED_TENSORS, *, batch_tokens: int = 4096, seed: int = 0,
) -> list[ProbeAccuracy]:  # fmt: skip
    """Fit linear probes for position, word and part of speech on q, k and z of each head.

    Half of the texts train the probes, the other half tests them. Labels are at the last token of each word.

    Args:
        model: The model to probe.
        corpus: Texts to probe. None uses 64 documents of the synthetic language, which have word classes.
        heads: Head pattern. "*" selects all heads.
        targets: One or more of "position" (8 quantile bins), "word" (50 most frequent words) and "class" (part of speech
            from a treebank or the synthetic language).
        tensors: One or more of "q", "k" and "z".
        batch_tokens: Maximum number of tokens per batch.
        seed: Seed of the random projections.

    Returns:
        One accuracy per head, tensor and target, with its baseline.
    """
    target_names, tensors = (
        _check_names(targets, TARGETS, "targets"),
        _check_names(tensors, PROBED_TENSORS, "tensors"),
    )
    selected = set(select_heads(heads, model.spec.head_addresses))
    samples = list(TokenizedCorpus.of(model, Corpus.synthetic(documents=64) if corpus is None else corpus))
    half_of = _assign_halves(samples)
    labels, sizes = _labels(samples, target_names, half_of)
    majorities = {name: _majority(half_of, labels, name) for name in target_names}
    projections = _projections(model, selected, seed)
    fits: dict[tuple[ProbeKey, str], RidgeAccumulator] = {}

    def fit(key: ProbeKey, name: str, features: np.ndarray, label_ids: np.ndarray) -> None:
        fits.setdefault((key, name), RidgeAccumulator()).add(features, label_ids, sizes[name])

    def test(key: ProbeKey, name: str, features: np.ndarray, label_ids: np.ndarray) -> None:
        fits[key, name].add_test_rows(features, label_ids)

    with eval_mode(model), torch.no_grad():
        for half, use in ((SELECTION, fit), (REPORTING, test)):
            half_samples = [sample for sample in samples if half_of[sample.index] == half]
            for batch in make_batches(half_samples, batch_tokens, device=model.device):
                _collect_features(model, batch, labels, selected, tensors, projections, use)
    return [
        _probe_accuracy(address, tensor, name, fits, majorities[name])
        for address in model.spec.head_addresses
        if address in selected
        for tensor in tensors
        for name in target_names
    ]


def _collect_features(
    model: ModelProtocol,
    batch: TokenBatch,
    labels: dict[int, ProbeLabels],
    selected: set[Address],
    tensors: Sequence[str],
    projections: dict[Any, Tensor],
    use: Callable[[ProbeKey, str, np.ndarray, np.ndarray], None],
) -> None:
    """Run a batch and pass the features of each head and random projection to `use`."""
    rows = torch.tensor(
        [row for row, sample in enumerate(batch.samples) for _ in labels[sample.index].positions], device="cpu"
    )
    sample_starts = zip(batch.samples, batch.first_token_positions.tolist(), strict=True)
    positions = torch.tensor(
        [first + position for sample, first in sample_starts for position in labels[sample.index].positions],
        device="cpu",
    )
    names = next(iter(labels.values())).targets
    labels_by_target = {
        name: np.concatenate([labels[sample.index].targets[name] for sample in batch.samples]) for name in names
    }

    def emit(keys: Sequence[ProbeKey | None], x: Tensor) -> None:
        """Pass on features (B, h, T, d), one key per head or projection. None skips a head."""
        features = to_float64(x[rows, :, positions]).cpu().numpy()  # (n, h, d)
        for i, key in enumerate(keys):
            for name, label_ids in labels_by_target.items() if key is not None else ():
                has_label = label_ids >= 0
                if key is not None and has_label.any():
                    use(key, name, features[has_label, i], label_ids[has_label])

    def on_call(call: AttentionCall) -> None:
        for tensor, x in (("q", call.q), ("k", repeat_kv(call.k, call.params.kv_of_head)), ("z", call.z)):
            keys = [(address, tensor) if address in selected else None for address in call.hook_point.head_addresses]
            if tensor in tensors and any(keys):
                emit(keys, x)

    def project(layer: MultiHeadAttention, module: Any, args: tuple[Any, ...]) -> None:
        x, projection = args[0], projections.get(layer.hook_point.address)
        if projection is not None:
            keys = [(layer.hook_point.address, str(index)) for index in range(len(projection))]
            x = at_least_float32(x)
            emit(keys, x[:, None] @ projection.to(x))  # (B, draws, T, d)

    with ExitStack() as watching:
        for layer in model.attention_layers():
            watching.enter_context(layer.hook_point.listen(on_call))
            watching.callback(layer.register_forward_pre_hook(partial(project, layer)).remove)
        forward_batch(model, batch)


def _projections(model: ModelProtocol, selected: set[Address], seed: int) -> dict[Any, Tensor]:
    """Draw random matrices from the residual stream to the size of a head for each layer: (draws, D, d)."""
    generator = torch.Generator().manual_seed(seed)
    d, D = model.spec.attention.head_dim, model.spec.width
    layer_addresses = [
        layer_address
        for layer_address in model.spec.layer_addresses
        if any(address.layer_address == layer_address for address in selected)
    ]
    return {
        layer_address: torch.randn(NUM_PROJECTIONS, D, d, generator=generator, device="cpu", dtype=torch.float32)
        / D**0.5
        for layer_address in layer_addresses
    }


def _assign_halves(samples: Sequence[TextSample]) -> dict[int, int]:
    """Assign texts to the two halves, alternating in the order of their hash. Equal texts share a half."""
    order = sorted({sample.ids for sample in samples}, key=lambda ids: hashlib.sha256(repr(ids).encode()).digest())
    if len(order) < 2:
        raise ArgumentError(
            f"corpus: linear probes train on half of the texts and test on the other half, so at least 2 different texts are "
            f"needed. Got {len(order)}. Add texts."
        )
    halves = {ids: (SELECTION, REPORTING)[rank % 2] for rank, ids in enumerate(order)}
    return {sample.index: halves[sample.ids] for sample in samples}


def _labels(
    samples: Sequence[TextSample], targets: Sequence[str], half_of: dict[int, int]
) -> tuple[dict[int, ProbeLabels], dict[str, int]]:
    """Return the labels of every text and the number of classes of each target. Classes come from the training half."""
    if "class" in targets and not any(sample.document is not None and sample.document.classes for sample in samples):
        raise ArgumentError(
            "targets: 'class' needs texts with parts of speech, but this corpus does not have them. Use the synthetic "
            "language or a treebank, or remove 'class' from targets=."
        )
    last_tokens = {sample.index: _last_tokens(sample.alignment) for sample in samples}
    fitting = [sample for sample in samples if half_of[sample.index] == SELECTION]
    edges = np.quantile(
        [p for sample in fitting for _, p in last_tokens[sample.index]], np.arange(1, POSITION_BINS) / POSITION_BINS
    )
    common = Counter(word.casefold() for sample in fitting for word in sample.alignment.words).most_common(NUM_WORDS)
    words = {word: i for i, (word, _) in enumerate(common)}
    word_classes = sorted(
        {word_class for sample in fitting if sample.document is not None for word_class in sample.document.classes}
    )
    class_ids = {word_class: i for i, word_class in enumerate(word_classes)}
    labels = {}
    for sample in samples:
        positions = np.array([position for _, position in last_tokens[sample.index]], dtype=np.int64)
        classes = sample.document.classes if sample.document is not None else ()
        label_ids = {
            "position": np.searchsorted(edges, positions, side="right"),
            "word": np.array(
                [words.get(sample.alignment.words[w].casefold(), -1) for w, _ in last_tokens[sample.index]], np.int64
            ),
            "class": np.array(
                [class_ids.get(classes[w], -1) if classes else -1 for w, _ in last_tokens[sample.index]], np.int64
            ),
        }
        labels[sample.index] = ProbeLabels(positions, {name: label_ids[name] for name in targets})
    return labels, {"position": POSITION_BINS, "word": len(words), "class": len(word_classes)}


def _last_tokens(alignment: Alignment) -> list[tuple[int, int]]:
    """Return each word with its last token, except words that share this token with another word."""
    pairs = [(word, tokens[-1]) for word, tokens in enumerate(alignment.tokens_of_word) if tokens]
    return [(word, token) for word, token in pairs if alignment.words_of_token[token] == (word,)]


def _majority(half_of: dict[int, int], labels: dict[int, ProbeLabels], name: str) -> float:
    """Accuracy on the test half of the most frequent class of the training half."""
    halves: list[list[int]] = [[], []]
    for index, half in half_of.items():
        label_ids = labels[index].targets[name]
        halves[half] += label_ids[label_ids >= 0].tolist()
    commonest = Counter(halves[SELECTION]).most_common(1)[0][0]
    return float(np.mean(np.array(halves[REPORTING]) == commonest))


def _probe_accuracy(
    address: Address, tensor: str, name: str, fits: dict[tuple[ProbeKey, str], RidgeAccumulator], majority: float
) -> ProbeAccuracy:
    own_fit = fits[(address, tensor), name]
    baselines = [fits[(address.layer_address, str(index)), name] for index in range(NUM_PROJECTIONS)]
    rates = [fit.hits / fit.tested for fit in baselines]
    return ProbeAccuracy(
        str(address), tensor, name, own_fit.hits / own_fit.tested, float(np.mean(rates)), float(np.std(rates, ddof=1)),
        majority, own_fit.tested,
    )  # fmt: skip


def _check_names(value: str | Sequence[str], valid: Sequence[str], argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    for name in names:
        if name not in valid:
            raise ArgumentError(f"{argument}: unknown value {name!r}; {suggest_names(str(name), valid)}")
    return names
