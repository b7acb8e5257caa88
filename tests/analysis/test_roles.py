"""Roles: hand-built heads get their roles and no others, untrained heads get none, one half selects and the other reports."""

import hashlib

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.directed_relations import DirectedRelation
from headwise.analysis.metrics.gold_arc_data import BASELINE_OFFSETS
from headwise.analysis.metrics.metric import MetricSpec
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.recording.text_hash_split import BUCKETS, bucket_of_text
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_sums import NUM_REPEATED_SEQUENCES
from headwise.analysis.roles.roles import (
    DEFAULT_ROLES,
    EVIDENCE_LEVELS,
    Role,
    RoleScores,
    assess,
    find_idle_patterns,
    score,
)
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, ENCODER, decoder, documents, encoder


@pytest.fixture(scope="module")
def decoder_profile() -> Profile:
    return profile(decoder(), documents())


@pytest.fixture(scope="module")
def encoder_profile() -> Profile:
    return profile(encoder(), documents())


def supported_roles(profiled: Profile, head: str) -> list[str]:
    """Return every confirmed role of a head, best first."""
    return [
        role_evidence.role
        for role_evidence in profiled[head].evidence
        if EVIDENCE_LEVELS.index(role_evidence.evidence_level) >= 2
    ]


@pytest.mark.parametrize("head", DECODER)
def test_profile_constructed_decoder_heads_get_their_roles(head: str, decoder_profile: Profile) -> None:
    role, level = DECODER[head]
    assert decoder_profile[head].role == role
    assert supported_roles(decoder_profile, head) == [role] * (role != "unclear")
    assert level is None or decoder_profile[head].evidence_level == level
    # the first token counts as its own previous token here, so the first of 16 repeated rows has two targets
    if role == "induction":
        assert decoder_profile[head].score == pytest.approx(15 / 16, abs=1e-3)
    elif role != "unclear":
        assert decoder_profile[head].score == pytest.approx(1, abs=1 / 30)


@pytest.mark.parametrize("head", ENCODER)
def test_profile_constructed_encoder_heads_get_their_roles(head: str, encoder_profile: Profile) -> None:
    role, detail = ENCODER[head]
    assert (encoder_profile[head].role, encoder_profile[head].detail) == (role, detail)
    assert supported_roles(encoder_profile, head) == [role] * (role != "unclear")
    assert role == "unclear" or encoder_profile[head].evidence_level == "value-weighted", (
        "a headless encoder has no probe"
    )


def test_role_evidence_score_is_at_most_one(decoder_profile: Profile, encoder_profile: Profile) -> None:
    for profiled in (decoder_profile, encoder_profile):
        for head in profiled:
            assert all(role_evidence.score <= 1 + 1e-6 for role_evidence in head.evidence), head.evidence


def test_profile_idle_patterns_of_constructed_heads(decoder_profile: Profile) -> None:
    idle_patterns = {str(head.address): head.idle_pattern for head in decoder_profile}
    assert idle_patterns["0.1"] == ("sink",), "all it does is rest"
    assert "sink" in idle_patterns["0.2"], "a duplicate-token head without a duplicate"
    assert "sink" in idle_patterns["1.0"], "an induction head rests most of the time, and is one still"
    assert idle_patterns["0.0"] == idle_patterns["1.1"] == idle_patterns["1.2"] == ()
    assert "broad" in idle_patterns["0.4"]
    assert idle_patterns["0.5"] == ("broad", "idle")


def test_profile_detail_has_offset_and_direction(decoder_profile: Profile, encoder_profile: Profile) -> None:
    assert decoder_profile["1.1"].detail == "-3"
    assert decoder_profile["0.3"].detail == ">", "from the closer to the opener"
    assert encoder_profile["0.3"].detail == "<"


