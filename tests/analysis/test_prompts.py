"""Roles on prompts of their own: heads built by hand score what their closed forms say."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.copy_suppression import CUE, LENGTH, CopySuppression, make_echoes
from headwise.analysis.metrics.hooks import listening
from headwise.analysis.metrics.name_movers import NAMES, SINGLES, TEMPLATES, NameMover, make_pairs
from headwise.analysis.metrics.prompts import Due, DuePrompt, ask_prompts, next_token
from headwise.analysis.metrics.query_focus import FACTS, QueryFocus, make_queries
from headwise.analysis.metrics.successor import CLASSES, ROUND, Successor, find_members, list_prompt
from headwise.analysis.metrics.tasks import TaskMeasure
from headwise.analysis.recording import batching
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_roles import PROMPTED
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, word_tokenizer
from headwise.ui.heads_view import show_profile
from tests.analysis.constructed_heads import BEFORE, OUT, Built, blank, documents
from tests.analysis.constructed_heads import V as BUILT
from tests.analysis.constructed_word_models import BETA, P, Worded, back, to_place
from tests.contract.layers import make_model

PEOPLE = sorted(
    {
        word
        for t in (*TEMPLATES, *SINGLES)
        for word in t.replace("{", " {").replace("}", "} ").split()
        if "{" not in word
    }
)


def asked(model: Transformer, measure: TaskMeasure) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Score, baseline, valued score of every head, and the cases of every unit."""
    tally = Tally(len(model.spec.addresses))
    with torch.no_grad():
        assert measure.run(model, tally) == ""
    score, null, valued = (tally.mean(name) for name in measure.names)
    return score, null, valued, tally.per_bucket(measure.names[0])[1][:, 0]


def people(heads: int = 4, parts: int = 3) -> Worded:
    """Three layers: who was said before; who is not due, brought to every row; who looks at the names that are left."""
    built = Worded((*PEOPLE, *NAMES), heads=heads, layers=3, parts=parts)
    V, eye = built.V, torch.eye(built.V)
    names = torch.zeros(V, 1)
    names[built.ids(NAMES)] = 1
    said, avoided, out = 0, 1, parts - 1
    built.head("0.0", places=to_place(0, BETA / 2) - 3 * BETA * torch.eye(P), tokens=BETA * eye, write=eye, into=said)
    any_name = BETA * torch.ones(V, 1) @ names.T  # from whatever word to names
    built.head("1.0", tokens=20 * any_name, at=said, read=said, write=eye * names, into=avoided)
    built.head("2.0", tokens=20 * any_name, write=4 * eye, into=out)
    with torch.no_grad():
        built.model.heads[Address.parse("2.0")].W_Q[built.part(avoided), :V] = -200 * BETA * eye
        for number in (1, 2, 3):
            head, same = built.model.heads[Address.parse(f"2.{number}")], built.model.heads[Address.parse("2.0")]
            for letter in ("W_Q", "W_K", "W_V"):
                getattr(head, letter).copy_(getattr(same, letter))
        built.model.heads[Address.parse("2.1")].W_O[
            :, built.part(out)
        ] = -eye  # looks at the right name and writes against it
    return built


def test_the_head_that_finds_the_other_name_moves_it() -> None:
    score, null, valued, counts = asked(people().model, NameMover())
    names = [str(address) for address in people().model.spec.addresses]
    assert (score[names.index("2.0")], valued[names.index("2.0")]) == (pytest.approx(1, abs=1e-5),) * 2
    assert null[names.index("2.0")] == pytest.approx(0, abs=1e-5)
    assert score[names.index("2.1")] == pytest.approx(0, abs=1e-5), "it writes against the name"
    assert score[names.index("2.2")] == 0, "it writes nothing"
    assert set(counts.tolist()) == {0.0, 2.0}
    assert (counts > 0).sum() == 64, "the model gets all of them right"
    found = profile(people().model, ["Then we met. " * 3] * 4, relations=False, prompts=True, causal=False)
    assert [str(address) for address in found.roles()["name mover"]] == ["2.0"]
    told = next(one for one in found["2.0"].roles if one.role == "name mover")
    assert (told.role, told.rung, told.on) == ("name mover", "effective", "sentences about two people")
    assert told.family > 0


