# ruff: noqa: C408 (sizes read better as keywords)
"""The model contract for models that read images, or images and text, without the parts about text.

Expected values are computed in another way: W_O changed in a copy, the model before it was attached, its own folder.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attached import AttachedModel
from headwise.attached.prune_in_place import flatten_tensors
from headwise.model.protocols import is_model
from tests.contract.attached_models import sample_heads, scaled_copy, training_mode

transformers: Any = pytest.importorskip("transformers")

TOLERANCE = 1e-9
COMMON_SIZES = dict(
    hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, attention_dropout=0.3
)
VISION = COMMON_SIZES | dict(image_size=8, patch_size=4)
TEXT = COMMON_SIZES | dict(vocab_size=31, max_position_embeddings=24, bos_token_id=1, eos_token_id=2, pad_token_id=0)
IMAGE_TOKEN = 30  # the token that patches replace


def _vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**VISION, attention_probs_dropout_prob=0.3, num_labels=5)
    )


def _clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8))


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE_TOKEN, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


BUILDERS = {"vit": _vit, "clip": _clip, "llava": _llava}
STACKS = {"vit": {""}, "clip": {"vision", "text"}, "llava": {"vision", "text"}}
each_model = pytest.mark.parametrize("name", BUILDERS)


def build_model(name: str) -> Any:
    """Return a model before it is attached, with weights large enough that every head matters."""
    torch.manual_seed(5)
    inner = BUILDERS[name]()
    with torch.no_grad():
        for part, weight in inner.named_parameters():
            weight.copy_(0.4 * torch.randn_like(weight) + ("norm" in part.lower() and part.endswith("weight")))
    return inner.double().eval()


@cache
def cached_model(name: str) -> Any:
    """Return the model of a name, attached once."""
    return hw.attach(build_model(name))


def model_inputs(name: str) -> dict[str, Tensor]:
    """Return two images, and two texts for models that also read text."""
    generator = torch.Generator().manual_seed(1)
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)}
    words = {"clip": [[1, 5, 7, 2], [1, 8, 9, 2]], "llava": [[5, *[IMAGE_TOKEN] * 4, 7], [6, *[IMAGE_TOKEN] * 4, 9]]}
    return pixels | ({"input_ids": torch.tensor(words[name])} if name in words else {})


def flat_outputs(model: Any, name: str, **extra: Any) -> Tensor:
    """Return all outputs of a call in one tensor."""
    with torch.no_grad():
        return torch.cat(
            [x.flatten() for x in flatten_tensors(model(**model_inputs(name), **extra)) if x.is_floating_point()]
        )


@each_model
def test_attach_image_model_keeps_outputs_bitwise(name: str) -> None:
    before = flat_outputs(build_model(name), name)
    model = cached_model(name)
    assert is_model(cached_model(name))
    assert (
        model.spec.head_addresses
        == model.heads.addresses
        == tuple(a for hook_point in model.hook_points() for a in hook_point.head_addresses)
    )
    assert [layer.hook_point for layer in model.attention_layers()] == model.hook_points()
    assert {hook_point.address.stack for hook_point in model.hook_points()} == STACKS[name]
    assert (model.training, model.checkpointing, model.plans) == (False, False, ())
    assert torch.equal(flat_outputs(model.model, name), before)
    with hw.record(model, tensors=("map", "z", "output")) as recording:
        assert torch.equal(flat_outputs(model.model, name), before)
    assert all(recorded.calls for recorded in recording)
    assert torch.equal(flat_outputs(model, name), before)


@each_model
def test_gates_image_model_equal_scaled_w_o_and_pruning(name: str) -> None:
    model = cached_model(name)
    full = flat_outputs(model, name)
    for address in sample_heads(model):
        with scaled_copy(model, address, 0.5) as twin:
            want = flat_outputs(twin, name)
        assert (flat_outputs(model, name, gates={str(address): 0.5}) - want).abs().max() <= TOLERANCE
        with scaled_copy(model, address, 0.0) as twin:
            want = flat_outputs(twin, name)
        with model.heads[address].silenced():
            silent = flat_outputs(model, name)
        assert (silent - want).abs().max() <= TOLERANCE
        assert (silent - full).abs().max() > 1e-6, f"{address} matters"
        small = model.prune(address)
        assert (flat_outputs(small, name) - want).abs().max() <= TOLERANCE
        assert address not in small.heads.addresses
        assert (flat_outputs(small.detach(), name) - want).abs().max() <= TOLERANCE
    assert torch.equal(flat_outputs(model, name), full), "and nothing stays"


@each_model
def test_attention_layer_output_equals_sum_of_heads(name: str) -> None:
    model, outputs = cached_model(name), dict[Any, Tensor]()
    hooks = [
        layer.register_forward_hook(
            lambda part, inputs, output, hook_point=layer.hook_point: outputs.update({hook_point: output})
        )
        for layer in model.attention_layers()
    ]
    with hw.record(model, tensors="z") as recording:
        flat_outputs(model, name)
    for hook in hooks:
        hook.remove()
    for layer in model.attention_layers():
        with torch.no_grad():
            total = sum(recording[a].z @ model.heads[a].W_O for a in layer.hook_point.head_addresses)
            total = total if layer.b_O is None else total + layer.b_O
        assert (outputs[layer.hook_point] - total).abs().max() <= TOLERANCE


@each_model
def test_record_maps_times_values_equal_z(name: str) -> None:
    model = cached_model(name)
    with hw.record(model, tensors=("map", "v", "z")) as recording:
        flat_outputs(model, name)
    for address in model.heads.addresses:
        recorded = recording[address]
        assert (recorded.map().sum(-1) - 1).abs().max() <= TOLERANCE
        assert (recorded.map() @ recorded.v - recorded.z).abs().max() <= TOLERANCE


@each_model
def test_deepcopy_and_untrained_image_model_are_independent(name: str) -> None:
    model = cached_model(name)
    before, twin, head = (
        flat_outputs(model, name),
        copy.deepcopy(cached_model(name)),
        sample_heads(cached_model(name))[0],
    )
    with twin.heads[head].silenced():
        assert torch.equal(flat_outputs(model, name), before)
        assert not torch.equal(flat_outputs(twin, name), before)
    first, same, other = (model.untrained(seed) for seed in (0, 0, 1))
    assert first.heads.addresses == model.heads.addresses
    assert torch.equal(first.heads[head].W_Q, same.heads[head].W_Q)
    assert not torch.equal(first.heads[head].W_Q, other.heads[head].W_Q)
    with training_mode(model):
        assert (flat_outputs(model, name) - before).abs().max() > 1e-6, "it drops out"
    assert torch.equal(flat_outputs(model, name), before)


@each_model
def test_save_load_full_or_pruned_restores_model(name: str, tmp_path: Path) -> None:
    model = cached_model(name)
    pruned = ",".join(str(address) for address in sample_heads(model))
    for index, variant in enumerate((model, model.prune(pruned))):
        variant.save(tmp_path / str(index))
        again = hw.load(tmp_path / str(index), dtype=torch.float64)
        assert isinstance(again, AttachedModel)
        assert again.heads.addresses == variant.heads.addresses
        weights = again.model.state_dict()
        assert all(torch.equal(value, weights[part]) for part, value in variant.model.state_dict().items())
        assert (
            flat_outputs(again, name) - flat_outputs(variant, name)
        ).abs().max() <= TOLERANCE  # memory alignment of weights from a file differs


@each_model
def test_text_functions_image_model_raise(name: str) -> None:
    """Without a tokenizer no text can be read; a picture model reads none with one either."""
    with pytest.raises(hw.HeadwiseError, match=r"tokenizer|reads images"):
        hw.importance(cached_model(name), ["a cat"])
    with pytest.raises(hw.HeadwiseError):
        cached_model(name).generate("a cat", 3)
