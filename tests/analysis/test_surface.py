"""Surface metrics: closed forms of hand-built heads, and full maps in float64 for all kinds of models."""

from dataclasses import replace
from math import lgamma
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import forward_batch, make_batch, make_batches
from headwise.analysis.roles.roles import DEFAULT_ROLES, score
from headwise.kernels import Mask, causal, padding_mask
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.analysis.dense_reference import (
    accumulate_call,
    accumulate_causal_head,
    assert_matches_dense,
    batch_without_repeats,
    call_from_scores,
    make_sample,
    streaming_and_dense,
)
from tests.contract.layers import make_model

VOCAB = 23
FLAGS = (torch.rand(VOCAB, len(CLASSES), generator=torch.Generator().manual_seed(5)) < 0.3).float()


def harmonic(n: int) -> float:
    return float((1 / np.arange(1, n + 1)).sum())


def mean_of_head(accumulator: Accumulator, name: str) -> float:
    return float(accumulator.mean(name)[0])


def scores_at_offset(n: int, offset: int, beta: float) -> Tensor:
    """Return scores of β at one offset back and 0 elsewhere. Rows without such a key are uniform."""
    return beta * torch.eye(n).roll(-offset, 1).tril() if offset else beta * torch.eye(n)


@pytest.mark.parametrize("n", [5, 64, 131, 257])
def test_default_metrics_uniform_causal_head_match_closed_form(n: int) -> None:
    accumulator = accumulate_causal_head(torch.zeros(n, n), n)
    assert mean_of_head(accumulator, "entropy") == pytest.approx(lgamma(n + 1) / n, abs=1e-6)
    assert mean_of_head(accumulator, "relative entropy") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(accumulator, "participation") == pytest.approx((n + 1) / 2, rel=1e-6), (
        "row i sees i + 1 keys alike"
    )
    assert mean_of_head(accumulator, "confidence") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert mean_of_head(accumulator, "first") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert mean_of_head(accumulator, "uniform") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert mean_of_head(accumulator, "offset 1") == pytest.approx((harmonic(n) - 1) / (n - 1), abs=1e-6)
    assert mean_of_head(accumulator, "distance") == pytest.approx((n - 1) / 4, rel=1e-6)
    assert mean_of_head(accumulator, "abstention") == pytest.approx(0, abs=1e-6)


def test_default_metrics_uniform_head_known_values_at_64() -> None:
    accumulator = accumulate_causal_head(torch.zeros(64, 64), 64)
    values = {name: mean_of_head(accumulator, name) for name in ("entropy", "offset 1", "first")}
    assert values == pytest.approx({"entropy": 3.2058, "offset 1": 0.05943, "first": 0.0741}, abs=5e-5)


@pytest.mark.parametrize("n", [33, 34, 64, 150])
def test_long_range_metric_uniform_head_matches_closed_form(n: int) -> None:
    accumulator = accumulate_causal_head(torch.zeros(n, n), n)
    # row i sees keys 1 … i − 32 outside the window, without the first token
    far = [(i - 32) / (i + 1) for i in range(33, n)]
    sums, counts = accumulator.bucket_sums_and_counts("long range")
    assert counts.sum() == len(far)
    assert sums.sum() == pytest.approx(sum(far), abs=1e-5)
    assert accumulator.bucket_sums_and_counts("long range baseline")[0].sum() == pytest.approx(sum(far), abs=1e-5)
    assert accumulator.bucket_sums_and_counts("long range value-weighted")[0].sum() == pytest.approx(sum(far), abs=1e-5)


