"""Native copies of live attached models: outputs equal those of transformers up to rounding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression.prune_request import PruneRequest
from headwise.text.build_tokenizers import byte_tokenizer
from tests.attached.models import CASES, VOCAB

transformers: Any = pytest.importorskip("transformers")
NATIVE = ("gpt2", "bert", "roberta", "distilbert", "llama", "mistral", "qwen2", "qwen2_windows", "gpt_neo")
TEXTS = ["to be or not to be", "that is the question", "whether it is nobler in the mind to suffer"]
PRUNINGS = {"full": "", "uneven groups and a layer without heads": "0.1,1.*,2.3"}


def build(name: str, **overrides: Any) -> Any:
    return next(case for case in CASES if case.name == name).build(**overrides)


def build_llama(**overrides: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "max_position_embeddings": 96,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | overrides)).eval()


def calls(padding: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 4) if padding == "left" else slice(9, 13)] = 0
    return ids, mask


def difference(native: Any, attached: Any, padding: str = "right") -> float:
    """Relative distance of the outputs at real tokens."""
    ids, mask = calls(padding)
    with torch.no_grad():
        actual, expected = (model(ids, attention_mask=mask)[mask.bool()].double() for model in (native, attached))
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("heads", PRUNINGS.values(), ids=PRUNINGS.keys())
@pytest.mark.parametrize("name", NATIVE)
def test_to_native_outputs_equal_transformers(name: str, heads: str) -> None:
    attached = hw.attach(build(name))
    attached = attached.prune(heads) if heads else attached
    native = hw.to_native(attached)
    assert native.is_native
    assert native.spec.head_addresses == attached.spec.head_addresses
    assert difference(native, attached) < 1e-5
    assert difference(native, attached, "left" if native.spec.kind == "decoder" else "right") < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_to_native_half_precision_keeps_dtype(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)  # milder, so that rounding stays small
    attached = hw.attach(model.to(dtype)).prune("0.1,1.*,2.3")
    native = hw.to_native(attached)
    assert {weight.dtype for weight in native.parameters()} == {dtype}
    assert difference(native, attached) < 8 * torch.finfo(dtype).eps


def test_to_native_folded_means_and_plan_are_converted() -> None:
    attached = hw.attach(build_llama(), byte_tokenizer())
    pruned = hw.apply(hw.plan_pruning(attached, PruneRequest(heads="0.1,0.4,2.*", corpus=TEXTS)), attached)
    native = hw.to_native(pruned)
    assert pruned.attention_layers()[0].b_O is not None
    assert difference(native, pruned) < 1e-5
    assert native.plans == pruned.plans
    assert native.generate("to be", max_new_tokens=8) == pruned.generate("to be", max_new_tokens=8)


def test_to_native_saved_and_loaded_bitwise(tmp_path: Path) -> None:
    pruned = hw.prune(hw.attach(build_llama(), byte_tokenizer()), heads="0.1,2.*", corpus=TEXTS)
    native = hw.to_native(pruned)
    native.save(tmp_path / "native")
    loaded = hw.load(tmp_path / "native")
    ids, _ = calls("right")
    assert torch.equal(loaded(ids), native(ids))
    assert len(loaded.plans) == 1


def test_to_native_shares_no_memory() -> None:
    model = build_llama()
    attached = hw.attach(model)
    before = attached(calls("right")[0])
    native = hw.to_native(attached)
    with torch.no_grad():
        for weight in native.parameters():
            weight.zero_()
    assert torch.equal(attached(calls("right")[0]), before)


def test_to_native_ignores_open_edits_and_calls_no_listener() -> None:
    attached, calls_shown = hw.attach(build_llama()), []
    reference = attached(calls("right")[0])
    with attached.heads["0.1,1.*"].silenced(), attached.hook_points()[0].listen(calls_shown.append):
        native = hw.to_native(attached)
    assert calls_shown == []
    assert (native(calls("right")[0]) - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.parametrize("trained", [False, True])
def test_to_native_expanded_kv_groups(trained: bool) -> None:
    """`detach` gives each head of an uneven group its own key and value, which training may change."""
    model = hw.attach(build_llama()).prune("0.1,2.3").detach()
    attached = hw.attach(model)
    if trained:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.add_(torch.randn(40, 48) * 0.05)
    native = hw.to_native(attached)
    assert difference(native, attached) < 1e-5
    assert native.spec.attention.kv_heads == (6 if trained else 2)


def test_to_native_untied_output_is_separate() -> None:
    model = build_llama(tie_word_embeddings=True)
    assert hw.to_native(hw.attach(model)).spec.tied
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(257, 48))
    attached = hw.attach(model)
    native = hw.to_native(attached)
    assert not native.spec.tied
    assert difference(native, attached) < 1e-5


def test_to_native_trained_weights_are_current() -> None:
    attached = hw.attach(build_llama())
    with torch.no_grad():
        for weight in attached.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    assert difference(hw.to_native(attached), attached) < 1e-5


def test_to_native_returns_native_model() -> None:
    native = hw.to_native(hw.attach(build_llama()))
    assert hw.to_native(native) is native


def make_classifier() -> Any:
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=31, pad_token_id=0)  # fmt: skip
    return transformers.LlamaForSequenceClassification(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("gpt_neox"), "family 'gpt_neox'"),
        (make_classifier, "has no weight lm_head.weight"),
        (lambda: build_llama(hidden_act="relu6"), "relu6"),
    ],
)
def test_to_native_unsupported_model_raises(make: Any, message: str, tmp_path: Path) -> None:
    attached = hw.attach(make())
    with pytest.raises(hw.HeadwiseError, match=message) as raised:
        hw.to_native(attached)
    assert "attached.save(folder)" in str(raised.value)
    attached.save(tmp_path / "saved")  # the advice


def test_to_native_broken_conversion_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of outputs finds a conversion that swaps heads."""
    attached = hw.attach(build_llama())
    layer_class = type(attached.attention_layers()[0].output_projection)
    original: Any = layer_class.head_output_weights.fget
    monkeypatch.setattr(layer_class, "head_output_weights", property(lambda view: original(view).flip(0)))
    with pytest.raises(hw.HeadwiseError, match="differ by more than rounding"):
        hw.to_native(attached)


def test_to_native_transformers_model_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match=r"hw\.attach"):
        hw.to_native(build_llama())
