"""Key heads that stream: plans of caches, how heads are chosen, beside chance; and pass keys."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression.passkey import DIGITS, PasskeyCase, Passkeys, ask_passkeys, make_cases
from headwise.compression.plan import Plan
from headwise.compression.report import Footprint, random_plan, report
from headwise.compression.streaming_selection import STREAM_WAYS, streaming_now
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Keeps
from headwise.text.build_tokenizers import character_tokenizer
from headwise.text.tokenizer import Tokenizer
from tests.analysis.models import reading
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids

LONG = ["the cat sat there " * 3, "a mat at the cat " * 3]
FEW = Keeps(first=1, last=3)
SHORT: Any = {"first": 1, "last": 3}


def make_reader(name: str = "decoder, rotary") -> Transformer:
    return reading(MODELS[name], layers=3)


# Plans.


def test_a_plan_of_caches_is_saved_and_applied(tmp_path: Path) -> None:
    model, ids = make_reader().float(), token_ids(2, 16)
    plan = Plan.make(model, cache={"0.*": FEW, "2.1": 8})
    back = Plan.load(plan.save(tmp_path / "plan.json"))
    assert back == plan
    changed = back.apply(model)
    assert changed.spec == model.spec.caching({"0.*": FEW, "2.1": 8})
    assert model.spec.cache == ()
    again = hw.load(changed.save(tmp_path / "m"))
    assert again.spec == changed.spec
    assert torch.equal(again(ids), changed(ids))
    by_plan, by_spec = model.cache(plan), changed.cache()
    with torch.no_grad():
        for piece in ids.split([9, 1, 6], 1):
            assert torch.equal(model(piece, cache=by_plan), changed(piece, cache=by_spec))
    assert by_plan.bytes == by_spec.bytes
    assert str(plan).splitlines() == [
        "3 of 6 key heads keep less, named by hand.", "  streaming 1 + 3: 0.0 0.1", "  8 bits: 2.1",
    ]  # fmt: skip


def test_heads_are_cut_and_key_heads_stream_in_one_plan() -> None:
    model, ids = make_reader(), token_ids(2, 16)
    plan = Plan.make(model, cut="0.0,0.1,1.3", cache={"0.*": FEW, "1.0": 8}, fold=False)
    small = plan.apply(model)
    assert [(rule.heads, rule.keeps) for rule in small.spec.cache] == [
        (("0.1",), FEW),
        (("1.0",), Keeps(bits=8)),
    ]
    with (
        torch.no_grad(),
        model.heads["0.0,0.1,1.3"].silenced(),
        streaming_now(model, model.spec.key_heads[1:2], FEW),
        streaming_now(model, model.spec.key_heads[2:3], Keeps(bits=8)),
    ):
        assert_equal(small(ids), model(ids), 1e-9)
    with pytest.raises(HeadwiseError, match=r"use plan.apply\(model\)\.cache\(\)"):
        model.cache(plan)
    assert "3 of 12 heads are cut" in str(plan)
    assert "3 of 6 key heads keep less" in str(plan)


def test_a_second_plan_leaves_the_first_in_place() -> None:
    model = make_reader()
    once = Plan.make(model, cache={"0.0": 8}).apply(model)
    twice = Plan.make(once, cache={"1.0": 4}).apply(once)
    assert [rule.heads for rule in twice.spec.cache] == [("0.0",), ("1.0",)]
    assert Plan.make(once, cut="2.0", fold=False).apply(once).spec.cache == once.spec.cache


def test_what_cannot_be_is_refused() -> None:
    model = make_reader()
    plan = Plan.make(model, cache={"0.0": FEW})
    for other, told in (
        (make_model(replace(model.spec, layers=2)), "made for another model"),
        (make_model(model.spec, seed=5), "other weights of the same sizes"),
    ):
        with pytest.raises(HeadwiseError, match=told):
            plan.apply(other)
        with pytest.raises(HeadwiseError, match=told):
            other.cache(plan)
    with pytest.raises(HeadwiseError, match="a cache is 'growing', 'fixed', 'sliding' or what a Plan says; got 3"):
        model.cache(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match="say which heads go, in one way"):
        Plan.make(model)
    with pytest.raises(HeadwiseError, match=r"name those that go: cut='5\.1"):
        Plan.make(model, heads="0.0")
    with pytest.raises(HeadwiseError, match="keeps no cache, for an encoder"):
        Plan.make(reading(MODELS["encoder"]), cache={"0.0": FEW})
    with pytest.raises(HeadwiseError, match="32, 16, 8, 4 bits; got 3"):
        Plan.make(model, cache={"0.0": 3})
    text = json.loads(plan.to_json())
    for damaged, told in (
        ({"cache": [{"heads": ["7.7"], "keeps": {"bits": 8}}]}, "names no head here"),
        ({"cache": [{"heads": ["0.0"], "keeps": {"bits": 5}}]}, "bits; got 5"),
        ({"cache_by": "luck"}, "cannot be made by 'luck'"),
        ({"cache_scores": [1.0]}, "1 scores for 6 heads"),
    ):
        with pytest.raises(HeadwiseError, match=told):
            Plan.from_json(json.dumps(text | damaged))


# Choosing.


@pytest.mark.parametrize("by", STREAM_WAYS)
@pytest.mark.parametrize("name", ["decoder, rotary", "decoder, cut"])
def test_every_way_chooses_the_share(by: str, name: str) -> None:
    model = make_reader(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = Plan.streaming(model, 0.5, **SHORT, by=by, on=LONG, longest=30, steps=3)
    heads = model.spec.key_heads
    assert sum(len(rule.heads) for rule in plan.cache) == round(0.5 * len(heads))
    assert [rule.keeps for rule in plan.cache] == [FEW]
    assert len(plan.cache_scores) == len(heads)
    scores = dict(zip(map(str, heads), plan.cache_scores, strict=True))
    assert max(scores[head] for head in plan.cache[0].heads) <= min(
        score for head, score in scores.items() if head not in plan.cache[0].heads
    )
    assert plan == Plan.from_json(plan.to_json())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.spec.cache == ()
    assert all(layer.spec.cache == () for layer in model.attention_layers())


@torch.no_grad()
def test_mass_is_what_the_maps_say() -> None:
    """Over all rows that have forgotten anything, from whole maps."""
    model, text = make_reader(), LONG[0]
    plan = Plan.streaming(model, 0.5, **SHORT, by="mass", on=[text])
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)])
    found, maps = list[Tensor](), list[Tensor]()
    with ExitStack() as listening:
        for site in model.sites():
            listening.enter_context(site.listen(lambda seen: maps.append(seen.maps()[0])))  # (H, T, T)
        model(ids)
    for layer in maps:
        rows = [layer[:, i, 1 : i - 2].sum(-1) for i in range(4, ids.shape[1])]
        mass = torch.stack(rows).mean(0)  # (H,)
        found += [mass[:2].max(), mass[2:].max()]  # one reader that looks far is enough
    assert plan.cache_scores == pytest.approx(torch.stack(found).tolist(), abs=1e-6)


@torch.no_grad()
def test_writes_move_as_far_as_the_layer_s_output_does() -> None:
    """Layer by layer on the whole model's stream, beside layers of models in which one key head streams."""
    model, text = make_reader(), LONG[0]
    plan = Plan.streaming(model, 0.5, **SHORT, by="writes", on=[text])
    assert model.tokenizer is not None
    x, beside = model.begin(torch.tensor([model.tokenizer.encode(text)]))
    streams = []
    for block in model.blocks:
        streams.append(x)
        x = block(x, beside)
    for head, score in zip(model.spec.key_heads, plan.cache_scores, strict=True):
        x, other = streams[head.layer], Plan.make(model, cache={str(head): FEW}).apply(model)
        one, two = (asked.blocks[head.layer] for asked in (model, other))
        moved = one.attend(one.reads(x), beside) - two.attend(two.reads(x), beside)  # pyright: ignore
        share = moved.square().sum(-1) / x.square().sum(-1)  # (1, T)
        assert score == pytest.approx(share[0, 4:].mean().item(), abs=1e-6)


