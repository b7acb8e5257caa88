"""Induction scores on repeated random tokens: hand-built heads match their closed forms at any length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.induction import InductionMetric, RepeatedSequences, make_repeated_sequences
from headwise.analysis.metrics.task_metric import run_task_into_accumulator
from headwise.analysis.recording.batching import make_batch
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import attention_weights, causal
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import word_tokenizer
from tests.analysis.dense_reference import accumulate_call, batch_without_repeats, call_from_scores, make_sample
from tests.analysis.models import character_model
from tests.contract.layers import make_model


def harmonic(low: int, high: int) -> float:
    """Return 1/(low + 1) + … + 1/high."""
    return float((1 / np.arange(low + 1, high + 1)).sum())


def make_sequences(m: int, start: int) -> RepeatedSequences:
    """Make sequences R R and R R′ after `start` tokens."""
    prefix, R = torch.arange(start), torch.arange(start, start + 2 * m)
    repeated, control = torch.cat((prefix, R[:m], R[:m])), torch.cat((prefix, R))
    return RepeatedSequences(repeated[None], control[None], start, m)


def run_induction(scores: Tensor, m: int, start: int, plain: Tensor | None = None, **options: Tensor) -> Accumulator:
    """Run a causal head with given scores on R R, and with other scores or zeros on R R′."""
    accumulator = Accumulator(1)
    scores_by_kind = {True: scores, False: torch.zeros_like(scores) if plain is None else plain}
    calls = {
        is_repeated: call_from_scores(kind_scores.double()[None, None], causal(), **options)
        for is_repeated, kind_scores in scores_by_kind.items()
    }
    run_task_into_accumulator(ReplayModel(calls), InductionMetric(make_sequences(m, start)), accumulator)  # pyright: ignore[reportArgumentType]
    return accumulator


class ReplayModel:
    """A model with one hook point that replays calls: for R R, in which tokens repeat, and for R R′."""

    tokenizer = word_tokenizer([f"w{i}" for i in range(200)])
    spec, device, image_input = SimpleNamespace(kind="decoder", stacks=()), "cpu", None

    def __init__(self, calls: dict[bool, AttentionCall]) -> None:
        self.calls, self.listeners = calls, []
        self.hook_point = SimpleNamespace(head_ids=(0,), listen=self._listen)

    def gathered_hook_points(self) -> list[SimpleNamespace]:
        return [self.hook_point]

    @contextmanager
    def _listen(self, listener: Callable[[AttentionCall], None]) -> Iterator[None]:
        self.listeners = [listener]
        yield

    def __call__(self, ids: Tensor, **_: object) -> None:
        is_repeated = len(set(ids[0].tolist())) < ids.shape[1]
        for listener in self.listeners:
            listener(self.calls[is_repeated])


def scores_to_offset(n: int, offset: int, beta: float) -> Tensor:
    return beta * torch.eye(n).roll(-offset, 1).tril()


def mean_of_head(accumulator: Accumulator, name: str) -> float:
    return float(accumulator.mean(name)[0])


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("m", [2, 5, 32, 90])
def test_induction_metric_perfect_head_scores_one(m: int, start: int) -> None:
    """Also after a start token. A metric that divided by all rows would give 0.495, one with an additional row m/(m + 1)."""
    n = start + 2 * m
    induction = run_induction(scores_to_offset(n, m - 1, 90.0), m, start)
    assert mean_of_head(induction, "induction") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(induction, "induction value-weighted") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(induction, "duplicate") == pytest.approx(0, abs=1e-6)
    duplicate = run_induction(scores_to_offset(n, m, 90.0), m, start)
    assert mean_of_head(duplicate, "duplicate") == pytest.approx(1, abs=1e-6)
    assert mean_of_head(duplicate, "induction") == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("m", [2, 7, 25, 100])
def test_induction_metric_uniform_head_matches_closed_form(m: int) -> None:
    accumulator = run_induction(torch.zeros(2 * m, 2 * m), m, 0)
    for name in ("induction", "induction baseline", "induction value-weighted"):
        assert mean_of_head(accumulator, name) == pytest.approx((harmonic(m, 2 * m)) / m, abs=1e-6), name
    # the target of the first row is the first token, so the row does not count
    behind_first = harmonic(m + 1, 2 * m) / (m - 1)
    for name in ("duplicate", "duplicate baseline", "duplicate value-weighted"):
        assert mean_of_head(accumulator, name) == pytest.approx(behind_first, abs=1e-6), name
    assert accumulator.bucket_sums_and_counts("induction")[1].sum() == m
    assert accumulator.bucket_sums_and_counts("duplicate")[1].sum() == m - 1


@pytest.mark.parametrize("beta", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("m", [3, 32, 75])
def test_induction_metric_constructed_heads_match_closed_form(
    m: int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 11)  # targets in other blocks than their queries
    e, query_rows = np.exp(beta), range(m, 2 * m)
    induction = run_induction(scores_to_offset(2 * m, m - 1, beta), m, 0)
    assert mean_of_head(induction, "induction") == pytest.approx(np.mean([e / (e + i) for i in query_rows]), abs=1e-6)
    # the head matches its own position as well as the first copy
    duplicate = run_induction(scores_to_offset(2 * m, m, beta) + beta * torch.eye(2 * m), m, 0)
    want = np.mean([e / (2 * e + i - 1) for i in query_rows[1:]])
    assert mean_of_head(duplicate, "duplicate") == pytest.approx(want, abs=1e-6)


def test_induction_metric_baseline_is_same_offset_on_control() -> None:
    m, e = 13, np.exp(2.0)
    fixed = scores_to_offset(2 * m, m - 1, 2.0)  # attends m − 1 tokens back in every text, which is not induction
    accumulator = run_induction(fixed, m, 0, plain=fixed)
    assert mean_of_head(accumulator, "induction") == pytest.approx(
        mean_of_head(accumulator, "induction baseline"), abs=1e-9
    )
    assert mean_of_head(accumulator, "induction baseline") == pytest.approx(
        np.mean([e / (e + i) for i in range(m, 2 * m)]), abs=1e-6
    )


def test_induction_metric_sink_logit_halves_score() -> None:
    m = 6
    accumulator = run_induction(scores_to_offset(2 * m, m - 1, 40.0), m, 0, sink=torch.tensor([40.0]))
    assert mean_of_head(accumulator, "induction") == pytest.approx(0.5, abs=1e-6)
    assert mean_of_head(accumulator, "induction value-weighted") == pytest.approx(1, abs=1e-6), (
        "what is written all comes from there"
    )


@pytest.mark.parametrize("n", [5, 60, 170])
def test_offset_metric_first_token_head_is_not_previous_token(n: int) -> None:
    """99.9% on the first token and the remainder on the previous token: normalized without the first token, this would be a
    perfect previous-token head."""
    scores = torch.full((n, n), -60.0)
    scores[:, 0] = np.log(0.999)
    scores += torch.eye(n).roll(-1, 1).tril() * (60 + np.log(0.001))
    scores[1, 0] = 0.0
    accumulator = accumulate_call(call_from_scores(scores.double()[None, None], causal()), batch_without_repeats(n))
    assert mean_of_head(accumulator, "aimed 1") == pytest.approx(0.001, abs=1e-6)
    assert mean_of_head(accumulator, "first") > 0.99
    assert all(mean_of_head(accumulator, f"aimed {o}") < 0.002 for o in range(1, min(n - 1, 32)))


@pytest.mark.parametrize("n", [9, 80])
def test_induction_metric_sink_head_scores_zero(n: int) -> None:
    scores = torch.zeros(n, n)
    scores[:, 0] = 80.0
    accumulator = accumulate_call(
        call_from_scores(scores.double()[None, None], causal()), make_batch([make_sample(0, [1] * n)])
    )
    assert all(mean_of_head(accumulator, f"aimed {o}") < 1e-6 for o in range(1, min(n - 1, 32)))
    for m in (2, 9):
        echoed = run_induction(torch.zeros(2 * m, 2 * m).index_fill_(1, torch.tensor([0]), 80.0), m, 0)
        assert mean_of_head(echoed, "induction") < 1e-6
        assert mean_of_head(echoed, "duplicate") < 1e-6


@torch.no_grad()
def test_induction_metric_equals_dense_maps() -> None:
    """A grouped-query rotary model with a window: streamed scores equal those of its maps."""
    attention = AttentionSpec(width=20, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), window=11)
    model = make_model(ModelSpec(vocab=19, context=16, layers=1, attention=attention, positions="none"))
    model.tokenizer = word_tokenizer([f"w{i}" for i in range(17)])
    repeats = make_repeated_sequences(model, sequences=5, length=8)
    m, accumulator = repeats.length, Accumulator(4)
    run_task_into_accumulator(model, InductionMetric(repeats), accumulator)
    for kind, ids in (("", repeats.repeated), (" baseline", repeats.control)):
        recorded_maps = []
        with model.hook_points()[0].listen(
            lambda call, recorded_maps=recorded_maps: recorded_maps.append(
                attention_weights(call.q, call.k, call.params)
            )
        ):
            model(ids, hidden=True)
        (p,) = recorded_maps
        for name, offset in (("induction", m - 1), ("duplicate", m)):
            first = m if name == "induction" else m + 1
            want = torch.stack([p[:, :, i, i - offset] for i in range(first, 2 * m)]).mean((0, 1))
            np.testing.assert_allclose(accumulator.mean(name + kind), want, atol=1e-9)
    assert [int(x) for x in accumulator.bucket_sums_and_counts("induction")[1][:6, 0]] == [m] * 5 + [0]


def test_make_repeated_sequences_tokens_and_seed() -> None:
    model = character_model(ModelSpec(vocab=17, context=64, layers=1, attention=AttentionSpec(width=12, heads=2)))
    sequences = make_repeated_sequences(model, sequences=7, length=32, seed=3)
    special = {i for i in model.tokenizer.special.values() if i is not None}  # pyright: ignore[reportOptionalMemberAccess]
    m, plain = sequences.length, 17 - len(special)
    assert m <= plain // 2, "R and R′ share no token"
    for repeated, control in zip(sequences.repeated.tolist(), sequences.control.tolist(), strict=True):
        assert repeated[:m] == repeated[m:] == control[:m]
        assert len(set(control)) == 2 * m
        assert not special & set(control)
    assert torch.equal(sequences.repeated, make_repeated_sequences(model, sequences=7, length=32, seed=3).repeated)
    assert not torch.equal(sequences.repeated, make_repeated_sequences(model, sequences=7, length=32, seed=4).repeated)


def test_make_repeated_sequences_short_context_is_empty() -> None:
    spec = ModelSpec(vocab=17, context=3, layers=1, attention=AttentionSpec(width=12, heads=2))
    model = SimpleNamespace(spec=spec, tokenizer=word_tokenizer(["a", "b", "c"]), device="cpu", image_input=None)
    sequences = make_repeated_sequences(model)  # pyright: ignore[reportArgumentType]
    assert len(sequences.repeated) == 0
    accumulator = Accumulator(2)
    model.gathered_hook_points = list
    run_task_into_accumulator(model, InductionMetric(sequences), accumulator)  # pyright: ignore[reportArgumentType]
    assert np.isnan([accumulator.mean(name) for name in ("induction", "duplicate value-weighted")]).all(), (
        "not asked, so not told"
    )
