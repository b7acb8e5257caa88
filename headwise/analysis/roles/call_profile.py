"""Profile over calls: the stages of a text profile without token features, for torch modules.

Each example of each call is one unit of the statistics. The positions of a self-attention layer are the tokens that it sees.
Cross-attention has no distances. Roles are not tested causally, because calls have no answers.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import token_free_metrics
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, TokenBatch
from headwise.analysis.recording.model_calls import normalize_call_list, run_call
from headwise.analysis.roles.profile_result import Profile, ProfileSums, build_profile
from headwise.analysis.roles.profile_sums import CollectOptions, metric_specs_by_name
from headwise.analysis.roles.roles import DEFAULT_ROLES, Role, assess, check_roles, score
from headwise.errors import ArgumentError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import Mask
from headwise.kernels.score_bias import DenseBias
from headwise.model import ModelProtocol, eval_mode
from headwise.text.token_alignment import Alignment


def profile_calls(
    model: ModelProtocol,
    corpus: Any,
    metrics: Sequence[Metric | TaskMetric],
    roles: Sequence[Role],
    options: CollectOptions,
) -> Profile:
    """Profile every head over a list of calls."""
    if options.control is not None or options.relations or options.max_length is not None:
        raise ArgumentError(
            "control, relations, max_length: not supported for a corpus of calls. Remove these arguments."
        )
    given_metrics = [metric for metric in metrics if not isinstance(metric, TaskMetric)]
    if len(given_metrics) < len(metrics):
        raise ArgumentError("metrics: task metrics use texts, but the corpus is a list of calls. Remove them.")
    all_metrics = [*token_free_metrics(), *given_metrics]
    check_roles(roles, metric_specs_by_name(all_metrics).values())
    with eval_mode(model), torch.no_grad():
        sums = collect_calls(model, normalize_call_list(model, corpus), all_metrics, options)
    scores = score(sums.accumulator, None, (*DEFAULT_ROLES, *roles))
    evidence, family_size = assess(scores, len(sums.addresses), sums.metadata)
    return build_profile(sums, evidence, family_size, roles)


def collect_calls(
    model: ModelProtocol, calls: Sequence[Any], metrics: Sequence[Metric], options: CollectOptions
) -> ProfileSums:
    """Run the calls once and sum the metrics at every hook point."""
    hook_points, spec = model.gathered_hook_points(), model.spec
    addresses = tuple(address for hook_point in hook_points for address in hook_point.head_addresses)
    accumulator, top_contexts = Accumulator(len(addresses)), TopContexts(len(addresses))
    runner = MetricRunner(accumulator, metrics, options.row_stride, observers=[top_contexts])
    examples = tokens = 0
    for index, call in enumerate(calls):
        options.progress("calls", index, len(calls))
        batches = StandInTokenBatches(index)
        with listen_at_hook_points(hook_points, partial(_update_metrics_on_call, runner, batches)):
            run_call(model, call)
        runner.reset_batch()
        examples, tokens = examples + batches.num_examples, tokens + batches.num_tokens
    options.progress("calls", len(calls), len(calls))
    metadata = {
        "texts": examples, "tokens": tokens, "documents": 0, "relations": "", "control": None, "seed": options.seed,
        "layers": [str(hook_point.address) for hook_point in hook_points],
        "row_stride": options.row_stride, "corpus": f"{len(calls)} calls", "relations_corpus": "",
        "model": f"torch module, {len(hook_points)} attention layers with up to {spec.attention.heads} heads, width "
        f"{spec.width}",
    }  # fmt: skip
    return ProfileSums(
        addresses, accumulator, None, top_contexts.contexts(), ExampleStore(len(addresses)), metadata,
        metric_specs_by_name(metrics),
    )  # fmt: skip


class StandInTokenBatches:
    """Batches that stand for the inputs of the attention calls in one call of the model.

    Attributes:
        num_examples: Number of examples in the first attention call.
        num_tokens: Number of real tokens in the first attention call.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._buckets: list[int] = []
        self._batches: dict[tuple[int, int, bytes], TokenBatch] = {}
        self.num_examples = self.num_tokens = 0

    def batch_of(self, call: AttentionCall) -> TokenBatch:
        """Return the batch of an attention call: position numbers as ids, real tokens by its mask."""
        B, S = call.k.shape[0], call.k.shape[2]
        real = _visible_to_any_query(call)
        if not self._buckets:
            self._buckets = [_hash_bucket_of_example(q) for q in call.q]
            self.num_examples, self.num_tokens = B, int(real.sum())
        key = (B, S, np.packbits(real.cpu().numpy()).tobytes())
        if key not in self._batches:
            ids = tuple(range(S))
            align = partial(Alignment.of, "", ids, tuple(map(str, ids)), [(0, 0)] * S)
            samples = tuple(
                TextSample(
                    self._index, self._buckets[row % len(self._buckets)], ids, None, align, text=f"call {self._index}"
                )
                for row in range(B)
            )
            self._batches[key] = TokenBatch(samples, torch.tensor(ids, device=call.k.device).expand(B, S), real)
        return self._batches[key]


