"""Roles: heads built by hand get their labels and no others; heads that learned nothing get none; A chooses, B reports."""

import hashlib

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.metric import Number
from headwise.analysis.metrics.relation_metrics import Question
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.word_arcs import NEAREST
from headwise.analysis.recording.text_buckets import BUCKETS, bucket_of
from headwise.analysis.roles.profile import SEQUENCES, profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import RUNGS, TABLE, Case, Role, judge, make_cases, rest
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, ENCODER, decoder, documents, encoder


@pytest.fixture(scope="module")
def decoded() -> Profile:
    return profile(decoder(), documents())


@pytest.fixture(scope="module")
def encoded() -> Profile:
    return profile(encoder(), documents())


def told(made: Profile, head: str) -> list[str]:
    """Every role a head may be said to have, best first."""
    return [support.role for support in made[head].supports if RUNGS.index(support.rung) >= 2]


@pytest.mark.parametrize("head", DECODER)
def test_built_heads_of_a_decoder(head: str, decoded: Profile) -> None:
    role, rung = DECODER[head]
    assert decoded[head].role == role
    assert told(decoded, head) == [role] * (role != "unclear")
    assert rung is None or decoded[head].rung == rung
    if role == "induction":  # the first token has itself before it here, so the first of 16 repeated rows finds two
        assert decoded[head].score == pytest.approx(15 / 16, abs=1e-3)
    elif role != "unclear":
        assert decoded[head].score == pytest.approx(1, abs=1 / 30)


@pytest.mark.parametrize("head", ENCODER)
def test_built_heads_of_an_encoder(head: str, encoded: Profile) -> None:
    role, detail = ENCODER[head]
    assert (encoded[head].role, encoded[head].detail) == (role, detail)
    assert told(encoded, head) == [role] * (role != "unclear")
    assert role == "unclear" or encoded[head].rung == "effective", "a headless encoder has no probe"


def test_a_score_is_at_most_one(decoded: Profile, encoded: Profile) -> None:
    for made in (decoded, encoded):
        for head in made:
            assert all(support.score <= 1 + 1e-6 for support in head.supports), head.supports


def test_where_they_rest(decoded: Profile) -> None:
    rests = {str(head.address): head.rest for head in decoded}
    assert rests["0.1"] == ("sink",), "all it does is rest"
    assert "sink" in rests["0.2"], "a duplicate-token head without a duplicate"
    assert "sink" in rests["1.0"], "an induction head rests most of the time, and is one still"
    assert rests["0.0"] == rests["1.1"] == rests["1.2"] == ()
    assert "broad" in rests["0.4"]
    assert rests["0.5"] == ("broad", "idle")


def test_the_offset_and_the_direction_are_told(decoded: Profile, encoded: Profile) -> None:
    assert decoded["1.1"].detail == "-3"
    assert decoded["0.3"].detail == ">", "from the closer to the opener"
    assert encoded["0.3"].detail == "<"


def test_nulls_and_intervals(decoded: Profile) -> None:
    for head in decoded:
        if head.role != "unclear":
            assert head.score is not None
            assert head.null is not None
            assert head.interval is not None
            assert head.null < head.score
            assert head.interval[0] <= head.score + 1e-9 <= head.interval[1] + 2e-9
    previous = decoded["0.0"].supports[0]
    n = np.array([len(d.words) for d in in_turns(documents())[1]])
    assert previous.rows == (n - 2).sum(), "rows whose previous token is not the first, in the half for reporting"
    uniform = sum((1 / np.arange(3, k + 1)).sum() for k in n) / (n - 2).sum()
    assert previous.null == pytest.approx(uniform, abs=1e-6)


def in_turns(texts: list[Document]) -> tuple[list[Document], list[Document]]:
    """For choosing and for reporting: texts by the first byte of their hash, every other byte that occurs."""
    byte = {d.text: hashlib.blake2b(d.text.encode(), digest_size=1).digest()[0] for d in texts}
    there = sorted({*byte.values()})
    first, second = ([d for d in texts if there.index(byte[d.text]) % 2 == half] for half in (0, 1))
    return first, second


