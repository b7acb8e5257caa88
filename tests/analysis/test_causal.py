"""The last rung: who is causal; who only looks so, beside heads that do nothing or because any answer hangs on it."""

import math
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import headwise as hw
from headwise.analysis.ablation.head_outputs import mean_of, record_z, run_on
from headwise.analysis.metrics.statistics import holm
from headwise.analysis.metrics.tasks import bare_unit
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.causal import Costs, climb, lost_without, try_heads
from headwise.analysis.roles.causal_cases import (
    CASES,
    LISTED,
    TWICE,
    Prompt,
    Trial,
    list_trial,
    surprises,
    text_trial,
    word_trial,
)
from headwise.analysis.roles.effects import RANDOM_TOKENS, RUNNING_TEXT, Effect
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Support
from headwise.model import Transformer
from headwise.spec import Address
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.documents import Document, Relation
from headwise.ui.heads_view import show_profile
from tests.analysis.constructed_heads import (
    BEFORE,
    FOLLOWS,
    OUT,
    PLACE,
    WORDS,
    Built,
    P,
    V,
    blank,
    decoder,
    documents,
    foresee,
    matching,
)


def judged(*heads: float, texts: int = 20, answers: float = 4.0, clean: float = 0.0, control: float = 0.0) -> Effect:
    """The first of some heads of a layer: cases of some answers each, in which every head costs so many nats an answer, the
    first so many in the control; its mean in its place costs as much as another case."""
    lost = np.tile(answers * np.array(heads), (texts, 1))
    return judge_all(lost, np.full((texts, 1), answers * control), np.full(texts, answers), clean)


def judge_all(lost: np.ndarray, control: np.ndarray, counts: np.ndarray, clean: float = 0.0) -> Effect:
    costs = Costs(counts, clean * counts.sum())
    found = costs.beyond(lost[:, 0], control[:, 0])
    found = costs.beside(found, lost[:, 0], lost[:, 1:]) if found.causal else found
    return costs.by_mean(found, lost[:, 0]) if found.causal else found


def test_the_numbers() -> None:
    found = judged(0.5, 0.1, 0.2, 0.3, 0.4, control=0.2)
    assert found.cost == pytest.approx(0.5)
    assert found.more == pytest.approx(0.5 - 0.25)
    assert found.interval == pytest.approx((0.25, 0.25))
    assert found.bar == pytest.approx(0.325), "three quarters of the way through .1, .2, .3, .4"
    assert found.control == pytest.approx(0.2)
    assert found.beyond == pytest.approx((0.3, 0.3))
    assert found.mean_cost == pytest.approx(0.5)
    assert found.p == pytest.approx(1 / 65536, rel=0.01), "no flip of twenty equal signs reaches the data"
    assert found.causal


def test_the_same_answers_reached_another_way_must_lose_less() -> None:
    assert judged(0.5, 0.1, control=0.4).causal
    for control in (0.5, 0.7):
        found = judged(0.5, 0.1, control=control)
        assert (found.p, found.more) == (1, None), "it hurts any answer as much, and no more is asked"


def test_a_control_that_one_case_alone_is_above_of() -> None:
    """It is missing from (11/12)¹² of all draws, which is 35 %, so the interval begins at 0."""
    lost = np.tile([2.0, 0.0], (12, 1))
    lost[3, 0] = 50.0
    found = judge_all(lost, np.full((12, 1), 2.0), np.full(12, 4.0))
    assert found.beyond is not None
    assert found.beyond[0] == 0
    assert not found.causal


def test_without_a_control_nobody_is_causal() -> None:
    found = Costs(np.ones(20), 0.0).beyond(np.ones(20), None)
    assert (found.cost, found.control, found.beyond) == (1, None, None)
    assert not found.causal


def test_a_head_whose_mean_would_do_is_not_causal() -> None:
    """Another case's answer misleads; with nothing said in its place nobody misses it."""
    costs, found = Costs(np.full(20, 4.0), 0.0), judged(0.7, 0.0)
    for lost, needed in ((0.6, True), (0.005, False), (-0.1, False)):
        assert costs.by_mean(found, np.full(20, 4 * lost)).causal == needed


def test_more_heads_tried_ask_for_more() -> None:
    """Six cases that all lose: one of 64 flips reaches as much, so p is 1/64; of four heads tried each needs .05/4."""
    found = judged(0.5, 0.0, texts=6)
    assert found.p == pytest.approx(1 / 64)
    assert found.causal
    assert not replace(found, p=float(holm([found.p, 1, 1, 1])[0])).causal


