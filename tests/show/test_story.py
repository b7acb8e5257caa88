"""A head's story: every number in it is one it was given, every sentence points to a heading that is there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.change.evaluation import Estimate
from headwise.look.measure.cases import Example
from headwise.look.profile.effects import Effect
from headwise.look.profile.roles import Support
from headwise.look.worth.importance import Worth
from headwise.look.worth.sensitivity import Cost
from headwise.look.writes.writes import Promoted
from headwise.show.known import Facts, Kin, Less, Missed, Streamed, Wrote, ask, streamed
from headwise.show.story import MEANS, story
from headwise.show.words import WORDS
from headwise.text.make import byte_tokenizer

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
    spread = 1.5 / random.spec.attention.value_dim
    assert ("neither what it reads" in told["copying"]) == (abs(found.wrote.copying) < 2 * spread)
    exact = hw.importance(random, hw.Reading.of(random, TEXTS), heads="0.*")["0.0"]
    assert f"loses {exact.worth:.2g} nats a token (95 % CI {exact.low:.2g} to {exact.high:.2g}" in told["worth"]


def test_every_number_given_is_told(profile):
    head = next(iter(profile))
    cost = Effect(0.5, 0.01, control=0.0625, more=0.25, interval=(0.125, 0.375), on="random tokens")
    also = replace(cost, cost=0.75, control=None, on="running text")
    first = role("induction", "causal", 0.61, effects=(cost, also), causal_on=("random tokens", "running text"))
    second = role("possessive", "effective", 0.875, relation=True, detail=">")
    third, fourth = role("same phrase", "selective", 0.5, relation=True), role("digit", "selective", 0.4)
    case = Example(True, 0.8, "ship", "sea", "sea", 0.8, "[ship] at *sea*", (("token", "ship"),))
    head = replace(head, role="induction", rung="causal",
                   roles=(first, second, third, fourth),
                   evidence=(case, replace(case, hit=False)),
                   rest=("sink",), measures={**head.measures, "first": 0.62})  # fmt: skip
    known = Facts(
        Wrote(0.45, 0.02, (Promoted(" ship", [(" harbour", 2.0)], [(" paint", -1.0)]),)),
        Missed(Worth("0.0", 0.031, 0.02, 0.04, 0.011, -0.01, 0.03), "ablation", "mean", "nats a token", 64),
        Less((Cost("0.0", "0.0 0.1", "qk", 4, 0.0012, -0.001, 0.003, 0.01),), "nats a token", 16, 2_097_152, "0.0",
             Streamed(hw.Keeps(first=4, last=128), Estimate(0.0039, 0.0005, 0.0071), 8, 512)),
        ("0.1", "0.2"), Kin("0.3", 0.19, 0.04), None, (("1.1", 0.123),),
    )  # fmt: skip
    told = story(profile, head, known)
    text = " ".join(line.text for line in told)
    for part in (
        "finds what came after the same token before (induction): 61 % of its weight",
        "1,234 held-out cases (the probe set): 95 % CI 50 % to 71 %; its baseline has 6 %; p = 0.0004",
        f"correction for {profile.family:,} tests", "It was tested on random tokens and running text.",
        "On random tokens, without", "loses +0.500 nats an answer", "and +0.062 where the same answers are",
        "On running text, without", "loses +0.750 nats an answer; nowhere were the same answers found",
            "; +0.250 more than without others of its layer (95 % CI +0.125 to +0.375)",
        "It also joins an owner and what is owned (possessive >): in 88 % of the cases it looks hardest at the right word (",
        "looks inside the same phrase (same phrase): 50 % of its weight", "weaker evidence: digit 40 %.",
        "[ship] at *sea* (0.80). Of 2 held-out cases kept as examples 1 is a hit.", "on the first token (62 % of its weight",
        "It writes what it reads (copying +0.45; random weights spread by 0.02)",
        "Looking at ' ship' it makes ' harbour' likelier",
        "loses 0.031 nats a token (95 % CI 0.02 to 0.04), +0.011 beside", "mean ablation on 64 texts",
        "Stored at 4 bits, with 0.1 and 0.2, which share its keys, "
        "the loss changes by: W_Q and W_K +0.0012 (95 % CI -0.001 to +0.003)",
        "kept the first 4 and the last 128 tokens alone, later tokens would cost +0.0039 nats (95 % CI +0.0005 to +0.0071; ",
        "keeps 2.1 MB of keys and values at 4,096 tokens", "reads 0.3 (V-composition 0.19, random weights 0.04) most",
        "looks most like 1.1 (0.12 nats apart)",
    ):  # fmt: skip
        assert part in text, part
    assert [line.about for line in told] == [
        "role", "evidence", "role", "role", "role", "hit", "rests", "copying", "writes", "worth", "bits", "cache",
        "streaming", "partners",
    ]  # fmt: skip


def test_what_streaming_costs_is_the_loss_behind_what_is_forgotten(random):
    text = "".join(TEXTS)
    found = streamed(random, "1.2", text)
    assert found is not None
    assert found.keeps.last is not None
    length, room = found.longest, found.keeps.first + found.keeps.last
    ids = torch.tensor(random.tokenizer.encode(text))
    pieces = [piece for piece in ids.split(length) if len(piece) > room + 1]
    fewer = hw.Plan.make(random, cache={"1.2": found.keeps}).apply(random)

    def lost(model):
        with torch.no_grad():
            surprise = [
                torch.nn.functional.cross_entropy(model(piece[None])[0, room:-1], piece[room + 1 :], reduction="sum")
                for piece in pieces
            ]
        return float(sum(surprise)) / sum(len(piece) - room - 1 for piece in pieces)

    assert found.texts == len(pieces)
    assert found.more.mean == pytest.approx(lost(fewer) - lost(random), abs=1e-6)
    assert found.more.mean != 0
    assert streamed(random, "1.2", TEXTS) is None  # too short to forget anything


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
    assert {"unclear", "rests", "copying", "worth", "bits", "partners"} <= set(told)
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
    from headwise.look.profile.roles import role_names
    from headwise.look.record.reading import documents_for
    from headwise.text.documents import Document

    names = role_names(one for one in documents_for(hw.load("minilm")).items() if isinstance(one, Document))
    assert names - set(MEANS) == set()


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