@pytest.mark.parametrize("beta", [2.0, 5.0])
def test_a_head_that_looks_at_the_first_name_scores_its_baseline(beta: float) -> None:
    """Beside the circuit that makes the model right: e^β / (e^β + n − 1) where the first name is due, that is every other
    time, and where it is not."""
    built = people()
    eye = torch.eye(built.V)
    built.head("0.1", places=to_place(1, beta), write=1e-3 * eye, into=2)
    built.head("0.2", write=1e-3 * eye, into=2)  # alike everywhere: the name said twice is written most
    built.head("0.3", write=-1e-3 * eye, into=2)
    lengths = np.array([len(prompt.ids) for prompt in make_pairs(tokenizer_of(built.model))[::2]])
    weights = np.exp(beta) / (np.exp(beta) + lengths - 1)
    weight = weights.mean()
    score, null, valued, _ = asked(built.model, NameMover())
    assert score[1] == pytest.approx(weight / 2, abs=1e-6)
    rest = np.mean((1 - weights) / (lengths - 1))  # on the name due where it is not the first, and is written less
    assert null[1] == pytest.approx((weight + rest) / 2, abs=1e-6)
    assert valued[1] == pytest.approx(weight / 2, abs=1e-6)
    assert (score[2], null[2]) == (0, pytest.approx(np.mean(2 / lengths), abs=1e-6))
    assert (score[3], null[3]) == (pytest.approx(np.mean(1 / lengths), abs=1e-6), 0)


def test_pairs_of_sentences_differ_in_one_name() -> None:
    tokenizer = tokenizer_of(people().model)
    made = make_pairs(tokenizer)
    for one, other in zip(made[::2], made[1::2], strict=True):
        differ = [i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b]
        assert len(differ) == 1, "who is named again"
        (due, twin), (other_due, other_twin) = one.dues, other.dues
        assert (due.place, due.answer) == (other_twin.place, other_twin.answer), "the baseline is of the same name"
        assert (twin.place, twin.answer) == (other_due.place, other_due.answer)
        assert one.ids[differ[0]] == twin.answer
        assert one.ids[due.place] == due.answer
        assert one.ids.count(due.answer) == 1
    assert made == make_pairs(tokenizer)
    assert made != make_pairs(tokenizer, seed=1)


LISTED = [word for some in CLASSES for word in some]


def followers(built: Worded) -> torch.Tensor:
    """From each word, bare and with a comma, to the one that comes next: (V, V)."""
    turn, place = torch.zeros(built.V, built.V), list(built.words).index
    for some in CLASSES:
        for word, behind in zip(some, (*some[1:], some[0]), strict=True):
            turn[place(word), place(behind)] = turn[place(f"{word},"), place(behind)] = 1
    return turn


def counting(heads: int = 5) -> Worded:
    built = Worded(("The", *dict.fromkeys((*LISTED, *(f"{word}," for word in LISTED)))), heads=heads)
    built.head("0.0", places=back(0), write=followers(built))
    return built


def test_the_head_that_writes_the_next_is_a_successor() -> None:
    built = counting()
    V, members = built.V, find_members(tokenizer_of(built.model))
    assert len(members) == sum(len(some) if some in ROUND else len(some) - 3 for some in CLASSES)
    friday = torch.zeros(V, V).index_fill_(1, torch.tensor(built.ids(["Friday"])), 1e-3)
    built.head("0.1", places=back(0), write=1e-3 * torch.eye(V))  # says what it reads
    built.head("0.2", places=back(0), write=friday)  # always the same
    built.head("0.3", places=to_place(0), write=1e-3 * followers(built))  # would write it, and never looks there
    built.head("0.4", places=back(0), write=-1e-3 * followers(built))
    score, null, valued, counts = asked(built.model, Successor())
    others = np.array([len(one.others) for one in members])
    assert counts.sum() == len(members), "the model goes on with every list"
    assert score[0] == valued[0] == 1
    assert null[0] == pytest.approx(np.mean(1 / others))
    assert (score[1], null[1]) == (0, 0)
    # It is right on Thursdays, says what it reads on Fridays, and is wrong on five days; elsewhere all members have the same.
    elsewhere = np.sum(1 / (others[others != 6] + 1))
    assert score[2] == pytest.approx(1 / len(members))
    assert null[2] == pytest.approx((6 / 6 + elsewhere) / len(members))
    assert (score[3], valued[3]) == (0, 0)
    assert score[4] == 0
    found = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False)
    rungs = {
        str(address): one.rung for address in found.addresses for one in found[address].roles if one.role == "successor"
    }
    assert rungs == {"0.0": "effective"}