def test_a_head_that_costs_next_to_nothing_is_not_causal_beside_idle_ones() -> None:
    found = judged(0.004, 0, 0, 0, 0, 0)
    assert found.beyond is not None
    assert found.beyond[0] > 0, "it is above its control without a doubt"
    assert found.bar == 0.01
    assert not found.causal


def test_the_least_that_counts_grows_with_the_surprise_of_the_whole_model() -> None:
    assert judged(0.05, 0, 0, 0, clean=4.0).causal
    found = judged(0.05, 0, 0, 0, clean=6.0)
    assert found.bar == pytest.approx(0.06)
    assert not found.causal


def test_idle_heads_do_not_make_one_of_several_causal() -> None:
    """Above the average of a layer in which five of eight others do nothing, but below the three that do most."""
    found = judged(0.5, 1, 1, 1, 0, 0, 0, 0, 0)
    assert found.more == pytest.approx(0.5 - 3 / 8)
    assert found.interval is not None
    assert found.interval[0] > 0
    assert not found.causal
    assert judged(0.5, 1, 0, 0, 0, 0, 0, 0, 0).causal, "second of nine"


def test_a_head_that_others_equal_is_not_causal() -> None:
    for heads in ((1.0, 1.0, 1.0), (0.3, 1.0), (-0.5, -1.0, -1.0)):
        assert not judged(*heads, control=-2.0).causal


def test_a_head_alone_in_its_layer() -> None:
    found = judged(0.5, clean=2.0)
    assert (found.more, found.cost, found.bar) == pytest.approx((0.5, 0.5, 0.02))
    assert found.causal
    assert not judged(0.5, texts=1).causal, "one case gives no interval"


def test_nothing_was_asked() -> None:
    assert not judge_all(np.zeros((8, 3)), np.zeros((8, 1)), np.zeros(8)).causal


# Trials.


def reads(model: Transformer, count: int = 40) -> Reading:
    return Reading.of(model, documents(count))


@torch.no_grad()
def test_lists_and_texts_ask_for_the_same() -> None:
    model = decoder()
    trial = list_trial(model, list(reads(model)), seed=3)
    followers = {WORDS.index(word) for word in FOLLOWS.values()}
    assert len(trial.cases) == len(trial.controls) == CASES
    for one, other in zip(trial.cases, trial.controls, strict=True):
        assert sorted(one.wanted.values()) == sorted(other.wanted.values())
        assert {*one.wanted.values()} <= followers, "what this model foresees in a text"
        first, second = one.unit.ids[:LISTED], one.unit.ids[LISTED:]
        assert first == second
        assert len({*first}) == LISTED
        assert min(one.wanted) > LISTED, "nobody can foresee the first token of the second copy"
        for place, token in other.wanted.items():
            assert token not in other.unit.ids[:place], "a text in which nothing is said again"
    costs = [
        cost for rows in (trial.cases, trial.controls) for some in surprises(model, rows) for cost in some.values()
    ]
    assert max(costs) <= 3


