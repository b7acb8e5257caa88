# ruff: noqa: C408 (sizes read better as keywords)
"""What is not as it was when a model was attached, or not to be seen: adapters, disks, packed weights, unknown ways of z."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.spec import Address
from tests.attached.models import BODY, BY_NAME, Case, transformers
from tests.attached.test_analysis import VOCABULARY, documents
from tests.attached.test_layer_probe import GATED

JETMOE = Case(
    "jetmoe", "JetMoeForCausalLM", "JetMoeConfig",
    BODY | dict(num_key_value_heads=2, kv_channels=6, num_local_experts=3, num_experts_per_tok=2, bos_token_id=1,
                eos_token_id=2, pad_token_id=0),
)  # fmt: skip
LETTERS = ("W_Q", "W_K", "W_V", "W_O")


def check_seen_and_silenced(model: Any, theirs: Any, given: dict[str, Tensor], before: Tensor) -> None:
    """Looking changes nothing, silence something, and no weights are shown."""
    with hw.record(theirs, what=("q", "map", "z")) as recording:
        assert torch.equal(model(**given).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with theirs.heads["1.1"].silenced():
        assert not torch.equal(model(**given).logits, before)
    for name in LETTERS:
        with pytest.raises(hw.HeadwiseError):
            getattr(theirs.heads["1.1"], name)


# Adapters that come later.


def test_adapters_added_later_are_noticed() -> None:
    peft = pytest.importorskip("peft")
    case = BY_NAME["llama"]
    model, given = case.build(), case.inputs()
    theirs = hw.attach(model)
    assert theirs.heads[Address.parse("1.1")].W_O.shape == (4, 24)
    how = dict(r=3, init_lora_weights=False)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], **how)).eval()
    with torch.no_grad():
        before = model(**given).logits
        check_seen_and_silenced(model, theirs, given, before)
        with pytest.raises(hw.HeadwiseError, match=r"attach it again"):
            theirs.heads["1.1"].W_O  # pyright: ignore
        again = hw.attach(theirs.detach())
        with hw.record(again, what=("z", "write")) as recording:
            model(**given)
        found: Any = model.model.layers[1].self_attn.o_proj
        z = torch.cat([recording[f"1.{head}"].z for head in range(6)], -1)
        total = sum(recording[f"1.{head}"].write for head in range(6))
        assert (total - found(z)).abs().max() < 1e-5  # pyright: ignore
        found.update_layer("more", 3, lora_alpha=1, config=peft.LoraConfig(**how))
        with pytest.raises(hw.HeadwiseError, match=r"attach it again"):
            again.heads["1.1"].W_O  # pyright: ignore


def test_an_adapter_around_a_gated_output_is_not_edited_by_halves() -> None:
    """z is edited where it enters W_O there; an adapter put around W_O reads z too, past the edit."""
    peft = pytest.importorskip("peft")
    model, given = GATED.build(), GATED.inputs()
    theirs = hw.attach(model)
    peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        model(**given)
        with theirs.heads["1.1"].silenced(), pytest.raises(hw.HeadwiseError, match="attach it again"):
            model(**given)
        again, o_proj = hw.attach(theirs.detach()), model.model.layers[1].self_attn.o_proj
        with again.heads["1.1"].silenced():
            silent = model(**given).logits
        size = again.heads[Address.parse("1.1")].layer.spec.value_dim
        for weight in (o_proj.base_layer.weight, o_proj.lora_A["default"].weight):
            weight[:, size : 2 * size] = 0  # what reads the head
        assert (model(**given).logits - silent).abs().max() < 1e-4


# Weights that are elsewhere, or packed.


def test_weights_on_a_disk_are_not_shown_and_heads_are_silenced_all_the_same(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    with torch.no_grad():
        before = model(**given).logits
        accelerate.disk_offload(model, str(tmp_path))
        assert model.model.layers[1].self_attn.o_proj.weight.device.type == "meta"
        check_seen_and_silenced(model, hw.attach(model), given, before)


class Packed(Tensor):
    """A weight of a quantiser: bytes and scales inside, numbers only in a product, as torchao's tensors are."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> "Packed":
        made = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # pyright: ignore
        made.scales = weight.abs().amax(1, keepdim=True) / 127
        made.codes = (weight / made.scales).round().to(torch.int8)
        return made

    def unpacked(self) -> Tensor:
        return self.codes * self.scales

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return torch.nn.functional.linear(args[0], args[1].unpacked(), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of packed weights")


def test_weights_of_a_class_of_their_own_are_not_shown_and_heads_are_silenced_all_the_same() -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
                module.weight = torch.nn.Parameter(Packed(module.weight.detach()), requires_grad=False)
        before = model(**given).logits
        check_seen_and_silenced(model, hw.attach(model), given, before)


# Where W_O is not known.


def test_silence_where_w_o_is_not_known_is_the_layer_without_those_columns() -> None:
    """Heads k and K + k of JetMoE read the same columns of every expert that writes: without these both are gone."""
    model, given = JETMOE.build(), JETMOE.inputs()
    theirs = hw.attach(model)
    assert {layer.passes for layer in theirs.attention_layers()} == {"unknown"}
    with torch.no_grad():
        whole = model(**given).logits
        with theirs.heads["1.1,1.3"].silenced():
            silent = model(**given).logits
        model.model.layers[1].self_attention.experts.output_linear.weight[:, :, 6:12] = 0
        assert (model(**given).logits - silent).abs().max() < 1e-5
        assert (whole - silent).abs().max() > 1e-2
    with pytest.raises(hw.HeadwiseError, match="not known"):
        theirs.heads["1.1"].W_O  # pyright: ignore


def test_silence_is_refused_where_the_layer_is_no_sum_over_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = JETMOE.build(), JETMOE.inputs()
    kind = type(model.model.layers[1].self_attention.experts)
    plain = kind.reduce
    monkeypatch.setattr(kind, "reduce", lambda self, z, where: plain(self, z / z.square().mean(-1, True).sqrt(), where))
    before = model(**given).logits
    theirs = hw.attach(model)
    with hw.record(theirs, what="map") as recording:
        assert torch.equal(model(**given).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with pytest.raises(hw.HeadwiseError, match="not seen to be a sum over heads"), theirs.heads["1.1"].silenced():
        pass


def test_a_profile_needs_no_w_o() -> None:
    sizes = JETMOE.sizes | dict(vocab_size=len(VOCABULARY), max_position_embeddings=300)
    model = dataclasses.replace(JETMOE, sizes=sizes).build()
    theirs = hw.attach(model, hw.Tokenizer.from_wordpiece(VOCABULARY))
    made = hw.profile(theirs, documents(3), causal=False)
    assert len(made) == 12
    for head in made:
        assert math.isnan(head.measures["write"])  # not 0
        assert math.isfinite(head.measures["entropy"])
        assert math.isfinite(head.measures["confidence"])


# Windows.


def test_a_window_that_means_chunks_is_not_told() -> None:
    """A frame of this encoder sees its chunk to the end and some chunks back: more than the number of its configuration."""
    from bench.shrink import tiny

    kind = transformers.NemotronAsrStreamingEncoder
    config = next(tiny(transformers.NemotronAsrStreamingEncoderConfig, kind))
    assert config.sliding_window
    assert {site.window for site in hw.attach(kind(config).eval()).sites()} == {None}
