"""The last rung of roles on prompts: prompts and lists that ask for the same word, and who is causal there."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.look.measure.names import NAMES, make_pairs
from headwise.look.profile.causal import climb
from headwise.look.profile.make import profile
from headwise.look.profile.prompt_trials import _comma, _list, prompt_trial
from headwise.look.profile.result import Profile
from headwise.look.profile.roles import DUE, HELD, Support
from headwise.look.profile.shards import profile_shards
from headwise.look.profile.trials import LISTED
from headwise.look.record.reading import Reading
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text import Tokenizer
from headwise.text.make import byte_tokenizer, word_tokenizer
from tests.look.built import BEFORE, OUT, Built, V, decoder, documents
from tests.look.test_prompts import people
from tests.look.worded import BETA, Worded, back
from tests.parity.real import smollm2_folder


def effective(role: str, probe: str, family: int = 8) -> Support:
    return Support(role, "", "effective", 1.0, 0.0, (0.9, 1.0), 1.0, 0.001, 1.0, probe, 64, family=family)


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
def test_sentences_and_lists_ask_for_the_same_name() -> None:
    built = people_who_repeat()
    trial = prompt_trial(built.model, "name mover", seed=5)
    assert len(trial.cases) == len(trial.controls) == 32
    names = set(built.ids(NAMES))
    for case, control in zip(trial.cases, trial.controls, strict=True):
        (answer,), (same,) = case.wanted.values(), control.wanted.values()
        assert answer == same
        ids = control.read.ids
        assert set(ids) < names
        first = ids.index(answer)
        assert first > 0, "nobody can foresee the first"
        assert ids[LISTED:] == ids[:first], "said again up to the answer"
        assert not {*ids} & ({*case.read.ids} - {answer}), "nobody else of the sentence is in the list"
    assert trial.cases != prompt_trial(built.model, "name mover", seed=6).cases


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


def test_the_answers_hang_on_the_head_that_finds_the_other_name() -> None:
    """The head that goes on with lists is needed there and not for names: as a name mover it is not causal."""
    heads = {address: effective("name mover", DUE) for address in ("2.0", "2.2", "1.4")}
    made = climbed(people_who_repeat().model, heads)
    mover = made["2.0"]
    assert (mover.rung, mover.control is not None) == ("causal", True)
    assert mover.cost is not None
    assert mover.control is not None
    assert mover.cost > 1 > mover.control
    assert made["2.2"].rung == "effective", "it writes nothing"
    assert made["2.2"].cost == 0
    assert made["1.4"].rung == "effective"
    assert made["1.4"].control is not None
    assert made["1.4"].control > 1


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
    assert prompt_trial(built.model, "name mover", seed=0).cases == ()


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
