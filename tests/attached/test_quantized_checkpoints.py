"""Models that others quantized (bitsandbytes, GPTQ, AWQ), other attention implementations, and versions of transformers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import headwise as hw  # noqa: E402
from headwise.errors import HeadwiseError  # noqa: E402

IDS = torch.tensor([[5, 7, 11, 13, 17, 19], [2, 3, 5, 8, 13, 21]])
WIDTH, HEADS = 64, 4


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2, intermediate_size=128,
        vocab_size=97, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class PackedLinear(nn.Module):
    """Linear layer with 4-bit codes, eight in an int32, and a scale and a zero point per group of 32 inputs.

    GPTQ packs along the inputs and AWQ along the outputs. Both name the tensors `qweight`, `qzeros` and `scales`, have no
    `weight`, and dequantize in each call.
    """

    scales: Tensor
    qzeros: Tensor
    qweight: Tensor

    def __init__(self, linear: nn.Linear, pack_inputs: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self._pack_inputs = linear.in_features, linear.out_features, pack_inputs
        groups = linear.weight.detach().mT.unflatten(0, (-1, 32))  # (groups, 32, out)
        low, high = groups.amin(1), groups.amax(1)
        scales = (high - low) / 15
        zeros = (-low / scales).round()
        codes = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15).flatten(0, 1).long()  # (in, out)
        self.register_buffer("scales", scales)
        self.register_buffer("qzeros", zeros)
        self.register_buffer("qweight", self._pack(codes))
        self.register_buffer("bias", None)

    def _pack(self, codes: Tensor) -> Tensor:
        codes = codes if self._pack_inputs else codes.mT
        shifted = codes.unflatten(0, (-1, 8)) << (4 * torch.arange(8))[:, None]
        packed = shifted.sum(1).to(torch.uint32).view(torch.int32)
        return packed if self._pack_inputs else packed.mT.contiguous()

    def dequantized(self) -> Tensor:
        """Return the weight, (in, out)."""
        packed = self.qweight if self._pack_inputs else self.qweight.mT
        codes = (packed.long()[:, None] >> (4 * torch.arange(8))[:, None]) & 15
        codes = codes.flatten(0, 1) if self._pack_inputs else codes.flatten(0, 1).mT
        return ((codes.unflatten(0, (-1, 32)) - self.qzeros[:, None]) * self.scales[:, None]).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dequantized weight."""
        return x @ self.dequantized()


def _packed(pack_inputs: bool) -> Any:
    model = _llama()
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, PackedLinear(child, pack_inputs))
    return model


def _bitsandbytes(folder: Path, **options: bool) -> Any:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install --no-deps bitsandbytes")
    _llama().save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**options)
    return transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)


FORMATS = {
    "gptq": lambda folder: _packed(True), "awq": lambda folder: _packed(False),
    "bitsandbytes 8 bits": lambda folder: _bitsandbytes(folder, load_in_8bit=True),
    "bitsandbytes 4 bits": lambda folder: _bitsandbytes(folder, load_in_4bit=True),
}  # fmt: skip


