"""Surface measures: closed forms of heads built by hand, and whole maps in float64 for models of every kind."""

from dataclasses import replace
from math import lgamma
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.analysis.recording.batching import make_batch, make_batches, run
from headwise.analysis.roles.roles import TABLE, make_cases
from headwise.kernels import Mask, causal, padding_mask
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.analysis.dense_reference import assert_alike, by_scores, distinct, head_of, measured, unit, watch
from tests.contract.layers import make_model

VOCAB = 23
FLAGS = (torch.rand(VOCAB, len(CLASSES), generator=torch.Generator().manual_seed(5)) < 0.3).float()


def harmonic(n: int) -> float:
    return float((1 / np.arange(1, n + 1)).sum())


def one(tally: Tally, name: str) -> float:
    return float(tally.mean(name)[0])


def at_offset(n: int, offset: int, beta: float) -> Tensor:
    """β on the key so many places back, 0 elsewhere; rows without such a key are uniform."""
    return beta * torch.eye(n).roll(-offset, 1).tril() if offset else beta * torch.eye(n)


@pytest.mark.parametrize("n", [5, 64, 131, 257])
def test_the_uniform_causal_head(n: int) -> None:
    made = head_of(torch.zeros(n, n), n)
    assert one(made, "entropy") == pytest.approx(lgamma(n + 1) / n, abs=1e-6)
    assert one(made, "relative entropy") == pytest.approx(1, abs=1e-6)
    assert one(made, "participation") == pytest.approx((n + 1) / 2, rel=1e-6), "row i sees i + 1 keys alike"
    assert one(made, "confidence") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert one(made, "first") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert one(made, "uniform") == pytest.approx(harmonic(n) / n, abs=1e-6)
    assert one(made, "offset 1") == pytest.approx((harmonic(n) - 1) / (n - 1), abs=1e-6)
    assert one(made, "distance") == pytest.approx((n - 1) / 4, rel=1e-6)
    assert one(made, "abstention") == pytest.approx(0, abs=1e-6)


def test_its_numbers_at_64() -> None:
    made = head_of(torch.zeros(64, 64), 64)
    told = {name: one(made, name) for name in ("entropy", "offset 1", "first")}
    assert told == pytest.approx({"entropy": 3.2058, "offset 1": 0.05943, "first": 0.0741}, abs=5e-5)


@pytest.mark.parametrize("n", [33, 34, 64, 150])
def test_long_range_of_the_uniform_head(n: int) -> None:
    made = head_of(torch.zeros(n, n), n)
    far = [(i - 32) / (i + 1) for i in range(33, n)]  # row i sees keys 1 … i − 32 beyond the window, and not the first
    sums, counts = made.per_bucket("long range")
    assert counts.sum() == len(far)
    assert sums.sum() == pytest.approx(sum(far), abs=1e-5)
    assert made.per_bucket("long range null")[0].sum() == pytest.approx(sum(far), abs=1e-5)
    assert made.per_bucket("long range valued")[0].sum() == pytest.approx(sum(far), abs=1e-5)


def test_bins_of_the_uniform_head() -> None:
    n = 150
    made = head_of(torch.zeros(n, n), n)
    for low, high in ((32, 64), (64, 128), (128, 256)):
        share = [(min(i, high - 1) - low + 1) / (i + 1) for i in range(low, n)]
        assert one(made, f"distance {low}-{high - 1}") == pytest.approx(np.mean(share), abs=1e-6)
    near = sum(one(made, f"offset {o}") * (n - o) for o in range(32))
    far = sum(made.per_bucket(f"distance {low}-{2 * low - 1}")[0].sum() for low in (32, 64, 128))
    assert near + far == pytest.approx(n, abs=1e-3), "nothing is counted twice or lost"


@pytest.mark.parametrize("beta", [1.0, 4.0, 9.0])
@pytest.mark.parametrize("n", [17, 200])
def test_a_previous_token_head(n: int, beta: float) -> None:
    made = head_of(at_offset(n, 1, beta), n)
    e = np.exp(beta)
    top = np.array([e / (e + i) for i in range(1, n)])
    assert one(made, "confidence") == pytest.approx((1 + top.sum()) / n, abs=1e-6), "the first row has but itself"
    assert one(made, "offset 1") == pytest.approx(top.mean(), abs=1e-6)
    assert one(made, "aimed 1") == pytest.approx(top[1:].mean(), abs=1e-6), "row 1 looks at the first token"
    assert one(made, "aimed valued 1") == pytest.approx(top[1:].mean(), abs=1e-6)
    assert one(made, "aimed null 1") == pytest.approx(np.mean([1 / (i + 1) for i in range(2, n)]), abs=1e-6)
    assert one(made, "argmax 1") == pytest.approx(1)


