"""Scores of the job `classes`: which head tells two classes of inputs apart?

Two features of a head: the attention to a marked span, and the head output z (mean over the tokens of an encoder, last token
of a decoder). A ridge probe is fitted on the selection half and tested on the reporting half. Selection scores are
leave-one-out predictions within the selection half. Both classes have the same weight, so guessing scores 0.5.

Baselines: the length of the input as the only feature, and the same probe fitted on shuffled labels.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headwise.analysis.finding.gold_pair_scores import check_layers_called, listening, selected_map_rows
from headwise.analysis.finding.job_examples import LabeledExample
from headwise.analysis.finding.per_input_scores import PerInputScores
from headwise.analysis.finding.prepared_example import PreparedExample
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION
from headwise.errors import ArgumentError, FileFormatError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import to_float64

RIDGE = 1.0  # relative to the mean variance of the features
SHUFFLES = 20  # shuffled labels of the baseline
OUTPUT, SPAN = "output direction", "attention to the span"


@dataclass(frozen=True, eq=False)
class ExampleFeatures:
    """Features of one example.

    Attributes:
        z: Head outputs in float32, (H, e).
        span: Attention to the marked span, (H,), or None.
        length: Number of tokens.
    """

    z: np.ndarray
    span: np.ndarray | None
    length: int

    def select(self, heads: Sequence[int]) -> "ExampleFeatures":
        """Return the features of some heads, by index."""
        return ExampleFeatures(self.z[heads], None if self.span is None else self.span[heads], self.length)

    def to_record(self) -> dict[str, Any]:
        """Return plain data for a result file. z is stored without rounding, in base64."""
        span = None if self.span is None else self.span.tolist()
        return {
            "z": base64.b64encode(self.z.astype("<f4").tobytes()).decode(), "shape": list(self.z.shape), "span": span,
            "length": self.length,
        }  # fmt: skip

    @staticmethod
    def from_record(record: dict[str, Any], num_heads: int) -> "ExampleFeatures":
        """Return the features of one record of a result file."""
        try:
            z = np.frombuffer(base64.b64decode(record["z"], validate=True), "<f4").reshape(record["shape"])
            span = None if record["span"] is None else np.array(record["span"], float)
            if z.ndim != 2 or len(z) != num_heads or (span is not None and span.shape != (num_heads,)):
                raise ValueError
            return ExampleFeatures(z.astype(np.float32), span, int(record["length"]))
        except (KeyError, TypeError, ValueError):
            raise FileFormatError(
                "out: a result in this file is damaged. Delete the file and repeat the search."
            ) from None


def class_features(model: Any, prepared: PreparedExample, hook_points: Sequence[HookPoint]) -> ExampleFeatures:
    """Run one example and return the features of all heads."""
    results: dict[Any, tuple[np.ndarray, np.ndarray | None]] = {}
    lengths: list[int] = []
    is_decoder = model.spec.kind == "decoder"

    def on_call(call: AttentionCall) -> None:
        z = to_float64(call.z[0]).cpu()  # (H, T, e)
        lengths.append(z.shape[1])
        pooled = z[:, -1] if is_decoder else z.mean(1)
        results[call.hook_point.address] = (pooled.numpy(), _span_attention(call, prepared))

    with listening(hook_points, on_call):
        prepared.run(model)
    check_layers_called(hook_points, results, prepared.where)
    pooled = np.concatenate([_pad_features(results[point.address][0], hook_points, results) for point in hook_points])
    if not np.isfinite(pooled).all():
        raise ArgumentError(f"{prepared.where}: head outputs are NaN or infinite. Check the input.")
    spans = [results[point.address][1] for point in hook_points]
    attention = None if prepared.example.span is None else np.concatenate([span for span in spans if span is not None])
    return ExampleFeatures(pooled.astype(np.float32), attention, lengths[0])


def _pad_features(z: np.ndarray, hook_points: Sequence[HookPoint], results: dict[Any, Any]) -> np.ndarray:
    """Append zeros, so that layers with smaller heads have as many features. Zeros do not change a ridge probe."""
    width = max(results[point.address][0].shape[1] for point in hook_points)
    return np.pad(z, ((0, 0), (0, width - z.shape[1])))


def _span_attention(call: AttentionCall, prepared: PreparedExample) -> np.ndarray | None:
    """Return the mean attention to the span from the tokens after it, or from all other tokens, (H,)."""
    span = prepared.example.span
    if span is None:
        return None
    if span[1] > len(prepared.keys.tokens):
        raise ArgumentError(
            f"{prepared.where}: span {list(span)} is outside the text, which has {len(prepared.keys.tokens)} units."
        )
    columns = sorted({token for unit in range(*span) for token in prepared.keys.tokens[unit]})
    rows = list(range(max(columns) + 1, call.q.shape[2]))
    rows = rows or [row for row in range(call.q.shape[2]) if row not in columns]
    if not rows:
        raise ArgumentError(f"{prepared.where}: the span covers the full text. Mark a part of it.")
    maps: Tensor = selected_map_rows(call, rows)
    return maps[..., columns].sum(-1).mean(1).numpy()


def fit_class_probes(
    examples: Sequence[LabeledExample],
    features: Sequence[ExampleFeatures],
    half_of: dict[str, int],
    seed: int = 0,
) -> tuple[PerInputScores, list[str]]:
    """Fit and test the probes. Return the scores of every head and feature, and the feature of each column."""
    first = {example.key: index for index, example in reversed(list(enumerate(examples)))}
    indices = sorted(first.values())
    labels = np.array([bool(examples[index].label) for index in indices])
    halves = np.array([half_of[examples[index].key] for index in indices])
    z = np.stack([features[index].z for index in indices], 1).astype(float)  # (H, n, e)
    has_span = all(features[index].span is not None for index in indices)
    blocks, details = [z], [OUTPUT] * len(z)
    if has_span:
        attentions = [attention for index in indices if (attention := features[index].span) is not None]
        span = np.stack(attentions, 1)[..., None]  # (H, n, 1)
        blocks.append(span)
        details += [SPAN] * len(span)
    weights = _class_weights(labels, halves)
    length = np.array([[[features[index].length] for index in indices]], float)
    rng = np.random.default_rng(seed)
    shuffled = [_shuffle_within_halves(labels, halves, rng) for _ in range(SHUFFLES)]
    scores, by_chance = [], []
    for block in blocks:
        for head in block:
            scores.append(_held_out_hits(head, labels, labels, halves) * weights)
            by_chance.append(np.mean([_held_out_hits(head, guess, labels, halves) for guess in shuffled], 0) * weights)
    table = PerInputScores(
        tuple(examples[index].key for index in indices), halves, weights.copy(), np.array(scores).T,
        np.full((len(indices), len(scores)), np.nan), np.full((len(indices), len(scores)), np.nan),
        {
            "guessing": (0.5 * weights)[:, None],
            "input length": (_held_out_hits(length[0], labels, labels, halves) * weights)[:, None],
            "shuffled labels": np.array(by_chance).T,
        },
    )  # fmt: skip
    return table, details


def _class_weights(labels: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Return weights with which both classes of a half count equally, with mean 1 in each half."""
    weights = np.zeros(len(labels))
    for half in (SELECTION, REPORTING):
        for label in (False, True):
            members = (halves == half) & (labels == label)
            weights[members] = (halves == half).sum() / (2 * max(1, members.sum()))
    return weights