def test_distance_bins_uniform_head_match_closed_form() -> None:
    n = 150
    accumulator = accumulate_causal_head(torch.zeros(n, n), n)
    for low, high in ((32, 64), (64, 128), (128, 256)):
        fractions = [(min(i, high - 1) - low + 1) / (i + 1) for i in range(low, n)]
        assert mean_of_head(accumulator, f"distance {low}-{high - 1}") == pytest.approx(np.mean(fractions), abs=1e-6)
    near = sum(mean_of_head(accumulator, f"offset {o}") * (n - o) for o in range(32))
    far = sum(accumulator.bucket_sums_and_counts(f"distance {low}-{2 * low - 1}")[0].sum() for low in (32, 64, 128))
    assert near + far == pytest.approx(n, abs=1e-3), "nothing is counted twice or lost"


@pytest.mark.parametrize("beta", [1.0, 4.0, 9.0])
@pytest.mark.parametrize("n", [17, 200])
def test_offset_metrics_previous_token_head_match_closed_form(n: int, beta: float) -> None:
    accumulator = accumulate_causal_head(scores_at_offset(n, 1, beta), n)
    e = np.exp(beta)
    top = np.array([e / (e + i) for i in range(1, n)])
    assert mean_of_head(accumulator, "confidence") == pytest.approx((1 + top.sum()) / n, abs=1e-6), (
        "the first row has but itself"
    )
    assert mean_of_head(accumulator, "offset 1") == pytest.approx(top.mean(), abs=1e-6)
    assert mean_of_head(accumulator, "aimed 1") == pytest.approx(top[1:].mean(), abs=1e-6), (
        "row 1 looks at the first token"
    )
    assert mean_of_head(accumulator, "aimed value-weighted 1") == pytest.approx(top[1:].mean(), abs=1e-6)
    assert mean_of_head(accumulator, "aimed baseline 1") == pytest.approx(
        np.mean([1 / (i + 1) for i in range(2, n)]), abs=1e-6
    )
    assert mean_of_head(accumulator, "argmax 1") == pytest.approx(1)


def test_default_metrics_hard_offset_heads_match_closed_form() -> None:
    n = 41
    accumulator = accumulate_causal_head(scores_at_offset(n, 1, 80.0), n)
    assert mean_of_head(accumulator, "distance") == pytest.approx((n - 1) / n, abs=1e-6)
    assert mean_of_head(accumulator, "entropy") == pytest.approx(0, abs=1e-6)
    assert mean_of_head(accumulator, "participation") == pytest.approx(1, abs=1e-6)
    identity = accumulate_causal_head(scores_at_offset(n, 0, 80.0), n)
    assert mean_of_head(identity, "offset 0") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(identity, "distance") == pytest.approx(0, abs=1e-6)
    assert mean_of_head(identity, "first") == pytest.approx(1 / n, abs=1e-6)


@pytest.mark.parametrize("n", [7, 61, 140])
def test_distance_metric_uniform_encoder_head_matches_closed_form(n: int) -> None:
    """The distance ahead equals the distance back, so the signed distance is 0. The absolute distance is (n² − 1) / 3n."""
    accumulator = accumulate_call(call_from_scores(torch.zeros(1, 1, n, n)), batch_without_repeats(n))
    assert mean_of_head(accumulator, "signed distance") == pytest.approx(0, abs=1e-4)
    assert mean_of_head(accumulator, "distance") == pytest.approx((n * n - 1) / (3 * n), rel=1e-5)


@pytest.mark.parametrize("n", [7, 61, 140])
def test_offset_metrics_next_token_head_match_closed_form(n: int) -> None:
    scores = 80.0 * torch.eye(n).roll(1, 1).triu(1)
    scores[-1, -1] = 80.0
    accumulator = accumulate_call(call_from_scores(scores.double()[None, None]), batch_without_repeats(n))
    sums, counts = accumulator.bucket_sums_and_counts("offset -1")
    assert counts.sum() == n - 1
    assert sums.sum() == pytest.approx(n - 1, abs=1e-5)
    assert mean_of_head(accumulator, "aimed -1") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(accumulator, "argmax -1") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(accumulator, "signed distance") == pytest.approx(-(n - 1) / n, abs=1e-6)
    assert mean_of_head(accumulator, "distance") == pytest.approx((n - 1) / n, abs=1e-6)
    if n > 65:
        assert mean_of_head(accumulator, "long range") == pytest.approx(0, abs=1e-6), "what is one ahead is near"