def test_role_evidence_baselines_and_intervals_are_consistent(decoder_profile: Profile) -> None:
    for head in decoder_profile:
        if head.role != "unclear":
            assert head.score is not None
            assert head.baseline is not None
            assert head.interval is not None
            assert head.baseline < head.score
            assert head.interval[0] <= head.score + 1e-9 <= head.interval[1] + 2e-9
    previous = decoder_profile["0.0"].evidence[0]
    n = np.array([len(d.words) for d in split_halves(documents())[1]])
    assert previous.rows == (n - 2).sum(), "rows whose previous token is not the first, in the half for reporting"
    uniform = sum((1 / np.arange(3, k + 1)).sum() for k in n) / (n - 2).sum()
    assert previous.baseline == pytest.approx(uniform, abs=1e-6)


def split_halves(texts: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split texts into the selection and the reporting half, by the first byte of their hash."""
    byte = {d.text: hashlib.blake2b(d.text.encode(), digest_size=1).digest()[0] for d in texts}
    present_bytes = sorted({*byte.values()})
    first, second = ([d for d in texts if present_bytes.index(byte[d.text]) % 2 == half] for half in (0, 1))
    return first, second


def test_text_buckets_halves_do_not_follow_order() -> None:
    """A file of alternating pairs, half of them marked: both halves contain both kinds, and all shards agree on the split."""
    pairs = [Document.of(f"{'a' if i % 2 else 'b'} w{i // 2}x".split()) for i in range(40)]
    for half in split_halves(pairs):
        assert 12 <= len(half) <= 28
        assert {d.words[0] for d in half} == {"a", "b"}
    few = Accumulator(1)
    for text in ("one", "two", "three", "four"):
        few.add(("x",), slice(0, 1), [bucket_of_text(text)], torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert [few.bucket_sums_and_counts("x", half)[1].sum() for half in (0, 1)] == [2, 2], (
        "few texts, and both halves have some"
    )


def test_profile_ablating_induction_circuit_has_effect(decoder_profile: Profile) -> None:
    for head in ("0.0", "1.0"):
        effect = decoder_profile[head].evidence[0]
        assert effect.effect is not None
        assert effect.effect_interval is not None
        assert effect.effect > 1
        assert effect.effect_interval[0] > 0
    duplicate = decoder_profile["0.2"].evidence[0]
    assert duplicate.cost is not None, "it was asked, and does not help"
    assert duplicate.effect is None, "so the others of its layer were not"
    assert all(s.effect is None for s in decoder_profile["1.1"].evidence), "a role without a probe is not asked"


def test_profile_without_causal_test_has_no_causal_role() -> None:
    profiled = profile(decoder(), documents(), causal=False)
    assert {head.evidence_level for head in profiled} == {"none", "value-weighted"}
    assert [head.role for head in profiled] == [role for role, _ in DECODER.values()]


def test_profile_head_without_values_is_not_value_weighted() -> None:
    """The head attends to the previous token, but the value there is zero: only the first token has a nonzero value."""
    model = decoder()
    layer = next(iter(model.attention_layers()))
    head = layer.heads[0]
    with torch.no_grad():
        head.W_V.zero_()
        head.W_V[model.tokenizer.encode("1 2")] = 1.0  # pyright: ignore
    profiled = profile(model, documents(), causal=False)
    assert profiled["0.0"].evidence_level == "attention"
    assert profiled["0.0"].role == "previous token"


def untrained_model(seed: int) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    attention = AttentionSpec(width=48, heads=6)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=3, attention=attention))
    model.tokenizer = tokenizer
    return model


def false_alarms(seeds: range) -> float:
    """Return the fraction of heads of random models that get a role."""
    synthetic = list(Corpus.synthetic("held-out", documents=60, seed=1).items())
    profiles = [profile(untrained_model(seed), synthetic, causal=False, seed=seed) for seed in seeds]
    return float(np.mean([head.role != "unclear" for profiled in profiles for head in profiled]))


def test_profile_untrained_heads_have_no_role() -> None:
    assert false_alarms(range(4)) <= 0.01


@pytest.mark.slow
def test_profile_untrained_heads_have_no_role_over_many_seeds() -> None:
    assert false_alarms(range(100, 120)) <= 0.01


def chance_scores(heads: int, arcs: int, rate: float, seed: int = 0) -> RoleScores:
    """Make heads that hit a given fraction of arcs of each half by chance, with an equal baseline."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((BUCKETS, heads))
    for half in (0, 1):
        counts[half::2][: BUCKETS // 2] = np.bincount(rng.integers(0, BUCKETS // 2, arcs), minlength=BUCKETS // 2)[
            :, None
        ]
    scores = rng.binomial(counts.astype(int), rate).astype(float)
    return RoleScores(Role("det", MetricSpec("det"), 0.1), scores, rate * counts, scores, counts)


@pytest.mark.parametrize(("arcs", "best"), [(100, 0.54), (3000, 0.426)])
def test_assign_roles_selected_head_is_not_biased_on_second_half(arcs: int, best: float) -> None:
    """The best of 288 heads with a baseline of 40%: 54% on the half for selection, 40% on the reporting half."""
    chosen, reported, claimed = [], [], 0
    for seed in range(20):
        case = chance_scores(288, arcs, 0.4, seed)
        winner = int(case.mean(0).argmax())
        chosen.append(case.mean(0)[winner])
        reported.append(case.mean(1)[winner])
        evidence, family = assess([case], 288)
        assert family == 288
        for head, head_evidence in enumerate(evidence):
            assert all(s.score == pytest.approx(case.mean(1)[head]) for s in head_evidence), "scores are of B"
        claimed += sum(
            EVIDENCE_LEVELS.index(s.evidence_level) >= 2 for head_evidence in evidence for s in head_evidence
        )
    assert np.mean(chosen) == pytest.approx(best, abs=0.01)
    assert np.mean(reported) == pytest.approx(0.4, abs=0.03)
    assert claimed <= 2, "family-wise 5 %: one in twenty families"


def test_assign_roles_finds_skilled_head_among_many() -> None:
    case = chance_scores(288, 600, 0.4)
    case.scores[:, 7] = case.value_weighted[:, 7] = np.random.default_rng(1).binomial(
        case.counts[:, 7].astype(int), 0.7
    )
    evidence, _ = assess([case], 288)
    assert [head for head, s in enumerate(evidence) if s and EVIDENCE_LEVELS.index(s[0].evidence_level) >= 2] == [7]
    assert evidence[7][0].gain == pytest.approx((0.7 - 0.4) / 0.6, abs=0.07)
    assert evidence[7][0].evidence_level == "value-weighted"


def test_assign_roles_enough_sequences_for_large_family() -> None:
    """An induction head (0.5 against 0.01) among the noise of a large model. The statistic is at most √units."""
    rng = np.random.default_rng(0)
    shape, supported = (BUCKETS, 270), []
    noise = [
        RoleScores(
            Role(str(i), MetricSpec(str(i)), 0.1),
            rng.standard_normal(shape),
            np.zeros(shape),
            np.zeros(shape),
            np.ones(shape),
        )
        for i in range(40)
    ]
    for sequences in (24, NUM_REPEATED_SEQUENCES):
        counts = (np.arange(BUCKETS) < sequences)[:, None] * np.ones(shape)
        scores, baselines = np.full(shape, 0.01) * counts, np.full(shape, 0.01) * counts
        scores[:, 7] = rng.uniform(0.4, 0.6, BUCKETS) * counts[:, 7]
        evidence, family = assess(
            [*noise, RoleScores(Role("induction", MetricSpec("induction"), 0.1), scores, baselines, scores, counts)],
            270,
        )
        assert family == 40 * 270 + 1
        supported.append(evidence[7][0].evidence_level)
    assert supported == ["none", "value-weighted"]


def test_assign_roles_skill_in_one_half_is_not_enough() -> None:
    case = chance_scores(40, 600, 0.4)
    filled_buckets = np.flatnonzero(case.counts[:, 0])  # buckets with counts
    case.scores[filled_buckets[0::2], 3] = case.counts[filled_buckets[0::2], 3]
    case.scores[filled_buckets[1::2], 5] = case.counts[filled_buckets[1::2], 5]
    evidence, _ = assess([case], 40)
    assert evidence[3][0].evidence_level == "none"
    assert evidence[5] == [], "what was not chosen is not reported"


@pytest.mark.parametrize(("unrelated", "baseline"), [(0.6, 0.6), (0.4, 0.5)])
def test_make_role_scores_uses_larger_baseline_overall(unrelated: float, baseline: float) -> None:
    """The best offset hits half of the arcs, and a fraction `unrelated` of unrelated pairs is hit. The larger of both totals
    is used, not the larger in each bucket, which would give 0.8 and 0.7."""
    accumulator = Accumulator(1)
    relations = RelationMetric(
        accumulator, (DirectedRelation("related", ">"), DirectedRelation("unrelated", ">")), causal=False
    )
    buckets = np.arange(40)
    sums = np.zeros((40, 1, len(relations.names)))
    for field, value in (("related > hits", 1.0), ("related > matched", 0.9), ("unrelated > hits", 10 * unrelated)):
        sums[:, 0, relations.names.index(field)] = value
    counts = np.repeat([1.0, 10.0], len(relations.names) // 2) * np.ones((40, 1, 1))
    accumulator.add(relations.names, slice(0, 1), buckets, torch.from_numpy(sums), torch.from_numpy(counts))
    relations.arcs[buckets] = 1, 10
    relations.offsets[buckets[buckets % 4 < 2], 0, BASELINE_OFFSETS.index(-1)] = 1  # equal in both halves
    (case,) = score(accumulator, relations, only_role="semantic")
    assert case.mean(1) == pytest.approx([1])
    assert [case.baseline(half)[0] for half in (0, 1)] == pytest.approx([baseline, baseline])


@pytest.mark.parametrize("half", [0, 1])
def test_make_role_scores_excess_is_tested_on_first_half(half: int) -> None:
    """Weight above other pairs in one half only: heads can pass if it is the selection half, otherwise not."""
    accumulator = Accumulator(1)
    relations = RelationMetric(accumulator, (DirectedRelation("det", ">"),), causal=False)
    sums = torch.zeros(40, 1, len(relations.names))
    sums[..., relations.names.index("det > hits")] = 1
    sums[half::2, :, relations.names.index("det > matched")] = 0.9
    sums[..., relations.names.index("det > others")] = 0.1
    accumulator.add(relations.names, slice(0, 1), range(40), sums, torch.ones(1))
    relations.arcs[:40] = 1
    (case,) = score(accumulator, relations, only_role="det")
    assert case.mean(1) == pytest.approx([1.0 - half])


def test_make_role_scores_single_role_or_unknown_raises() -> None:
    profiled = profile(decoder(), documents(), causal=False)
    role_scores = score(profiled.accumulator, profiled.relation_metric, only_role="induction")
    assert [case.role.name for case in role_scores] == ["induction"]
    evidence, _ = assess(role_scores, len(profiled))
    assert [str(a) for a, s in zip(profiled.addresses, evidence, strict=True) if s] == ["1.0"]
    with pytest.raises(HeadwiseError, match=r"'inductoin' was not measured; .*induction"):
        score(profiled.accumulator, profiled.relation_metric, only_role="inductoin")


def test_assign_roles_without_scores_is_empty() -> None:
    assert assess([], 3) == ([[], [], []], 0)
    names = ("first", "special", "relative entropy", "output share")
    accumulator = Accumulator(3)
    values = torch.tensor([[[0.31, 0, 0.5, 0.3], [0.25, 0.4, 0.95, 0.3], [0.1, 0.25, 0.85, 0.01]]])
    accumulator.add(names, slice(0, 3), [0], values.double(), torch.ones(1, 1, 4))
    assert find_idle_patterns(accumulator, np.full(3, 3)) == [("sink",), ("special token", "broad"), ("idle",)]


def test_role_table_has_no_duplicates() -> None:
    forms = [(role.name, role.detail) for role in DEFAULT_ROLES]
    assert len(set(forms)) == len(forms)
    assert all(0 < role.threshold < 1 for role in DEFAULT_ROLES)
