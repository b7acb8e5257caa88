# ruff: noqa: C408 (sizes read better as keywords)
"""Models that changed after attaching, offloaded and quantized weights, and layers with an unknown W_O."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.spec import Address
from tests.attached.models import BY_NAME, COMMON_SIZES, Case, transformers
from tests.attached.test_analysis import VOCABULARY, documents
from tests.attached.test_layer_structure_check import GATED

JETMOE = Case(
    "jetmoe", "JetMoeForCausalLM", "JetMoeConfig",
    COMMON_SIZES | dict(num_key_value_heads=2, kv_channels=6, num_local_experts=3, num_experts_per_tok=2, bos_token_id=1,
                eos_token_id=2, pad_token_id=0),
)  # fmt: skip
WEIGHT_NAMES = ("W_Q", "W_K", "W_V", "W_O")


def check_recorded_and_silenced(model: Any, attached: Any, inputs: dict[str, Tensor], before: Tensor) -> None:
    """Check that recording does not change outputs, that silencing does, and that weights are not available."""
    with hw.record(attached, tensors=("q", "map", "z")) as recording:
        assert torch.equal(model(**inputs).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with attached.heads["1.1"].silenced():
        assert not torch.equal(model(**inputs).logits, before)
    for name in WEIGHT_NAMES:
        with pytest.raises(hw.HeadwiseError):
            getattr(attached.heads["1.1"], name)


# Adapters added after attaching.


def test_attached_adapter_added_later_raises() -> None:
    peft = pytest.importorskip("peft")
    case = BY_NAME["llama"]
    model, inputs = case.build(), case.inputs()
    attached = hw.attach(model)
    assert attached.heads[Address.parse("1.1")].W_O.shape == (4, 24)
    options = dict(r=3, init_lora_weights=False)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], **options)).eval()
    with torch.no_grad():
        before = model(**inputs).logits
        check_recorded_and_silenced(model, attached, inputs, before)
        with pytest.raises(hw.HeadwiseError, match="Attach it again"):
            attached.heads["1.1"].W_O  # pyright: ignore
        again = hw.attach(attached.detach())
        with hw.record(again, tensors=("z", "output")) as recording:
            model(**inputs)
        o_proj: Any = model.model.layers[1].self_attn.o_proj
        z = torch.cat([recording[f"1.{head}"].z for head in range(6)], -1)
        total = sum(recording[f"1.{head}"].output for head in range(6))
        assert (total - o_proj(z)).abs().max() < 1e-5  # pyright: ignore
        o_proj.update_layer("more", 3, lora_alpha=1, config=peft.LoraConfig(**options))
        with pytest.raises(hw.HeadwiseError, match="Attach it again"):
            again.heads["1.1"].W_O  # pyright: ignore


def test_save_model_with_adapters_raises_and_merged_model_loads(tmp_path: Path) -> None:
    """Adapters of an MLP, too: their projections would be saved under names that no model reads."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=3, target_modules=["down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(BY_NAME["llama"].build(), options).eval()
    attached, ids = hw.attach(adapted), torch.arange(3, 13)[None]
    for save in (lambda: attached.save_pretrained(tmp_path / "a"), lambda: hw.export(attached, tmp_path / "b")):
        with pytest.raises(hw.HeadwiseError, match=r"cannot be saved\. Merge them"):
            save()
    logits = attached(ids)
    attached.detach()
    merged = hw.attach(adapted.merge_and_unload())
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(hw.load(tmp_path / "merged")(ids), logits, rtol=1e-4, atol=1e-4)


def test_silenced_adapter_around_gated_output_raises() -> None:
    """z is edited at the input of W_O. An adapter around W_O would receive the unedited z."""
    peft = pytest.importorskip("peft")
    model, inputs = GATED.build(), GATED.inputs()
    attached = hw.attach(model)
    peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        model(**inputs)
        with attached.heads["1.1"].silenced(), pytest.raises(hw.HeadwiseError, match="Attach it again"):
            model(**inputs)
        again, o_proj = hw.attach(attached.detach()), model.model.layers[1].self_attn.o_proj
        with again.heads["1.1"].silenced():
            silent = model(**inputs).logits
        size = again.heads[Address.parse("1.1")].layer.spec.value_dim
        for weight in (o_proj.base_layer.weight, o_proj.lora_A["default"].weight):
            weight[:, size : 2 * size] = 0  # the columns that read the head
        assert (model(**inputs).logits - silent).abs().max() < 1e-4


