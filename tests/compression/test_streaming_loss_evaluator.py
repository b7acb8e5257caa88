"""Loss with KV heads streaming: a built induction head is never recommended, a built previous-token head is."""

import math
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.far_attention import LENGTH, STREAMING_POLICY, FarAttentionMetric
from headwise.analysis.roles.prompt_role_definitions import streaming_candidate_mask
from headwise.compression.cache_study import CacheStudyConfig, cache_study
from headwise.compression.streaming_loss_evaluator import (
    BOUND,
    FACTS,
    KINDS,
    NOUNS,
    QUESTIONS,
    TOKENS,
    StreamingHeadLossEvaluator,
    StreamingTestResult,
)
from headwise.model import Transformer
from headwise.model.simulated_streaming_forward import streaming
from headwise.spec import Address
from tests.analysis.constructed_word_models import BETA, WordModel, scores_to_offset, scores_to_position

FILLERS = [f"w{i}x" for i in range(130)]


def words() -> list[str]:
    questions = " ".join(part.format("") for pair in QUESTIONS for part in pair).split()
    return [*FILLERS, *dict.fromkeys([*NOUNS, *questions])]


def texts(count: int = 24) -> list[str]:
    """Each filler once per text."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.permutation(FILLERS)) for _ in range(count)]


@cache
def build_induction() -> WordModel:
    """0.0 attends to the previous token, 1.0 to the token after an earlier copy, else to the first token."""
    built = WordModel(words(), heads=2, layers=2, parts=2, positions=LENGTH)
    eye = torch.eye(built.V)
    unit = math.sqrt(2 / built.model.spec.width)  # the norm makes a token this much longer
    built.set_head("0.0", position_scores=scores_to_offset(1, num_positions=LENGTH), output_map=unit * eye)
    built.set_head(
        "1.0",
        token_scores=BETA * eye,
        key_part=0,
        position_scores=scores_to_position(0, BETA / 2, LENGTH),
        output_map=eye,
        output_part=1,
    )
    return built


@pytest.fixture(scope="module")
def induction() -> WordModel:
    return build_induction()


@pytest.fixture(scope="module")
def evaluation(induction: WordModel) -> StreamingHeadLossEvaluator:
    return StreamingHeadLossEvaluator.of(induction.model, STREAMING_POLICY, texts())


def streamed(model: Transformer, evaluation: StreamingHeadLossEvaluator, key: str) -> StreamingTestResult:
    with streaming(model, (Address.parse(key),), STREAMING_POLICY):
        return evaluation.test(model)


def test_streaming_cost_built_heads_both_meet_the_attention_condition(induction: WordModel) -> None:
    accumulator = Accumulator(4)
    with torch.no_grad():
        assert FarAttentionMetric(texts(1)).run(induction.model, accumulator).skip_reason == ""
    local = streaming_candidate_mask(accumulator)
    assert local is not None
    assert local[0]
    assert local[2], "on text without repetition an induction head attends to the first token"


def test_streaming_cost_built_previous_token_head_passes(
    induction: WordModel, evaluation: StreamingHeadLossEvaluator
) -> None:
    test = streamed(induction.model, evaluation, "0.0")
    assert tuple(cost.kind for cost in test.costs) == KINDS
    assert [cost.loss_increase.mean for cost in test.costs] == pytest.approx([0] * 4, abs=1e-5)
    assert test.passed


def test_streaming_cost_built_induction_head_fails(
    induction: WordModel, evaluation: StreamingHeadLossEvaluator
) -> None:
    test = streamed(induction.model, evaluation, "1.0")
    costs = {cost.kind: cost.loss_increase for cost in test.costs}
    assert tuple(costs) == KINDS
    assert costs["running text"].mean == pytest.approx(0, abs=BOUND)
    assert costs["random tokens repeated"].low > 1
    assert costs["nouns repeated"].low > 1
    assert costs["facts recalled later"].low > BOUND
    assert not test.passed


def test_streaming_cost_equals_loss_by_hand(induction: WordModel, evaluation: StreamingHeadLossEvaluator) -> None:
    """Batch by batch, with a model whose spec has the cache policy."""
    small = hw.apply(hw.plan_pruning(induction.model, cache={"1.0": STREAMING_POLICY}), induction.model)
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
        assert cost.full_loss == pytest.approx(loss(induction.model, kind), abs=1e-5)
        assert cost.loss_increase.mean == pytest.approx(loss(small, kind) - cost.full_loss, abs=1e-5)


def test_streaming_cost_targets_are_outside_the_window(evaluation: StreamingHeadLossEvaluator) -> None:
    """A copy has its original, and an answer its fact, among the evicted tokens."""
    for batch in evaluation.kinds[TOKENS].batches:
        assert batch.targets is not None
        for ids, targets in zip(batch.ids, batch.targets, strict=True):
            for row in (targets >= 0).nonzero()[:, 0].tolist():
                (place,) = (ids[:row] == targets[row]).nonzero()[:, 0].tolist()
                assert place <= row - STREAMING_POLICY.window
    for batch in evaluation.kinds[FACTS].batches:
        assert batch.targets is not None
        for ids, targets in zip(batch.ids, batch.targets, strict=True):
            (row,) = (targets >= 0).nonzero()[:, 0].tolist()
            places = (ids[:row] == targets[row]).nonzero()[:, 0]
            assert STREAMING_POLICY.sink_tokens <= int(places.min())
            assert int(places.max()) <= row - STREAMING_POLICY.window


def test_cache_study_passkeys_reports_losses_on_retrieval_texts(induction: WordModel) -> None:
    study = {
        "sink_tokens": STREAMING_POLICY.sink_tokens,
        "window": STREAMING_POLICY.window,
        "corpus": texts(),
        "max_length": 100,
        "seeds": 0,
        "passkeys": 1,
    }
    for key, lost in (("0.0", False), ("1.0", True)):
        report = cache_study(induction.model, CacheStudyConfig(heads=key, **study)).report
        assert report is not None
        assert [cost.kind for cost in report.retrieval] == list(KINDS[1:])
        assert all((cost.loss_increase.low > BOUND) == lost for cost in report.retrieval)
        assert [row[0] for row in report.loss_rows()][-1] == "this plan − full cache, facts recalled later"


def test_streaming_cost_model_without_retrieval_never_passes() -> None:
    """A model that cannot repeat anything has no loss increase. This must not count as evidence."""
    built = WordModel(words(), heads=1, positions=LENGTH)
    built.set_head("0.0", position_scores=scores_to_offset(1, num_positions=LENGTH), output_map=torch.eye(built.V))
    evaluation = StreamingHeadLossEvaluator.of(built.model, STREAMING_POLICY, texts())
    assert set(evaluation.kinds) == {"running text"}
    assert not streamed(built.model, evaluation, "0.0").passed


def test_streaming_cost_short_context_measures_nothing() -> None:
    built = WordModel(words(), heads=1, positions=STREAMING_POLICY.sink_tokens + (STREAMING_POLICY.window or 0))
    assert StreamingHeadLossEvaluator.of(built.model, STREAMING_POLICY, texts()).kinds == {}
