"""Attention outside the window: hand-built heads match their closed forms."""

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.far_attention import (
    LENGTH,
    STREAMING_POLICY,
    TEXTS,
    FarAttentionMetric,
    attention_outside_window,
    concatenated_texts,
)
from headwise.analysis.metrics.task_metric import TaskMetricDetails
from headwise.analysis.roles.prompt_role_definitions import PROMPT_ROLES, streaming_candidate_mask
from headwise.analysis.roles.roles import assess, score
from headwise.model import Transformer
from headwise.spec import AttentionSpec, CachePolicy, ModelSpec, Rotary
from headwise.text.build_tokenizers import bpe_tokenizer, word_tokenizer
from tests.analysis.constructed_word_models import WordModel, scores_to_offset, scores_to_position
from tests.analysis.test_false_alarms import GAINS, sentencepiece_tokenizer, untrained_model

WORDS = [f"w{i}" for i in range(20)]
POSITION, OFFSET = 9, 45
T = np.arange(LENGTH)


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, 14)) for _ in range(60)]


def run_far_offset_task(built: WordModel) -> tuple[Accumulator, TaskMetricDetails]:
    accumulator, metric = Accumulator(built.heads), FarAttentionMetric(texts())
    with torch.no_grad():
        result = metric.run(built.model, accumulator)
    assert result.skip_reason == ""
    return accumulator, result


@pytest.mark.parametrize("beta", [3.0, 6.0, 90.0])
def test_far_offset_task_constructed_heads_match_closed_form(beta: float) -> None:
    """The weight is e^β / (e^β + i) in a row that sees i other keys. The baseline is 1 / number of visible keys."""
    built = WordModel(WORDS, heads=5, positions=LENGTH)
    eye, e = torch.eye(built.V), np.exp(beta)
    built.set_head("0.0", position_scores=scores_to_offset(OFFSET, beta, LENGTH), output_map=eye)
    built.set_head("0.1", position_scores=scores_to_position(POSITION, beta, LENGTH), output_map=eye)
    built.set_head("0.2", position_scores=scores_to_position(0, beta, LENGTH), output_map=eye)
    built.set_head("0.3", output_map=eye)
    built.set_head("0.4", position_scores=scores_to_offset(1, beta, LENGTH), output_map=eye)
    accumulator, result = run_far_offset_task(built)
    far, fixed, beyond = (accumulator.mean(name) for name in ("far offset", "fixed position", "outside window"))
    assert result.chosen_offsets["far offset"][0] == OFFSET
    assert result.chosen_offsets["fixed position"][1] == POSITION
    rows = T[OFFSET + 1 :]  # rows whose target is not the first token
    assert far[0] == pytest.approx(np.mean(e / (e + rows)), rel=1e-5)
    assert accumulator.mean("far offset value-weighted")[0] == pytest.approx(far[0], rel=1e-5)
    assert accumulator.mean("far offset baseline")[0] == pytest.approx(np.mean(1 / (rows + 1)), rel=1e-6)
    rows = T[POSITION + WINDOW :]
    assert fixed[1] == pytest.approx(np.mean(e / (e + rows)), rel=1e-5)
    assert accumulator.mean("fixed position baseline")[1] == pytest.approx(np.mean(1 / (rows + 1)), rel=1e-6)
    for name in ("far offset", "fixed position"):
        assert accumulator.mean(name)[3] == pytest.approx(accumulator.mean(f"{name} baseline")[3], rel=1e-5), (
            "alike everywhere"
        )
        assert accumulator.mean(name)[2] <= accumulator.mean(name)[3], "a sink"
    rows = T[STREAMING_POLICY.cached_tokens(LENGTH) :]
    forgotten = rows + 1 - STREAMING_POLICY.cached_tokens(LENGTH)
    assert beyond[3] == pytest.approx(np.mean(forgotten / (rows + 1)), rel=1e-5)
    small_mass = pytest.approx(np.mean(forgotten / (e + rows)), rel=1e-5, abs=1e-30)
    assert (beyond[2], beyond[4]) == (small_mass, small_mass)
    evidence, _ = assess(score(accumulator, None, roles=PROMPT_ROLES), accumulator.heads)
    levels = [
        {
            role_evidence.role: role_evidence.evidence_level
            for role_evidence in head_evidence
            if role_evidence.is_supported
        }
        for head_evidence in evidence
    ]
    enough = beta > 5
    assert levels == [
        {"far offset": "value-weighted"} if enough else {},
        {"fixed position": "value-weighted"} if enough else {},
        {},
        {},
        {},
    ]
    if enough:
        metadata = {"corpus": "", "relations_corpus": "", "chosen_offsets": result.chosen_offsets}
        labeled, _ = assess(score(accumulator, None, PROMPT_ROLES), accumulator.heads, metadata)
        assert labeled[0][0].detail == str(OFFSET)
    streams = streaming_candidate_mask(accumulator)
    assert streams is not None
    assert streams.tolist() == [False, False, beta > 50, False, beta > 50], "at a β of 6 there is .08 beyond"


