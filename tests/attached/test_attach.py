"""Errors leave the model unchanged. Caches, autocast and checkpointing do not change outputs."""

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
    attached = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="already attached"):
        hw.attach(model.model)
    ids = torch.tensor([[3, 4, 5]])
    with attached.heads["1.1"].silenced():
        assert not torch.equal(attached(ids), attached(ids, gates={"0.0": 0.0}))


def test_detach_twice_and_later_calls_raise() -> None:
    attached = hw.attach(BY_NAME["bert"].build())
    attached.detach()
    for call in (
        attached.detach,
        lambda: attached(torch.tensor([[3, 4]])),
        attached.__enter__,
        lambda: attached.prune("0.0", in_place=True),
    ):
        with pytest.raises(hw.HeadwiseError, match="handle is detached"):
            call()


def test_attach_context_exception_detaches() -> None:
    model = BY_NAME["gpt2"].build()
    with pytest.raises(ZeroDivisionError), hw.attach(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    hw.attach(model).detach()


@pytest.mark.parametrize("backend", ["eager", "mine"])
def test_attach_other_attention_implementation_raises(backend: str) -> None:
    model = BY_NAME["llama"].build()
    if backend == "mine":
        transformers.AttentionInterface.register("mine", lambda *arguments, **more: None)
    model.set_attn_implementation(backend)
    with pytest.raises(hw.HeadwiseError, match=r"set_attn_implementation\(\"sdpa\"\)"):
        hw.attach(model)
    assert model.config._attn_implementation == backend


def test_output_attentions_while_attached_raises() -> None:
    model, inputs = BY_NAME["bert"].build(), BY_NAME["bert"].inputs()
    attached = hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match=r"hw\.attention_maps or hw\.record"):
        model(**inputs, output_attentions=True)
    attached.detach()
    model.set_attn_implementation("eager")
    assert model(**inputs, output_attentions=True).attentions[0] is not None


def test_attach_unsupported_model_error_names_reason() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
    canine = transformers.ConvBertModel(transformers.ConvBertConfig(**sizes, intermediate_size=24, embedding_size=8))
    with pytest.raises(hw.HeadwiseError, match=r"ConvBertModel cannot be attached"):
        hw.attach(canine)
    grouped = sizes | {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0}
    for name, reason in (("GptOss", "learned attention sinks"), ("Gemma2", "soft-caps")):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**grouped))
        model.config._attn_implementation_internal = "sdpa"  # SDPA would ignore them
        with pytest.raises(hw.HeadwiseError, match=reason):
            hw.attach(model)
    with pytest.raises(hw.HeadwiseError, match="Got Linear"):
        hw.attach(torch.nn.Linear(2, 2))
    with pytest.raises(hw.HeadwiseError, match="without attaching"):
        hw.attach(hw.Transformer(hw.preset("nano")))