def test_a_hard_previous_token_head_and_an_identity_head() -> None:
    n = 41
    made = head_of(at_offset(n, 1, 80.0), n)
    assert one(made, "distance") == pytest.approx((n - 1) / n, abs=1e-6)
    assert one(made, "entropy") == pytest.approx(0, abs=1e-6)
    assert one(made, "participation") == pytest.approx(1, abs=1e-6)
    itself = head_of(at_offset(n, 0, 80.0), n)
    assert one(itself, "offset 0") == pytest.approx(1, abs=1e-6)
    assert one(itself, "distance") == pytest.approx(0, abs=1e-6)
    assert one(itself, "first") == pytest.approx(1 / n, abs=1e-6)


@pytest.mark.parametrize("detail", ["full", "light"])
@pytest.mark.parametrize("n", [7, 61, 140])
def test_how_far_a_uniform_encoder_head_looks(n: int, detail: str) -> None:
    """As far ahead as back, so the signed distance is 0; without the sign it is (n² − 1) / 3n."""
    made = measured(by_scores(torch.zeros(1, 1, n, n)), distinct(n), detail=detail)
    assert one(made, "signed distance") == pytest.approx(0, abs=1e-4)
    assert one(made, "distance") == pytest.approx((n * n - 1) / (3 * n), rel=1e-5)


@pytest.mark.parametrize("n", [7, 61, 140])
def test_an_encoder_head_that_looks_ahead(n: int) -> None:
    scores = 80.0 * torch.eye(n).roll(1, 1).triu(1)
    scores[-1, -1] = 80.0
    made = measured(by_scores(scores.double()[None, None]), distinct(n))
    sums, counts = made.per_bucket("offset -1")
    assert counts.sum() == n - 1
    assert sums.sum() == pytest.approx(n - 1, abs=1e-5)
    assert one(made, "aimed -1") == pytest.approx(1, abs=1e-6)
    assert one(made, "argmax -1") == pytest.approx(1, abs=1e-6)
    assert one(made, "signed distance") == pytest.approx(-(n - 1) / n, abs=1e-6)
    assert one(made, "distance") == pytest.approx((n - 1) / n, abs=1e-6)
    if n > 65:
        assert one(made, "long range") == pytest.approx(0, abs=1e-6), "what is one ahead is near"


def test_keys_that_write_little_count_little() -> None:
    """With lengths f the valued weight is softmax(s + ln f): a previous-token head on keys of length 1 and 3 in turn."""
    n, beta = 21, 2.0
    f = 1.0 + 2.0 * (np.arange(n) % 2)
    made = head_of(at_offset(n, 1, beta), n, norms=torch.from_numpy(f))
    e = np.exp(beta)
    want = [e * f[i - 1] / ((e - 1) * f[i - 1] + f[: i + 1].sum()) for i in range(2, n)]
    assert one(made, "aimed valued 1") == pytest.approx(np.mean(want), abs=1e-6)


@pytest.mark.parametrize("level", [-60.0, -1.0, 0.0, 3.0, 60.0])
def test_abstention_and_what_is_left(level: float) -> None:
    """A sink logit takes σ(S − lse); what keys get is the rest, and confidence is the largest weight on a key."""
    n = 19
    scores = torch.randn(n, n, generator=torch.Generator().manual_seed(1)).double()
    made = head_of(scores, n, sink=torch.tensor([level]).double())
    lse = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).logsumexp(-1)
    top = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).amax(-1)
    assert one(made, "abstention") == pytest.approx(float((level - lse).sigmoid().mean()), abs=1e-6)
    total = torch.logaddexp(lse, torch.tensor(level).double())
    assert one(made, "confidence") == pytest.approx(float((top - total).exp().mean()), abs=1e-6)


def test_half_where_the_sink_is_the_logsumexp() -> None:
    n = 12
    made = head_of(-torch.arange(1, n + 1).log()[:, None].expand(n, n), n, sink=torch.zeros(1))
    assert one(made, "abstention") == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("mask", [None, causal()])
