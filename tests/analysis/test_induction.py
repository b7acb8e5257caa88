"""Random tokens said twice: heads built by hand score what their closed forms say, whatever the length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.induction import Echo, Repeats, make_repeats
from headwise.analysis.metrics.tasks import run_task
from headwise.analysis.recording.batching import make_batch
from headwise.heads.hook_point import Seen
from headwise.kernels import causal, maps
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import word_tokenizer
from tests.analysis.dense_reference import by_scores, distinct, measured, unit
from tests.analysis.models import reading
from tests.contract.layers import make_model


def harmonic(low: int, high: int) -> float:
    """1/(low + 1) + … + 1/high"""
    return float((1 / np.arange(low + 1, high + 1)).sum())


def repeats_of(m: int, start: int) -> Repeats:
    """R R and R R′ behind `start` tokens."""
    frame, R = torch.arange(start), torch.arange(start, start + 2 * m)
    twice, once = torch.cat((frame, R[:m], R[:m])), torch.cat((frame, R))
    return Repeats(twice[None], once[None], start, m)


def echo(scores: Tensor, m: int, start: int, plain: Tensor | None = None, **options: Tensor) -> Tally:
    """A causal head with these scores on R R, and with others, or none, on R R′."""
    tally = Tally(1)
    given = {True: scores, False: torch.zeros_like(scores) if plain is None else plain}
    calls = {twice: by_scores(some.double()[None, None], causal(), **options) for twice, some in given.items()}
    run_task(Recited(calls), Echo(repeats_of(m, start)), tally)  # pyright: ignore[reportArgumentType]
    return tally


class Recited:
    """A model of one site that gives these calls: for R R, in which a token comes twice, and for R R′."""

    tokenizer = word_tokenizer([f"w{i}" for i in range(200)])
    spec, device, pictures = SimpleNamespace(kind="decoder", stacks=()), "cpu", None

    def __init__(self, calls: dict[bool, Seen]) -> None:
        self.calls, self.heard = calls, []
        self.site = SimpleNamespace(head_ids=(0,), listen=self._listen)

    def all_sites(self) -> list[SimpleNamespace]:
        return [self.site]

    @contextmanager
    def _listen(self, listener: Callable[[Seen], None]) -> Iterator[None]:
        self.heard = [listener]
        yield

    def __call__(self, ids: Tensor, **_: object) -> None:
        twice = len(set(ids[0].tolist())) < ids.shape[1]
        for listener in self.heard:
            listener(self.calls[twice])


def back(n: int, offset: int, beta: float) -> Tensor:
    return beta * torch.eye(n).roll(-offset, 1).tril()


def one(tally: Tally, name: str) -> float:
    return float(tally.mean(name)[0])


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("m", [2, 5, 32, 90])
def test_a_perfect_head_scores_one_at_any_length(m: int, start: int) -> None:
    """Also behind a start token: a detector that divided by all rows would say .495, one with a row too many m/(m + 1)."""
    n = start + 2 * m
    induction = echo(back(n, m - 1, 90.0), m, start)
    assert one(induction, "induction") == pytest.approx(1, abs=1e-6)
    assert one(induction, "induction valued") == pytest.approx(1, abs=1e-6)
    assert one(induction, "duplicate") == pytest.approx(0, abs=1e-6)
    duplicate = echo(back(n, m, 90.0), m, start)
    assert one(duplicate, "duplicate") == pytest.approx(1, abs=1e-6)
    assert one(duplicate, "induction") == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("m", [2, 7, 25, 100])
def test_the_uniform_head(m: int) -> None:
    made = echo(torch.zeros(2 * m, 2 * m), m, 0)
    for name in ("induction", "induction null", "induction valued"):
        assert one(made, name) == pytest.approx((harmonic(m, 2 * m)) / m, abs=1e-6), name
    behind_first = harmonic(m + 1, 2 * m) / (m - 1)  # the first row's target is the first token: not asked
    for name in ("duplicate", "duplicate null", "duplicate valued"):
        assert one(made, name) == pytest.approx(behind_first, abs=1e-6), name
    assert made.per_bucket("induction")[1].sum() == m
    assert made.per_bucket("duplicate")[1].sum() == m - 1


@pytest.mark.parametrize("beta", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("m", [3, 32, 75])
def test_constructed_heads(m: int, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "ROWS", 11)  # targets in blocks of their own
    e, asked = np.exp(beta), range(m, 2 * m)
    induction = echo(back(2 * m, m - 1, beta), m, 0)
    assert one(induction, "induction") == pytest.approx(np.mean([e / (e + i) for i in asked]), abs=1e-6)
    both = echo(back(2 * m, m, beta) + beta * torch.eye(2 * m), m, 0)  # its own copy fits as well as the first one
    want = np.mean([e / (2 * e + i - 1) for i in asked[1:]])
    assert one(both, "duplicate") == pytest.approx(want, abs=1e-6)


def test_the_null_is_the_same_offset_without_repetition() -> None:
    m, e = 13, np.exp(2.0)
    fixed = back(2 * m, m - 1, 2.0)  # looks m − 1 back whatever it reads: no induction
    made = echo(fixed, m, 0, plain=fixed)
    assert one(made, "induction") == pytest.approx(one(made, "induction null"), abs=1e-9)
    assert one(made, "induction null") == pytest.approx(np.mean([e / (e + i) for i in range(m, 2 * m)]), abs=1e-6)


def test_a_sink_logit_takes_its_share() -> None:
    m = 6
    made = echo(back(2 * m, m - 1, 40.0), m, 0, sink=torch.tensor([40.0]))
    assert one(made, "induction") == pytest.approx(0.5, abs=1e-6)
    assert one(made, "induction valued") == pytest.approx(1, abs=1e-6), "what is written all comes from there"


@pytest.mark.parametrize("n", [5, 60, 170])
def test_a_head_that_rests_on_the_first_token_is_no_previous_token_head(n: int) -> None:
    """99.9 % on the first token and the rest on the previous: renormalised without it, that would be a perfect head."""
    scores = torch.full((n, n), -60.0)
    scores[:, 0] = np.log(0.999)
    scores += torch.eye(n).roll(-1, 1).tril() * (60 + np.log(0.001))
    scores[1, 0] = 0.0
    made = measured(by_scores(scores.double()[None, None], causal()), distinct(n))
    assert one(made, "aimed 1") == pytest.approx(0.001, abs=1e-6)
    assert one(made, "first") > 0.99
    assert all(one(made, f"aimed {o}") < 0.002 for o in range(1, min(n - 1, 32)))


@pytest.mark.parametrize("n", [9, 80])
def test_a_pure_sink_scores_nothing(n: int) -> None:
    scores = torch.zeros(n, n)
    scores[:, 0] = 80.0
    made = measured(by_scores(scores.double()[None, None], causal()), make_batch([unit(0, [1] * n)]))
    assert all(one(made, f"aimed {o}") < 1e-6 for o in range(1, min(n - 1, 32)))
    for m in (2, 9):
        echoed = echo(torch.zeros(2 * m, 2 * m).index_fill_(1, torch.tensor([0]), 80.0), m, 0)
        assert one(echoed, "induction") < 1e-6
        assert one(echoed, "duplicate") < 1e-6


@torch.no_grad()
def test_against_whole_maps() -> None:
    """A grouped rotary model with a window: the streamed scores are those of its maps."""
    attention = AttentionSpec(width=20, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), window=11)
    model = make_model(ModelSpec(vocab=19, context=16, layers=1, attention=attention, positions="none"))
    model.tokenizer = word_tokenizer([f"w{i}" for i in range(17)])
    repeats = make_repeats(model, sequences=5, length=8)
    m, tally = repeats.length, Tally(4)
    run_task(model, Echo(repeats), tally)
    for kind, ids in (("", repeats.twice), (" null", repeats.once)):
        kept = []
        with model.sites()[0].listen(lambda seen, kept=kept: kept.append(maps(seen.q, seen.k, seen.terms))):
            model(ids, hidden=True)
        (p,) = kept
        for name, offset in (("induction", m - 1), ("duplicate", m)):
            first = m if name == "induction" else m + 1
            want = torch.stack([p[:, :, i, i - offset] for i in range(first, 2 * m)]).mean((0, 1))
            np.testing.assert_allclose(tally.mean(name + kind), want, atol=1e-9)
    assert [int(x) for x in tally.per_bucket("induction")[1][:6, 0]] == [m] * 5 + [0]


def test_what_is_read() -> None:
    model = reading(ModelSpec(vocab=17, context=64, layers=1, attention=AttentionSpec(width=12, heads=2)))
    made = make_repeats(model, sequences=7, length=32, seed=3)
    special = {i for i in model.tokenizer.special.values() if i is not None}  # pyright: ignore[reportOptionalMemberAccess]
    m, plain = made.length, 17 - len(special)
    assert m <= plain // 2, "R and R′ share no token"
    for twice, once in zip(made.twice.tolist(), made.once.tolist(), strict=True):
        assert twice[:m] == twice[m:] == once[:m]
        assert len(set(once)) == 2 * m
        assert not special & set(once)
    assert torch.equal(made.twice, make_repeats(model, sequences=7, length=32, seed=3).twice)
    assert not torch.equal(made.twice, make_repeats(model, sequences=7, length=32, seed=4).twice)


def test_no_room_to_repeat() -> None:
    spec = ModelSpec(vocab=17, context=3, layers=1, attention=AttentionSpec(width=12, heads=2))
    model = SimpleNamespace(spec=spec, tokenizer=word_tokenizer(["a", "b", "c"]), device="cpu", pictures=None)
    made = make_repeats(model)  # pyright: ignore[reportArgumentType]
    assert len(made.twice) == 0
    tally = Tally(2)
    model.all_sites = list
    run_task(model, Echo(made), tally)  # pyright: ignore[reportArgumentType]
    assert np.isnan([tally.mean(name) for name in ("induction", "duplicate valued")]).all(), "not asked, so not told"