@pytest.fixture(scope="module", params=FORMATS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return FORMATS[request.param](tmp_path_factory.mktemp("model"))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@torch.no_grad()
def test_quantized_checkpoint_is_looked_at_and_silenced_exactly(quantized: Any) -> None:
    before = quantized(IDS).logits
    attention = quantized.model.layers[1].self_attn
    size = WIDTH // HEADS

    def without_head(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = inputs[0].clone()
        changed[..., size : 2 * size] = 0  # head 1
        return (changed,)

    hook = attention.o_proj.register_forward_pre_hook(without_head)
    expected = quantized(IDS).logits
    hook.remove()
    attached = hw.attach(quantized)
    assert torch.equal(quantized(IDS).logits, before)
    with hw.record(attached, tensors=("map", "z", "v")) as recording:
        assert torch.equal(quantized(IDS).logits, before)
    with attached.heads["1.1"].silenced():
        assert torch.equal(quantized(IDS).logits, expected)
    head = recording["1.1"]
    assert torch.allclose((head.map() @ head.v.float()), head.z.float(), atol=2e-3)
    assert attached.spec.width == WIDTH
    assert len(attached.heads) == 2 * HEADS
    importance = hw.importance(attached, [{"input_ids": IDS, "labels": IDS}], heads="1.1")
    assert importance.texts == 1
    attached.detach()


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantized_checkpoint_says_what_needs_plain_weights(quantized: Any) -> None:
    with hw.attach(quantized) as attached:
        head: Any = attached.heads["1.1"]
        operations = (
            lambda: head.W_O,
            lambda: head.W_Q,
            lambda: hw.prune(attached, heads="1.1", fold_mean=False),
            lambda: attached.prune("1.1", in_place=True),
        )
        for operation in operations:
            with pytest.raises(HeadwiseError, match=r"quantized.*without quantization"):
                operation()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_other_attention_implementations_are_named_with_the_call_that_helps(implementation: str) -> None:
    model = _llama()
    model.config._attn_implementation_internal = implementation  # set_attn_implementation needs the kernel's package
    with pytest.raises(HeadwiseError, match=f"{implementation}.*set_attn_implementation"):
        hw.attach(model)
    model.set_attn_implementation("sdpa")
    before = model(IDS).logits
    attached = hw.attach(model)
    assert torch.equal(model(IDS).logits, before)
    model.config._attn_implementation_internal = implementation
    with pytest.raises(HeadwiseError, match=f"{implementation}.*set_attn_implementation"):
        model(IDS)
    model.set_attn_implementation("sdpa")
    assert torch.equal(attached(IDS), before)


def test_peft_model_is_attached_with_its_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj", "q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(_llama(), config).eval()
    before = wrapped(IDS).logits
    attached = hw.attach(wrapped)
    with hw.record(attached) as recording:
        assert torch.equal(wrapped(IDS).logits, before)
    assert torch.equal(attached(IDS), before)
    assert recording["1.1"].output.shape == (2, 6, WIDTH)
    assert hw.attach(wrapped) is attached
    attached.detach()
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(HeadwiseError, match=r"learned tokens.*get_base_model"):
        hw.attach(peft.get_peft_model(_llama(), prompts))


def test_pruning_and_quantizing_a_peft_model_advise_merged_weights_which_work() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["o_proj", "q_proj"], init_lora_weights=False)
    peft_model = peft.get_peft_model(_llama(), config).eval()
    before, attached = peft_model(IDS).logits, hw.attach(peft_model)
    advice = r"hw\.attach\(peft_model\.merge_and_unload\(\), tokenizer\)"
    with pytest.raises(HeadwiseError, match=f"cannot be pruned.*{advice}"):
        hw.prune(attached, heads="0.1", fold_mean=False)
    with pytest.raises(HeadwiseError, match=f"cannot be quantized.*{advice}"):
        hw.quantize(attached, 8)
    with attached.heads["0.1"].silenced():
        silenced = attached(IDS)
    attached.detach()
    merged = hw.attach(peft_model.merge_and_unload(), None)
    assert torch.allclose(merged(IDS), before, atol=1e-5)
    assert torch.allclose(hw.prune(merged, heads="0.1", fold_mean=False)(IDS), silenced, atol=1e-5)
    assert not torch.equal(hw.quantize(merged, 8)(IDS), before)


@pytest.mark.parametrize(("version", "is_supported"), [
    ("4.57.1", False), ("5.0.0", False), ("5.21.3", False), ("5.22.0", True), ("5.22.2", True), ("5.30.0.dev0", True),
    ("6.0.0", False), ("6.1", False),
])  # fmt: skip
def test_version_of_transformers_is_checked_at_attach(
    version: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _llama()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # transformers replaces its own module
    if is_supported:
        assert hw.attach(model).is_attached
        return
    with pytest.raises(HeadwiseError, match=rf"transformers {version} is installed.*>=5\.22,<6\.0"):
        hw.attach(model)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
