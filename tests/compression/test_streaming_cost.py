"""Loss with KV heads streaming: a built induction head is never recommended, a built previous-token head is."""

import math
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.long_offsets import KEEPS, LENGTH, FarPlaces
from headwise.analysis.roles.prompt_roles import could_stream
from headwise.compression.cache_study import CacheStudy, cache_study
from headwise.compression.streaming_cost import (
    BOUND,
    FACTS,
    KINDS,
    NOUNS,
    QUESTIONS,
    TOKENS,
    StreamingEvaluation,
    StreamingTest,
)
from headwise.compression.streaming_selection import streaming_now
from headwise.model import Transformer
from headwise.spec import Address
from tests.analysis.constructed_word_models import BETA, Worded, back, to_place

FILLERS = [f"w{i}x" for i in range(130)]


def words() -> list[str]:
    questions = " ".join(part.format("") for pair in QUESTIONS for part in pair).split()
    return [*FILLERS, *dict.fromkeys([*NOUNS, *questions])]


def texts(count: int = 24) -> list[str]:
    """Each filler once per text."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.permutation(FILLERS)) for _ in range(count)]


@cache
def build_induction() -> Worded:
    """0.0 attends to the previous token, 1.0 to the token after an earlier copy, else to the first token."""
    built = Worded(words(), heads=2, layers=2, parts=2, places=LENGTH)
    eye = torch.eye(built.V)
    one = math.sqrt(2 / built.model.spec.width)  # the norm makes a token this much longer
    built.head("0.0", places=back(1, places=LENGTH), write=one * eye)
    built.head("1.0", tokens=BETA * eye, at=0, places=to_place(0, BETA / 2, LENGTH), write=eye, into=1)
    return built


@pytest.fixture(scope="module")
def induction() -> Worded:
    return build_induction()


@pytest.fixture(scope="module")
def evaluation(induction: Worded) -> StreamingEvaluation:
    return StreamingEvaluation.of(induction.model, KEEPS, texts())


def streamed(model: Transformer, evaluation: StreamingEvaluation, key: str) -> StreamingTest:
    with streaming_now(model, (Address.parse(key),), KEEPS):
        return evaluation.test(model)


def test_streaming_cost_built_heads_both_meet_the_attention_condition(induction: Worded) -> None:
    tally = Tally(4)
    with torch.no_grad():
        assert FarPlaces(texts(1)).run(induction.model, tally) == ""
    local = could_stream(tally)
    assert local is not None
    assert local[0]
    assert local[2], "on text without repetition an induction head attends to the first token"


def test_streaming_cost_built_previous_token_head_passes(induction: Worded, evaluation: StreamingEvaluation) -> None:
    test = streamed(induction.model, evaluation, "0.0")
    assert tuple(cost.kind for cost in test.costs) == KINDS
    assert [cost.more.mean for cost in test.costs] == pytest.approx([0] * 4, abs=1e-5)
    assert test.passed


def test_streaming_cost_built_induction_head_fails(induction: Worded, evaluation: StreamingEvaluation) -> None:
    test = streamed(induction.model, evaluation, "1.0")
    costs = {cost.kind: cost.more for cost in test.costs}
    assert tuple(costs) == KINDS
    assert costs["running text"].mean == pytest.approx(0, abs=BOUND)
    assert costs["random tokens repeated"].low > 1
    assert costs["nouns repeated"].low > 1
    assert costs["facts asked for later"].low > BOUND
    assert not test.passed


def test_streaming_cost_equals_loss_by_hand(induction: Worded, evaluation: StreamingEvaluation) -> None:
    """Batch by batch, with a model whose spec has the cache policy."""
    small = hw.Plan.make(induction.model, cache={"1.0": KEEPS}).apply(induction.model)
    costs = {cost.kind: cost for cost in evaluation.test(small).costs}

    def loss(model: Transformer, kind: str) -> float:
        total, count = 0.0, 0
        for batch in evaluation.kinds[kind].batches:
            assert batch.targets is not None
            with torch.no_grad():
                logits = model(batch.ids).flatten(0, 1)
            total += float(F.cross_entropy(logits.double(), batch.targets.flatten(), reduction="sum"))
            count += int((batch.targets >= 0).sum())
        return total / count

    for kind, cost in costs.items():
        assert cost.full == pytest.approx(loss(induction.model, kind), abs=1e-5)
        assert cost.more.mean == pytest.approx(loss(small, kind) - cost.full, abs=1e-5)


def test_streaming_cost_targets_are_outside_the_window(evaluation: StreamingEvaluation) -> None:
    """A copy has its original, and an answer its fact, among the evicted tokens."""
    for batch in evaluation.kinds[TOKENS].batches:
        assert batch.targets is not None
        for ids, targets in zip(batch.ids, batch.targets, strict=True):
            for row in (targets >= 0).nonzero()[:, 0].tolist():
                (place,) = (ids[:row] == targets[row]).nonzero()[:, 0].tolist()
                assert place <= row - KEEPS.last
    for batch in evaluation.kinds[FACTS].batches:
        assert batch.targets is not None
        for ids, targets in zip(batch.ids, batch.targets, strict=True):
            (row,) = (targets >= 0).nonzero()[:, 0].tolist()
            places = (ids[:row] == targets[row]).nonzero()[:, 0]
            assert KEEPS.first <= int(places.min())
            assert int(places.max()) <= row - KEEPS.last


def test_cache_study_passkeys_reports_losses_on_retrieval_texts(induction: Worded) -> None:
    study = {"first": KEEPS.first, "last": KEEPS.last, "on": texts(), "length": 100, "seeds": 0, "passkeys": 1}
    for key, lost in (("0.0", False), ("1.0", True)):
        report = cache_study(induction.model, CacheStudy(heads=key, **study)).report
        assert report is not None
        assert [cost.kind for cost in report.retrieval] == list(KINDS[1:])
        assert all((cost.more.low > BOUND) == lost for cost in report.retrieval)
        assert [row[0] for row in report.losses()][-1] == "this plan − whole, facts asked for later"


def test_streaming_cost_model_without_retrieval_never_passes() -> None:
    """A model that cannot repeat anything loses nothing, and that is no evidence."""
    built = Worded(words(), heads=1, places=LENGTH)
    built.head("0.0", places=back(1, places=LENGTH), write=torch.eye(built.V))
    evaluation = StreamingEvaluation.of(built.model, KEEPS, texts())
    assert set(evaluation.kinds) == {"running text"}
    assert not streamed(built.model, evaluation, "0.0").passed


def test_streaming_cost_short_context_measures_nothing() -> None:
    built = Worded(words(), heads=1, places=KEEPS.first + (KEEPS.last or 0))
    assert StreamingEvaluation.of(built.model, KEEPS, texts()).kinds == {}