def test_other_roles_are_told_as_they_are_without_prompts(tmp_path: Path) -> None:
    """The same numbers, in the same order; and a profile with prompts is saved, read and merged like any other."""
    texts = ["The one two three four five six", "The a b c d", "The Monday Tuesday Friday"]
    built = counting(2)
    built.head("0.1", places=back(1), write=1e-3 * torch.eye(built.V))
    plain = profile(built.model, texts * 4, relations=False)
    more = profile(built.model, texts * 4, relations=False, prompts=True)
    assert [[one for one in some if not one.family] for some in more.supports] == [
        list(some) for some in plain.supports
    ]
    assert plain.family == more.family
    assert any(one.family for some in more.supports for one in some)
    more.save(tmp_path / "more.npz")
    again = Profile.load(tmp_path / "more.npz")
    assert again.supports == more.supports
    both = more.merge(profile(built.model, ["The ten nine"], relations=False, prompts=True))
    assert both.roles()["successor"] == more.roles()["successor"]
    np.testing.assert_array_equal(both.measure("successor"), more.measure("successor"))


def test_a_model_that_is_too_weak_is_told_so() -> None:
    built = counting(1)
    with torch.no_grad():
        built.model.heads[Address.parse("0.0")].W_O.zero_()
    found = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True, causal=False)
    assert "too weak for it: of 89 lists" in found.about["unasked"]["successor"]
    assert "single tokens" in found.about["unasked"]["name mover"]
    assert np.isnan(found.measure("successor")).all()
    console = Console(file=StringIO(), width=200)
    show_profile(found, {"0.0"}, console)
    assert "Not asked for successor: too weak for it" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert not {role.name for role in PROMPTED} & {*found.roles()}


def test_models_with_few_positions_are_asked_what_fits() -> None:
    """Lists of four words fit into ten positions, and so do the lists of the last rung; sentences about people do not."""
    places = 10
    built = Worded(("The", *dict.fromkeys((*LISTED, *(f"{word}," for word in LISTED)))), heads=2, places=places)
    built.head("0.0", places=back(0, places=places), write=followers(built))
    found = profile(built.model, ["The one two three"] * 4, relations=False, prompts=True)
    assert {str(address) for address in found.roles()["successor"]} == {"0.0"}
    assert next(one for one in found["0.0"].roles if one.role == "successor").cost is not None
    model = Worded((*PEOPLE, *NAMES), heads=1, places=places).model
    found = profile(model, ["Then we met. "] * 4, relations=False, prompts=True)
    assert "tokens, and this model has 10 positions" in found.about["unasked"]["name mover"]


def test_a_list_shows_the_member_before_what_is_due() -> None:
    """Whether its comma is a token of its own or a part of it."""
    apart = bpe_tokenizer([f"The {word}," for word in LISTED] * 2, size=800)
    for tokenizer, back_from_the_end in ((apart, 2), (tokenizer_of(counting().model), 1)):
        members = find_members(tokenizer)
        assert len(members) > 50
        for member in members:
            prompt = list_prompt(tokenizer, member)
            assert prompt.dues[0].place == len(prompt.ids) - back_from_the_end


def test_prompts_cannot_be_shuffled() -> None:
    with pytest.raises(HeadwiseError, match="prompts are read as they are"):
        profile(counting(1).model, ["The one two"], prompts=True, control="shuffled")


def test_words_of_several_tokens_are_left_out() -> None:
    model = Transformer(ModelSpec(vocab=257, context=64, layers=1, attention=AttentionSpec(width=12, heads=2)))
    model.tokenizer = byte_tokenizer()
    assert next_token(tokenizer_of(model), "Then", "Mary") is None
    with pytest.raises(HeadwiseError, match="of 24 names only 0 are single tokens"):
        make_pairs(tokenizer_of(model))
    assert find_members(tokenizer_of(model)) == []