# Offloaded and quantized weights.


def test_attach_disk_offloaded_weights_silences_without_views(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    with torch.no_grad():
        before = model(**inputs).logits
        accelerate.disk_offload(model, str(tmp_path))
        assert model.model.layers[1].self_attn.o_proj.weight.device.type == "meta"
        check_recorded_and_silenced(model, hw.attach(model), inputs, before)


class FakeQuantizedTensor(Tensor):
    """Quantized weight like those of torchao: stores bytes and scales, and dequantizes only in a matmul."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, weight: Tensor) -> "FakeQuantizedTensor":
        tensor = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # pyright: ignore
        tensor.scales = weight.abs().amax(1, keepdim=True) / 127
        tensor.codes = (weight / tensor.scales).round().to(torch.int8)
        return tensor

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


def test_attach_tensor_subclass_weights_silences_without_views() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
                module.weight = torch.nn.Parameter(FakeQuantizedTensor(module.weight.detach()), requires_grad=False)
        before = model(**inputs).logits
        check_recorded_and_silenced(model, hw.attach(model), inputs, before)


# Layers whose W_O is not found.


def test_silenced_unknown_w_o_equals_zeroed_expert_columns() -> None:
    """Heads k and K + k of JetMoE use the same output columns of every expert, so zeroing these removes both heads."""
    model, inputs = JETMOE.build(), JETMOE.inputs()
    attached = hw.attach(model)
    assert {layer.z_path for layer in attached.attention_layers()} == {"unknown"}
    with torch.no_grad():
        full = model(**inputs).logits
        with attached.heads["1.1,1.3"].silenced():
            silent = model(**inputs).logits
        model.model.layers[1].self_attention.experts.output_linear.weight[:, :, 6:12] = 0
        assert (model(**inputs).logits - silent).abs().max() < 1e-5
        assert (full - silent).abs().max() > 1e-2
    with pytest.raises(hw.HeadwiseError, match="not found"):
        attached.heads["1.1"].W_O  # pyright: ignore


def test_silenced_layer_not_sum_over_heads_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = JETMOE.build(), JETMOE.inputs()
    kind = type(model.model.layers[1].self_attention.experts)
    plain = kind.reduce
    monkeypatch.setattr(kind, "reduce", lambda self, z, where: plain(self, z / z.square().mean(-1, True).sqrt(), where))
    before = model(**inputs).logits
    attached = hw.attach(model)
    with hw.record(attached, tensors="map") as recording:
        assert torch.equal(model(**inputs).logits, before)
    assert recording["1.1"].map().shape == (2, 13, 13)
    with (
        pytest.raises(hw.HeadwiseError, match="could not be verified to be a sum over heads"),
        attached.heads["1.1"].silenced(),
    ):
        pass


def test_profile_without_w_o_gives_nan_output_norm() -> None:
    sizes = JETMOE.sizes | dict(vocab_size=len(VOCABULARY), max_position_embeddings=300)
    model = dataclasses.replace(JETMOE, sizes=sizes).build()
    attached = hw.attach(model, hw.Tokenizer.from_wordpiece(VOCABULARY))
    profile = hw.profile(attached, documents(3), causal=False)
    assert len(profile) == 12
    for head in profile:
        assert math.isnan(head.metrics["output norm"])  # not 0
        assert math.isfinite(head.metrics["entropy"])
        assert math.isfinite(head.metrics["confidence"])


# Windows.


def test_hook_point_chunked_window_is_none() -> None:
    """A frame of this encoder sees its full chunk and some earlier chunks, which is more than its configured window."""
    from bench.shrink import tiny_configs

    kind = transformers.NemotronAsrStreamingEncoder
    config = next(tiny_configs(transformers.NemotronAsrStreamingEncoderConfig, kind))
    assert config.sliding_window
    assert {hook_point.window for hook_point in hw.attach(kind(config).eval()).hook_points()} == {None}
