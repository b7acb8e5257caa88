"""What goes wrong is told and leaves the model as it was; caches, autocast and checkpointing change nothing."""

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import headwise as hw
from tests.attached.models import BY_NAME, CASES, Case, transformers

GENERATING = [case for case in CASES if case.kind in ("decoder", "two")]


def test_attach_of_a_part_of_an_attached_model_raises_and_the_handle_goes_on() -> None:
    model = BY_NAME["llama"].build()
    theirs = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="attached already"):
        hw.attach(model.model)
    ids = torch.tensor([[3, 4, 5]])
    with theirs.heads["1.1"].silenced():
        assert not torch.equal(theirs(ids), theirs(ids, gates={"0.0": 0.0}))


def test_detaching_twice_and_calls_after_it_are_refused() -> None:
    theirs = hw.attach(BY_NAME["bert"].build())
    theirs.detach()
    for call in (theirs.detach, lambda: theirs(torch.tensor([[3, 4]])), theirs.__enter__, lambda: theirs.cut("0.0")):
        with pytest.raises(hw.HeadwiseError, match="detached already"):
            call()


def test_a_context_that_was_left_by_an_error_has_detached() -> None:
    model = BY_NAME["gpt2"].build()
    with pytest.raises(ZeroDivisionError), hw.attach(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    hw.attach(model).detach()


@pytest.mark.parametrize("backend", ["eager", "mine"])
def test_a_model_on_another_attention_is_refused(backend: str) -> None:
    model = BY_NAME["llama"].build()
    if backend == "mine":
        transformers.AttentionInterface.register("mine", lambda *arguments, **more: None)
    model.set_attn_implementation(backend)
    with pytest.raises(hw.HeadwiseError, match=r"set_attn_implementation\(\"sdpa\"\)"):
        hw.attach(model)
    assert model.config._attn_implementation == backend


def test_maps_all_at_once_are_refused_while_attached() -> None:
    model, given = BY_NAME["bert"].build(), BY_NAME["bert"].inputs()
    theirs = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match=r"hw\.attend or hw\.record"):
        model(**given, output_attentions=True)
    theirs.detach()
    model.set_attn_implementation("eager")
    assert model(**given, output_attentions=True).attentions[0] is not None


def test_models_that_cannot_be_attached_say_why() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
    canine = transformers.ConvBertModel(transformers.ConvBertConfig(**sizes, intermediate_size=24, embedding_size=8))
    with pytest.raises(hw.HeadwiseError, match=r"ConvBertModel is not on transformers' attention interface"):
        hw.attach(canine)
    grouped = sizes | {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0}
    for name, why in (("GptOss", "learned sinks"), ("Gemma2", "caps its scores")):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**grouped))
        model.config._attn_implementation_internal = "sdpa"  # which would drop them
        with pytest.raises(hw.HeadwiseError, match=why):
            hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="takes a transformers model; got Linear"):
        hw.attach(torch.nn.Linear(2, 2))
    with pytest.raises(hw.HeadwiseError, match="Our own models have"):
        hw.attach(hw.Transformer(hw.preset("nano")))