def test_halves_do_not_go_by_order() -> None:
    """A file of pairs in turns, half of them marked: either half has some of both kinds, and all shards agree which."""
    pairs = [Document.of(f"{'a' if i % 2 else 'b'} w{i // 2}x".split()) for i in range(40)]
    for half in in_turns(pairs):
        assert 12 <= len(half) <= 28
        assert {d.words[0] for d in half} == {"a", "b"}
    few = Tally(1)
    for text in ("one", "two", "three", "four"):
        few.add(("x",), slice(0, 1), [bucket_of(text)], torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert [few.per_bucket("x", half)[1].sum() for half in (0, 1)] == [2, 2], "few texts, and both halves have some"


def test_taking_the_previous_token_head_away_breaks_induction(decoded: Profile) -> None:
    for head in ("0.0", "1.0"):
        effect = decoded[head].supports[0]
        assert effect.effect is not None
        assert effect.effect_interval is not None
        assert effect.effect > 1
        assert effect.effect_interval[0] > 0
    duplicate = decoded["0.2"].supports[0]
    assert duplicate.cost is not None, "it was asked, and does not help"
    assert duplicate.effect is None, "so the others of its layer were not"
    assert all(s.effect is None for s in decoded["1.1"].supports), "a role without a probe is not asked"


def test_without_ablation_nobody_is_causal() -> None:
    made = profile(decoder(), documents(), causal=False)
    assert {head.rung for head in made} == {"unclear", "effective"}
    assert [head.role for head in made] == [role for role, _ in DECODER.values()]


def test_a_head_that_fetches_nothing_is_not_effective() -> None:
    """It looks at the previous token, but what it fetches there is nothing: only the first token has a value."""
    model = decoder()
    layer = next(iter(model.attention_layers()))
    head = layer.heads[0]
    with torch.no_grad():
        head.W_V.zero_()
        head.W_V[model.tokenizer.encode("1 2")] = 1.0  # pyright: ignore
    made = profile(model, documents(), causal=False)
    assert made["0.0"].rung == "selective"
    assert made["0.0"].role == "previous token"


def untrained(seed: int) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    attention = AttentionSpec(width=48, heads=6)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=3, attention=attention))
    model.tokenizer = tokenizer
    return model


def false_alarms(seeds: range) -> float:
    """The share of heads of random models that are said to have a role."""
    little = list(Corpus.little("held-out", documents=60, seed=1).items())
    made = [profile(untrained(seed), little, causal=False, seed=seed) for seed in seeds]
    return float(np.mean([head.role != "unclear" for one in made for head in one]))


def test_heads_that_learned_nothing_have_no_role() -> None:
    assert false_alarms(range(4)) <= 0.01


@pytest.mark.slow
def test_heads_that_learned_nothing_have_no_role_over_many_seeds() -> None:
    assert false_alarms(range(100, 120)) <= 0.01


def cases_of(heads: int, arcs: int, rate: float, seed: int = 0) -> Case:
    """Heads that hit so many of the arcs of each half by chance alone, and a null that says so."""
    draw = np.random.default_rng(seed)
    counts = np.zeros((BUCKETS, heads))
    for half in (0, 1):
        counts[half::2][: BUCKETS // 2] = np.bincount(draw.integers(0, BUCKETS // 2, arcs), minlength=BUCKETS // 2)[
            :, None
        ]
    scores = draw.binomial(counts.astype(int), rate).astype(float)
    return Case(Role("det", Number("det"), 0.1), scores, rate * counts, scores, counts)


@pytest.mark.parametrize(("arcs", "best"), [(100, 0.54), (3000, 0.426)])
def test_choosing_makes_heads_look_skilled_and_reporting_does_not(arcs: int, best: float) -> None:
    """The best of 288 heads under a null of 40 %: 54 % where it was chosen, 40 % where it is reported."""
    chosen, reported, claimed = [], [], 0
    for seed in range(20):
        case = cases_of(288, arcs, 0.4, seed)
        winner = int(case.mean(0).argmax())
        chosen.append(case.mean(0)[winner])
        reported.append(case.mean(1)[winner])
        found, family = judge([case], 288)
        assert family == 288
        for head, supports in enumerate(found):
            assert all(s.score == pytest.approx(case.mean(1)[head]) for s in supports), "scores are of B"
        claimed += sum(RUNGS.index(s.rung) >= 2 for supports in found for s in supports)
    assert np.mean(chosen) == pytest.approx(best, abs=0.01)
    assert np.mean(reported) == pytest.approx(0.4, abs=0.03)
    assert claimed <= 2, "family-wise 5 %: one in twenty families"


def test_a_skilled_head_among_many_is_found() -> None:
    case = cases_of(288, 600, 0.4)
    case.scores[:, 7] = case.valued[:, 7] = np.random.default_rng(1).binomial(case.counts[:, 7].astype(int), 0.7)
    found, _ = judge([case], 288)
    assert [head for head, s in enumerate(found) if s and RUNGS.index(s[0].rung) >= 2] == [7]
    assert found[7][0].gain == pytest.approx((0.7 - 0.4) / 0.6, abs=0.07)
    assert found[7][0].rung == "effective"