def test_class_masses_of_a_uniform_head(mask: Mask | None) -> None:
    n = 45
    flags = torch.zeros(n, len(CLASSES))
    flags[4::5, 0], flags[0, 1], flags[10:, 2], flags[3, 3] = 1, 1, 1, 1
    made = measured(by_scores(torch.zeros(1, 1, n, n), mask), distinct(n), flags)
    for c, name in enumerate(CLASSES):
        there = flags[:, c].numpy()
        shares = np.full(n, there.sum() / n) if mask is None else there.cumsum() / np.arange(1, n + 1)
        if name != "special":
            shares = shares[shares > 0]  # rows that see the class
        for kind in ("", " null", " valued"):
            assert one(made, name + kind) == pytest.approx(shares.mean(), abs=1e-6), name + kind


@pytest.mark.parametrize("mask", [None, causal()])
@pytest.mark.parametrize("n", [4, 23, 140])
def test_a_perfect_head_scores_one_and_a_sink_nothing(n: int, mask: Mask | None) -> None:
    """At any length, for every role of the table; rows that cannot have the target do not count, and are told."""
    here = [2, n - 2] if n > 4 else [2]
    flags = torch.zeros(n, len(CLASSES))
    flags[[0, *here]] = 1  # the first token as well, and it is nobody's target
    seen = np.ones(n) if mask is None else np.arange(n) >= 2
    to_class = torch.zeros(n, n)
    to_class[:, 0], to_class[:, here] = 100.0, 200.0
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    around = torch.where((j > 0) & (i != j) & ((i - j).abs() <= 3), 200.0, 0.0)
    far = torch.where((j > 0) & ((i - j).abs() >= 32), 200.0, 0.0)
    perfect = {
        **{name: (to_class, seen.sum()) for name in CLASSES if name != "special"},
        "local": (around, n if mask is None else n - 2),
    }
    if n > 40:
        perfect["long range"] = far, n - 33 if mask is not None else n
    for name, (scores, could) in perfect.items():
        made = measured(by_scores(scores.double()[None, None], mask), distinct(n), flags)
        assert one(made, name) == one(made, f"{name} valued") == pytest.approx(1, abs=1e-6), name
        assert made.per_bucket(name)[1].sum() == made.per_bucket(f"{name} null")[1].sum() == could, name
        (case,) = make_cases(made, None, name)
        assert case.coverage == pytest.approx([0]), "one text: there is no half for reporting"
    sink = torch.zeros(n, n)
    sink[:, 0] = 200.0
    made = measured(by_scores(sink.double()[None, None], mask), distinct(n), flags)
    for role in TABLE:
        if role.measure.name in made.fields:
            assert np.nan_to_num(made.mean(role.measure.name)) == pytest.approx([0], abs=1e-6), role


ATTENTION = AttentionSpec(width=24, heads=4, head_dim=6, bias=True)
SIZES: dict[str, Any] = {"vocab": VOCAB, "context": 210, "layers": 2, "hidden": 13}
VARIANTS = {
    "decoder": ModelSpec(**SIZES, attention=ATTENTION),
    "encoder": ModelSpec(**SIZES, attention=ATTENTION, kind="encoder", output="none"),
    "grouped": ModelSpec(**SIZES, attention=replace(ATTENTION, kv_heads=2, rotary=Rotary()), positions="none"),
    "windows": ModelSpec(**SIZES, attention=ATTENTION, windows=(9, None)),
    "encoder, window": ModelSpec(**SIZES, attention=replace(ATTENTION, window=40), kind="encoder", output="none"),
    "alibi": ModelSpec(**SIZES, attention=replace(ATTENTION, alibi=True), positions="none"),
    "softcap": ModelSpec(**SIZES, attention=replace(ATTENTION, softcap=1.5)),
    "sink": ModelSpec(**SIZES, attention=replace(ATTENTION, softmax="sink")),
    "cut": ModelSpec(**SIZES, attention=replace(ATTENTION, kv_heads=2), kept={"0": (0, 2, 3), "1": ()}),
    "wide values": ModelSpec(**SIZES, attention=replace(ATTENTION, value_dim=11)),
}
LENGTHS = (3, 75, 40, 201, 1, 130, 33, 66)


def texts(seed: int = 2) -> list:
    draw = np.random.default_rng(seed)
    return [unit(number, draw.integers(0, VOCAB, length).tolist()) for number, length in enumerate(LENGTHS)]


