# ruff: noqa: C408 (sizes read better as keywords)
"""The contract of models, for those that read pictures, or pictures and words: as far as it does not speak of texts.

Every expected value comes another way: W_O changed by hand in a copy, the model before it was attached, its own folder.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attached import Attached
from headwise.attached.verify_prune import tensors
from headwise.model.protocols import is_model
from tests.contract.attached_models import edited, some_heads, training

transformers: Any = pytest.importorskip("transformers")

CLOSE = 1e-9
SIDE = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, attention_dropout=0.3)
VISION = SIDE | dict(image_size=8, patch_size=4)
TEXT = SIDE | dict(vocab_size=31, max_position_embeddings=24, bos_token_id=1, eos_token_id=2, pad_token_id=0)
PICTURE = 30  # the token in whose place patches stand


def _vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**VISION, attention_probs_dropout_prob=0.3, num_labels=5)
    )


def _clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8))


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=PICTURE, vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


BUILT = {"vit": _vit, "clip": _clip, "llava": _llava}
STACKS = {"vit": {""}, "clip": {"vision", "text"}, "llava": {"vision", "text"}}
each = pytest.mark.parametrize("name", BUILT)


def plain(name: str) -> Any:
    """A model as it is built, with weights large enough that every head matters."""
    torch.manual_seed(5)
    inner = BUILT[name]()
    with torch.no_grad():
        for part, weight in inner.named_parameters():
            weight.copy_(0.4 * torch.randn_like(weight) + ("norm" in part.lower() and part.endswith("weight")))
    return inner.double().eval()


@cache
def kept(name: str) -> Any:
    """The model of a name, attached once."""
    return hw.attach(plain(name))


def given(name: str) -> dict[str, Tensor]:
    """Two pictures, and for models of words too two texts."""
    dice = torch.Generator().manual_seed(1)
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8, generator=dice, dtype=torch.float64)}
    words = {"clip": [[1, 5, 7, 2], [1, 8, 9, 2]], "llava": [[5, *[PICTURE] * 4, 7], [6, *[PICTURE] * 4, 9]]}
    return pixels | ({"input_ids": torch.tensor(words[name])} if name in words else {})


def said(model: Any, name: str, **more: Any) -> Tensor:
    """All numbers that a model gives for a call, one after the other."""
    with torch.no_grad():
        return torch.cat([x.flatten() for x in tensors(model(**given(name), **more)) if x.is_floating_point()])


@each
def test_it_is_a_model_and_attaching_changes_no_bit(name: str) -> None:
    before = said(plain(name), name)
    model = kept(name)
    assert is_model(kept(name))
    assert model.spec.addresses == model.heads.addresses == tuple(a for site in model.sites() for a in site.addresses)
    assert [layer.site for layer in model.attention_layers()] == model.sites()
    assert {site.address.stack for site in model.sites()} == STACKS[name]
    assert (model.training, model.checkpointing, model.plans) == (False, False, ())
    assert torch.equal(said(model.model, name), before)
    with hw.record(model, what=("map", "z", "write")) as recording:
        assert torch.equal(said(model.model, name), before)
    assert all(one.calls for one in recording)
    assert torch.equal(said(model, name), before)


@each
def test_gates_and_silence_are_w_o_scaled_and_silence_is_the_cut(name: str) -> None:
    model = kept(name)
    whole = said(model, name)
    for address in some_heads(model):
        with edited(model, address, 0.5) as twin:
            want = said(twin, name)
        assert (said(model, name, gates={str(address): 0.5}) - want).abs().max() <= CLOSE
        with edited(model, address, 0.0) as twin:
            want = said(twin, name)
        with model.heads[address].silenced():
            silent = said(model, name)
        assert (silent - want).abs().max() <= CLOSE
        assert (silent - whole).abs().max() > 1e-6, f"{address} matters"
        small = model.without(address)
        assert (said(small, name) - want).abs().max() <= CLOSE
        assert address not in small.heads.addresses
        assert (said(small.detach(), name) - want).abs().max() <= CLOSE
    assert torch.equal(said(model, name), whole), "and nothing stays"


@each
def test_layers_show_what_they_write(name: str) -> None:
    model, wrote = kept(name), dict[Any, Tensor]()
    hooks = [
        layer.register_forward_hook(lambda part, given, made, site=layer.site: wrote.update({site: made}))
        for layer in model.attention_layers()
    ]
    with hw.record(model, what="z") as recording:
        said(model, name)
    for hook in hooks:
        hook.remove()
    for layer in model.attention_layers():
        with torch.no_grad():
            total = sum(recording[a].z @ model.heads[a].W_O for a in layer.site.addresses)
            total = total if layer.b_O is None else total + layer.b_O
        assert (wrote[layer.site] - total).abs().max() <= CLOSE


@each
def test_maps_times_values_are_what_heads_find(name: str) -> None:
    model = kept(name)
    with hw.record(model, what=("map", "v", "z")) as recording:
        said(model, name)
    for address in model.heads.addresses:
        seen = recording[address]
        assert (seen.map().sum(-1) - 1).abs().max() <= CLOSE
        assert (seen.map() @ seen.v - seen.z).abs().max() <= CLOSE


@each
def test_copies_twins_and_modes(name: str) -> None:
    model = kept(name)
    before, twin, head = said(model, name), copy.deepcopy(kept(name)), some_heads(kept(name))[0]
    with twin.heads[head].silenced():
        assert torch.equal(said(model, name), before)
        assert not torch.equal(said(twin, name), before)
    one, same, other = (model.untrained(seed) for seed in (0, 0, 1))
    assert one.heads.addresses == model.heads.addresses
    assert torch.equal(one.heads[head].W_Q, same.heads[head].W_Q)
    assert not torch.equal(one.heads[head].W_Q, other.heads[head].W_Q)
    with training(model):
        assert (said(model, name) - before).abs().max() > 1e-6, "it drops out"
    assert torch.equal(said(model, name), before)


@each
def test_a_folder_brings_it_back_cut_or_not(name: str, tmp_path: Path) -> None:
    model = kept(name)
    gone = ",".join(str(address) for address in some_heads(model))
    for number, one in enumerate((model, model.without(gone))):
        one.save(tmp_path / str(number))
        again = hw.load(tmp_path / str(number), dtype=torch.float64)
        assert isinstance(again, Attached)
        assert again.heads.addresses == one.heads.addresses
        weights = again.model.state_dict()
        assert all(torch.equal(value, weights[part]) for part, value in one.model.state_dict().items())
        assert (said(again, name) - said(one, name)).abs().max() <= CLOSE  # a file's weights lie at other addresses


@each
def test_what_reads_texts_says_that_this_is_none(name: str) -> None:
    """Without a tokenizer no text can be read; a picture model reads none with one either."""
    with pytest.raises(hw.HeadwiseError, match=r"tokenizer|reads pictures, not text"):
        hw.importance(kept(name), ["a cat"])
    with pytest.raises(hw.HeadwiseError):
        kept(name).generate("a cat", 3)