def test_repeats_are_enough_among_ten_thousand_tests() -> None:
    """An induction head (.5 against .01) beside the noise of a large model: the statistic is √units at most."""
    draw = np.random.default_rng(0)
    shape, supported = (BUCKETS, 270), []
    noise = [
        Case(
            Role(str(i), Number(str(i)), 0.1),
            draw.standard_normal(shape),
            np.zeros(shape),
            np.zeros(shape),
            np.ones(shape),
        )
        for i in range(40)
    ]
    for sequences in (24, SEQUENCES):
        asked = (np.arange(BUCKETS) < sequences)[:, None] * np.ones(shape)
        scores, nulls = np.full(shape, 0.01) * asked, np.full(shape, 0.01) * asked
        scores[:, 7] = draw.uniform(0.4, 0.6, BUCKETS) * asked[:, 7]
        found, family = judge(
            [*noise, Case(Role("induction", Number("induction"), 0.1), scores, nulls, scores, asked)], 270
        )
        assert family == 40 * 270 + 1
        supported.append(found[7][0].rung)
    assert supported == ["pattern", "effective"]


def test_a_head_that_is_skilled_in_one_half_only_is_no_more_than_a_pattern() -> None:
    case = cases_of(40, 600, 0.4)
    turns = np.flatnonzero(case.counts[:, 0])  # buckets that hold anything
    case.scores[turns[0::2], 3] = case.counts[turns[0::2], 3]
    case.scores[turns[1::2], 5] = case.counts[turns[1::2], 5]
    found, _ = judge([case], 40)
    assert found[3][0].rung == "pattern"
    assert found[5] == [], "what was not chosen is not reported"


@pytest.mark.parametrize(("unrelated", "null"), [(0.6, 0.6), (0.4, 0.5)])
def test_the_larger_baseline_is_chosen_once(unrelated: float, null: float) -> None:
    """Words that mean alike: the best offset hits every other arc, an unrelated word is hit so often; the larger of both, not
    of both in each bucket, which would be .8 and .7."""
    tally = Tally(1)
    relations = Relations(tally, (Question("related", ">"), Question("unrelated", ">")), causal=False)
    there = np.arange(40)
    made = np.zeros((40, 1, len(relations.names)))
    for field, value in (("related > hits", 1.0), ("related > matched", 0.9), ("unrelated > hits", 10 * unrelated)):
        made[:, 0, relations.names.index(field)] = value
    counts = np.repeat([1.0, 10.0], len(relations.names) // 2) * np.ones((40, 1, 1))
    tally.add(relations.names, slice(0, 1), there, torch.from_numpy(made), torch.from_numpy(counts))
    relations.arcs[there] = 1, 10
    relations.offsets[there[there % 4 < 2], 0, NEAREST.index(-1)] = 1  # in both halves alike
    (case,) = make_cases(tally, relations, "semantic")
    assert case.mean(1) == pytest.approx([1])
    assert [case.null(half)[0] for half in (0, 1)] == pytest.approx([null, null])


@pytest.mark.parametrize("half", [0, 1])
def test_excess_weight_is_asked_of_the_half_for_choosing(half: int) -> None:
    """Weight above other pairs in one half alone: if it is where heads are chosen they may pass, else not."""
    tally = Tally(1)
    relations = Relations(tally, (Question("det", ">"),), causal=False)
    made = torch.zeros(40, 1, len(relations.names))
    made[..., relations.names.index("det > hits")] = 1
    made[half::2, :, relations.names.index("det > matched")] = 0.9
    made[..., relations.names.index("det > others")] = 0.1
    tally.add(relations.names, slice(0, 1), range(40), made, torch.ones(1))
    relations.arcs[:40] = 1
    (case,) = make_cases(tally, relations, "det")
    assert case.mean(1) == pytest.approx([1.0 - half])


def test_one_role_alone() -> None:
    made = profile(decoder(), documents(), causal=False)
    cases = make_cases(made.tally, made.relations, "induction")
    assert [case.role.name for case in cases] == ["induction"]
    found, _ = judge(cases, len(made))
    assert [str(a) for a, s in zip(made.addresses, found, strict=True) if s] == ["1.0"]
    with pytest.raises(HeadwiseError, match=r"there is no role 'inductoin' here; .*induction"):
        make_cases(made.tally, made.relations, "inductoin")


def test_nothing_to_judge() -> None:
    assert judge([], 3) == ([[], [], []], 0)
    names = ("first", "special", "relative entropy", "write share")
    tally = Tally(3)
    values = torch.tensor([[[0.31, 0, 0.5, 0.3], [0.25, 0.4, 0.95, 0.3], [0.1, 0.25, 0.85, 0.01]]])
    tally.add(names, slice(0, 3), [0], values.double(), torch.ones(1, 1, 4))
    assert rest(tally, np.full(3, 3)) == [("sink",), ("special token", "broad"), ("idle",)]


def test_the_table_has_each_role_in_each_form_once() -> None:
    forms = [(role.name, role.detail) for role in TABLE]
    assert len(set(forms)) == len(forms)
    assert all(0 < role.threshold < 1 for role in TABLE)