def _shuffle_within_halves(labels: np.ndarray, halves: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    shuffled = labels.copy()
    for half in (SELECTION, REPORTING):
        members = np.flatnonzero(halves == half)
        shuffled[members] = labels[rng.permutation(members)]
    return shuffled


def _held_out_hits(x: np.ndarray, fit: np.ndarray, labels: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Return the hits of a ridge probe (n,): leave-one-out on the selection half, fitted on it for the reporting half."""
    selection = halves == SELECTION
    mean, scale = x[selection].mean(0), x[selection].std(0)
    features = (x - mean) / np.where(scale > 1e-12, scale, 1.0) * (scale > 1e-12)
    targets = np.where(fit, 1.0, -1.0)
    balance = _class_weights(fit, halves)
    predictions = np.zeros(len(x))
    own, own_targets, own_weights = features[selection], targets[selection], balance[selection]
    own = np.concatenate((own, np.ones((len(own), 1))), 1)
    penalty = RIDGE * len(own) * np.eye(own.shape[1])
    penalty[-1, -1] = 1e-9
    inverse = np.linalg.pinv(own.T @ (own * own_weights[:, None]) + penalty)
    coefficients = inverse @ own.T @ (own_weights * own_targets)
    leverage = np.einsum("ij,jk,ik->i", own, inverse, own) * own_weights
    fitted = own @ coefficients
    predictions[selection] = (fitted - leverage * own_targets) / np.clip(1 - leverage, 1e-9, None)
    predictions[~selection] = features[~selection] @ coefficients[:-1] + coefficients[-1]
    hits = np.where(np.abs(predictions) < 1e-9, 0.5, (predictions > 0) == labels)
    return hits.astype(float)