def test_value_weighted_score_follows_value_norms() -> None:
    """With norms f the value-weighted score is softmax(s + ln f): a previous-token head on keys with alternating norms 1 and
    3."""
    n, beta = 21, 2.0
    f = 1.0 + 2.0 * (np.arange(n) % 2)
    accumulator = accumulate_causal_head(scores_at_offset(n, 1, beta), n, norms=torch.from_numpy(f))
    e = np.exp(beta)
    want = [e * f[i - 1] / ((e - 1) * f[i - 1] + f[: i + 1].sum()) for i in range(2, n)]
    assert mean_of_head(accumulator, "aimed value-weighted 1") == pytest.approx(np.mean(want), abs=1e-6)


@pytest.mark.parametrize("level", [-60.0, -1.0, 0.0, 3.0, 60.0])
def test_abstention_metric_sink_logit_matches_closed_form(level: float) -> None:
    """A sink logit S takes weight σ(S − lse). The keys have the remaining weight, and confidence is the largest weight on a
    key."""
    n = 19
    scores = torch.randn(n, n, generator=torch.Generator().manual_seed(1)).double()
    accumulator = accumulate_causal_head(scores, n, sink=torch.tensor([level]).double())
    lse = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).logsumexp(-1)
    top = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).amax(-1)
    assert mean_of_head(accumulator, "abstention") == pytest.approx(float((level - lse).sigmoid().mean()), abs=1e-6)
    total = torch.logaddexp(lse, torch.tensor(level).double())
    assert mean_of_head(accumulator, "confidence") == pytest.approx(float((top - total).exp().mean()), abs=1e-6)


def test_abstention_metric_sink_at_logsumexp_is_half() -> None:
    n = 12
    accumulator = accumulate_causal_head(-torch.arange(1, n + 1).log()[:, None].expand(n, n), n, sink=torch.zeros(1))
    assert mean_of_head(accumulator, "abstention") == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("mask", [None, causal()])
def test_class_metrics_uniform_head_match_closed_form(mask: Mask | None) -> None:
    n = 45
    flags = torch.zeros(n, len(CLASSES))
    flags[4::5, 0], flags[0, 1], flags[10:, 2], flags[3, 3] = 1, 1, 1, 1
    accumulator = accumulate_call(call_from_scores(torch.zeros(1, 1, n, n), mask), batch_without_repeats(n), flags)
    for c, name in enumerate(CLASSES):
        in_class = flags[:, c].numpy()
        fractions = np.full(n, in_class.sum() / n) if mask is None else in_class.cumsum() / np.arange(1, n + 1)
        if name != "special":
            fractions = fractions[fractions > 0]  # rows that see the class
        for kind in ("", " baseline", " value-weighted"):
            assert mean_of_head(accumulator, name + kind) == pytest.approx(fractions.mean(), abs=1e-6), name + kind