@torch.no_grad()
def test_list_trial_at_least_half_of_a_list_is_drawn_from_the_vocabulary() -> None:
    model = decoder()
    trial = list_trial(model, list(reads(model)), seed=3)
    lists = [row.unit.ids[:LISTED] for row in trial.cases]
    assert all(len(row.wanted) <= LISTED // 2 for row in trial.cases)
    assert {*range(len(WORDS))} == {token for ids in lists for token in ids} | {*range(len(WORDS))}, (
        "ordinary tokens alone"
    )
    rare = {WORDS.index(word) for word in WORDS[:6]}  # digits, which no text asks for
    assert any({*ids} & rare for ids in lists)


@torch.no_grad()
def test_text_trial_asks_second_copy_with_the_text_read_once_as_control() -> None:
    model = decoder()
    texts = list(reads(model))
    trial = text_trial(model, texts, seed=3)
    known = {unit.ids[:TWICE] for unit in texts}
    assert len(trial.cases) == len(trial.controls) == len(trial.matched) == CASES
    for case, matched, control in zip(trial.cases, trial.matched, trial.controls, strict=True):
        first, second = case.unit.ids[:TWICE], case.unit.ids[TWICE:]
        assert first == second
        assert first in known, "in the text's own order"
        assert matched.wanted.items() <= case.wanted.items()
        assert {place - TWICE: token for place, token in matched.wanted.items()} == control.wanted
        assert all(control.unit.ids[place] == token for place, token in control.wanted.items())
        assert min(case.wanted) > TWICE, "the first token of the second copy cannot be foreseen"
        assert all(token not in first[: place - TWICE] for place, token in case.wanted.items())
    more = sum(len(case.wanted) - len(matched.wanted) for case, matched in zip(trial.cases, trial.matched, strict=True))
    assert more > CASES, "tokens that the text does not foretell are asked for as well"


@torch.no_grad()
def test_the_seed_draws_the_lists() -> None:
    model = decoder()
    texts = list(reads(model))
    one, same, other = (list_trial(model, texts, seed) for seed in (3, 3, 4))
    assert [row.unit.ids for row in one.cases] == [row.unit.ids for row in same.cases]
    assert [row.unit.ids for row in one.cases] != [row.unit.ids for row in other.cases]


@torch.no_grad()
def test_a_model_that_foresees_nothing_has_no_control() -> None:
    model = blank(heads=2, layers=1)
    trial = list_trial(model, list(reads(model)), seed=0)
    assert trial.controls == ()
    assert len(trial.cases) == CASES, "lists of any words: what a head costs can still be told"


def closers(model: Transformer) -> Transformer:
    """Say each closer behind any of two words, `5` and `6`: twelve of them, so that each is one in twelve."""
    assert model.output is not None
    with torch.no_grad():
        for word in ("5", "6"):
            for closer in WORDS[-12:]:
                model.output.vocabulary.weight[WORDS.index(closer), WORDS.index(word)] = 1.0
    return model


@torch.no_grad()
def test_brackets_and_where_the_same_closer_comes_without_one() -> None:
    """Closers behind a word that calls for them, once with their opener in the text and once without."""
    model = closers(blank(heads=2, layers=1))
    with_pairs = [Document.of(["w1x", f"a{k}x", "w3x", "5", f"b{k}x"], [Relation("bracket", 4, 1)]) for k in range(6)]
    without = [Document.of(["w1x", f"a{(k + 1) % 12}x", "w5x", "6", f"b{k}x"], []) for k in range(6)]
    trap = [Document.of(["w1x", f"a{k}x", "w7x", "w9x", "6", f"b{k}x"], []) for k in range(6)]
    units = list(Reading.of(model, [*with_pairs, *without, *trap]))
    trial = word_trial(model, units[:6], units[6:], "bracket", "later word")
    assert [row.unit.ids for row in trial.cases] == [unit.ids for unit in units[:6]]
    assert [row.unit.ids for row in trial.controls] == [unit.ids for unit in units[6:12]], "not where the opener stands"
    assert trial.of_case == tuple((number,) for number in range(6))
    assert word_trial(model, units[:6], units[6:10], "bracket", "later word").controls == (), "four are too few"


@torch.no_grad()
def test_another_case_stands_in() -> None:
    """What the sweep loses is what the model loses with the head patched from the row before."""
    model = decoder()
    trial = list_trial(model, list(reads(model)), seed=3)
    heads = [Address.parse("0.0"), Address.parse("1.0")]
    lost, clean = lost_without(model, heads, trial.cases[:5])
    means, _ = lost_without(model, heads, trial.cases[:5], "mean")

    def surprise(row: Prompt) -> float:
        logs = model(torch.tensor([row.read.ids]))[0].log_softmax(-1)
        return -sum(float(logs[place - 1, token]) for place, token in row.wanted.items())

    ids = [torch.tensor([row.read.ids]) for row in trial.cases[:5]]
    over = mean_of(record_z(model, one) for one in ids)
    for number, row in enumerate(trial.cases[:5]):
        assert clean[number] == pytest.approx(surprise(row), abs=1e-5)
        for place, head in enumerate(heads):
            with hw.ablated(model, str(head), "resample", other=run_on(model, ids[number - 1])):
                assert lost[number, place] == pytest.approx(surprise(row) - clean[number], abs=1e-4)
            with hw.ablated(model, str(head), "mean", means=over):
                assert means[number, place] == pytest.approx(surprise(row) - clean[number], abs=1e-4)


# Built heads.


def almost_idle(size: float) -> Transformer:
    """One layer: a previous-token head that makes the token before a little less likely, and five that write nothing."""
    model = blank(heads=6, layers=1)
    (layer,) = model.attention_layers()
    Built(layer, 0).places(1).writes(OUT, -size)
    return model


def test_a_layer_of_idle_heads() -> None:
    """Another case's token is taken away in place of its own: the answers lose next to nothing, and no control is found."""
    head = profile(almost_idle(0.1), documents(40))["0.0"].supports[0]
    assert head.role == "previous token"
    assert head.cost is not None
    assert abs(head.cost) < 2 / V
    assert head.bar == pytest.approx(0.01 * math.log(V), rel=0.02), "a model that knows nothing: ln V an answer"
    assert head.effect is None, "its layer is not asked"
    assert (head.control, head.causal_p, head.rung) == (None, None, "effective")


@pytest.fixture(scope="module")
def real() -> Profile:
    return profile(decoder(), documents(40))


def first(made: Profile, address: str) -> Support:
    return made[address].supports[0]


def test_heads_that_copying_needs(real: Profile) -> None:
    """Both links of the chain; the duplicate-token head is asked the same, and nothing hangs on it."""
    for address in ("0.0", "1.0"):
        head = first(real, address)
        assert head.rung == "causal"
        assert head.cost is not None
        assert head.bar is not None
        assert head.control is not None
        assert head.mean_cost is not None
        assert head.cost > 1 > head.bar
        assert head.mean_cost > 1
        assert abs(head.control) < 0.2, "followers are said without any head"
        assert head.causal_on == (RANDOM_TOKENS, RUNNING_TEXT)
        assert head.evidence_level == "causal on random tokens and running text"
        assert head.causal_p == pytest.approx(6 / 65536), "of three heads on two token sets the first counts six times"
    idle = first(real, "0.2")
    assert idle.rung == "effective"
    assert idle.cost is not None
    assert idle.cost < 0.2, "what it writes makes the stream longer, and that is all"
    assert idle.mean_cost is None, "not asked any more"
    assert real.tried == 6, "three heads on two token sets"


def test_two_heads_that_do_the_same_work() -> None:
    """Half each: both are needed, and both are told; without a second one the work would all be one's."""
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 1.0)
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 1.0)
    made = profile(model, documents(40))
    for address in ("1.0", "1.4"):
        assert (made[address].role, made[address].rung) == ("induction", "causal")


