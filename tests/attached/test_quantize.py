"""Quantized heads of attached models: values of native models, undo, copies, folders, pruning."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression.quantize import weight_footprints
from headwise.kernels.quantization import fake_quantize
from headwise.text.build_tokenizers import byte_tokenizer
from tests.attached.models import CASES, VOCAB

ALLOCATIONS = {
    "uniform": 4,
    "mixed": {"*": 8, "0.1": 4, "1.*:qk": 3, "2.0:vo": 2, "mlp": 8},
    "heads only": {"0.0,0.1": 4},
    "sixteen": {"*": 16, "vocabulary": 8},
}
NAMES = ("llama", "gpt2", "bert", "qwen2")


def build(name: str, **overrides: Any) -> Any:
    case = next(case for case in CASES if case.name == name)
    return replace(case, sizes=case.sizes | overrides).build()


def ids() -> Tensor:
    return torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("weights", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_quantize_attached_equals_native(name: str, weights: Any) -> None:
    """The native model of the float weights, quantized by the same allocation, is the reference."""
    attached = hw.attach(build(name))
    before = attached(ids())
    reference = hw.quantize(hw.to_native(attached), weights)
    small = hw.quantize(attached, weights)
    assert relative(small(ids()), reference(ids())) < 1e-5
    for head in small.heads:
        address = str(head.address)
        for matrix in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(head, matrix), getattr(reference.heads[address], matrix)), (address, matrix)
    assert torch.equal(attached(ids()), before)
    assert small.spec.weight_rules == reference.spec.weight_rules


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "qwen3", "opt", "t5", "gemma3"])
def test_quantize_attached_equals_dequantize_and_multiply(name: str) -> None:
    """Families without a native class: fused, interleaved and separate projections, against values written by hand."""
    attached = hw.attach(build(name))
    case = next(case for case in CASES if case.name == name)
    small = hw.quantize(attached, {"*": 4})
    reference = copy.deepcopy(attached)
    with torch.no_grad():
        for head in reference.heads:
            for matrix in ("W_Q", "W_K", "W_V", "W_O"):
                value = getattr(head, matrix)  # (D, d), a live view; W_O (d, D)
                value.copy_(fake_quantize(value.mT.contiguous(), 4).mT)
    with torch.no_grad():
        actual, expected = (model.model(**case.inputs())[0] for model in (small, reference))
    assert relative(actual, expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_quantized_context_restores_bitwise(name: str) -> None:
    model = build(name)
    attached = hw.attach(model)
    weights = {path: (id(weight), weight.clone()) for path, weight in model.named_parameters()}
    before, classes = attached(ids()), [type(module) for module in model.modules()]
    weights_of_context = {"*": 2, "mlp": 4, "vocabulary": 8}
    with hw.quantized(attached, weights_of_context):
        assert relative(attached(ids()), before) > 1e-3
        assert attached.spec.weight_rules
    assert torch.equal(attached(ids()), before)
    with pytest.raises(KeyError), hw.quantized(attached, weights_of_context):
        raise KeyError
    assert torch.equal(attached(ids()), before)
    assert [type(module) for module in model.modules()] == classes
    assert {path: id(weight) for path, weight in model.named_parameters()} == {
        path: number for path, (number, _) in weights.items()
    }
    assert not attached.spec.weight_rules


def test_quantize_in_place_and_dequantize() -> None:
    attached = hw.attach(build("llama"))
    copied = hw.quantize(attached, {"*": 4, "mlp": 8, "vocabulary": 8})
    assert hw.quantize(attached, {"*": 4, "mlp": 8, "vocabulary": 8}, in_place=True) is attached
    assert torch.equal(attached(ids()), copied(ids()))
    floats = hw.dequantize(attached)
    assert relative(floats(ids()), attached(ids())) < 1e-6
    assert not floats.spec.weight_rules
    assert attached.spec.weight_rules
    again = hw.quantize(floats, {"*": 4, "mlp": 8, "vocabulary": 8})
    assert torch.equal(again(ids()), attached(ids())), "quantized values are quantized to themselves"
    hw.dequantize(attached, in_place=True)
    assert torch.equal(attached(ids()), floats(ids()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_quantized_attached_saved_and_loaded_bitwise(name: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    attached = hw.attach(build(name, tie_word_embeddings=tied).to(dtype)).prune("0.1,1.*")
    small = hw.quantize(attached, {"*": 4, "0.2:vo": 3, "mlp": 8, "vocabulary": 8})
    small.save(tmp_path / "small")
    loaded = hw.load(tmp_path / "small", dtype=None)
    assert loaded.spec.weight_rules == small.spec.weight_rules
    assert loaded(ids()).dtype == dtype
    assert torch.equal(loaded(ids()), small(ids()))
    attached.save(tmp_path / "full")
    size, full_size = ((tmp_path / folder / "model.safetensors").stat().st_size for folder in ("small", "full"))
    assert size < (0.7 if dtype == torch.float32 else 0.85) * full_size
    loaded.save(tmp_path / "again")
    assert torch.equal(hw.load(tmp_path / "again", dtype=None)(ids()), small(ids()))


def test_quantized_attached_hostile_metadata_raises(tmp_path: Path) -> None:
    small = hw.quantize(hw.attach(build("llama")), 4)
    small.save(tmp_path / "m")
    file = tmp_path / "m" / "headwise.json"
    good = json.loads(file.read_text())
    rule = {"part": "q", "bits": 4, "heads": ["0.0"]}
    wrong = [rule | {"bits": 5}], [rule | {"heads": ["9.9"]}], [rule | {"heads": 3}], [{"part": "q"}], [7], "x"
    for rules in wrong:
        file.write_text(json.dumps(good | {"weight_rules": rules}))
        with pytest.raises(hw.HeadwiseError):
            hw.load(tmp_path / "m")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_quantized_attached_pruned_keeps_values(name: str) -> None:
    attached = hw.attach(build(name))
    weights = {"*": 4, "mlp": 8}
    small = hw.quantize(attached, weights)
    pruned = small.prune("0.1,1.*")
    with small.heads["0.1,1.*"].silenced():
        expected = small(ids())
    assert relative(pruned(ids()), expected) < 1e-5
    assert pruned.spec.weight_rules
    for head in pruned.heads:
        assert torch.equal(head.W_Q, small.heads[head.address].W_Q)


def test_quantized_attached_copies_and_pickles() -> None:
    small = hw.quantize(hw.attach(build("gpt2")), {"*": 4, "vocabulary": 8})
    assert torch.equal(copy.deepcopy(small)(ids()), small(ids()))
    expected = small(ids())
    model = small.detach()
    assert torch.equal(model(ids()).logits, expected), "the detached model runs without hooks"
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids()).logits, expected)
    assert hw.attach(model).spec.weight_rules


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_attached_to_native_and_dtype(tied: bool) -> None:
    small = hw.quantize(
        hw.attach(build("llama", tie_word_embeddings=tied)).prune("0.1"), {"*": 4, "mlp": 8, "vocabulary": 4}
    )
    native = hw.to_native(small)
    assert native.spec.weight_rules == small.spec.weight_rules
    assert relative(native(ids()), small(ids())) < 1e-5
    small.model.to(torch.bfloat16)
    assert small(ids()).dtype == torch.bfloat16
    assert relative(small(ids()), native(ids())) < 0.1
    assert next(iter(small.heads)).W_Q.dtype == torch.bfloat16


def test_quantized_attached_activation_bits_equal_native() -> None:
    attached = hw.attach(build("llama"))
    reference = hw.quantize(hw.to_native(attached), 8, activation_bits=8)
    small = hw.quantize(attached, 8, activation_bits=8)
    assert relative(small(ids()), reference(ids())) < 1e-3
    assert relative(small(ids()), hw.quantize(attached, 8)(ids())) > 1e-3


def test_weight_footprints_attached_equal_native() -> None:
    attached = hw.attach(build("llama", tie_word_embeddings=True))
    for weights in (None, {"*": 4, "mlp": 8, "vocabulary": 8}):
        models = [attached, hw.to_native(attached)]
        models = models if weights is None else [hw.quantize(model, weights) for model in models]
        attached_parts, native_parts = ({part.part: part for part in weight_footprints(model)} for model in models)
        for part in ("heads", "MLPs", "vocabulary"):
            own, reference = attached_parts[part], native_parts[part]
            assert (own.parameters, own.nbytes) == (reference.parameters, reference.nbytes), part


def test_quantize_attached_plan_and_allocation() -> None:
    attached = hw.attach(build("llama", vocab_size=257), byte_tokenizer())
    texts = ["to be or not to be", "that is the question"]
    costs = hw.sensitivity(attached, texts)
    native = hw.to_native(attached)
    reference = hw.sensitivity(native, texts, basis="given")
    assert costs.kl_divergence == pytest.approx(reference.kl_divergence, rel=1e-2, abs=1e-7)
    allocation = hw.allocate_bits(attached, costs, mean_bits=3.5, choices=(4, 3))
    assert allocation.bits == hw.allocate_bits(native, reference, mean_bits=3.5, choices=(4, 3)).bits
    plan = hw.plan_pruning(attached, weights=allocation.bits_by_head_and_part)
    small = hw.apply(plan, attached)
    assert torch.equal(small(ids()), hw.quantize(attached, allocation.bits_by_head_and_part)(ids()))
    assert small.plans[-1].weight_rules


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: hw.quantize(a, 4, basis="balanced"), "basis='given'"),
        (lambda a: hw.quantize(hw.quantize(a, 4), 4), "already quantized"),
        (lambda a: hw.quantize(a, {"9.9": 4}), "9.9"),
        (lambda a: hw.quantized(hw.to_native(a), 4).__enter__(), "hw.quantize"),
        (lambda a: hw.quantize(hw.to_native(a), 4, in_place=True), "Leave out in_place"),
        (lambda a: hw.sensitivity(hw.quantize(a, 4), ["to be or not"]), "hw.dequantize"),
    ],
)
def test_quantize_attached_invalid_calls_raise(call: Any, message: str) -> None:
    attached = hw.attach(build("llama", vocab_size=257), byte_tokenizer())
    before = attached(ids())
    with pytest.raises(hw.HeadwiseError, match=message):
        call(attached)
    assert torch.equal(attached(ids()), before)


def test_quantize_attached_open_edit_raises() -> None:
    attached = hw.attach(build("llama"))
    with attached.heads["0.1"].silenced(), pytest.raises(hw.HeadwiseError, match="Close it"):
        hw.quantize(attached, 4, in_place=True)


def test_quantize_attached_layers_with_different_numbers_of_heads() -> None:
    """Layers of a Swin have 2, then 4 heads. All heads of all layers are quantized."""
    from transformers import SwinConfig, SwinModel

    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    attached = hw.attach(SwinModel(SwinConfig(**sizes)).eval())
    expected = {
        (str(head.address), matrix): fake_quantize(getattr(head, matrix).detach().mT.contiguous(), 4).mT
        for head in attached.heads
        for matrix in ("W_Q", "W_K", "W_V", "W_O")
    }
    assert len(expected) == (2 + 4) * 4
    small = hw.quantize(attached, {"*": 4})
    for (address, matrix), value in expected.items():
        assert torch.equal(getattr(small.heads[address], matrix), value), (address, matrix)
