"""A head's story: every number in it is one it was given, every sentence points to a heading that is there."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.importance import Worth
from headwise.analysis.ablation.sensitivity import Cost
from headwise.analysis.attribution.direct_effect import DirectEffect, direct_effects
from headwise.analysis.attribution.ov_analysis import Promoted
from headwise.analysis.metrics.long_offsets import KEEPS
from headwise.analysis.metrics.role_examples import Example
from headwise.analysis.roles.effects import Effect
from headwise.analysis.roles.roles import Support
from headwise.compression.evaluation import Estimate
from headwise.compression.streaming_cost import BOUND, KINDS, StreamingCost, StreamingTest
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.glossary import WORDS
from headwise.ui.head_facts import Facts, Kin, Less, Missed, Wrote, ask
from headwise.ui.head_summary import story
from headwise.ui.role_descriptions import RELATION_ROLES, TOKEN_ROLES

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [
    f"The {one} saw the {other}, and then the {one} left." for one in ("dog", "cat", "cow") for other in ("hen", "fox")
]


@pytest.fixture(scope="module")
def random():
    """A model that has learned nothing."""
    torch.manual_seed(0)
    model = hw.Transformer(hw.preset("nano").resized(layers=2, width=32, heads=4))
    model.tokenizer = byte_tokenizer()
    return model.eval()


@pytest.fixture(scope="module")
def profile(random):
    return hw.profile(random, TEXTS, causal=False)


def role(name, rung, score, **more):
    told = Support(name, "", rung, score, 0.0625, (0.5, 0.71), 0.5, 0.0004, 1.0, None, 1234, on="the probe set")
    return replace(told, **more)


def lines(profile, head, known=None):
    return {line.about: line.text for line in reversed(story(profile, head, known))}  # the first of each kind


def test_of_a_random_model_nothing_is_found_and_that_is_said(random, profile):
    for head in profile:
        told = lines(profile, head)
        assert set(told) == {"unclear", "rests"}
        assert told["unclear"].startswith(f"Head {head.address}: nothing found. On 6 texts no role of it")
        assert f"{profile.family:,} tests" in told["unclear"]
    head = next(iter(profile))
    found = ask(random, head, TEXTS)
    assert found.refused == ()
    told = lines(profile, head, found)
    assert found.wrote is not None
    effect = found.wrote.effect
    assert effect is not None
    assert effect == direct_effects(random, TEXTS, "0.0")["0.0"]
    verb = {1: "raises the", -1: "lowers the", 0: "does not measurably change the"}[effect.sign]
    assert f"Its output {verb} logit of the token it attends to most" in told["direct effect"]
    assert f"95% CI {effect.low:+.2f} to {effect.high:+.2f}" in told["direct effect"]
    exact = hw.importance(random, hw.Reading.of(random, TEXTS), heads="0.*")["0.0"]
    assert f"loses {exact.worth:.2g} nats a token (95 % CI {exact.low:.2g} to {exact.high:.2g}" in told["worth"]


def test_every_number_given_is_told(profile):
    head = next(iter(profile))
    cost = Effect(0.5, 0.01, control=0.0625, more=0.25, interval=(0.125, 0.375), on="random tokens")
    also = replace(cost, cost=0.75, control=None, on="running text")
    first = role("induction", "causal", 0.61, effects=(cost, also), causal_on=("random tokens", "running text"))
    second = role("possessive", "effective", 0.875, relation=True, hits=True, detail=">")
    third, fourth = (
        role("same phrase", "selective", 0.5, relation=True, detail="<"), role("digit", "selective", 0.4, gain=0.25),
    )  # fmt: skip
    case = Example(True, 0.8, "ship", "sea", "sea", 0.8, "[ship] at *sea*", (("token", "ship"),))
    head = replace(head, role="induction", rung="causal",
                   roles=(first, second, third, fourth),
                   evidence=(case, replace(case, hit=False)),
                   rest=("sink",), measures={**head.measures, "first": 0.62})  # fmt: skip
    known = Facts(
        Wrote(-0.45, 0.02, (Promoted(" ship", [(" harbour", 2.0)], [(" paint", -1.0)]),),
              DirectEffect(0.66, 0.47, 0.85, 1027, 0.007, 22)),
        Missed(Worth("0.0", 0.031, 0.02, 0.04, 0.011, -0.01, 0.03), "ablation", "mean", "nats a token", 64),
        Less((Cost("0.0", "0.0 0.1", "qk", 4, 0.0012, -0.001, 0.003, 0.01),), "nats a token", 16, 2_097_152, "0.0",
             StreamingTest(hw.Keeps(first=4, last=128),
                           (StreamingCost("nouns repeated", 2.85, Estimate(3.1, 2.8, 3.4), 12),))),
        ("0.1", "0.2"), Kin("0.3", 0.19, 0.04), None, (("1.1", 0.123),),
    )  # fmt: skip
    told = story(profile, head, known)
    text = " ".join(line.text for line in told)
    for part in (
        "attends from the second copy of a random token to the token after the first copy (induction): in the cases measured "
        "61 % of its weight goes there",
        "1,234 held-out cases (the probe set): 95 % CI 50 % to 71 %; its baseline has 6 %; p = 0.0004",
        f"correction for {profile.family:,} tests", "It was tested on random tokens and running text.",
        "On random tokens, without", "loses +0.500 nats an answer", "and +0.062 where the same answers are",
        "On running text, without", "loses +0.750 nats an answer; nowhere were the same answers found",
            "; +0.250 more than without others of its layer (95 % CI +0.125 to +0.375)",
        "It also attends from a possessive pronoun to its owner (possessive >): in 88 % of the cases the right word gets the "
        "largest weight of all words (",
        "attends from a word to earlier words of the same phrase (same phrase <): in the cases measured 50 % of its weight",
        "Further roles at the same evidence level (selective, p up to 0.0004), less far above their baselines: digit 40 % "
        "(baseline 6 %).",
        "[ship] at *sea* (0.80). Of 2 held-out cases kept as examples 1 is a hit.",
        "Idle pattern: attention sink, on average 62 % of its weight lies on the first token.",
        "Its output raises the logit of the token it attends to most by 0.66 (95% CI +0.47 to +0.85), relative to the mean "
        "over the vocabulary: direct effect at 1,027 query positions of 22 texts, 0.7% of all;",
        "Looking at ' ship' it makes ' harbour' likelier",
        "loses 0.031 nats a token (95 % CI 0.02 to 0.04), +0.011 beside", "mean ablation on 64 texts",
        "Stored at 4 bits, with 0.1 and 0.2, which share its keys, "
        "the loss changes by: W_Q and W_K +0.0012 (95 % CI -0.001 to +0.003)",
        "increase with KV head 0.0 at 4 sink tokens and a window of 128: nouns repeated 2.85 +3.1 (95% CI +2.8 to +3.4; 12",
        "keeps 2.1 MB of keys and values at 4,096 tokens", "reads 0.3 (V-composition 0.19, random weights 0.04) most",
        "looks most like 1.1 (0.12 nats apart)",
    ):  # fmt: skip
        assert part in text, part
    assert [line.about for line in told] == [
        "role", "evidence", "role", "role", "role", "hit", "rests", "direct effect", "writes", "worth", "bits", "cache",
        "streaming", "partners",
    ]  # fmt: skip


def test_story_direct_effect_sentence_follows_the_interval(profile):
    head = next(iter(profile))
    claims = {
        (0.1, 0.3): "raises the logit",
        (-0.3, -0.1): "lowers the logit",
        (-0.1, 0.3): "does not measurably change",
    }
    for (low, high), claim in claims.items():
        for score in (-0.9, 0.9, float("nan")):  # the eigenvalue score decides nothing
            wrote = Wrote(score, 0.02, (), DirectEffect((low + high) / 2, low, high, 50, 0.1, 9))
            assert claim in lines(profile, head, Facts(wrote))["direct effect"]
    assert set(lines(profile, head, Facts(Wrote(0.9, 0.02)))) == {"unclear", "rests"}, "nothing measured, nothing said"


def test_story_encoder_has_no_direct_effect_sentence():
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=64, layers=1, kind="encoder", attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    head = hw.profile(model, TEXTS, causal=False)["0.1"]
    wrote = ask(model, head, TEXTS).wrote
    assert wrote is not None
    assert wrote.effect is None


def costs(**highs):
    """Loss increases of every kind with these upper ends; 0.01 if none is given."""
    ends = {kind: highs.get(kind.split()[0], 0.01) for kind in KINDS}
    return tuple(StreamingCost(kind, 2.5, Estimate(0.0, -0.01, high), 12) for kind, high in ends.items())


@pytest.mark.parametrize(
    ("local", "measured", "recommended"),
    [
        (True, costs(), True),
        (False, costs(), False),
        (None, costs(), False),
        (True, costs(random=BOUND), False),
        (True, costs(nouns=3.4), False),
        (True, costs(facts=0.06), False),
        (True, costs(running=float("nan")), False),
        (True, costs()[:3], False),
        (True, (), False),
    ],
)
def test_story_streaming_recommended_only_if_attention_and_all_losses_allow_it(
    profile, monkeypatch, local, measured, recommended
):
    flags = None if local is None else np.full(len(profile), local)
    monkeypatch.setattr("headwise.ui.head_summary.could_stream", lambda tally: flags)
    known = Facts(less=Less(key="0.0", streamed=StreamingTest(KEEPS, measured)))
    text = lines(profile, next(iter(profile)), known).get("streaming", "")
    assert ("can stream" in text) == recommended
    assert all(f"{cost.kind} 2.50" in text for cost in measured)


@pytest.mark.parametrize("value", [0.0, 0.012, 0.4])
def test_story_attention_outside_the_window_is_a_figure_and_no_recommendation(profile, value):
    head = next(iter(profile))
    text = lines(profile, replace(head, measures={**head.measures, "beyond": value}))
    assert "stream" not in " ".join(text.values())
    assert text["beyond"].startswith(
        f"{100 * value:.2g}% of its attention falls outside 4 sink tokens and a window of 32"
    )


def test_ask_measures_streaming_only_if_attention_is_local(random, profile):
    head = profile["0.1"]
    for beyond, measured in ((0.4, False), (float("nan"), False), (0.01, True)):
        less = ask(random, replace(head, measures={**head.measures, "beyond": beyond}), TEXTS).less
        assert less is not None
        assert (less.streamed is not None) == measured


def test_somebody_elses_model_has_a_story_too():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = hw.attach(
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=257, n_positions=64)).eval()
    )
    theirs.tokenizer = byte_tokenizer()
    seen = hw.profile(theirs, TEXTS, causal=False)
    head = seen["1.1"]
    told = lines(seen, head, ask(theirs, head, TEXTS))
    assert {"unclear", "rests", "direct effect", "worth", "bits", "partners"} <= set(told)
    assert "nothing found" in told["unclear"]


def test_every_pointer_leads_to_a_heading():
    for name, word in WORDS.items():
        page, _, anchor = word.docs.partition("#")
        text = (DOCS / page).read_text()
        headings = [
            re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)
        ]
        assert not anchor or anchor in headings, (name, word.docs)


def test_roles_of_the_probe_set_have_a_sentence():
    from headwise.analysis.recording.tokenized_corpus import documents_for
    from headwise.analysis.roles.roles import role_names
    from headwise.text.documents import Document

    names = role_names(one for one in documents_for(hw.load("minilm")).items() if isinstance(one, Document))
    assert names - {*TOKEN_ROLES, *RELATION_ROLES} == set()


def test_an_encoder_decoder_is_told_as_far_as_texts_go():
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=16, heads=2)
    model = hw.Transformer(
        hw.ModelSpec(vocab=257, context=64, layers=1, kind="encoder-decoder", attention=attention)
    ).eval()
    model.tokenizer = byte_tokenizer()
    seen = hw.profile(model, TEXTS[:3], causal=False)
    for address in ("enc.0.1", "dec.0.0", "cross.0.1"):
        found = ask(model, seen[address])
        assert found.loss is None
        assert any("pairs" in why for why in found.refused)
        assert "nothing found" in lines(seen, seen[address], found)["unclear"]
