"""The last rung of roles on prompts: prompts and lists that ask for the same word, and who is causal there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.head_outputs import run_on
from headwise.analysis.metrics import name_suppression
from headwise.analysis.metrics.name_movers import NAMES, NamePair, make_name_pairs, make_pairs
from headwise.analysis.metrics.prompts import Looks, ask_prompts
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.causal import climb, lost_without
from headwise.analysis.roles.causal_cases import LISTED, Prompt
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_cases import _comma, _list, lead_trial, prompt_trial
from headwise.analysis.roles.roles import HELD, LEAD, Support
from headwise.analysis.roles.shards import profile_shards
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from tests.analysis.constructed_heads import BEFORE, OUT, Built, V, decoder, documents
from tests.analysis.constructed_word_models import BETA, P, Worded, back, to_place
from tests.analysis.test_prompts import people
from tests.parity.real import smollm2_folder


def effective(role: str, probe: str, family: int = 8) -> Support:
    on = "sentences about two people" if probe == LEAD else ""
    return Support(role, "", "effective", 1.0, 0.0, (0.9, 1.0), 1.0, 0.001, 1.0, probe, 64, on=on, family=family)


@torch.no_grad()
def climbed(model: Transformer, found: dict[str, Support], texts: Reading | None = None) -> dict[str, Support]:
    """What ablation says of some heads, each with one role."""
    addresses = model.spec.addresses
    given = [[found[str(address)]] if str(address) in found else [] for address in addresses]
    made = climb(model, addresses, given, [], list(texts or ()), 1, lambda what, done, of: None)
    return {str(address): some[0] for address, some in zip(addresses, made, strict=True) if some}


def people_who_repeat() -> Worded:
    """As in the tests of the measure, and besides a model that goes on with lists: what stood behind a word is said again."""
    built = people(parts=4, heads=6)
    eye, before = torch.eye(built.V), 2
    built.head("0.4", places=back(1), write=eye, into=before)
    built.head("1.4", tokens=20 * BETA * eye, at=before, write=6 * eye, into=3)
    return built


@torch.no_grad()
@pytest.mark.parametrize(("role", "share"), [("name mover", 0.5), ("name suppression", 1.0)])
def test_lead_trial_sentences_lists_and_single_names_ask_for_the_same_lead(role: str, share: float) -> None:
    built = people_who_repeat()
    trial = lead_trial(built.model, role, seed=5)
    assert len(trial.cases) == len(trial.controls) == len(trial.singles) == 32
    assert trial.share == share
    names = set(built.ids(NAMES))
    for case, control, single in zip(trial.cases, trial.controls, trial.singles, strict=True):
        (answer,), (other,) = case.wanted.values(), case.rivals.values()
        for row in (control, single):
            assert [*row.wanted.values()] == [answer]
            assert [*row.rivals.values()] == [other]
        assert case.read.ids.count(answer) == 1
        assert case.read.ids.count(other) == 2, "said again, so it is not due"
        assert set(single.read.ids) & names == {answer}, "one name alone"
        ids = control.read.ids
        assert set(ids) < names
        first = ids.index(answer)
        assert first > 0, "nobody can foresee the first"
        assert ids[LISTED:] == ids[:first], "said again up to the answer"
        assert not {*ids} & ({*case.read.ids} - {answer}), "nobody else of the sentence is in the list"
    due_first = [
        case.read.ids.index(*case.wanted.values()) < case.read.ids.index(*case.rivals.values()) for case in trial.cases
    ]
    assert 8 < sum(due_first) < 24, "either name is due"
    assert trial.cases != lead_trial(built.model, role, seed=6).cases


@torch.no_grad()
def test_lost_without_rivals_measures_the_lead() -> None:
    """What a row loses is the fall of log p(due) − log p(other), as the patched model gives it."""
    model = people_who_repeat().model
    rows = lead_trial(model, "name mover", seed=5).cases[:4]
    assert len({len(row.read.ids) for row in rows}) == 1
    head = Address.parse("2.0")
    lost, clean = lost_without(model, [head], rows)

    def lead(row: Prompt) -> float:
        logs = model(torch.tensor([row.read.ids]))[0, -1].log_softmax(-1)
        return float(
            sum(logs[token] for token in row.wanted.values()) - sum(logs[token] for token in row.rivals.values())
        )

    for number, row in enumerate(rows):
        assert clean[number] == pytest.approx(-lead(row), abs=1e-4)
        before = lead(row)
        with hw.ablated(model, "2.0", "resample", other=run_on(model, torch.tensor([rows[number - 1].read.ids]))):
            assert lost[number, 0] == pytest.approx(before - lead(row), abs=1e-4)


def test_commas_stand_between_the_words_of_a_list() -> None:
    """Where they are tokens of their own: SmolLM2 does not go on with names side by side."""
    words = Tokenizer.load(smollm2_folder())
    (prompt, *_), dice = make_pairs(words, seed=3), np.random.default_rng(0)
    comma, answer = words.encode("Then,", special=False)[-1], prompt.dues[0].answer
    ids = _list(prompt, [11, 12, 13, answer], LISTED, _comma(words), dice)
    assert set(ids[1::2]) == {comma}
    assert ids[-1] == answer
    assert sorted(ids[:8:2]) == sorted([11, 12, 13, answer])
    assert ids[8::2] == ids[:8:2][: len(ids[8::2])]
    assert _comma(word_tokenizer(["Then"])) == ()


def test_climb_name_mover_is_judged_by_the_lead() -> None:
    """The head that goes on with lists is needed there and not for names: as a name mover it is not causal. A name
    mover lifts a single name as much as the name due among two."""
    heads = {address: effective("name mover", LEAD) for address in ("2.0", "2.2", "1.4")}
    made = climbed(people_who_repeat().model, heads)
    mover, (effect,) = made["2.0"], made["2.0"].effects
    assert mover.rung == "causal"
    assert effect.control is not None
    assert effect.single is not None
    assert effect.cost > 1 > effect.control
    assert effect.single > 0.5 * effect.cost
    assert made["2.2"].rung == "effective", "it writes nothing"
    assert made["2.2"].cost == pytest.approx(0, abs=1e-6)
    assert made["1.4"].rung == "effective"
    assert made["1.4"].control is not None
    assert made["1.4"].control > 1


def people_with_a_suppressor() -> Worded:
    """A model that chooses between two names by suppression: 2.0 looks at all names and writes them, whoever is due; 2.1
    looks at the name said again and writes against it; 2.2 looks there too and writes a little for it; 2.3 writes against
    the name due."""
    built = people_who_repeat()
    eye, avoided, out = torch.eye(built.V), 1, 3
    with torch.no_grad():
        built.model.heads[Address.parse("2.0")].W_Q[built.part(avoided)] = 0
        built.model.heads[Address.parse("2.3")].W_O[:, built.part(out)] = -0.1 * eye
    for address, size in (("2.1", -8.0), ("2.2", 0.1)):
        head = built.model.heads[Address.parse(address)]
        with torch.no_grad():
            for letter in ("W_Q", "W_K", "W_V", "W_O"):
                getattr(head, letter).zero_()
        rest = to_place(0, 20 * BETA)
        built.head(address, tokens=200 * BETA * eye, asked=avoided, places=rest, write=size * eye, into=out)
    return built


def test_climb_head_that_lifts_any_name_is_no_name_mover() -> None:
    """The surprise of the name due depends on it, among two names and alone. The lead over the other name does not."""
    model = people_with_a_suppressor().model
    made = climbed(model, {"2.0": effective("name mover", LEAD), "2.1": effective("name suppression", LEAD)})
    lifter, suppressor = made["2.0"], made["2.1"]
    with torch.no_grad():
        trial = lead_trial(model, "name mover", seed=1)
        surprise, _ = lost_without(model, [Address.parse("2.0")], [row._replace(rivals={}) for row in trial.cases])
    assert surprise.mean() > 0.5, "judged by the name due alone it would be causal"
    (effect,) = lifter.effects
    assert effect.single is not None
    assert effect.single > 0.5
    assert effect.cost < 0.1 * effect.single
    assert lifter.rung == "effective"
    (effect,) = suppressor.effects
    assert suppressor.evidence_level == "causal on sentences about two people"
    assert effect.single is not None
    assert effect.cost > 1 > 0.2 > abs(effect.single), "a single name is not suppressed"


def test_name_suppression_built_heads_only_the_one_that_writes_against_the_wrong_name() -> None:
    built = people_with_a_suppressor()
    found = profile(built.model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    assert [str(address) for address in found.roles()["name suppression"]] == ["2.1"]
    at = [str(address) for address in found.addresses].index
    score, null = (found.measure(name) for name in ("name suppression", "name suppression null"))
    assert (score[at("2.1")], null[at("2.1")]) == (pytest.approx(1, abs=1e-4), pytest.approx(0, abs=1e-4))
    assert (score[at("2.2")], null[at("2.2")]) == (pytest.approx(0, abs=1e-4), pytest.approx(1, abs=1e-4)), (
        "writes for it"
    )
    assert score[at("2.3")] < 0.1, "it looks at the name due"
    assert "attends to the name that is not due and writes less for it" in str(found.story("2.1"))


def test_name_suppression_head_that_suppresses_the_last_name_scores_its_baseline() -> None:
    """It looks at whatever name was said last, which is the wrong candidate among two and the one due if it is alone."""
    built = people_with_a_suppressor()
    V, eye = built.V, torch.eye(built.V)
    names = torch.zeros(V, 1)
    names[built.ids(NAMES)] = 1
    later = BETA * torch.arange(P)[None].expand(P, P)  # later places score more
    built.head("0.1", tokens=50 * BETA * torch.ones(V, 1) @ names.T, places=later, write=-0.01 * eye, into=3)
    found = profile(built.model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    at = [str(address) for address in found.addresses].index("0.1")
    assert found.measure("name suppression")[at] > 0.9
    assert found.measure("name suppression null")[at] > 0.9
    assert "name suppression" not in {one.role for one in found["0.1"].roles}


def test_name_suppression_shuffled_gold_gives_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other pair the sentences change places, so that gold names the wrong one of them."""

    def shuffled(*given: Any) -> list[NamePair]:
        made = []
        for number, (sentences, singles) in enumerate(make_name_pairs(*given)):
            one, other = sentences
            swapped = one._replace(ids=other.ids), other._replace(ids=one.ids)
            made.append(NamePair(swapped if number % 4 < 2 else sentences, singles))
        return made

    def always_right(*given: Any) -> Looks:
        looks = ask_prompts(*given)
        return looks._replace(right=np.ones_like(looks.right))

    monkeypatch.setattr(name_suppression, "make_name_pairs", shuffled)
    monkeypatch.setattr(name_suppression, "ask_prompts", always_right)
    found = profile(
        people_with_a_suppressor().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False
    )
    at = [str(address) for address in found.addresses].index("2.1")
    assert found.measure("name suppression")[at] == pytest.approx(0.5, abs=0.05)
    assert "name suppression" not in found.roles()


