"""Pruned heads: equal to silenced heads, or to their mean output if folded; the result is a regular model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.analysis.ablation.ablate import ablated, mean_activations, mean_of_outputs, record_z
from headwise.compression.select_heads import compute_folded_biases
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import LayerAddress, ModelSpec, preset, presets
from headwise.training import Recipe, train
from tests.analysis.models import TEXTS, character_model
from tests.contract.layers import (
    LAYERS,
    MODELS,
    SIZES,
    assert_equal,
    make_model,
    make_varied_model,
    run_model,
    token_ids,
)
from tests.parity.real import smollm2_folder
from tests.training.tiny import same_weights

# Every preset with small sizes (eight heads in two layers), and every attention variant as the layer of a decoder.
SMALL_PRESETS = {
    name: replace(preset(name).resized(layers=2, width=32, heads=4), vocab=17, context=19, dropout=0.0)
    for name in presets()
}
SMALL_PRESETS["gpt-neo-125m"] = replace(SMALL_PRESETS["gpt-neo-125m"], windows=(None, 3))
VARIANTS = {
    name: ModelSpec(**SIZES, attention=spec)
    for name, spec in LAYERS.items()
    if spec.kept_heads is None and spec.kv_width == spec.width
}
SPECS = {**MODELS, **SMALL_PRESETS, **VARIANTS}
PATTERNS = ("{}0.1", "{}0.0-1", "{}1.*", "{}0.0-1,{}0.3,{}1.0", "{}0.*,{}1.1-3")  # the last leaves one head
PRUNE_CASES = [(name, pattern.format(*[""] * 4)) for name, spec in SPECS.items() for pattern in PATTERNS
        if spec.kind != "encoder-decoder" and not spec.kept_heads and not spec.shared_layers]  # fmt: skip
PRUNE_CASES += [("decoder, cut", "0.3")]
ENCODER_DECODER_PATTERNS = (
    "enc.0.1",
    "dec.1.*",
    "cross.0.1-3",
    "enc.*.*,dec.0.2,cross.1.*",
    "enc.0.0-2,dec.*.*,cross.*.*",
)
PRUNE_CASES += [
    (name, pattern) for name in ("encoder-decoder", "transformer-base") for pattern in ENCODER_DECODER_PATTERNS
]


@pytest.mark.parametrize(("name", "pattern"), PRUNE_CASES)
@torch.no_grad()
def test_prune_heads_equals_silencing(name: str, pattern: str) -> None:
    model = make_model(SPECS[name])
    before = run_model(model)
    with model.heads.select(pattern).silenced():
        silenced = run_model(model)
    small = model.prune(pattern)
    assert_equal(run_model(small), silenced, 1e-9)
    assert (silenced - before).abs().max() > 1e-4, "the heads have an effect"
    assert torch.equal(run_model(model), before), "the model itself is not changed"
    assert set(small.spec.head_addresses) == set(model.spec.head_addresses) - set(model.heads.select(pattern).addresses)
    assert sum(p.numel() for p in small.parameters()) == small.spec.num_parameters


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "sink", "slice", "encoder", "encoder-decoder"])
@pytest.mark.parametrize("storage", ["qkv", "q,kv", "q,k,v"])
@torch.no_grad()
def test_prune_heads_shares_no_memory_with_source(name: str, storage: str) -> None:
    model = make_model(SPECS[name], storage=storage)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = model.prune("enc.0.1" if name == "encoder-decoder" else "0.1")
    assert {layer.qkv.storage for layer in small.attention_layers()} == {storage}
    for parameter in small.parameters():
        parameter.add_(1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_prune_heads_keeps_mode_family_tokenizer_and_backend() -> None:
    model = character_model(MODELS["decoder, rotary"]).train()
    model.family = "llama"
    for layer in model.attention_layers():
        layer.backend = "batched"
    small = model.prune("0.1")
    assert small.training
    assert small.family == "llama"
    assert small.tokenizer is model.tokenizer
    assert [layer.backend for layer in small.attention_layers()] == ["batched", "batched"]
    assert model.to(torch.bfloat16).prune("0.1").embed.tokens.weight.dtype == torch.bfloat16
    assert same_weights(model.prune(()), model), "pruning no head copies the model"


def test_prune_heads_drops_unused_kv_heads() -> None:
    model = make_model(MODELS["decoder, rotary"])  # four heads share two KV heads
    small = model.prune("0.0-1,1.2,1.0")
    first, second = (layer.spec for layer in small.attention_layers())
    assert (first.kv_head_ids, first.kv_of_head) == ((1,), (0, 0))
    assert (second.kv_head_ids, second.kv_of_head) == ((0, 1), (0, 1))
    assert small.state_dict()["blocks.0.attention.qkv.k.weight"].shape == (1, 6, 12)
    pruned_twice = small.prune("0.2")  # remaining heads keep their ids
    assert [str(address) for address in pruned_twice.spec.head_addresses] == ["0.3", "1.1", "1.3"]
    assert_equal(run_model(pruned_twice), run_model(model.prune("0.0-2,1.2,1.0")), 0)


# Folding.


@pytest.mark.parametrize(
    "name", ["decoder", "decoder, rotary", "decoder, windows", "encoder", "gated", "sink", "slice"]
)
@pytest.mark.parametrize("pattern", ["0.3", "0.0-1,1.*"])
@torch.no_grad()
def test_fold_mean_equals_mean_ablation(name: str, pattern: str) -> None:
    model, ids = character_model(SPECS[name]), token_ids(3, 7)
    means = mean_activations(model, TEXTS)
    small = model.prune(pattern, compute_folded_biases(model, model.heads.select(pattern).addresses, means))
    with ablated(model, pattern, "mean", means=means):
        assert_equal(small(ids), model(ids), 1e-9)
    assert (small(ids) - model.prune(pattern)(ids)).abs().max() > 1e-4
    assert small.spec.attention.out_bias
    assert sum(p.numel() for p in small.parameters()) == small.spec.num_parameters


@torch.no_grad()
def test_fold_mean_every_stack_equals_mean_ablation() -> None:
    model, pattern = make_model(MODELS["encoder-decoder"]), "enc.1.0,dec.0.*,cross.1.1-2"
    inputs: dict[str, Any] = {"ids": token_ids(2, 5), "source": token_ids(2, 7, seed=4)}
    means = mean_of_outputs([record_z(model, **inputs)])
    small = model.prune(pattern, compute_folded_biases(model, pattern, means))
    with ablated(model, pattern, "mean", means=means):
        assert_equal(small(**inputs), model(**inputs), 1e-9)


def test_fold_mean_equals_closed_form() -> None:
    model = character_model(MODELS["decoder"])
    means = mean_activations(model, TEXTS)
    head, other = model.heads["1.2"], model.heads["1.0"]
    folded = compute_folded_biases(model, "1.0,1.2", means)
    expected = means["1.2"] @ head.W_O + means["1.0"] @ other.W_O  # pyright: ignore
    assert_equal(folded, {LayerAddress("", 1): expected.detach()}, 1e-12)
    with pytest.raises(HeadwiseError, match="granularity='global'"):
        compute_folded_biases(model, "1.0", mean_activations(model, TEXTS, "position"))


# A pruned model is a regular model.

PLANS = [("decoder", "0.1,1.*"), ("decoder, rotary", "0.0-1,1.2"), ("decoder, parallel", "1.0-2"), ("sink", "0.*,1.3")]


@pytest.mark.parametrize(("name", "pattern"), [*PLANS, ("encoder", "0.*,1.1"), ("slice", "0.2")])
@torch.no_grad()
def test_pruned_model_save_load_is_bitwise(name: str, pattern: str, tmp_path: Path) -> None:
    model = character_model(SPECS[name]).float()
    small = model.prune(pattern, compute_folded_biases(model, pattern, mean_activations(model, TEXTS)))
    small.save(tmp_path / "small")
    loaded = hw.load(tmp_path / "small")
    ids = token_ids(2, 9)
    assert loaded.spec == small.spec
    assert torch.equal(loaded(ids), small(ids))
    assert same_weights(loaded, small)


@pytest.mark.parametrize(("name", "pattern"), [*PLANS, ("encoder", "0.*,1.1")])
def test_pruned_model_trains(name: str, pattern: str) -> None:
    small = character_model(SPECS[name]).float().prune(pattern)
    before = {key: value.clone() for key, value in small.state_dict().items()}
    text = "the cat sat on the mat that was there " * 20
    result = train(
        small,
        text,
        Recipe(steps=20, batch_size=8, context=16, learning_rate=1e-2, warmup=1, log_every=1),
        progress=False,
    )
    assert result.loss < result.history[0]["loss"]
    changed_keys = [key for key, value in result.model.state_dict().items() if not torch.equal(value, before[key])]
    assert any("output_projection" in key for key in changed_keys)
    assert result.model.spec == small.spec


@pytest.mark.parametrize(("name", "pattern"), [*PLANS, ("decoder, windows", "0.*,1.1")])
@torch.no_grad()
def test_pruned_model_generate_cache_equals_no_cache(name: str, pattern: str) -> None:
    small = make_varied_model(replace(SPECS[name], context=64)).prune(pattern)
    prompt = token_ids(2, 5)
    generated = small.generate(prompt, 12)
    rows = prompt
    for _ in range(12):
        rows = torch.cat((rows, small(rows)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(generated, rows)


# Pretrained models.


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        pytest.param("smollm2", "0.0-2,3.*,17.1,29.4-8", marks=pytest.mark.slow),
        ("minilm", "0.*,1.3,5.1-11"),
    ],
)
@torch.no_grad()
def test_prune_heads_real_models_equal_silencing(name: str, pattern: str) -> None:
    model = hw.load(smollm2_folder() if name == "smollm2" else name)
    assert model.tokenizer is not None
    sentence = "The teacher gave the students their homework."
    ids, means = torch.tensor([model.tokenizer.encode(sentence)]), mean_activations(model, sentence)
    with model.heads[pattern].silenced():
        assert_equal(model.prune(pattern)(ids), model(ids), 1e-3)
    with ablated(model, pattern, "mean", means=means):
        assert_equal(model.prune(pattern, compute_folded_biases(model, pattern, means))(ids), model(ids), 1e-3)


# Errors.


def test_prune_heads_invalid_heads_raise() -> None:
    model: Any = make_model(MODELS["decoder"])
    for heads, message in (
        ("*", "prune all 8 heads"),
        ("0.*,1.*", "prune all 8 heads"),
        ("2.1", "no such head"),
        ("0.9", "no such head"),
        ("1", "selects a layer"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            model.prune(heads)
    with pytest.raises(HeadwiseError, match="Got Linear"):
        hw.prune(torch.nn.Linear(2, 2), heads="0.1")  # pyright: ignore
    with pytest.raises(HeadwiseError, match="does not name a stack"):
        make_model(MODELS["encoder-decoder"]).prune("0.1")
    assert isinstance(model, Transformer)
    assert isinstance(run_model(model), Tensor)