@pytest.mark.parametrize("mask", [None, causal()])
@pytest.mark.parametrize("n", [4, 23, 140])
def test_role_metrics_perfect_head_is_one_and_sink_is_zero(n: int, mask: Mask | None) -> None:
    """At any length, for every role. Rows that cannot have a target do not count, and their number is reported."""
    class_positions = [2, n - 2] if n > 4 else [2]
    flags = torch.zeros(n, len(CLASSES))
    flags[[0, *class_positions]] = 1  # the first token is marked too, but never a target
    sees_class = np.ones(n) if mask is None else np.arange(n) >= 2
    to_class = torch.zeros(n, n)
    to_class[:, 0], to_class[:, class_positions] = 100.0, 200.0
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    around = torch.where((j > 0) & (i != j) & ((i - j).abs() <= 3), 200.0, 0.0)
    far = torch.where((j > 0) & ((i - j).abs() >= 32), 200.0, 0.0)
    perfect = {
        **{name: (to_class, sees_class.sum()) for name in CLASSES if name != "special"},
        "local": (around, n if mask is None else n - 2),
    }
    if n > 40:
        perfect["long range"] = far, n - 33 if mask is not None else n
    for name, (scores, eligible) in perfect.items():
        accumulator = accumulate_call(
            call_from_scores(scores.double()[None, None], mask), batch_without_repeats(n), flags
        )
        assert (
            mean_of_head(accumulator, name)
            == mean_of_head(accumulator, f"{name} value-weighted")
            == pytest.approx(1, abs=1e-6)
        ), name
        assert (
            accumulator.bucket_sums_and_counts(name)[1].sum()
            == accumulator.bucket_sums_and_counts(f"{name} baseline")[1].sum()
            == eligible
        ), name
        (case,) = score(accumulator, None, only_role=name)
        assert case.coverage == pytest.approx([0]), "one text: there is no half for reporting"
    sink = torch.zeros(n, n)
    sink[:, 0] = 200.0
    accumulator = accumulate_call(call_from_scores(sink.double()[None, None], mask), batch_without_repeats(n), flags)
    for role in DEFAULT_ROLES:
        if role.metric_spec.name in accumulator.fields:
            assert np.nan_to_num(accumulator.mean(role.metric_spec.name)) == pytest.approx([0], abs=1e-6), role


ATTENTION = AttentionSpec(width=24, heads=4, head_dim=6, bias=True)
SIZES: dict[str, Any] = {"vocab": VOCAB, "context": 210, "layers": 2, "mlp_width": 13}
VARIANTS = {
    "decoder": ModelSpec(**SIZES, attention=ATTENTION),
    "encoder": ModelSpec(**SIZES, attention=ATTENTION, kind="encoder", output="none"),
    "grouped": ModelSpec(**SIZES, attention=replace(ATTENTION, kv_heads=2, rotary=Rotary()), positions="none"),
    "windows": ModelSpec(**SIZES, attention=ATTENTION, windows=(9, None)),
    "encoder, window": ModelSpec(**SIZES, attention=replace(ATTENTION, window=40), kind="encoder", output="none"),
    "alibi": ModelSpec(**SIZES, attention=replace(ATTENTION, alibi=True), positions="none"),
    "softcap": ModelSpec(**SIZES, attention=replace(ATTENTION, softcap=1.5)),
    "sink": ModelSpec(**SIZES, attention=replace(ATTENTION, softmax="sink")),
    "cut": ModelSpec(**SIZES, attention=replace(ATTENTION, kv_heads=2), kept_heads={"0": (0, 2, 3), "1": ()}),
    "wide values": ModelSpec(**SIZES, attention=replace(ATTENTION, value_dim=11)),
}
LENGTHS = (3, 75, 40, 201, 1, 130, 33, 66)


def random_samples(seed: int = 2) -> list:
    rng = np.random.default_rng(seed)
    return [make_sample(index, rng.integers(0, VOCAB, length).tolist()) for index, length in enumerate(LENGTHS)]


# Padding on both sides for the first variant, and on alternating sides for the others; all combinations in `make test-all`.
each_variant = pytest.mark.parametrize(
    ("variant", "side"),
    [
        pytest.param(name, side, marks=pytest.mark.slow if number and number % 2 != (side == "left") else ())
        for number, name in enumerate(VARIANTS)
        for side in ("right", "left")
    ],
)


@each_variant
def test_default_metrics_equal_dense_maps(variant: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(VARIANTS[variant])
    small = (side == "left") ^ (variant in ("decoder", "grouped", "sink"))
    if small:  # several blocks of rows and groups of heads
        monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 23)
        monkeypatch.setattr(row_blocks, "BLOCK_CELLS", 40_000)
    batches = list(make_batches(random_samples(), 4 * 201 if side == "left" else 300, side=side))
    accumulator, dense = streaming_and_dense(model, batches, FLAGS.double(), evidence=True)
    assert_matches_dense(accumulator, dense)
    assert set(dense) <= set(accumulator.fields)


