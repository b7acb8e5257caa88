"""Scores of the job `alignment` without gold positions: does cross-attention follow the source in order?

The score of a head is the attention weight on the best monotonic path: one key per query, never going back. The baseline is
the same on the same rows in random order, so a head whose rows are all equal scores exactly its baseline.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.analysis.finding.gold_pair_scores import ExampleScores, check_layers_called, listening, selected_map_rows
from headwise.analysis.finding.prepared_example import PreparedExample
from headwise.analysis.metrics.row_blocks import value_output_norms
from headwise.errors import ArgumentError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import to_float64

SHUFFLES = 16  # random orders of the rows
SHUFFLED_ROWS = "shuffled rows"


def score_monotonic_alignment(model: Any, prepared: PreparedExample, hook_points: Sequence[HookPoint]) -> ExampleScores:
    """Run one example and score all heads of these hook points."""
    queries = [token for tokens in prepared.queries.tokens for token in tokens]
    keys = [token for tokens in prepared.keys.tokens for token in tokens]
    if len(queries) < 2 or len(keys) < 2:
        raise ArgumentError(f"{prepared.where}: an alignment needs at least 2 words in the text and in the source.")
    results: dict[Any, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    rng = np.random.default_rng(int(prepared.example.key, 16))
    orders = [rng.permutation(len(queries)) for _ in range(SHUFFLES)]

    def on_call(call: AttentionCall) -> None:
        maps = selected_map_rows(call, queries)
        if bool(maps.isnan().any()):
            raise ArgumentError(
                f"{prepared.where}: the attention weights of layer {call.hook_point.address} are NaN. Check the input."
            )
        norms = to_float64(value_output_norms(call)[0]).cpu()[:, None]
        weights = maps[..., keys].numpy()  # (H, Q, S)
        weighted = maps * norms
        weighted = (weighted / weighted.sum(-1, keepdim=True).clamp(min=1e-30))[..., keys].numpy()
        shuffled = np.mean([monotonic_path_weight(weights[:, order]) for order in orders], 0)
        results[call.hook_point.address] = (monotonic_path_weight(weights), monotonic_path_weight(weighted), shuffled)

    with listening(hook_points, on_call):
        prepared.run(model)
    check_layers_called(hook_points, results, prepared.where)
    scores, weighted, shuffled = (
        np.concatenate([results[point.address][column] for point in hook_points]) for column in range(3)
    )
    return ExampleScores(
        prepared.example.key, len(queries), 0, scores.tolist(), weighted.tolist(), scores.tolist(),
        {SHUFFLED_ROWS: shuffled.tolist()}, {"uniform": len(queries) / len(keys)},
    )  # fmt: skip


def monotonic_path_weight(weights: np.ndarray) -> np.ndarray:
    """Return the largest total weight of a path with one key per query that never goes back: (…, Q, S) → (…).

    >>> monotonic_path_weight(np.eye(4)).item(), monotonic_path_weight(np.eye(4)[::-1]).item()
    (4.0, 1.0)
    """
    best = np.zeros(weights.shape[:-2] + weights.shape[-1:])
    for row in range(weights.shape[-2]):
        best = np.maximum.accumulate(best, -1) + weights[..., row, :]
    return best.max(-1)