@torch.no_grad()
def test_a_second_round_asks_with_the_first_s_choice_streaming() -> None:
    """Scores of the second round, beside layers of models in which those of the first and one more stream."""
    model, text = make_reader(), LONG[0]
    once, twice = (
        Plan.streaming(model, share, **SHORT, by="writes", on=[text], rounds=rounds)
        for share, rounds in ((0.5, 1), (1.0, 2))
    )
    begun = once.cache[0].heads  # half of the heads is what the first of two rounds chooses of all
    scores = dict(zip(map(str, model.spec.key_heads), twice.cache_scores, strict=True))
    first = dict(zip(map(str, model.spec.key_heads), once.cache_scores, strict=True))
    assert {head: scores[head] for head in begun} == {head: first[head] for head in begun}
    assert max(scores[head] for head in begun) < min(scores[head] for head in scores if head not in begun)
    assert model.tokenizer is not None
    base = Plan.make(model, cache={",".join(begun): FEW}).apply(model)
    x, beside = base.begin(torch.tensor([model.tokenizer.encode(text)]))
    streams = []
    for block in base.blocks:
        streams.append(x)
        x = block(x, beside)
    for head in (head for head in model.spec.key_heads if str(head) not in begun):
        x, other = streams[head.layer], Plan.make(model, cache={",".join((*begun, str(head))): FEW}).apply(model)
        one, two = (asked.blocks[head.layer] for asked in (base, other))
        moved = one.attend(one.reads(x), beside) - two.attend(two.reads(x), beside)  # pyright: ignore
        share = (moved.square().sum(-1) / x.square().sum(-1))[0, 4:].mean().item()
        assert scores[str(head)] == pytest.approx(max(share, max(first[head] for head in begun)), abs=1e-6)


