"""User-defined metrics and roles: as exact as the built-in ones, and supported everywhere."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric import AttentionToPosition, AttentionToTokens, Metric, MetricSpec
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.retrieval import CUE, NEEDLE, RetrievalMetric, make_needle_texts
from headwise.analysis.metrics.task_metric import run_task_into_accumulator
from headwise.analysis.recording.batching import TextSample, make_batches
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Role
from headwise.errors import HeadwiseError
from headwise.kernels import causal
from headwise.text.annotated_document import Document
from headwise.ui.report_data import make_report_data
from tests.analysis.constructed_heads import WORDS, decoder, documents
from tests.analysis.dense_reference import batch_without_repeats, call_from_scores, make_sample

N = 13


def every_third_token(text: TextSample) -> list[float]:
    """Mark every third token."""
    return [float(position % 3 == 0) for position in range(len(text.ids))]


def two_tokens_back(text: TextSample) -> list[int]:
    return [position - 2 for position in range(len(text.ids))]


def run_metric(metric: Metric, scores: torch.Tensor, norms: torch.Tensor | None = None, **options: Any) -> Accumulator:
    accumulator = Accumulator(1)
    call = call_from_scores(scores.double()[None, None], causal(), norms=norms)
    MetricRunner(accumulator, [metric], **options).on_call(call, batch_without_repeats(len(scores)), 0)
    return accumulator


def test_attention_to_tokens_uniform_head_matches_closed_form() -> None:
    """Uniform causal attention: row i sees ⌊i/3⌋ marked tokens after the first one, out of i + 1."""
    norms = torch.arange(1.0, N + 1)
    accumulator = run_metric(AttentionToTokens("third", every_third_token), torch.zeros(N, N), norms)
    rows = [i for i in range(N) if i >= 3]  # the first token is marked, but never a target
    expected = np.mean([(i // 3) / (i + 1) for i in rows])
    expected_value_weighted = np.mean([sum(j + 1 for j in range(3, i + 1, 3)) / sum(range(1, i + 2)) for i in rows])
    assert accumulator.mean("third") == pytest.approx([expected])
    assert accumulator.mean("third baseline") == pytest.approx([expected])
    assert accumulator.mean("third value-weighted") == pytest.approx([expected_value_weighted])
    assert accumulator.bucket_sums_and_counts("third")[1].sum() == len(rows)


def test_attention_to_position_matches_closed_form() -> None:
    """Score β two tokens back, 0 elsewhere: the weight is e^β / (e^β + i) in row i. The value-weighted score is proportional
    to norms."""
    beta, scores = 1.7, torch.zeros(N, N)
    scores[torch.arange(2, N), torch.arange(N - 2)] = beta
    norms = torch.arange(1.0, N + 1)
    accumulator = run_metric(AttentionToPosition("two back", two_tokens_back), scores, norms)
    rows = range(3, N)  # the target of row 2 would be the first token
    top = np.exp(beta)
    assert accumulator.mean("two back") == pytest.approx([np.mean([top / (top + i) for i in rows])])
    assert accumulator.mean("two back baseline") == pytest.approx([np.mean([1 / (i + 1) for i in rows])])
    expected_value_weighted = [top * (i - 1) / (top * (i - 1) + sum(range(1, i + 2)) - (i - 1)) for i in rows]
    assert accumulator.mean("two back value-weighted") == pytest.approx([np.mean(expected_value_weighted)])


def test_attention_to_position_hits_are_shared_by_ties() -> None:
    """Hits: uniform attention shares one hit over all visible keys; a head that attends two back in every other row scores
    half."""
    hits = AttentionToPosition("two back", two_tokens_back, hits=True)
    rows = range(3, N)
    assert run_metric(hits, torch.zeros(N, N)).mean("two back") == pytest.approx([np.mean([1 / (i + 1) for i in rows])])
    scores = torch.zeros(N, N)
    for i in range(N):
        scores[i, i - 2 if i % 2 and i > 1 else i] = 3.0
    accumulator = run_metric(hits, scores)
    assert accumulator.mean("two back") == pytest.approx([np.mean([i % 2 for i in rows])])
    assert accumulator.mean("two back value-weighted") == pytest.approx(accumulator.mean("two back"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_custom_metrics_do_not_depend_on_padding(side: str) -> None:
    model, texts = decoder(), [make_sample(0, range(2, 23)), make_sample(1, range(5, 16))]
    metrics = [AttentionToTokens("third", every_third_token), AttentionToPosition("two back", two_tokens_back)]
    accumulators = []
    for batches in (make_batches(texts, 4096, side), (batch for text in texts for batch in make_batches([text]))):
        accumulator = Accumulator(12)
        with torch.no_grad():
            MetricRunner(accumulator, metrics).run(model, batches)
        accumulators.append(accumulator)
    for name in accumulators[0].fields:
        assert accumulators[0].mean(name) == pytest.approx(accumulators[1].mean(name), abs=1e-6, nan_ok=True)


ONE_BACK = AttentionToPosition(
    "one back", lambda text: [place - 1 for place in range(len(text.ids))], hue=120, high_means="looks back"
)
LOOKS_BACK = Role("looks back", ONE_BACK.score_spec, 0.3)


@pytest.fixture(scope="module")
def custom_profile() -> Profile:
    return profile(decoder(), documents(), metrics=[ONE_BACK], roles=[LOOKS_BACK], causal=False)


def test_custom_metric_equals_builtin_previous_token(custom_profile: Profile) -> None:
    """A custom metric for one token back: scores, role, examples and heads equal those of `previous token`."""
    for custom_name, builtin_name in (
        ("one back", "aimed 1"),
        ("one back baseline", "aimed baseline 1"),
        ("one back value-weighted", "aimed value-weighted 1"),
    ):
        assert custom_profile.metric(custom_name) == pytest.approx(custom_profile.metric(builtin_name), abs=1e-6)
    heads_by_role = custom_profile.heads_by_role()
    assert heads_by_role["looks back"] == heads_by_role["previous token"]
    head = custom_profile[heads_by_role["looks back"][0]]
    custom, builtin = (next(s for s in head.roles if s.role == role) for role in ("looks back", "previous token"))
    assert (custom.evidence_level, custom.score, custom.baseline, custom.rows) == pytest.approx(
        (builtin.evidence_level, builtin.score, builtin.baseline, builtin.rows)
    )
    assert head.examples_by_role["looks back"] == head.examples_by_role["previous token"] != ()


def test_custom_metric_appears_in_files_tables_and_plots(custom_profile: Profile, tmp_path: Path) -> None:
    loaded = Profile.load(custom_profile.save(tmp_path / "made.npz"))
    assert loaded.metric_specs == custom_profile.metric_specs
    assert loaded.extra_roles == custom_profile.extra_roles == (LOOKS_BACK,)
    for profiled in (custom_profile, loaded):
        assert profiled.heads_by_role()["looks back"]
        assert profiled["0.0"].examples_by_role["looks back"] == custom_profile["0.0"].examples_by_role["looks back"]
        assert "one back" in profiled.table()[0]
        assert profiled.to_dict()["heads"][0]["metrics"]["one back"] > 0.9
        report_data = make_report_data(profiled)
        assert report_data["heads"][0]["metrics"]["one back"] > 0.9
        assert report_data["metrics"]["one back"]["more"] == "looks back"
        assert "looks back" in report_data["heads"][0]["roles"]
        assert profiled.plot.depth(["one back"]).rows[0]["measure"] == "one back"
        assert any(role_evidence.role == "looks back" for head in profiled for role_evidence in head.roles)
        assert [row["head"] for row in profiled.plot.roles().rows] == [str(address) for address in profiled.addresses]


def test_profile_merge_with_custom_metric_equals_single_pass(custom_profile: Profile) -> None:
    texts, model = documents(), decoder()
    parts = [
        profile(model, docs, metrics=[ONE_BACK], roles=[LOOKS_BACK], causal=False) for docs in (texts[:30], texts[30:])
    ]
    merged = parts[0].merge(parts[1])
    assert merged.metric("one back") == pytest.approx(custom_profile.metric("one back"), abs=1e-6)
    assert merged.heads_by_role() == custom_profile.heads_by_role()
    with pytest.raises(HeadwiseError, match="different metrics or roles cannot be merged"):
        parts[0].merge(profile(model, texts[30:], causal=False))


def test_profile_is_frozen(custom_profile: Profile) -> None:
    with pytest.raises(FrozenInstanceError):
        custom_profile.evidence = ()  # pyright: ignore[reportAttributeAccessIssue]


class ExtraMetric(Metric):
    metric_specs = (MetricSpec("odd"),)

    def compute(self, rows: Any) -> Any:
        return rows.total, rows.total


@pytest.mark.parametrize(
    ("metrics", "roles", "message"),
    [
        ([AttentionToTokens("digit", every_third_token)], [], "'digit' is already used"),
        ([ONE_BACK, ONE_BACK], [], "'one back' is already used"),
        ([AttentionToTokens("short", lambda text: [1.0])], [], r"'short'.*shape \(1,\) for a text of"),
        ([AttentionToPosition("far", lambda text: [999] * len(text.ids))], [], "'far'.*after the end"),
        ([ExtraMetric()], [], "'odd'.*returned sums of shape"),
        ([], [LOOKS_BACK], "needs the metric 'one back'"),
        (
            [ExtraMetric()], [Role("odd", ExtraMetric.metric_specs[0], 0.3)],
            "metric 'odd', which has no baseline",
        ),
        ([ONE_BACK], [Role("local", ONE_BACK.score_spec, 0.3, None, "within 3")], "a role named 'local'"),
        ([ONE_BACK], [Role("mine", ONE_BACK.score_spec, 1.3)], "a threshold between 0 and 1"),
    ],
)  # fmt: skip
def test_profile_invalid_custom_metric_or_role_raises(metrics: list[Metric], roles: list[Role], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        profile(decoder(), documents(3), metrics=metrics, roles=roles, causal=False)


# Retrieval.

DISJOINT_DOCUMENTS = [Document.of(WORDS[start : start + 20]) for start in (0, 20, 40)]  # no word occurs in two of them


def test_make_needles_positions_match_copies() -> None:
    for needle in make_needle_texts(decoder(), DISJOINT_DOCUMENTS, seed=3, texts=5):
        repeat_start, start = needle.repeat_start, needle.start
        assert (
            needle.ids[start : start + NEEDLE]
            == needle.ids[repeat_start:]
            != needle.control_ids[start : start + NEEDLE]
        )
        assert (
            needle.control_ids[:start] + needle.control_ids[start + NEEDLE :]
            == needle.ids[:start] + needle.ids[start + NEEDLE :]
        )
        target_positions = {row: position for row, position in enumerate(needle.copy_source_positions) if position >= 0}
        assert all(needle.ids[row + 1] == needle.ids[position] for row, position in target_positions.items())
        assert len(target_positions) == NEEDLE - CUE


def test_retrieval_metric_copying_head_scores_one() -> None:
    """A model that copies with one head: the head attends to every copied token, and to none with another needle. Heads that
    attend to the same token or one token back score zero."""
    model, accumulator = decoder(), Accumulator(12)
    with torch.no_grad():
        run_task_into_accumulator(model, RetrievalMetric(DISJOINT_DOCUMENTS), accumulator)
    names = [str(address) for hook_point in model.hook_points() for address in hook_point.head_addresses]
    score, baseline, value_weighted = (
        accumulator.mean(name) for name in ("retrieval", "retrieval baseline", "retrieval value-weighted")
    )
    assert score[names.index("1.0")] == value_weighted[names.index("1.0")] == pytest.approx(1)
    assert baseline[names.index("1.0")] == pytest.approx(0, abs=1e-6)
    for other in ("0.0", "0.2"):
        assert score[names.index(other)] == pytest.approx(0, abs=1e-6)
    counts = accumulator.bucket_sums_and_counts("retrieval")[1][:, 0]
    assert 0 < counts.max() <= NEEDLE - CUE


def test_retrieval_metric_without_texts_is_nan() -> None:
    blind = decoder()
    profiled = profile(blind, documents(8), metrics=[RetrievalMetric(["1 2"])], causal=False)
    assert np.isnan(profiled.metric("retrieval")).all()
