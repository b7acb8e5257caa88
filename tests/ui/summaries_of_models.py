"""Summaries of heads of models built by hand: what each head attends to and writes is known from its weights."""

from dataclasses import replace
from functools import cache

import torch

import headwise as hw
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.copy_suppression import CopySuppression
from headwise.analysis.metrics.image_patches import apart, picture_measures
from headwise.analysis.metrics.long_offsets import BEYOND, LENGTH
from headwise.analysis.metrics.query_focus import FACTS
from headwise.analysis.metrics.retrieval import Retrieval
from headwise.analysis.metrics.role_examples import Cases, Example
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.image import InputPicture, picture_unit
from headwise.analysis.roles.effects import Effect
from headwise.analysis.roles.image_profile import ROLES
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_roles import PROMPTED
from headwise.analysis.roles.roles import HELD, LEAD, Support
from headwise.spec import Address
from headwise.spec.patch_grid import Grid
from headwise.text.build_tokenizers import byte_tokenizer
from headwise.ui.head_facts import ask
from headwise.ui.head_summary import story
from tests.analysis.constructed_heads import BEFORE, OUT, SCRATCH, TOKEN, Built, V, blank, decoder, documents, encoder
from tests.analysis.constructed_word_models import BETA, Worded, back, to_place
from tests.analysis.dense_reference import by_scores
from tests.analysis.test_custom_metrics import THREE
from tests.analysis.test_long_offsets import texts
from tests.analysis.test_prompt_cases import people_with_a_suppressor
from tests.analysis.test_prompts import ASKED, counting, people
from tests.analysis.test_prompts import followers as next_words
from tests.compression.test_streaming_cost import build_induction
from tests.compression.test_streaming_cost import texts as permuted_texts
from tests.ui.summaries import SHARP, summary

Summaries = dict[str, list[str]]


def summaries(profile: Profile, names: dict[str, str] | None = None) -> Summaries:
    """The summary of every head, or of some under other names."""
    named = names or {str(address): str(address) for address in profile.addresses}
    return {name: summary(profile, head) for name, head in named.items()}


@cache
def decoder_heads() -> Summaries:
    """`tests.analysis.constructed_heads.DECODER`, tested causally, and a role of retrieval."""
    retrieval = Retrieval(THREE)
    role = hw.Role("retrieval", retrieval.score, 0.1)
    own = hw.WeightAt("three back", lambda text: [place - 3 for place in range(len(text.ids))])
    roles = [role, hw.Role("three back", own.score, 0.1)]
    return summaries(hw.profile(decoder(), documents(), measures=[retrieval, own], roles=roles))


@cache
def encoder_heads() -> Summaries:
    """`tests.analysis.constructed_heads.ENCODER`, and a previous-token head that fetches nothing but from the first token."""
    found = summaries(hw.profile(encoder(), documents(), causal=False))
    model = decoder()
    with torch.no_grad():
        head = next(iter(model.attention_layers())).heads[0]
        head.W_V.zero_()
        head.W_V[model.tokenizer.encode("1 2")] = 1.0  # pyright: ignore[reportOptionalMemberAccess]
    return {**found, "fetches nothing": summary(hw.profile(model, documents(), causal=False), "0.0")}


@cache
def prompted_heads() -> Summaries:
    """Heads on prompts: each model has a head with the role, and heads beside it that have a part of the behavior."""
    named = summaries(
        hw.profile(people().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    )
    lists = counting()
    lists.head("0.1", places=back(0), write=1e-3 * torch.eye(lists.V))
    lists.head("0.3", places=to_place(0), write=1e-3 * next_words(lists))
    listed = summaries(hw.profile(lists.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False))
    suppressed = summaries(
        hw.profile(
            people_with_a_suppressor().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False
        )
    )
    return {
        "name suppression": suppressed["2.1"], "writes for the other name": suppressed["2.2"],
        "name mover": named["2.0"], "writes against the name": named["2.1"],
        "successor": listed["0.0"], "repeats the word": listed["0.1"], "never attends to the word": listed["0.3"],
        **_suppressing(), **_focused(), **_far(),
    }  # fmt: skip


def _suppressing() -> Summaries:
    model = blank(heads=6, layers=2)
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(BEFORE, 1.0)
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 2.0)
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, -0.5)
    measure = CopySuppression(documents(120))
    role = next(one for one in PROMPTED if one.name == "copy suppression")
    profile = hw.profile(
        model, documents(120), relations=False, measures=[measure], roles=[replace(role, measure=measure.score)]
    )
    return summaries(profile, {"copy suppression": "1.4", "writes for the token": "1.0"})