@torch.no_grad()
def test_two_heads_of_which_one_would_do() -> None:
    """Each says the answer loud enough. One that says another case's answer misleads; one that says nothing is not missed.
    Lists are made of followers alone, so that nothing but these heads has a part in them."""
    model = decoder()
    _, two = model.attention_layers()
    for number in (0, 4):
        Built(two, number).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 1.0)
    assert model.output is not None
    model.output.vocabulary.weight.mul_(4)
    draw, followers = np.random.default_rng(0), [WORDS.index(word) for word in FOLLOWS.values()]
    lists = [draw.permutation(followers)[:LISTED].tolist() for _ in range(CASES)]
    cases = [asked([*ids, *ids], range(LISTED + 2, 2 * LISTED)) for ids in lists]
    pairs = [[WORDS.index(word) for pair in list(FOLLOWS.items())[i : i + 4] for word in pair] for i in range(CASES)]
    controls = [asked(ids[: len(ids) // 2 * 2], [1]) for ids in pairs if len(ids) > 1]
    of_case = tuple((i % len(controls),) for i in range(CASES))
    heads = [Address.parse("1.0"), Address.parse("1.4")]
    for effect in try_heads(model, model.spec.addresses, heads, Trial(tuple(cases), tuple(controls), of_case)):
        assert 0.5 < effect.cost < 0.7, "ln 2: two answers, equally loud; 0 where the other case has the same answer"
        assert effect.mean_cost is not None
        assert effect.mean_cost < 0.01
        assert not effect.causal


def asked(ids: list[int], places: Iterable[int]) -> Prompt:
    """A text of built words, and the tokens asked for."""
    return Prompt(bare_unit(0, tuple(ids), word_tokenizer(WORDS)), {place: ids[place] for place in places})


def test_a_head_that_writes_whatever_the_answer_is() -> None:
    """Where a token was said before it looks behind it, elsewhere at itself, and it writes what follows: every answer of the
    model, however it was found, is written by this head. Its pattern is induction's, and lists lose all without it; texts
    in which nothing is repeated lose as much."""
    model = blank(heads=6, layers=2)
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(BEFORE, 1.0)
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).itself().writes(OUT, 2.0)
    with torch.no_grad():
        for word, follower in FOLLOWS.items():
            two.heads[0].W_V[WORDS.index(word), WORDS.index(follower)] += 2 * two.heads[0].W_V[0, 0]
    head = first(profile(model, documents(40)), "1.0")
    assert head.role == "induction"
    assert head.cost is not None
    assert head.cost > 1, "by its ablation alone it would be causal"
    assert head.control is not None
    assert head.control > head.cost
    assert head.rung == "effective"


def test_a_head_that_writes_a_constant_all_answers_need() -> None:
    """One word would be said everywhere, and a head with the pattern of induction keeps it down, wherever it looks. Nothing
    stands in its place: no answer is left. But it says nothing about any case, and another case's is as good."""
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 4).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 0.0)
    loud, quiet = 3.0, OUT + WORDS.index("4")
    assert model.output is not None
    with torch.no_grad():
        model.output.vocabulary.weight[WORDS.index("4"), PLACE : PLACE + P] = loud
        head = two.heads[4]
        head.W_V.zero_()[PLACE : PLACE + P, 0] = (2 / V) ** 0.5
        head.W_V[:V, 0] = 0.0
        head.W_O.zero_()[0, quiet] = -loud
    made = first(profile(model, documents(40)), "1.4")
    assert (made.role, made.rung) == ("induction", "effective")
    assert made.cost == pytest.approx(0, abs=0.05), "but for what norms make of the rest of the stream"
    ids = torch.tensor([[WORDS.index(word) for pair in list(FOLLOWS.items())[:3] for word in pair]])
    with torch.no_grad():
        whole = model(ids)[0, 0].log_softmax(-1)[ids[0, 1]]
        with hw.ablated(model, "1.4", "zero"):
            without = model(ids)[0, 0].log_softmax(-1)[ids[0, 1]]
    assert whole - without > 1