def test_attach_two_towers_together_or_alone() -> None:
    side = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    text, image = side | {"vocab_size": 31}, side | {"image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8))
    with hw.attach(model) as attached:
        assert {address.stack for address in attached.heads.addresses} == {"vision", "text"}
    assert len(hw.attach(model.text_model).heads) == 2


def test_attach_transformers_4_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(hw.HeadwiseError, match=r"requires at least 5\.22"):
        hw.attach(model)
    assert model.config._attn_implementation == "sdpa"


def test_attention_interface_argument_sdpa_drops_raises() -> None:
    from headwise.attached.hooked_sdpa import sdpa_with_hooks

    attached = hw.attach(BY_NAME["llama"].build())
    module = attached.attention_layers()[0].module
    q, k, v = torch.randn(1, 6, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    sdpa_with_hooks(module, q, k, v, None, scaling=0.5, sliding_window=7, softcap=None)
    for wrong in ({"s_aux": torch.zeros(6)}, {"softcap": 30.0}, {"output_attentions": True}, {"cache": 1}):
        with pytest.raises(hw.HeadwiseError, match="was called with"):
            sdpa_with_hooks(module, q, k, v, None, scaling=0.5, **wrong)
    plain = sdpa_with_hooks(module, q, k, v, None, scaling=0.5)[0]
    assert torch.equal(
        sdpa_with_hooks(module, q, k, v, None, scaling=0.5, labels=q, strange=1)[0], plain
    )  # SDPA supports neither


def test_attach_shared_config_leaves_other_model_unchanged() -> None:
    """No configuration is changed: the other model computes the same outputs and can be attached at the same time."""
    case = BY_NAME["llama"]
    first_model = case.build()
    other = type(first_model)(first_model.config).eval()
    inputs = case.inputs()
    before = other(**inputs).logits
    attached = hw.attach(first_model)
    with attached.heads["*.*"].silenced():
        assert torch.equal(other(**inputs).logits, before)
    second = hw.attach(other)
    attached.detach()
    with second.heads["*.*"].silenced():
        assert not torch.equal(other(**inputs).logits, before)
    second.detach()
    assert torch.equal(other(**inputs).logits, before)


@pytest.mark.parametrize("case", GENERATING, ids=lambda case: case.name)
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generate_attached_same_tokens_and_silences_each_step(case: Case, cache: str) -> None:
    model, inputs = case.build(), case.inputs("left")
    inputs.pop("decoder_input_ids", None)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": cache != "none", "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    before = model.generate(**inputs, **options)
    attached = hw.attach(model)
    last = attached.heads.addresses[-1]
    with hw.record(attached, [last], tensors="z") as recording:
        after = model.generate(**inputs, **options)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
    assert len(recording[last].calls) >= 6
    with attached.heads.select(str(last)).silenced():
        silent = model.generate(**inputs, **options)
    W_O = attached.heads.select(str(last))
    for head in W_O:
        head.W_O.data.zero_()
    zeroed = model.generate(**inputs, **options)
    assert torch.equal(silent.sequences, zeroed.sequences)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(silent.logits, zeroed.logits, strict=True))


AUTOCAST = """
import torch
import headwise as hw
from tests.attached.models import BY_NAME
for name in ("llama", "bert", "gpt2", "t5"):
    model, inputs = BY_NAME[name].build(), BY_NAME[name].inputs("right")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = model(**inputs).logits
        attached = hw.attach(model)
        with hw.record(attached, tensors="map") as recording:
            after = model(**inputs).logits
    assert before.dtype == torch.bfloat16
    assert torch.equal(before, after)
    assert (recording[attached.heads.addresses[0]].map()[0].sum(-1) - 1).abs().max() < 0.02
    print(name)
"""


def test_attach_under_autocast_keeps_outputs() -> None:
    """Runs in a separate process: on some processors the library has wrong half-precision kernels."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", AUTOCAST], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["llama", "bert", "gpt2", "t5"], done.stderr


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "whisper"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_scaled_heads_same_gradients(name: str, reentrant: bool) -> None:
    """Gradients with scaled heads do not depend on checkpointing, although the context is closed before the backward pass."""
    case = BY_NAME[name]
    gradients = []
    for checkpointed in (False, True):
        model, inputs = case.build(), case.inputs("right")
        attached = hw.attach(model)
        attached.train()
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
        heads = attached.heads.addresses
        calls: list[Any] = []
        with (
            attached.heads.select([heads[1], heads[-1]]).scaled(0.3),
            attached.hook_points()[0].listen(calls.append),
        ):
            loss = model(**inputs).logits.square().mean()
        with attached.heads.select([heads[2]]).silenced():  # opened later, so it must not affect the recomputation
            loss.backward()
        assert len(calls) == 1
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, again = gradients
    shared = plain.keys() & again.keys()
    assert len(shared) > 10
    assert all((plain[n] - again[n]).abs().max() <= 1e-4 * plain[n].abs().max() + 1e-7 for n in shared)


def test_deepcopy_attached_has_own_hook_points() -> None:
    attached = hw.attach(BY_NAME["llama"].build())
    twin = copy.deepcopy(attached)
    ids = torch.tensor([[3, 4, 5, 6]])
    before = twin(ids)
    with attached.heads["*.*"].silenced():
        assert torch.equal(twin(ids), before)
    twin.detach()
    assert attached.is_attached
    assert torch.equal(attached(ids), before)


def test_attached_call_native_arguments_match_model() -> None:
    for case in CASES:
        if case.kind not in ("decoder", "encoder"):
            continue
        model, inputs = case.build(), case.inputs("right")
        attached = hw.attach(model)
        ids, real_tokens = inputs["input_ids"], inputs["attention_mask"].bool()
        with torch.no_grad():
            logits = attached(ids, attention_mask=real_tokens)
            assert torch.equal(logits, model(**inputs).logits)
            hidden = attached(ids, attention_mask=real_tokens, hidden=True)
            assert attached.output is not None
            assert torch.equal(attached.output(hidden), logits)
            # The padded text, moved to the right.
            left_padded = torch.cat((torch.zeros_like(ids[1:, :4]), ids[1:, :-4]), 1)
            moved = attached(left_padded, attention_mask=torch.arange(ids.shape[1])[None] >= 4)
            assert (moved[0, 4:] - logits[1, :-4]).abs().max() <= 1e-5


def test_attached_call_without_token_input_raises() -> None:
    attached = hw.attach(BY_NAME["vit"].build())
    with pytest.raises(hw.HeadwiseError, match="takes pixel_values"):
        attached(torch.tensor([[1, 2]]))
    seq = hw.attach(BY_NAME["t5"].build())
    with pytest.raises(hw.HeadwiseError, match="source"):
        seq(torch.tensor([[1, 2]]))