def test_the_head_that_writes_against_what_is_foretold_suppresses_it() -> None:
    """Beside an induction head, which makes the model say it; a head that looks at the same places whatever is read; one
    that looks there and writes for every other token."""
    model, texts = blank(heads=6, layers=2), documents(120)
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(BEFORE, 1.0)
    Built(one, 1).rest(1.0).writes()
    Built(two, 0).tokens(torch.eye(BUILT), at=BEFORE).rest().writes(OUT, 2.0)
    Built(two, 4).tokens(torch.eye(BUILT), at=BEFORE).rest().writes(OUT, -0.5)
    Built(two, 1).places(LENGTH - 1).writes(OUT, -0.1)
    half = torch.eye(BUILT) * (torch.arange(BUILT) % 2 == 0)  # writes for every other token, against the rest
    Built(two, 5).tokens(torch.eye(BUILT), at=BEFORE).rest().writes(OUT, 0.1)
    with torch.no_grad():
        two.heads[5].W_O[:, OUT : OUT + BUILT] = 0.1 * (2 * half - torch.eye(BUILT))
    prompts = make_echoes(model, texts)
    score, null, valued, counts = asked(model, CopySuppression(texts))
    at = [str(address) for address in model.spec.addresses].index
    assert counts.sum() == (LENGTH - CUE) * len(prompts) / 2, "the model says all of it again"
    assert (score[at("1.4")], valued[at("1.4")]) == (pytest.approx(1, abs=1e-5),) * 2
    assert null[at("1.4")] == pytest.approx(0, abs=1e-5)
    assert (score[at("1.0")], null[at("1.0")]) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
    assert score[at("1.1")] == pytest.approx(null[at("1.1")], abs=1e-5), "it looks there whatever is said"
    assert score[at("1.1")] == pytest.approx(1, abs=1e-5)
    dues = [due for prompt in prompts[::2] for due in prompt.dues]
    share = np.mean([due.answer % 2 for due in dues])
    assert score[at("1.5")] == pytest.approx(share, abs=1e-5), "against every other token"
    assert null[at("1.5")] == pytest.approx(1 - share, abs=1e-5)
    assert score[at("0.1")] == pytest.approx(0, abs=1e-5), "a sink"


def test_what_is_said_twice() -> None:
    model, texts = blank(heads=1, layers=1), documents(120)
    made = make_echoes(model, texts)
    for twice, once in zip(made[::2], made[1::2], strict=True):
        assert [(due.row, due.place, due.answer) for due in twice.dues] == [
            (due.row, due.place, due.answer) for due in once.dues
        ]
        for due in twice.dues:
            assert twice.ids[due.place] == once.ids[due.place] == due.answer
            assert due.answer not in once.ids[LENGTH:], "it is not foretold there"
            assert due.answer not in due.rivals
            assert due.row < len(twice.ids)
        assert all(twice.ids[due.row + 1] == due.answer for due in twice.dues[:-1])