def test_what_is_held_back_gains() -> None:
    """Beside an induction head one that writes against what it says, half as loud: without it the copy is likelier. The
    induction head would have its answers lose, so it holds nothing back."""
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, -1.0)
    heads = {address: effective("copy suppression", HELD) for address in ("1.4", "1.0")}
    made = climbed(model, heads, Reading.of(model, documents(40)))
    assert made["1.4"].rung == "causal"
    assert made["1.4"].cost is not None
    assert made["1.4"].cost > 0.5
    assert made["1.0"].rung == "effective"
    assert made["1.0"].cost is not None
    assert made["1.0"].cost < -0.5


@torch.no_grad()
def tried(model: Transformer, more: list[Support]) -> list[Support]:
    """What ablation says of the induction head, with other roles beside that."""
    texts = list(Reading.of(model, documents(40)))
    address = model.spec.addresses.index(Address.parse("1.0"))
    found: list[list[Support]] = [[] for _ in model.spec.addresses]
    found[address] = [effective("induction", "repeats", family=0), *more]
    return climb(model, model.spec.addresses, found, [], texts, 1, lambda what, done, of: None)[address]


def test_a_role_on_prompts_is_tried_beside_the_first_and_in_a_family_of_its_own() -> None:
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, -1.0)
    (alone,) = tried(model, [])
    first, second = tried(model, [effective("copy suppression", HELD)])
    assert alone.rung == "causal"
    assert first == alone, "the same verdict and the same p"
    assert (second.role, second.rung, second.causal_p) == ("copy suppression", "effective", 1.0)