def test_climb_head_that_copies_texts_alone_names_the_set(tmp_path: Path) -> None:
    """An induction head for tokens that have a follower: texts are made of such pairs, random tokens are not. It is
    causal on one set. The level is not causal, and the set is named, saved, merged and printed."""
    model = decoder()
    _, two = model.attention_layers()
    Built(two, 0).tokens(matching(tuple(FOLLOWS), tuple(FOLLOWS)), at=BEFORE).rest().writes(OUT, 2.0)
    made = profile(model, documents(40))
    head = first(made, "1.0")
    assert (head.role, head.rung, head.causal_on) == ("induction", "effective", (RUNNING_TEXT,))
    assert head.evidence_level == "effective; causal on running text"
    lists, texts = head.effects
    assert (lists.on, lists.causal) == (RANDOM_TOKENS, False)
    assert (texts.on, texts.causal) == (RUNNING_TEXT, True)
    assert texts.control is not None
    assert texts.cost > 1 > texts.control
    again = Profile.load(made.save(tmp_path / "made.npz"))
    assert again.supports == made.supports
    assert first(again.merge(profile(model, documents(8, seed=9), causal=False)), "1.0").causal_on == (RUNNING_TEXT,)
    row = next(row for row in made.table() if row["head"] == "1.0")
    assert row["causal_on"] == RUNNING_TEXT
    console = Console(file=StringIO(), width=250)
    show_profile(made, {"1.0"}, console)
    assert "effective; causal on running text" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "running text" in str(made.story("1.0"))


@pytest.mark.parametrize("seed", range(1, 3))
@torch.no_grad()
def test_random_heads_are_not_causal(seed: int) -> None:
    """Beside the two heads of a copying chain, 18 with random weights, that write everywhere; all are tried for induction."""
    model = foresee(blank(heads=10, layers=2))
    one, two = model.attention_layers()
    Built(one, 0).places(1).writes(BEFORE, 1.0)
    Built(two, 0).tokens(torch.eye(V), at=BEFORE).rest().writes(OUT, 2.0)
    dice = torch.Generator().manual_seed(seed)
    for layer in (one, two):
        for head in list(layer.heads)[1:]:
            for weight, size in ((head.W_Q, 1.0), (head.W_K, 1.0), (head.W_V, 0.1), (head.W_O, 0.001)):
                weight.copy_(torch.randn(weight.shape, generator=dice) * size)
    said = Support("induction", "", "effective", 0.9, 0.0, (0.8, 1.0), 0.9, 0.001, 1.0, "repeats", 100)
    heads = [address for site in model.all_sites() for address in site.addresses]
    tried = climb(model, heads, [[said]] * len(heads), (), list(reads(model)), seed, lambda what, done, of: None)
    assert all(some[0].causal_p is not None for some in tried)
    assert [str(head) for head, some in zip(heads, tried, strict=True) if some[0].rung == "causal"] == ["0.0", "1.0"]
    assert sum((some[0].control or 0) > 0.05 for some in tried) > 5, "they do change what is answered"