def test_far_offset_task_encoder_finds_offsets_ahead() -> None:
    built = WordModel(WORDS, heads=2, positions=LENGTH, kind="encoder")
    built.set_head("0.0", position_scores=90 * torch.eye(LENGTH).roll(40, 1).triu(), output_map=torch.eye(built.V))
    built.set_head("0.1", position_scores=scores_to_position(100, num_positions=LENGTH), output_map=torch.eye(built.V))
    accumulator, result = run_far_offset_task(built)
    assert result.chosen_offsets["far offset"][0] == -40
    assert result.chosen_offsets["fixed position"][1] == 100
    assert accumulator.mean("far offset")[0] == accumulator.mean("fixed position")[1] == pytest.approx(1, abs=1e-6)
    assert np.isnan(accumulator.mean("outside window")).all()
    assert streaming_candidate_mask(accumulator) is None


def test_far_offset_task_skips_layers_with_window() -> None:
    """The layers of a model can have different windows. Only layers that see the full text are measured."""
    attention = AttentionSpec(width=12, heads=2, rotary=Rotary(), window=16)
    model = Transformer(ModelSpec(vocab=24, context=LENGTH, layers=1, attention=attention, positions="none"))
    model.tokenizer = word_tokenizer(WORDS)
    accumulator = Accumulator(2)
    with torch.no_grad():
        assert FarAttentionMetric(texts()).run(model, accumulator).skip_reason == ""
    assert all(np.isnan(accumulator.mean(name)).all() for name in ("far offset", "fixed position", "outside window"))
    assert assess(score(accumulator, None, roles=PROMPT_ROLES), 2)[0] == [[], []]


def test_concatenated_texts_have_fixed_length_and_follow_seed() -> None:
    built = WordModel(WORDS, heads=1, positions=LENGTH)
    sequences = concatenated_texts(built.model, texts())
    assert (len(sequences), {len(ids) for ids in sequences}) == (TEXTS, {LENGTH})
    assert sequences != concatenated_texts(built.model, texts(), seed=1)
    assert concatenated_texts(WordModel(WORDS, heads=1, positions=LENGTH - 1).model, texts()) == []
    assert concatenated_texts(built.model, ["w1 w2"]) == []
    assert "too little context or text" in FarAttentionMetric(["w1 w2"]).run(built.model, Accumulator(1)).skip_reason


def test_attention_outside_window_equals_hand_count() -> None:
    """Keys from the fifth to the fourth last, counted by hand."""
    weights = torch.arange(1.0, 11.0).expand(2, 10)  # (rows, S)
    assert attention_outside_window(weights, [9, 6], CachePolicy(sink_tokens=2, window=4)).tolist() == [
        3 + 4 + 5 + 6,
        3,
    ]


def false_alarms(seeds: range, gain: float, kind: str, size: tuple[int, int, int]) -> list[str]:
    corpus, labels = texts(), []
    tokenizer = sentencepiece_tokenizer() if kind == "pieces" else bpe_tokenizer(corpus * 4, vocab_size=300)
    for seed in seeds:
        model = untrained_model(seed, gain, tokenizer, *size)
        accumulator = Accumulator(len(model.spec.head_addresses))
        with torch.no_grad():
            task = FarAttentionMetric(None if kind == "pieces" else corpus)
            assert task.run(model, accumulator, seed).skip_reason == ""
        evidence, _ = assess(score(accumulator, None, roles=PROMPT_ROLES), accumulator.heads)
        labels += [
            f"{role_evidence.role}, {role_evidence.evidence_level}"
            for head_evidence in evidence
            for role_evidence in head_evidence
            if role_evidence.is_supported
        ]
    return labels


def test_far_offset_task_sharp_random_heads_have_no_role() -> None:
    assert false_alarms(range(400, 401), 4.0, "pieces", (3, 6, 48)) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [(3, 6, 48), (2, 16, 64)])
@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@pytest.mark.parametrize("gain", GAINS)
def test_far_offset_task_random_models_have_no_roles(gain: float, kind: str, size: tuple[int, int, int]) -> None:
    alarm_labels = false_alarms(range(400, 412), gain, kind, size)
    print(f"gain {gain:g}, {kind}, {size}: {alarm_labels}")
    assert alarm_labels == []