def _focused() -> Summaries:
    built = Worded(ASKED, heads=2, kind="encoder")
    scores = torch.zeros(built.V, built.V)
    common = {
        word for text, _ in FACTS for word in text.split() if sum(word in other.split() for other, _ in FACTS) > 1
    }
    for text, question in FACTS:
        for word in {*text.split()[1:]} - common:
            scores[[[i] for i in built.ids(question.split())], built.ids([word])] = BETA
    built.head("0.0", tokens=scores, places=to_place(0, BETA / 2), write=torch.eye(built.V))
    built.head("0.1", write=torch.eye(built.V))
    profile = hw.profile(built.model, [" ".join(text for text, _ in FACTS[:3])] * 4, relations=False, prompts=True)
    return summaries(profile, {"query focus": "0.0", "uniform": "0.1"})


def _far() -> Summaries:
    words = sorted({word for text in texts() for word in text.split()})
    built = Worded(words, heads=4, places=LENGTH)
    eye = torch.eye(built.V)
    built.head("0.0", places=back(45, places=LENGTH), write=eye)
    built.head("0.1", places=to_place(9, places=LENGTH), write=eye)
    built.head("0.2", places=back(1, places=LENGTH), write=eye)
    built.head("0.3", write=eye)
    profile = hw.profile(built.model, texts(), relations=False, prompts=True, causal=False)
    return summaries(profile, {"far offset": "0.0", "fixed place": "0.1", "one back": "0.2", "uniform decoder": "0.3"})


@cache
def patch_heads() -> Summaries:
    """Heads over pictures of 5 by 5 patches, after a class token and a register; attention is made by hand."""
    grid = Grid.of(5, 5, ["class", "register"])
    down, across = (torch.nan_to_num(part, nan=99.0) for part in apart(grid))
    far, steps = (down.square() + across.square()).sqrt(), torch.maximum(down.abs(), across.abs())
    allowed = {
        "row": (down == 0) & (across != 0), "column": (across == 0) & (down != 0), "local": steps == 1,
        "global": (far > 2.5) & (far < 99), "class token": one_key(grid, 0), "register": one_key(grid, 1),
        "sink": one_key(grid, 14), "uniform": torch.ones(len(grid), len(grid), dtype=torch.bool),
    }  # fmt: skip
    tally, measures = Tally(len(allowed)), picture_measures(grid)
    runner, scores = Runner(tally, measures), SHARP * torch.stack(list(allowed.values()))[None].float()
    for number in range(40):
        picture = InputPicture(str(number), torch.full((1, 1, 1), float(number)), grid)
        runner.see(by_scores(scores), make_batch([picture_unit(number, picture)]), 0)
    about = {"texts": 40, "layers": ["0"], "read": "pictures", "asked": "", "pictures": [5, 5]}
    heads = tuple(Address.parse(f"0.{number}") for number in range(len(allowed)))
    numbers = {number.name: number for measure in measures for number in measure.numbers}
    nothing = [[] for _ in heads]
    profile = Profile.of(heads, tally, None, nothing, Cases(len(heads)), about, numbers, ROLES)
    return summaries(profile, {name: str(head) for name, head in zip(allowed, heads, strict=True)})


def one_key(grid: Grid, key: int) -> torch.Tensor:
    """Every row attends to one token."""
    return torch.zeros(len(grid), len(grid), dtype=torch.bool).index_fill_(1, torch.tensor([key]), True)


