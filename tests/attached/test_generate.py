"""Generation with attached models: the same tokens as transformers, exact lengths, streaming, and clean termination."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.test_analysis import TEXTS, build

NEW_TOKENS = 7


def hf_generate(model: Any, ids: Tensor, max_new_tokens: int = NEW_TOKENS, **options: Any) -> list[int]:
    """Return the tokens that transformers' `generate` adds to one prompt."""
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, pad_token_id=0, **options
    )
    start = (
        1 if model.config.is_encoder_decoder else ids.shape[1]
    )  # encoder-decoders of transformers start with a start token
    return output[0, start:].tolist()


def encode_prompt(attached: Any, text: str = TEXTS[0]) -> Tensor:
    return torch.tensor([attached.tokenizer.encode(text)])


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generate_any_prompt_type_gives_hf_tokens(name: str) -> None:
    model, tokenizer = build(name)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([tokenizer.encode(TEXTS[0])])
    start = 0 if name == "t5" else ids.shape[1]
    want = hf_generate(model, ids, do_sample=False)
    attached = hw.attach(model, tokenizer)
    assert [step.tolist() for step in attached.stream(TEXTS[0], NEW_TOKENS)] == [[token] for token in want]
    assert [step.tolist() for step in attached.stream(ids, NEW_TOKENS)] == [[token] for token in want]
    assert attached.generate(TEXTS[0], NEW_TOKENS) == tokenizer.decode([*ids[0].tolist()[:start], *want])
    generated = attached.generate(ids, max_new_tokens=NEW_TOKENS)
    assert generated[0, -NEW_TOKENS:].tolist() == want
    assert attached.generate(ids[0].tolist(), NEW_TOKENS)[-NEW_TOKENS:] == want
    assert attached.generate(input_ids=ids, max_new_tokens=NEW_TOKENS).equal(generated)
    assert attached.generate(ids, max_new_tokens=NEW_TOKENS).equal(generated)
    assert attached.generate(ids).shape[1] == generated.shape[1] - NEW_TOKENS + 64, "as for our own models"
    assert list(attached.stream(ids, 0)) == []


def test_stream_runs_one_pass_per_token() -> None:
    attached = hw.attach(*build("llama"))
    passes = []
    attached.model.register_forward_hook(lambda *_: passes.append(threading.current_thread()))
    steps = attached.stream(TEXTS[0], NEW_TOKENS)
    assert passes == []
    for count in range(1, 4):
        next(steps)
        assert len(passes) == count, "a pass for each token that was read, none ahead"
    steps.close()
    assert len(passes) == 3


def test_stream_stopped_early_leaves_no_thread() -> None:
    attached = hw.attach(*build("llama"))
    before = threading.active_count()
    for _ in attached.stream(TEXTS[0], 50):
        assert threading.active_count() == before + 1
        break
    assert threading.active_count() == before
    steps = attached.stream(TEXTS[0], 50)
    next(steps)
    del steps
    assert threading.active_count() == before
    attached.stream(TEXTS[0], 50)  # never iterated
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in attached.stream(TEXTS[0], 50)]
    assert threading.active_count() == before
    assert len(list(attached.stream(TEXTS[0], 3))) == 3, "and it still writes"


def test_stream_errors_are_raised_to_caller() -> None:
    attached = hw.attach(*build("llama"))
    before, calls = threading.active_count(), []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("half-way")

    hook = attached.model.register_forward_hook(fail)
    got = []
    with pytest.raises(ZeroDivisionError, match="half-way"):
        got.extend(attached.stream(TEXTS[0], 9))
    assert len(got) == 2
    assert threading.active_count() == before
    hook.remove()
    with pytest.raises(hw.HeadwiseError, match="one number per head"):
        list(attached.stream(TEXTS[0], 3, gates={attached.hook_points()[0].address: torch.ones(3)}))
    for call, message in (
        (lambda: attached.stream(TEXTS[0], -1), "at least 0"),
        (lambda: hw.attach(build("llama")[0]).stream(TEXTS[0]), "has no tokenizer"),
        (lambda: hw.attach(*build("bert")).generate(TEXTS[0]), "cannot generate text"),
        (lambda: hw.attach(*build("bert")).generate(torch.tensor([[3, 4]])), "cannot generate text"),
    ):
        with pytest.raises(hw.HeadwiseError, match=message):
            call()


def test_stream_same_seed_gives_same_tokens() -> None:
    attached = hw.attach(*build("gpt2"))
    ids, options = encode_prompt(attached), {"temperature": 1.3, "top_k": 20}
    torch.manual_seed(5)
    want = hf_generate(attached.model, ids, do_sample=True, top_p=1.0, **options)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    got = [int(step) for step in attached.stream(TEXTS[0], NEW_TOKENS, seed=5, **options)]
    assert got == want
    assert torch.equal(torch.get_rng_state(), state)
    mixed = []
    for step in attached.stream(TEXTS[0], NEW_TOKENS, seed=5, **options):
        torch.rand(3)
        mixed.append(int(step))
    assert mixed == want
    assert attached.generate(ids, NEW_TOKENS, seed=5, top_p=1.0, **options)[0, ids.shape[1] :].tolist() == want
    zero = attached.generate(ids, NEW_TOKENS, temperature=0.0)[0, ids.shape[1] :].tolist()
    assert zero == hf_generate(attached.model, ids, do_sample=False)


def test_stream_gates_apply_to_one_call() -> None:
    attached = hw.attach(*build("llama"))
    ids = encode_prompt(attached)
    logits = attached(ids)
    with attached.heads["0-1.*"].silenced():
        silent, want = attached(ids), hf_generate(attached.model, ids, do_sample=False)
    assert not torch.equal(silent, logits)
    got = []
    for step in attached.stream(TEXTS[0], NEW_TOKENS, gates={"0-1.*": 0.0}):
        got.append(int(step))
        assert torch.equal(attached(ids), logits), "between two tokens the model is as it was"
    assert got == want
    assert attached.generate(ids, NEW_TOKENS, gates={"0-1.*": 0.0})[0, ids.shape[1] :].tolist() == want


def test_stream_autocast_reaches_generation_thread() -> None:
    attached = hw.attach(*build("llama"))
    dtypes = []
    attached.model.model.layers[0].mlp.register_forward_hook(lambda part, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        list(attached.stream(TEXTS[0], 2))
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_generate_prompt_is_tokenized_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attached, texts, original = hw.attach(*build(name)), [], hw.Tokenizer.encode
    monkeypatch.setattr(
        hw.Tokenizer, "encode", lambda self, text, *a: (texts.append(text), original(self, text, *a))[1]
    )
    attached.generate(TEXTS[0], 3)
    assert texts == [TEXTS[0]]