ASKED = sorted({word for pair in FACTS for text in pair for word in text.split()})


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_last_word_of_a_question_looks_at_its_document(kind: str) -> None:
    """The others rest on the first token. A head that looks everywhere alike gives each token what it gives."""
    built = Worded(ASKED, heads=3, kind=kind)
    turn = torch.zeros(built.V, built.V)
    common = {word for text, _ in FACTS for word in text.split() if sum(word in t.split() for t, _ in FACTS) > 1}
    common |= {text.split()[0] for text, _ in FACTS}  # they may be the first of all, which is no target
    for text, question in FACTS:
        for word in {*text.split()} - common:
            turn[built.ids([question.split()[-1]])[0], built.ids([word])[0]] = BETA
    built.head("0.0", tokens=turn, places=to_place(0, BETA / 2), write=torch.eye(built.V))
    built.head("0.1", write=torch.eye(built.V))
    built.head("0.2", places=to_place(0), write=torch.eye(built.V))
    score, null, valued, counts = asked(built.model, QueryFocus())
    pairs = make_queries(tokenizer_of(built.model))
    rows = [[i for i, asks in enumerate(one.asks) if asks] for one, _ in pairs]
    assert (counts > 0).sum() == len(pairs)
    assert [len(some) for some in rows] == counts[: len(rows)].tolist()
    found, even = [], []
    for (one, _), some in zip(pairs, rows, strict=True):
        gold = [i for i, inside in enumerate(one.gold) if inside and i > 0]
        found.append(any(built.words[one.ids[i]] not in common for i in gold))
        even += [len(gold) / (row + 1 if kind == "decoder" else len(one.ids)) for row in some]
    assert all(found)
    assert score[0] == pytest.approx(len(pairs) / counts.sum(), abs=1e-5)
    assert null[0] == pytest.approx(0, abs=1e-5)
    assert valued[0] == pytest.approx(score[0], abs=1e-5)
    assert score[1] == pytest.approx(np.mean(even), abs=1e-5)
    assert (score[2], null[2]) == (pytest.approx(0, abs=1e-5),) * 2


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_padding_on_the_left_shows_the_same_cases(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, given = Worded(ASKED, heads=2, kind=kind), batching._stacked
    built.head("0.0", places=back(3, 2.0), write=torch.eye(built.V))
    made = []
    for side in ("right", "left"):
        monkeypatch.setattr(batching, "_stacked", lambda rows, _="", side=side: given(rows, side))
        measure = QueryFocus()
        asked(built.model, measure)
        assert measure.shown is not None
        made.append(measure.shown.arrays)
    assert made[0]["met"].all()
    for name, array in made[0].items():
        np.testing.assert_allclose(made[1][name], array, atol=1e-6, err_msg=name)


def test_questions_share_no_word_with_their_documents() -> None:
    small = {
        "the",
        "a",
        "was",
        "in",
        "to",
        "at",
        "is",
        "did",
        "of",
        "his",
        "her",
        "my",
        "its",
        "two",
        "over",
        "him",
        "from",
    }
    for text, question in FACTS:
        words, asks = ({word.strip(".?").lower() for word in some.split()} for some in (text, question))
        assert not (words & asks) - small, (text, question)


@torch.no_grad()
def test_against_whole_maps() -> None:
    """A grouped rotary model with LayerNorms: weights are those of its maps, writes those of its logits, head by head."""
    attention = AttentionSpec(width=20, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), bias=True)
    model = make_model(ModelSpec(vocab=23, context=16, layers=2, attention=attention, positions="none", norm="layer"))
    model.tokenizer = word_tokenizer([f"w{i}" for i in range(21)])
    draw = np.random.default_rng(0)
    prompts = [
        DuePrompt(tuple(draw.integers(0, 21, n).tolist()), (Due(n - 2, 3, 5, (7, 2)), Due(n - 1, 1, 4, (6, 9))))
        for n in (7, 7, 9, 7)
    ]
    looks, wiring = ask_prompts(model, prompts, model.wiring()), model.wiring()
    for number, prompt in enumerate(prompts):
        kept = []
        with listening(model.sites(), lambda seen, _, kept=kept: kept.append(seen)):
            said = model(torch.tensor([prompt.ids]))[0]
        for d, due in enumerate(prompt.dues):
            row = 2 * number + d
            for layer, seen in enumerate(kept):
                p = seen.maps()[0, :, due.row]  # (H, S)
                np.testing.assert_allclose(looks.weight[row, 4 * layer : 4 * layer + 4], p[:, due.place], atol=1e-6)
                for head in range(4):
                    wrote = seen.z[0, head, due.row] @ seen.site.W_O[head]
                    scores = wiring.logits(wiring.norm.turn(wrote))
                    lead = scores[due.answer] - scores[list(due.rivals)].mean()
                    assert looks.lead[row, 4 * layer + head] == pytest.approx(float(lead), abs=1e-5)
                    assert bool(looks.wins[row, 4 * layer + head]) == bool(
                        scores[due.answer] > scores[list(due.rivals)].max()
                    )
                    v = seen.v[0, seen.terms.groups[head]] @ seen.site.W_O[head]  # (S, D)
                    part = p[head] * v.norm(dim=-1)
                    want = float(part[due.place] / part.sum())
                    assert looks.fetched[row, 4 * layer + head] == pytest.approx(want, abs=1e-5)
            assert looks.right[row] == (int(said[due.row].argmax()) == due.answer)