@torch.no_grad()
def test_those_that_find_repeats_are_spared() -> None:
    """The best by role stay whole, though they would be first to stream by what they write."""
    model, text = make_reader(), "to be or not to be that is the question " * 4
    roles = Plan.streaming(model, 0.0, **SHORT, by="role")
    heads = model.spec.key_heads
    best = sorted(heads, key=lambda head: roles.cache_scores[heads.index(head)], reverse=True)[: len(heads) // 2]
    rest = {str(head) for head in heads if head not in best}
    made = Plan.streaming(model, 0.5, **SHORT, by="writes", on=[text], rounds=2, spare=0.5)
    assert {head for rule in made.cache for head in rule.heads} == rest
    free = Plan.streaming(model, 1.0, **SHORT, by="writes", on=[text])
    assert {head for rule in free.cache for head in rule.heads} == {str(head) for head in heads}


def test_loss_is_what_each_model_loses() -> None:
    """From plans of one head each, applied; before the fifth token nothing can differ."""
    model, text = make_reader(), LONG[0]
    plan = Plan.streaming(model, 0.5, **SHORT, by="loss", on=[text])
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)])

    def surprise(asked: Transformer) -> Tensor:
        return torch.nn.functional.cross_entropy(asked(ids)[0, :-1], ids[0, 1:], reduction="none")

    for head, score in zip(model.spec.key_heads, plan.cache_scores, strict=True):
        gained = surprise(Plan.make(model, cache={str(head): FEW}).apply(model)) - surprise(model)
        assert torch.equal(gained[:4], torch.zeros(4, dtype=torch.float64))
        assert score == pytest.approx(gained[4:].mean().item(), abs=1e-6)


def test_a_head_that_looks_back_far_stays_whole() -> None:
    """Blind to what is said, heads lean on what is near by ALiBi's slopes alone: 1/4, 1/16, 1/64 and 1/256."""
    model = reading(MODELS["decoder, parallel"], layers=1)
    with torch.no_grad():
        for head in model.heads:
            assert head.b_Q is not None
            head.W_Q.zero_()
            head.b_Q.zero_()
    plan = Plan.streaming(model, 0.75, first=0, last=8, by="mass", on=LONG)
    assert plan.cache[0].heads == ("0.0", "0.1", "0.2")