def test_two_towers_are_attached_together_or_one_of_them() -> None:
    side = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    text, image = side | {"vocab_size": 31}, side | {"image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8))
    with hw.attach(model) as theirs:
        assert {address.stack for address in theirs.heads.addresses} == {"vision", "text"}
    assert len(hw.attach(model.text_model).heads) == 2


def test_transformers_4_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(hw.HeadwiseError, match="attaching needs 5 or newer"):
        hw.attach(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_call_that_carries_what_sdpa_would_drop_is_refused() -> None:
    from headwise.attached.interface import attend

    theirs = hw.attach(BY_NAME["llama"].build())
    module = theirs.attention_layers()[0].module
    q, k, v = torch.randn(1, 6, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    attend(module, q, k, v, None, scaling=0.5, sliding_window=7, softcap=None)
    for wrong in ({"s_aux": torch.zeros(6)}, {"softcap": 30.0}, {"output_attentions": True}, {"cache": 1}):
        with pytest.raises(hw.HeadwiseError, match="carries"):
            attend(module, q, k, v, None, scaling=0.5, **wrong)
    plain = attend(module, q, k, v, None, scaling=0.5)[0]
    assert torch.equal(attend(module, q, k, v, None, scaling=0.5, labels=q, strange=1)[0], plain)  # SDPA knows neither


def test_two_models_that_share_a_configuration() -> None:
    """No configuration is touched: the other one computes what it did, and can be attached at the same time."""
    case = BY_NAME["llama"]
    one = case.build()
    other = type(one)(one.config).eval()
    given = case.inputs()
    before = other(**given).logits
    theirs = hw.attach(one)
    with theirs.heads["*.*"].silenced():
        assert torch.equal(other(**given).logits, before)
    second = hw.attach(other)
    theirs.detach()
    with second.heads["*.*"].silenced():
        assert not torch.equal(other(**given).logits, before)
    second.detach()
    assert torch.equal(other(**given).logits, before)


@pytest.mark.parametrize("case", GENERATING, ids=lambda case: case.name)
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generating_gives_the_same_tokens_and_silence_reaches_every_step(case: Case, cache: str) -> None:
    model, given = case.build(), case.inputs("left")
    given.pop("decoder_input_ids", None)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": cache != "none", "pad_token_id": 0}
    how |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    if cache == "static":
        how["cache_implementation"] = "static"
    before = model.generate(**given, **how)
    theirs = hw.attach(model)
    last = theirs.heads.addresses[-1]
    with hw.record(theirs, [last], what="z") as recording:
        after = model.generate(**given, **how)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
    assert len(recording[last].calls) >= 6
    with theirs.heads.select(str(last)).silenced():
        silent = model.generate(**given, **how)
    W_O = theirs.heads.select(str(last))
    for head in W_O:
        head.W_O.data.zero_()
    zeroed = model.generate(**given, **how)
    assert torch.equal(silent.sequences, zeroed.sequences)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(silent.logits, zeroed.logits, strict=True))


AUTOCAST = """
import torch
import headwise as hw
from tests.attached.models import BY_NAME
for name in ("llama", "bert", "gpt2", "t5"):
    model, given = BY_NAME[name].build(), BY_NAME[name].inputs("right")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = model(**given).logits
        theirs = hw.attach(model)
        with hw.record(theirs, what="map") as recording:
            after = model(**given).logits
    assert before.dtype == torch.bfloat16
    assert torch.equal(before, after)
    assert (recording[theirs.heads.addresses[0]].map()[0].sum(-1) - 1).abs().max() < 0.02
    print(name)
"""


def test_under_autocast() -> None:
    """In a process of its own: some processors have instructions for half precision that the library gets wrong."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", AUTOCAST], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["llama", "bert", "gpt2", "t5"], done.stderr


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "whisper"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_repeats_a_block_as_it_was(name: str, reentrant: bool) -> None:
    """Gradients with heads scaled are the same with and without checkpointing, though the context has ended by then."""
    case = BY_NAME[name]
    gradients = []
    for checkpointed in (False, True):
        model, given = case.build(), case.inputs("right")
        theirs = hw.attach(model)
        theirs.train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        for part in model.modules():
            for name_of in ("attention_dropout", "dropout", "activation_dropout"):
                if isinstance(getattr(part, name_of, None), float):
                    setattr(part, name_of, 0.0)
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        heads = theirs.heads.addresses
        calls: list[Any] = []
        with theirs.heads.select([heads[1], heads[-1]]).scaled(0.3), theirs.sites()[0].listen(calls.append):
            loss = model(**given).logits.square().mean()
        with theirs.heads.select([heads[2]]).silenced():  # opened later: none of the repeated pass's business
            loss.backward()
        assert len(calls) == 1
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, again = gradients
    shared = plain.keys() & again.keys()
    assert len(shared) > 10
    assert all((plain[n] - again[n]).abs().max() <= 1e-4 * plain[n].abs().max() + 1e-7 for n in shared)


def test_a_copy_has_sites_of_its_own() -> None:
    theirs = hw.attach(BY_NAME["llama"].build())
    twin = copy.deepcopy(theirs)
    ids = torch.tensor([[3, 4, 5, 6]])
    before = twin(ids)
    with theirs.heads["*.*"].silenced():
        assert torch.equal(twin(ids), before)
    twin.detach()
    assert theirs.attached
    assert torch.equal(theirs(ids), before)


def test_called_as_our_own_models_are() -> None:
    for case in CASES:
        if case.kind not in ("decoder", "encoder"):
            continue
        model, given = case.build(), case.inputs("right")
        theirs = hw.attach(model)
        ids, real = given["input_ids"], given["attention_mask"].bool()
        with torch.no_grad():
            logits = theirs(ids, padding=real)
            assert torch.equal(logits, model(**given).logits)
            hidden = theirs(ids, padding=real, hidden=True)
            assert theirs.output is not None
            assert torch.equal(theirs.output(hidden), logits)
            left = torch.cat((torch.zeros_like(ids[1:, :4]), ids[1:, :-4]), 1)  # the padded text, moved to the right
            moved = theirs(left, padding=torch.arange(ids.shape[1])[None] >= 4)
            assert (moved[0, 4:] - logits[1, :-4]).abs().max() <= 1e-5


def test_what_reads_no_tokens_says_so() -> None:
    theirs = hw.attach(BY_NAME["vit"].build())
    with pytest.raises(hw.HeadwiseError, match="reads pixel_values"):
        theirs(torch.tensor([[1, 2]]))
    seq = hw.attach(BY_NAME["t5"].build())
    with pytest.raises(hw.HeadwiseError, match="needs what it reads"):
        seq(torch.tensor([[1, 2]]))