def test_a_head_with_two_roles_that_are_tried_alike_is_one_head_of_its_layer() -> None:
    """Among the others of its layer it does not stand itself: a role of one's own changes nothing for the first."""
    model = decoder()
    (alone,) = tried(model, [])
    first, second = tried(model, [effective("retrieval", "repeats")])
    assert first == alone
    assert (second.rung, second.effect, second.cost) == ("causal", first.effect, first.cost)


def test_who_has_no_prompts_has_no_trial() -> None:
    built = people()
    assert prompt_trial(built.model, "query focus", seed=0).cases == ()
    built.model.tokenizer = byte_tokenizer()
    assert lead_trial(built.model, "name mover", seed=0).cases == ()


def test_cases_of_roles_on_prompts_are_shown_and_shards_ask_for_them_once(tmp_path: Path) -> None:
    model, corpus = people_who_repeat().model, tmp_path / "text.txt"
    corpus.write_text("Then we met.\n\n" * 8)
    found = profile(model, corpus, relations=False, prompts=True)
    parts = profile_shards(model, corpus, tmp_path / "out", relations=False, prompts=True, shard=60)
    assert len(list((tmp_path / "out").glob("shard-*"))) > 1
    assert parts.roles() == found.roles()
    assert parts["2.0"].roles == found["2.0"].roles
    assert parts["2.0"].cases["name mover"] == found["2.0"].cases["name mover"]
    assert Profile.load(tmp_path / "out" / "profile.npz")["2.0"].cases == parts["2.0"].cases
    with pytest.raises(HeadwiseError, match="prompts differ"):
        profile_shards(model, corpus, tmp_path / "out", relations=False, shard=60)
    head = found["2.0"]
    told = next(one for one in head.roles if one.role == "name mover")
    assert told.rung == "causal"
    shown = head.cases["name mover"]
    assert len(shown) == 8
    assert all(case.hit and case.token == "to" and case.meant == case.attended in NAMES for case in shown)
    assert all(case.text.endswith("[to]") for case in shown)