def test_choosing_needs_what_it_needs() -> None:
    model = make_reader()
    for options, told in (
        ({"by": "luck"}, "cannot be ranked by 'luck'"),
        ({"on": None}, r"needs a text: give on=…"),
        ({"share": 1.5}, "from 0 to 1; got 1.5"),
        ({"longest": 4}, "so nothing is forgotten; give a larger"),
        ({"on": ["at"]}, "no text is longer than the 4 tokens"),
        ({"by": "gates", "steps": 0}, "1 or more; got 0"),
        ({"rounds": 0}, "in rounds, 1 or more; got 0"),
        ({"spare": 0.75}, "never stream, at most 0.5; got 0.75"),
        ({"by": "role", "rounds": 2}, r"rounds say nothing; choose by mass \| writes \| loss"),
    ):
        with pytest.raises(HeadwiseError, match=told):
            Plan.streaming(model, **({"on": LONG, **SHORT} | options))  # pyright: ignore
    with pytest.raises(HeadwiseError, match="keep less already"):
        Plan.streaming(Plan.make(model, cache={"0.0": 8}).apply(model), on=LONG, **SHORT)
    with pytest.raises(HeadwiseError, match="own decoders"):
        Plan.streaming(reading(MODELS["encoder"]), on=LONG, **SHORT)


# What it costs.


def test_a_report_stands_beside_chance() -> None:
    model = make_reader()
    changed = Plan.make(model, cache={"0.*,1.0": FEW, "2.0": 8}, cut="2.3", fold=False).apply(model)
    told = report(model, changed, LONG, seeds=2, longest=30, turns=1, length=20)
    assert len(told.random) == 2
    assert told.more_than_random is not None
    drawn = [random_plan(model, changed.spec, None, seed).spec for seed in range(6)]
    assert all(sorted(len(rule.heads) for rule in spec.cache) == [1, 3] for spec in drawn)
    assert all(len(spec.addresses) == 11 for spec in drawn)
    assert len({spec.cache for spec in drawn}) > 2
    # 20 tokens, 6 + 6 numbers of 8 bytes; 4 tokens are held by those that stream, 2 · (6 + 4) bytes at 8 bits
    assert told.before.cache_bytes_per_token == 6 * 12 * 8
    assert told.after.cache_bytes_per_token == round((3 * 4 * 96 + 20 * 20 + 2 * 20 * 96) / 20)


def test_sizes_of_streaming_heads() -> None:
    spec = hw.preset("smollm2-135m")
    half = spec.caching({str(head): Keeps(first=4, last=128) for head in spec.key_heads[::2]})
    assert Footprint.of(half, 4096).cache_bytes_per_token == round(45 * 512 * (4096 + 132) / 4096)


# Pass keys.


def test_cases_are_as_long_as_asked_and_hide_their_key() -> None:
    model = make_reader()
    model.tokenizer = tokenizer = _letters()
    cases = make_cases(model, ["some long text " * 60], 300, count=4, seed=1)
    assert [len(case.ids) for case in cases] == [300] * 4
    assert [case.depth for case in cases] == [0.125, 0.375, 0.625, 0.875]
    for case in cases:
        text = tokenizer.decode(list(case.ids))
        assert text.count(case.key) == 2
        assert len(case.key) == DIGITS
        assert text.endswith("What is the pass key? The pass key is")
        assert abs(text.index("The pass key is") / (300 - 115) - case.depth) < 0.1
    with pytest.raises(HeadwiseError, match="the text has 10"):
        make_cases(model, ["some words"], 300)


def test_who_writes_the_key_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_reader()
    model.tokenizer = tokenizer = _letters()
    cases = make_cases(model, ["some long text " * 60], 200, count=3)
    answers = iter([f" {cases[0].key}.", "12", f" {cases[2].key}"])

    def generate(self: Transformer, prompt: Tensor, tokens: int, cache: object) -> Tensor:
        made = torch.tensor([tokenizer.encode(next(answers))])
        return torch.cat((prompt, made), 1)

    monkeypatch.setattr(Transformer, "generate", generate)
    found = ask_passkeys(model, cases)
    assert found.right == (True, False, True)
    assert str(found) == "2 of 3 pass keys found"
    whole = Passkeys(cases, (True, True, False))
    assert found.kept(whole) == (1, 2)
    with pytest.raises(HeadwiseError, match="the same cases"):
        found.kept(Passkeys((PasskeyCase((1,), "1", 0.5),), (True,)))


def _letters() -> Tokenizer:
    return character_tokenizer("some long text The pass key is Remember it. What is the ?0123456789\n")