def _update_metrics_on_call(
    runner: MetricRunner, batches: StandInTokenBatches, call: AttentionCall, first_head: int
) -> None:
    call = _pad_keys_to_queries(call) if call.hook_point.is_cross_attention else _with_extra_keys_first(call)
    runner.on_call(call, batches.batch_of(call), first_head)


def _with_extra_keys_first(call: AttentionCall) -> AttentionCall:
    """Move keys that are not tokens in front of the tokens, because positions are counted from the last key."""
    count, params = call.hook_point.extra_keys, call.params
    if not count:
        return call
    (T, S), device = (call.q.shape[2], call.k.shape[2]), call.k.device
    mask = None if params.mask is None else Mask.of(params.mask.dense(T, S, device).roll(count, -1))
    bias = params.bias_block(range(T), range(S), T, S)
    bias = None if bias is None else DenseBias(bias.expand(*bias.shape[:3], S).roll(count, -1))
    k, v = (x.roll(count, 2) for x in (call.k, call.v))
    return replace(call, k=k, v=v, params=replace(params, mask=mask, bias=bias))


def _visible_to_any_query(call: AttentionCall) -> Tensor:
    """Return which keys are real tokens, (B, S). Queries of cross-attention have no position among the keys: all are."""
    B, S, mask = call.k.shape[0], call.k.shape[2], call.params.mask
    if mask is None or call.hook_point.is_cross_attention:
        return torch.ones(B, S, dtype=torch.bool, device=call.k.device)
    dense = mask.dense(call.q.shape[2], S, call.k.device)
    return dense.expand(*dense.shape[:2], call.q.shape[2], S).any(2).any(1).expand(B, S)


def _pad_keys_to_queries(call: AttentionCall) -> AttentionCall:
    """Append hidden keys if there are fewer keys than queries, because rows are counted from the last key."""
    T, S = call.q.shape[2], call.k.shape[2]
    if S >= T:
        return call
    mask, params = call.params.mask, call.params
    dense = torch.ones(1, 1, T, S, dtype=torch.bool, device="cpu") if mask is None else mask.dense(T, S, call.k.device)
    dense = F.pad(dense.expand(*dense.shape[:2], T, S), (0, T - S)).to(call.k.device)
    bias = params.bias_block(range(T), range(S), T, S)
    bias = None if bias is None else F.pad(bias.expand(*bias.shape[:3], S), (0, T - S))
    params = replace(params, mask=Mask.of(dense), bias=None if bias is None else DenseBias(bias))
    k, v = (F.pad(x, (0, 0, 0, T - S)) for x in (call.k, call.v))
    return replace(call, k=k, v=v, params=params)


def _hash_bucket_of_example(q: Tensor) -> int:
    """Return the bucket of an example, a hash of its first queries."""
    data = np.ascontiguousarray(q.detach().float().cpu().numpy()).tobytes()
    return hashlib.blake2b(data, digest_size=1).digest()[0]
