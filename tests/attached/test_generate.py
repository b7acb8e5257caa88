"""Writing on with others' models: their own tokens, as many as asked for, one at a time, and clean ends."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.test_analysis import TEXTS, build

TOKENS = 7


def plain(model: Any, ids: Tensor, tokens: int = TOKENS, **how: Any) -> list[int]:
    """What transformers' own call adds to one prompt."""
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **how)
    return made[0, 1 if model.config.is_encoder_decoder else ids.shape[1] :].tolist()  # theirs write from a start token


def ids_of(theirs: Any, text: str = TEXTS[0]) -> Tensor:
    return torch.tensor([theirs.tokenizer.encode(text)])


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_as_many_tokens_as_asked_for_whatever_the_prompt_is(name: str) -> None:
    model, tokenizer = build(name)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([tokenizer.encode(TEXTS[0])])
    start = 0 if name == "t5" else ids.shape[1]
    want = plain(model, ids, do_sample=False)
    theirs = hw.attach(model, tokenizer)
    assert [step.tolist() for step in theirs.stream(TEXTS[0], TOKENS)] == [[token] for token in want]
    assert [step.tolist() for step in theirs.stream(ids, TOKENS)] == [[token] for token in want]
    assert theirs.generate(TEXTS[0], TOKENS) == tokenizer.decode([*ids[0].tolist()[:start], *want])
    made = theirs.generate(ids, tokens=TOKENS)
    assert made[0, -TOKENS:].tolist() == want
    assert theirs.generate(ids[0].tolist(), TOKENS)[-TOKENS:] == want
    assert theirs.generate(input_ids=ids, tokens=TOKENS).equal(made)
    assert theirs.generate(ids, max_new_tokens=TOKENS).equal(made)
    assert theirs.generate(ids).shape[1] == made.shape[1] - TOKENS + 64, "as for our own models"
    assert list(theirs.stream(ids, 0)) == []


def test_tokens_come_while_they_are_made_and_no_sooner() -> None:
    theirs = hw.attach(*build("llama"))
    passes = []
    theirs.model.register_forward_hook(lambda *_: passes.append(threading.current_thread()))
    steps = theirs.stream(TEXTS[0], TOKENS)
    assert passes == []
    for number in range(1, 4):
        next(steps)
        assert len(passes) == number, "a pass for each token that was read, none ahead"
    steps.close()
    assert len(passes) == 3


def test_whoever_stops_early_leaves_no_thread_behind() -> None:
    theirs = hw.attach(*build("llama"))
    before = threading.active_count()
    for _ in theirs.stream(TEXTS[0], 50):
        assert threading.active_count() == before + 1
        break
    assert threading.active_count() == before
    steps = theirs.stream(TEXTS[0], 50)
    next(steps)
    del steps
    assert threading.active_count() == before
    theirs.stream(TEXTS[0], 50)  # never read
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in theirs.stream(TEXTS[0], 50)]
    assert threading.active_count() == before
    assert len(list(theirs.stream(TEXTS[0], 3))) == 3, "and it still writes"


def test_what_goes_wrong_is_heard() -> None:
    theirs = hw.attach(*build("llama"))
    before, calls = threading.active_count(), []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("half-way")

    hook = theirs.model.register_forward_hook(fail)
    got = []
    with pytest.raises(ZeroDivisionError, match="half-way"):
        got.extend(theirs.stream(TEXTS[0], 9))
    assert len(got) == 2
    assert threading.active_count() == before
    hook.remove()
    with pytest.raises(hw.HeadwiseError, match="one number per head"):
        list(theirs.stream(TEXTS[0], 3, gates={theirs.sites()[0].address: torch.ones(3)}))
    for call, message in (
        (lambda: theirs.stream(TEXTS[0], -1), "0 or more"),
        (lambda: theirs.generate(ids_of(theirs), tokens=3, max_new_tokens=4), "said twice"),
        (lambda: hw.attach(build("llama")[0]).stream(TEXTS[0]), "has no tokenizer"),
        (lambda: hw.attach(*build("bert")).generate(TEXTS[0]), "does not generate"),
        (lambda: hw.attach(*build("bert")).generate(torch.tensor([[3, 4]])), "does not generate"),
    ):
        with pytest.raises(hw.HeadwiseError, match=message):
            call()


def test_a_seed_draws_the_same_tokens_whatever_is_drawn_between() -> None:
    theirs = hw.attach(*build("gpt2"))
    ids, how = ids_of(theirs), {"temperature": 1.3, "top_k": 20}
    torch.manual_seed(5)
    want = plain(theirs.model, ids, do_sample=True, top_p=1.0, **how)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    got = [int(step) for step in theirs.stream(TEXTS[0], TOKENS, seed=5, **how)]
    assert got == want
    assert torch.equal(torch.get_rng_state(), state)
    mixed = []
    for step in theirs.stream(TEXTS[0], TOKENS, seed=5, **how):
        torch.rand(3)
        mixed.append(int(step))
    assert mixed == want
    assert theirs.generate(ids, TOKENS, seed=5, top_p=1.0, **how)[0, ids.shape[1] :].tolist() == want
    zero = theirs.generate(ids, TOKENS, temperature=0.0)[0, ids.shape[1] :].tolist()
    assert zero == plain(theirs.model, ids, do_sample=False)


def test_gates_are_for_the_tokens_of_one_call() -> None:
    theirs = hw.attach(*build("llama"))
    ids = ids_of(theirs)
    logits = theirs(ids)
    with theirs.heads["0-1.*"].silenced():
        silent, want = theirs(ids), plain(theirs.model, ids, do_sample=False)
    assert not torch.equal(silent, logits)
    got = []
    for step in theirs.stream(TEXTS[0], TOKENS, gates={"0-1.*": 0.0}):
        got.append(int(step))
        assert torch.equal(theirs(ids), logits), "between two tokens the model is as it was"
    assert got == want
    assert theirs.generate(ids, TOKENS, gates={"0-1.*": 0.0})[0, ids.shape[1] :].tolist() == want


def test_autocast_reaches_the_writer() -> None:
    theirs = hw.attach(*build("llama"))
    seen = []
    theirs.model.model.layers[0].mlp.register_forward_hook(lambda part, given, made: seen.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        list(theirs.stream(TEXTS[0], 2))
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_prompt_is_tokenised_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, asked, usual = hw.attach(*build(name)), [], hw.Tokenizer.encode
    monkeypatch.setattr(hw.Tokenizer, "encode", lambda self, text, *a: (asked.append(text), usual(self, text, *a))[1])
    theirs.generate(TEXTS[0], 3)
    assert asked == [TEXTS[0]]