@cache
def asked_heads() -> Summaries:
    """Heads with all that is measured beside a profile: writes, loss without the head, cost of bits, partners."""
    model = blank(heads=4, layers=2)
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(TOKEN, 0.5)  # copies into the part it reads: eigenvalues above 0
    Built(one, 1).places(1).writes(TOKEN, -0.5)
    Built(one, 2).places(1).writes(OUT, 4.0)  # the model says the token before
    Built(two, 0).places(1).writes(TOKEN, 0.5)
    Built(two, 1).places(1).writes(SCRATCH, 0.5)  # it writes what it never reads
    Built(two, 2).places(1).writes(OUT, -1.0)
    corpus = [" ".join(["w0x"] + ["w1x w2x"] * 12)] * 8
    profile = hw.profile(model, corpus, relations=False, causal=False)
    found = {
        name: summary(profile, name, ask(model, profile[name], corpus))
        for name in ("0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2")
    }
    return {
        **found,
        **_random_heads(),
        **_encoder_head(),
    }


def _random_heads() -> Summaries:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=32, heads=4, kv_heads=2)
    model = hw.Transformer(hw.ModelSpec(vocab=257, context=96, layers=2, attention=attention)).eval()
    model.tokenizer = byte_tokenizer()
    corpus = ["The dog saw the hen, and then the dog left. " * 40]
    profile = hw.profile(model, corpus, relations=False, causal=False)
    return {"random": summary(profile, "1.2", ask(model, profile["1.2"], corpus)), "not asked": summary(profile, "1.2")}


@cache
def ranked_heads() -> Summaries:
    """Heads with five roles each, of evidence levels and distances from the baseline that are set by hand."""
    profile = hw.profile(encoder(), documents(8), relations=False, causal=False)
    head, names = profile["0.0"], ("self", "digit", "local", "bracket", "quote")
    ranks = {
        "same level, less far": [("effective", gain) for gain in (0.9, 0.8, 0.7, 0.6, 0.5)],
        "same level, farther": [("effective", gain) for gain in (0.9, 0.8, 0.3, 0.6, 0.5)],
        "lower level": [
            ("effective", 0.9),
            ("effective", 0.8),
            ("effective", 0.7),
            ("selective", 0.95),
            ("selective", 0.9),
        ],
    }
    base = Support("", "", "", 0.8, 0.1, (0.7, 0.9), 0.0, 0.0005, 1.0, None, 100)
    roles = {
        name: tuple(
            replace(base, role=role, rung=level, gain=gain) for role, (level, gain) in zip(names, rank, strict=True)
        )
        for name, rank in ranks.items()
    }
    held = replace(base, role="copy suppression", rung="effective", probe=HELD)
    held = held.with_effects([Effect(0.125, 0.01, on="texts that repeat a token")], 1)
    case = Example(True, 0.8, "x", "y", "y", 0.8, "*y* [x]", ())
    heads = {name: replace(head, roles=ranking) for name, ranking in roles.items()}
    effect = Effect(
        1.5, 0.01, control=0.125, single=0.25, more=1.25, interval=(1.0, 1.5), on="sentences about two people"
    )
    lead = replace(base, role="name suppression", rung="effective", probe=LEAD).with_effects([effect], 1)
    lead = replace(lead, rung="causal", causal_on=(effect.on,))
    one_set = replace(lead, role="induction", rung="effective", probe=None, causal_on=("running text",))
    heads["lead"], heads["one set"] = replace(head, roles=(lead,)), replace(head, roles=(one_set,))
    heads["held back"] = replace(head, roles=(held,), evidence=(case, replace(case, hit=False)))
    return {name: [line.text for line in story(profile, one)] for name, one in heads.items()}


def _encoder_head() -> Summaries:
    model = encoder()
    profile = hw.profile(model, documents(8), relations=False, causal=False)
    return {"encoder": summary(profile, "0.0", ask(model, profile["0.0"], documents(8)))}


@cache
def streaming_heads() -> Summaries:
    """A previous-token head and an induction head: both attend locally on running text, only the first can stream."""
    model, corpus = build_induction().model, permuted_texts()
    profile = hw.profile(model, corpus, relations=False, prompts=True, causal=False)
    measured = replace(
        profile["1.0"], measures={**profile["1.0"].measures, BEYOND.name: 0.01}
    )  # as on text that repeats nothing
    return {
        "previous token": summary(profile, "0.0", ask(model, profile["0.0"], corpus)),
        "induction": summary(profile, "1.0", ask(model, measured, corpus)),
    }
