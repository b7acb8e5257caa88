"""Scores of every head on one example of the job `pairs`: does the largest weight of a query lie on its gold key?

All candidate keys of a query compete: its own unit, special tokens, keys that a causal model cannot see and the first token
of a causal model are left out. A tie is divided equally, so a head with uniform attention scores 1 / candidates.

Baselines on the same queries:

    uniform            a random candidate
    longest            the candidate with most tokens, which uniform attention chooses
    shuffled gold      the choices of the same head, judged by the gold keys of the other queries of the example
    a position rule    a fixed offset, rank or place, whichever hits most on the selection half
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.finding.prepared_example import PreparedExample
from headwise.analysis.metrics.row_blocks import value_output_norms
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import to_float64

MAX_MAP_CELLS = 1 << 25  # larger maps are computed row by row
TIE_TOLERANCE = 1e-6  # relative difference below which two weights are equal
UNIFORM, LONGEST, SHUFFLED = "uniform", "longest", "shuffled gold"


@dataclass(frozen=True, eq=False)
class ExampleScores:
    """Sums of one example over its rows (queries), for every head.

    Attributes:
        key: Key of the input.
        count: Number of queries.
        skipped: Number of pairs that could not be scored, because their gold key is not visible.
        scores: Hits, by head.
        value_weighted: Hits of value-weighted attention, by head.
        weights: Attention weight on the gold keys, by head.
        baselines: Baselines that differ between heads, by name and head.
        rules: Baselines that do not depend on the head, by name.
    """

    key: str
    count: int
    skipped: int
    scores: list[float]
    value_weighted: list[float]
    weights: list[float]
    baselines: dict[str, list[float]] = field(default_factory=dict)
    rules: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CandidateGoldMask:
    """Queries of one example with their candidates and gold keys.

    Attributes:
        rows: Token rows that are needed.
        row_means: Averages the rows of each query, (Q, rows).
        key_sums: Sums the columns of each unit, (S, U). None if each column is a unit.
        candidates: Units that compete, (Q, U).
        gold: Gold units, (Q, U).
        query_units: Unit of each query.
        skipped: Number of pairs that could not be scored.
    """

    rows: list[int]
    row_means: Tensor
    key_sums: Tensor | None
    candidates: Tensor
    gold: Tensor
    query_units: list[int]
    skipped: int


def score_pairs(
    model: Any, prepared: PreparedExample, hook_points: Sequence[HookPoint], *, causal: bool, allow_self: bool
) -> ExampleScores:
    """Run one example and score all heads of these hook points."""
    results: dict[Any, dict[str, Tensor]] = {}
    masks: dict[int, CandidateGoldMask] = {}

    def on_call(call: AttentionCall) -> None:
        num_keys = call.k.shape[2]
        if num_keys not in masks:
            masks[num_keys] = candidate_gold_masks(
                prepared, call.q.shape[2], num_keys, causal=causal, allow_self=allow_self
            )
        results[call.hook_point.address] = score_attention_call(call, masks[num_keys], prepared.where)

    with listening(hook_points, on_call):
        prepared.run(model)
    check_layers_called(hook_points, results, prepared.where)
    if len(masks) != 1:
        raise ArgumentError(f"{prepared.where}: the layers have different numbers of keys. Select layers with heads=.")
    (used,) = masks.values()
    ordered = [results[hook_point.address] for hook_point in hook_points]
    columns = {name: torch.cat([result[name] for result in ordered]).tolist() for name in ordered[0]}
    return ExampleScores(
        prepared.example.key, len(used.query_units), used.skipped, columns["scores"], columns["value_weighted"],
        columns["weights"], {SHUFFLED: columns[SHUFFLED]}, hits_per_position_rule(used),
    )  # fmt: skip


@contextmanager
def listening(hook_points: Sequence[HookPoint], listener: Any) -> Iterator[None]:
    """Call a listener with the attention call of each hook point in one forward pass."""
    called: set[Any] = set()

    def listen_once(call: AttentionCall) -> None:
        address = call.hook_point.address
        if address in called:
            raise UnsupportedModelError(
                f"model: it runs attention layer {address} several times per forward pass, so one address stands for several "
                f"layers. Load the model with hw.load, if its family is supported: layers that share weights then have "
                f"addresses of their own."
            )
        called.add(address)
        listener(call)

    with ExitStack() as stack:
        for hook_point in hook_points:
            stack.enter_context(hook_point.listen(listen_once))
        yield


def check_layers_called(hook_points: Sequence[HookPoint], results: dict[Any, Any], where: str) -> None:
    """Raise if the input does not reach one of the layers."""
    for hook_point in hook_points:
        if hook_point.address not in results:
            raise ArgumentError(
                f"{where}: the input does not reach layer {hook_point.address}. Select heads of the layers that read it with "
                f"heads=."
            )


def candidate_gold_masks(
    prepared: PreparedExample, num_queries: int, num_keys: int, *, causal: bool, allow_self: bool
) -> CandidateGoldMask:
    """Return the queries, candidates and gold keys of an example as tensors."""
    example, queries, keys = prepared.example, prepared.queries, prepared.keys
    is_raw = example.inputs is not None
    key_tokens = tuple((column,) for column in range(num_keys)) if is_raw else keys.tokens
    listed = (
        None
        if example.candidates is None
        else {_index_of_key_unit(prepared, unit, num_keys) for unit in example.candidates}
    )
    rows, candidates, gold, query_units, skipped = [], [], [], [], 0
    for query, gold_units in example.pairs:
        unit = queries.index(query)
        gold_indices = {_index_of_key_unit(prepared, key, num_keys) for key in gold_units}
        tokens = queries.tokens[unit]
        if not tokens or (is_raw and max(tokens) >= num_queries):
            raise ArgumentError(
                f"{prepared.where}: query {query!r} has no token in this model. Choose another position."
            )
        allowed = {
            index
            for index, columns in enumerate(key_tokens)
            if columns
            and (listed is None or index in listed)
            and (prepared.is_cross or allow_self or index != unit)
            and not (causal and (max(columns) > max(tokens) or (0 in columns and not allow_self)))
        }
        if not gold_indices & allowed or len(allowed) < 2:
            skipped += 1
            continue
        rows.append(tokens)
        candidates.append([index in allowed for index in range(len(key_tokens))])
        gold.append([index in gold_indices & allowed for index in range(len(key_tokens))])
        query_units.append(unit)
    needed = sorted({token for tokens in rows for token in tokens})
    row_means = torch.zeros(len(rows), len(needed), dtype=torch.float64, device="cpu")
    for index, tokens in enumerate(rows):
        row_means[index, [needed.index(token) for token in tokens]] = 1 / len(tokens)
    key_sums = None
    if not is_raw:
        key_sums = torch.zeros(num_keys, len(key_tokens), dtype=torch.float64, device="cpu")
        for index, columns in enumerate(key_tokens):
            key_sums[list(columns), index] = 1.0
    shape = (len(rows), len(key_tokens))
    return CandidateGoldMask(
        needed, row_means, key_sums, torch.tensor(candidates, dtype=torch.bool, device="cpu").reshape(shape),
        torch.tensor(gold, dtype=torch.bool, device="cpu").reshape(shape), query_units, skipped,
    )  # fmt: skip


def _index_of_key_unit(prepared: PreparedExample, unit: int | str, num_keys: int) -> int:
    if prepared.example.inputs is None:
        return prepared.keys.index(unit)
    if not isinstance(unit, int) or not 0 <= unit < num_keys:
        raise ArgumentError(
            f"{prepared.where}: key {unit!r} is outside the input, which has {num_keys} keys. Use positions from 0 to "
            f"{num_keys - 1}."
        )
    return unit


def score_attention_call(call: AttentionCall, masks: CandidateGoldMask, where: str) -> dict[str, Tensor]:
    """Score the heads of one attention call, (H,) each."""
    maps = selected_map_rows(call, masks.rows)  # (H, rows, S)
    if bool(maps.isnan().any()):
        raise ArgumentError(
            f"{where}: the attention weights of layer {call.hook_point.address} are NaN. Check the input."
        )
    norms = to_float64(value_output_norms(call)[0]).cpu()  # (H, S)
    group = partial(_sum_and_average_by_unit, masks=masks)
    weights = group(maps)  # (H, Q, U)
    tied = _tied_fractions(weights, masks.candidates)
    weighted = _tied_fractions(group(maps * norms[:, None]), masks.candidates)
    return {
        "scores": (tied * masks.gold).sum((1, 2)),
        "value_weighted": (weighted * masks.gold).sum((1, 2)),
        "weights": (weights * masks.gold).sum((1, 2)),
        SHUFFLED: _shuffled_hits(tied, masks),
    }


def selected_map_rows(call: AttentionCall, rows: Sequence[int]) -> Tensor:
    """Return rows of all maps of a call with batch size 1 in float64 on the CPU, (H, rows, S)."""
    _, H, T, _ = call.q.shape
    if H * T * call.k.shape[2] <= MAX_MAP_CELLS:
        return to_float64(call.maps()[0][:, list(rows)]).cpu()
    return (
        to_float64(call.map_rows(rows)[0]).cpu() if rows else to_float64(call.z.new_zeros(H, 0, call.k.shape[2])).cpu()
    )


def _sum_and_average_by_unit(maps: Tensor, masks: CandidateGoldMask) -> Tensor:
    """Sum columns and average rows by unit: (H, rows, S) → (H, Q, U)."""
    grouped = masks.row_means @ maps
    return grouped if masks.key_sums is None else grouped @ masks.key_sums


def _tied_fractions(weights: Tensor, candidates: Tensor) -> Tensor:
    """Return 1 at the candidate with the largest weight, divided equally among ties: (H, Q, U). NaN weights give NaN."""
    unknown = weights.isnan().any(-1, keepdim=True)
    masked = weights.masked_fill(~candidates, -1.0)
    largest = masked.amax(-1, keepdim=True)
    tied = ((masked >= largest * (1 - TIE_TOLERANCE)) & candidates).double()
    return (tied / tied.sum(-1, keepdim=True).clamp(min=1)).masked_fill(unknown, torch.nan)


def _shuffled_hits(tied: Tensor, masks: CandidateGoldMask) -> Tensor:
    """Return the expected hits if each query gets the gold keys of another query of the example, (H,).

    A query for which no other gold key is a candidate counts with its uniform hit rate.
    """
    gold, candidates = masks.gold.double(), masks.candidates.double()
    hits = tied @ gold.T  # (H, Q, Q): choice of the first query, gold of the second
    reachable = (candidates @ gold.T > 0).double()
    reachable.fill_diagonal_(0)
    others = reachable.sum(1)  # (Q,)
    expected = (hits * reachable).sum(-1) / others.clamp(min=1)  # (H, Q)
    return torch.where(others > 0, expected, _uniform_hits(masks)).sum(1)


def _uniform_hits(masks: CandidateGoldMask) -> Tensor:
    return masks.gold.sum(1).double() / masks.candidates.sum(1).clamp(min=1)  # (Q,)


def hits_per_position_rule(masks: CandidateGoldMask) -> dict[str, float]:
    """Return the hits of rules that ignore the content: a random candidate, the one with most tokens, a fixed offset, a fixed
    difference in rank, a fixed place from the start or the end.

    The rank of a query is its place among the queries of the example, that of a key its place among the candidates.
    """
    num_units = masks.candidates.shape[1]
    sizes = (
        torch.ones(num_units, dtype=torch.float64, device="cpu") if masks.key_sums is None else masks.key_sums.sum(0)
    )
    most_tokens = _tied_fractions(sizes.expand(masks.candidates.shape)[None], masks.candidates)[0]
    rules = {UNIFORM: float(_uniform_hits(masks).sum()), LONGEST: float((most_tokens * masks.gold).sum())}
    order = sorted(range(len(masks.query_units)), key=lambda index: masks.query_units[index])
    for rank, index in enumerate(order):
        candidate_ranks = (masks.candidates[index].cumsum(0) - 1).tolist()
        gold_units = masks.gold[index].nonzero()[:, 0].tolist()
        last = int(masks.candidates[index].sum()) - 1
        scaled = round(rank * last / max(1, len(order) - 1))
        hit_rules = {f"offset {masks.query_units[index] - unit:+d}" for unit in gold_units}
        hit_rules |= {f"rank {candidate_ranks[unit] - rank:+d}" for unit in gold_units}
        hit_rules |= {f"candidate {candidate_ranks[unit] + 1}" for unit in gold_units}
        hit_rules |= {f"candidate {candidate_ranks[unit] - last - 1}" for unit in gold_units}
        hit_rules |= {"diagonal"} if scaled in [candidate_ranks[unit] for unit in gold_units] else set()
        for rule in hit_rules:
            rules[rule] = rules.get(rule, 0.0) + 1.0
    return rules