# Padding on both sides for the first variant, and by turns on either for the others; all of them in `make test-all`.
each_variant = pytest.mark.parametrize(
    ("variant", "side"),
    [
        pytest.param(name, side, marks=pytest.mark.slow if number and number % 2 != (side == "left") else ())
        for number, name in enumerate(VARIANTS)
        for side in ("right", "left")
    ],
)


@each_variant
def test_whole_maps_agree(variant: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(VARIANTS[variant])
    small = (side == "left") ^ (variant in ("decoder", "grouped", "sink"))
    if small:  # several blocks of rows and groups of heads
        monkeypatch.setattr(row_blocks, "ROWS", 23)
        monkeypatch.setattr(row_blocks, "CELLS", 40_000)
    batches = list(make_batches(texts(), 4 * 201 if side == "left" else 300, side=side))
    tally, dense = watch(model, batches, FLAGS.double(), evidence=True)
    assert_alike(tally, dense)
    assert set(dense) <= set(tally.fields)


def test_single_precision_is_good_to_five_digits() -> None:
    tally, dense = watch(make_model(VARIANTS["decoder"]).float(), list(make_batches(texts(), 900)), FLAGS)
    assert_alike(tally, dense)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["decoder", "encoder", "sink", "cut"])
def test_looking_leaves_every_bit(variant: str) -> None:
    model = make_model(VARIANTS[variant]).float()
    for batch in make_batches(texts(), 600, side="left"):
        plain = run(model, batch)
        again = []
        tally, _ = watch(model, [batch], FLAGS, evidence=True)
        again.append(run(model, batch))
        heads = sum(len(site.head_ids) for site in model.sites())
        runner = Runner(Tally(heads), [Evidence(heads), *usual_measures(FLAGS)])
        with model.sites()[0].listen(lambda seen, b=batch, r=runner: r.see(seen, b, 0)):
            again.append(run(model, batch))
        assert all(torch.equal(plain, other) for other in again)
        assert tally.heads == heads


@pytest.mark.parametrize("sink", [None, torch.tensor([2.0, 9.0])], ids=["plain", "sink"])
def test_evidence_is_the_largest_weights_on_keys(sink: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strongest looks that do not rest on the first token or on the looker; told by unit, row and column."""
    monkeypatch.setattr(row_blocks, "ROWS", 17)
    n, batch = 50, make_batch([unit(7, range(50)), unit(9, range(31))], side="left")
    scores = 3 * torch.randn(2, 2, n, n, generator=torch.Generator().manual_seed(3))
    seen = by_scores(scores, causal() & padding_mask(batch.real), sink)
    evidence = Evidence(2)
    measured(seen, batch, evidence=evidence)
    found = evidence.contexts()
    for head in range(2):
        looks = []
        for place, (number, first) in enumerate(((7, 0), (9, 19))):
            p = seen.maps()[place, head]
            best = [(i, int(p[i].argmax())) for i in range(first, n)]
            looks += [(float(p[i, j]), number, i - first, j - first) for i, j in best if j not in (first, i)]
        want = sorted(looks, reverse=True)[:8]
        told = [(c.weight, c.unit, c.row, c.column) for c in found[head]]
        assert [t[1:] for t in told] == [w[1:] for w in want]
        assert [t[0] for t in told] == pytest.approx([w[0] for w in want], abs=1e-5)


@pytest.mark.parametrize("special", [(), (0,), (0, 8), (0, 4, 8), (3,), tuple(range(9))])
@pytest.mark.parametrize("is_causal", [True, False])
def test_confidence_passes_over_special_tokens_wherever_they_stand(special: tuple[int, ...], is_causal: bool) -> None:
    n = 9
    flags = torch.zeros(n, len(CLASSES))
    flags[list(special), CLASSES.index("special")] = 1
    scores = 3 * torch.randn(2, 3, n, n, generator=torch.Generator().manual_seed(len(special))).double()
    seen = by_scores(scores, causal() if is_causal else None)
    made = measured(seen, distinct(n, 2), flags)
    p, ordinary = seen.maps(), [i for i in range(n) if i not in special]
    rows = [i for i in ordinary if not is_causal or any(key <= i for key in ordinary)]
    sums, counts = made.per_bucket("confidence")
    assert counts.sum(0).tolist() == [2 * len(rows)] * 3
    expected = p[:, :, rows][..., ordinary].amax(-1).sum((0, 2)) if rows else torch.zeros(3).double()
    np.testing.assert_allclose(sums.sum(0), expected.numpy(), atol=1e-9)