def test_default_metrics_float32_equal_dense_maps() -> None:
    accumulator, dense = streaming_and_dense(
        make_model(VARIANTS["decoder"]).float(), list(make_batches(random_samples(), 900)), FLAGS
    )
    assert_matches_dense(accumulator, dense)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["decoder", "encoder", "sink", "cut"])
def test_metric_runner_keeps_outputs_bitwise(variant: str) -> None:
    model = make_model(VARIANTS[variant]).float()
    for batch in make_batches(random_samples(), 600, side="left"):
        plain = forward_batch(model, batch)
        again = []
        accumulator, _ = streaming_and_dense(model, [batch], FLAGS, evidence=True)
        again.append(forward_batch(model, batch))
        heads = sum(len(hook_point.head_ids) for hook_point in model.hook_points())
        runner = MetricRunner(Accumulator(heads), default_metrics(FLAGS), observers=[TopContexts(heads)])
        with model.hook_points()[0].listen(lambda call, b=batch, r=runner: r.on_call(call, b, 0)):
            again.append(forward_batch(model, batch))
        assert all(torch.equal(plain, other) for other in again)
        assert accumulator.heads == heads


@pytest.mark.parametrize("sink", [None, torch.tensor([2.0, 9.0])], ids=["plain", "sink"])
def test_top_contexts_are_largest_weights(sink: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weights that are not on the first token or on the query itself, with sample, row and column."""
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 17)
    n, batch = 50, make_batch([make_sample(7, range(50)), make_sample(9, range(31))], side="left")
    scores = 3 * torch.randn(2, 2, n, n, generator=torch.Generator().manual_seed(3))
    call = call_from_scores(scores, causal() & padding_mask(batch.real_tokens), sink)
    evidence = TopContexts(2)
    accumulate_call(call, batch, observers=[evidence])
    contexts = evidence.contexts()
    for head in range(2):
        expected = []
        for row, (sample_index, first) in enumerate(((7, 0), (9, 19))):
            p = call.maps()[row, head]
            best = [(i, int(p[i].argmax())) for i in range(first, n)]
            expected += [(float(p[i, j]), sample_index, i - first, j - first) for i, j in best if j not in (first, i)]
        want = sorted(expected, reverse=True)[:8]
        actual = [(c.weight, c.sample, c.row, c.column) for c in contexts[head]]
        assert [t[1:] for t in actual] == [w[1:] for w in want]
        assert [t[0] for t in actual] == pytest.approx([w[0] for w in want], abs=1e-5)


@pytest.mark.parametrize("special", [(), (0,), (0, 8), (0, 4, 8), (3,), tuple(range(9))])
@pytest.mark.parametrize("is_causal", [True, False])
def test_confidence_metric_ignores_special_tokens(special: tuple[int, ...], is_causal: bool) -> None:
    n = 9
    flags = torch.zeros(n, len(CLASSES))
    flags[list(special), CLASSES.index("special")] = 1
    scores = 3 * torch.randn(2, 3, n, n, generator=torch.Generator().manual_seed(len(special))).double()
    call = call_from_scores(scores, causal() if is_causal else None)
    accumulator = accumulate_call(call, batch_without_repeats(n, 2), flags)
    p, ordinary = call.maps(), [i for i in range(n) if i not in special]
    rows = [i for i in ordinary if not is_causal or any(key <= i for key in ordinary)]
    sums, counts = accumulator.bucket_sums_and_counts("confidence")
    assert counts.sum(0).tolist() == [2 * len(rows)] * 3
    expected = p[:, :, rows][..., ordinary].amax(-1).sum((0, 2)) if rows else torch.zeros(3).double()
    np.testing.assert_allclose(sums.sum(0), expected.numpy(), atol=1e-9)
