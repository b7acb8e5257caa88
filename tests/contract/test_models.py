"""The model contract for native models and fourteen attached architectures: calls, padding, caches, modes, copies, folders.

Expected values are computed in another way: W_O changed in a copy, single texts instead of padded ones, no cache instead of
one.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from headwise.model.protocols import ModelProtocol, is_model
from headwise.model.randomize_attention_weights import randomize_attention
from tests.contract.attached_models import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    END,
    GENERATORS,
    NAMES,
    NATIVE,
    NO_RESIDUAL_STREAM,
    NOT_PRUNABLE,
    POST_NORM,
    PRE_NORM,
    TEXTS,
    TOKENIZER,
    VOCAB,
    batch,
    cached_model,
    each_model,
    logits,
    new_model,
    sample_heads,
    scaled_copy,
    tolerance,
    training_mode,
)

SIDES = ("none", "left", "right")
# not supported by this model
NAMES_AND_SIDES = [(name, side) for name in NAMES for side in SIDES if (name, side) != ("bart", "left")]


@each_model
def test_model_any_architecture_satisfies_protocol(name: str) -> None:
    model: ModelProtocol = cached_model(name)
    assert is_model(model)
    assert (
        model.spec.head_addresses
        == model.heads.addresses
        == tuple(a for hook_point in model.hook_points() for a in hook_point.head_addresses)
    )
    assert [layer.hook_point for layer in model.attention_layers()] == model.hook_points()
    kind = "encoder" if name in ENCODERS else "encoder-decoder" if name in ENCODER_DECODERS else "decoder"
    assert (model.spec.kind, model.spec.vocab, model.device.type) == (kind, VOCAB, "cpu")
    assert model.tokenizer.encode("the cat") == TOKENIZER.encode("the cat")
    assert (model.training, model.checkpointing, model.plans, model.why_not_resumable()) == (False, False, (), "")
    if name in ENCODER_DECODERS:
        assert model.decoder_start_token == END


# Calls: padding, modes and gates.


@each_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_padding_either_side_changes_nothing(name: str, side: str) -> None:
    model, inputs = cached_model(name), batch(name, side)
    if (name, side) == ("bart", "left"):
        with pytest.raises(hw.HeadwiseError, match="Pad on the right"):
            logits(model, inputs)
        return
    batched = logits(model, inputs)
    separate = []
    for row in range(2):
        real = inputs["attention_mask"][row]
        single = {"ids": inputs["ids"][row : row + 1, real]}
        if name in ENCODER_DECODERS:
            single["source"] = inputs["source"][row : row + 1, inputs["source_attention_mask"][row]]
        separate.append(logits(model, single))
    assert (batched - torch.cat(separate)).abs().max() <= tolerance(name)


@each_model
def test_forward_hidden_states_through_output_equal_logits(name: str) -> None:
    model, inputs = cached_model(name), batch(name)
    with torch.no_grad():
        hidden = model(**inputs, hidden=True)
        assert (model.output(hidden) - model(**inputs)).abs().max() <= tolerance(name)
    targets = torch.arange(hidden.shape[1]).expand(2, -1).flatten() % VOCAB
    with torch.no_grad():
        by_hand = torch.nn.functional.cross_entropy(model(**inputs).flatten(0, 1), targets)
        assert float(model.output.cross_entropy(hidden.flatten(0, 1), targets)) == pytest.approx(
            float(by_hand), abs=1e-6
        )


@pytest.mark.parametrize(("name", "side"), NAMES_AND_SIDES)
def test_gates_half_equal_scaled_w_o(name: str, side: str) -> None:
    model, inputs = cached_model(name), batch(name, side)
    for address in sample_heads(model):
        with scaled_copy(model, address, 0.5) as twin:
            want = logits(twin, inputs)
        got = logits(model, inputs, gates={str(address): 0.5})
        layer_gates = {
            address.layer_address: torch.where(
                torch.tensor(model.heads[address].layer.spec.head_ids) == address.head, 0.5, 1.0
            )
        }
        assert (got - want).abs().max() <= tolerance(name)
        assert (logits(model, inputs, gates=layer_gates) - want).abs().max() <= tolerance(name)
        twice = logits(model, inputs, gates={str(address): 0.5, f"{address.layer_address}.*": 0.75})
        with model.heads[address].scaled(0.5), model.heads.select(f"{address.layer_address}.*").scaled(0.75):
            assert (logits(model, inputs) - twice).abs().max() <= tolerance(name)
    for wrong, message in (
        ({"77.0": 0.0}, "77"),
        ({3: 0.0}, "keys must be head patterns"),
        ([1], "must map head patterns"),
    ):
        with pytest.raises(hw.HeadwiseError, match=message):
            logits(model, inputs, gates=wrong)


@pytest.mark.parametrize(("name", "side"), NAMES_AND_SIDES)
def test_silenced_head_equals_zeroed_w_o_and_pruned_model(name: str, side: str) -> None:
    model, inputs = cached_model(name), batch(name, side)
    full = logits(model, inputs)
    for address in sample_heads(model):
        with scaled_copy(model, address, 0.0) as twin:
            want = logits(twin, inputs)
        with model.heads[address].silenced():
            silent = logits(model, inputs)
        assert (silent - want).abs().max() <= tolerance(name)
        assert (silent - full).abs().max() > 1e-4
        if name in NOT_PRUNABLE:
            with pytest.raises(hw.HeadwiseError, match=NOT_PRUNABLE[name]):
                model.prune(address)
            continue
        small = model.prune(address)
        assert (logits(small, inputs) - want).abs().max() <= tolerance(name)
        assert address not in small.heads.addresses
    assert torch.equal(logits(model, inputs), full), "and nothing stays"


def test_without_unprunable_model_raises() -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "vocab_size": VOCAB,
    }
    model = hw.attach(transformers.DogeForCausalLM(transformers.DogeConfig(**sizes, num_key_value_heads=3, head_dim=4)))
    with pytest.raises(hw.HeadwiseError, match=r"cannot be pruned.*Silence the heads instead"):
        model.prune("0.1")


@each_model
def test_train_mode_forward_applies_dropout(name: str) -> None:
    model, inputs = cached_model(name), batch(name)
    still = logits(model, inputs)
    with training_mode(model):
        assert model.training
        torch.manual_seed(1)
        assert (logits(model, inputs) - still).abs().max() > 1e-6
    assert not model.training
    assert torch.equal(logits(model, inputs), still)


# Generation with and without a cache.


def greedy(model: Any, inputs: dict[str, torch.Tensor], tokens: int, gates: Any = None) -> torch.Tensor:
    """Generate token by token from the full text: (1, T + tokens)."""
    ids = inputs["ids"]
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat((ids, model(**{**inputs, "ids": ids}, gates=gates)[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("gated", [False, True])
def test_generate_with_cache_equals_without(name: str, gated: bool) -> None:
    model, ids = cached_model(name), batch(name)["ids"][:1]
    gates = {str(sample_heads(model)[0]): 0.0} if gated else None
    want = greedy(model, {"ids": ids}, 8, gates)
    with training_mode(model):
        assert torch.equal(torch.stack(list(model.stream(ids, 8, gates=gates)), 1), want[:, ids.shape[1] :])
        assert model.generate(ids[0].tolist(), 8, gates=gates) == want[0].tolist()
        assert model.generate("the cat", 4, gates=gates).startswith("the cat")


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_stream_encoder_decoder_generates_from_source(name: str) -> None:
    model, text = cached_model(name), TEXTS[0]
    ids = TOKENIZER.encode(text)
    source = torch.tensor([[*ids, END] if name == "encoder-decoder" else ids])
    want = greedy(model, {"ids": torch.tensor([[END]]), "source": source}, 6)[0, 1:]
    with training_mode(model):
        tokens = [int(step) for step in model.stream(text, 6)]
    stop = tokens.index(END) + 1 if END in tokens else 6
    assert tokens[:stop] == want.tolist()[:stop]


@pytest.mark.parametrize("name", ENCODERS)
def test_stream_encoder_raises(name: str) -> None:
    with pytest.raises(hw.HeadwiseError, match="generate"):
        list(cached_model(name).stream("the cat", 3))


@pytest.mark.parametrize("name", GENERATORS)
def test_stream_same_seed_samples_same_tokens(name: str) -> None:
    model = cached_model(name)
    samples = [torch.cat(list(model.stream("the cat", 6, temperature=1.5, seed=seed))).tolist() for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


# Structure.


@each_model
def test_norms_pre_norm_model_returns_layer_input_norms(name: str) -> None:
    """The norm of the residual stream equals the recorded input of the layer. Post-norm stacks have no input norm."""
    model, inputs = cached_model(name), batch(name)
    norms = model.input_norms()
    if name not in (*PRE_NORM, *POST_NORM):
        assert norms is None
        return
    assert norms is not None
    assert list(norms) == [str(hook_point.address) for hook_point in model.hook_points()]
    norm_outputs: dict[Any, torch.Tensor] = {}
    layer_inputs: dict[str, torch.Tensor] = {}
    hooks = []
    for layer in model.attention_layers():
        where = str(layer.hook_point.address)
        norm = norms[where][0]
        if norm is not None:
            hooks.append(
                norm.register_forward_hook(lambda part, inputs, output, norm=norm: norm_outputs.update({norm: output}))
            )
        hooks.append(
            layer.register_forward_pre_hook(lambda part, inputs, where=where: layer_inputs.update({where: inputs[0]}))
        )
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    assert layer_inputs.keys() == norms.keys()
    for where, (norm, _) in norms.items():
        if norm is not None:
            assert torch.equal(norm_outputs[norm], layer_inputs[where])
    assert any(norm is not None for norm, _ in norms.values()) == (name in PRE_NORM)


@each_model
def test_attention_layer_output_equals_sum_of_heads(name: str) -> None:
    """A forward hook on a layer sees Σ z W_O + b_O."""
    model, inputs = cached_model(name), batch(name)
    outputs: dict[Any, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda part, inputs, output, hook_point=layer.hook_point: outputs.update({hook_point: output})
        )
        for layer in model.attention_layers()
    ]
    with torch.no_grad(), hw.record(model, tensors="z") as recording:
        model(**inputs)
    for hook in hooks:
        hook.remove()
    for layer in model.attention_layers():
        total = sum(recording[a].z @ model.heads[a].W_O for a in layer.hook_point.head_addresses)
        total = total if layer.b_O is None else total + layer.b_O
        assert (outputs[layer.hook_point] - total).abs().max() <= tolerance(name)


@each_model
def test_residual_stream_decoder_returned_else_raises(name: str) -> None:
    model = cached_model(name)
    if name in DECODERS and name not in NO_RESIDUAL_STREAM:
        residual = model.residual_stream()
        assert list(residual.layers) == [0, 1]
        return
    with pytest.raises(hw.HeadwiseError, match=NO_RESIDUAL_STREAM.get(name, r"logit|no sum")):
        model.residual_stream()


# Copies and variants.


@each_model
def test_deepcopy_model_is_independent(name: str) -> None:
    model, inputs = cached_model(name), batch(name)
    before, twin = logits(model, inputs), copy.deepcopy(cached_model(name))
    assert torch.equal(logits(twin, inputs), before)
    head = sample_heads(model)[0]
    with twin.heads[head].silenced():
        assert torch.equal(logits(model, inputs), before)
        assert not torch.equal(logits(twin, inputs), before)
    with torch.no_grad():
        twin.heads[head].W_O.zero_()
    assert torch.equal(logits(model, inputs), before)


@each_model
def test_untrained_model_same_shape_new_weights(name: str) -> None:
    model = cached_model(name)
    first, same, other = (model.untrained(seed) for seed in (0, 0, 1))
    assert first.heads.addresses == model.heads.addresses
    assert first.tokenizer is model.tokenizer
    head = sample_heads(model)[0]
    W = [m.heads[head].W_Q.double() for m in (first, same, other, model)]
    assert torch.equal(W[0], W[1])
    assert all(not torch.equal(W[0], w) for w in W[2:])


@each_model
def test_randomize_attention_any_model_redraws_projections_alone(name: str) -> None:
    """Every head keeps the root mean square of each of its weights, and every other tensor keeps its bits."""
    model = cached_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    redrawn_model, same, other = (randomize_attention(model, seed) for seed in (0, 0, 1))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    redrawn = 0
    for head in model.heads.addresses:
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            old, new, again, next_seed = (
                getattr(m.heads[head], weight).detach() for m in (model, redrawn_model, same, other)
            )
            assert torch.equal(new, again)
            assert not torch.equal(new, next_seed)
            spread = 4 / (2 * new.numel()) ** 0.5  # four standard errors of the root mean square of normal numbers
            assert new.norm() / old.norm() == pytest.approx(1, abs=spread)
            cosine = torch.cosine_similarity(new.flatten(), old.flatten(), dim=0)
            assert abs(cosine) < 5 / new.numel() ** 0.5
            redrawn += new.numel()
    with torch.no_grad():
        for layer, twin in zip(model.attention_layers(), redrawn_model.attention_layers(), strict=True):
            for letter in "qkv":
                twin.qkv.weight_by_head(letter).copy_(layer.qkv.weight_by_head(letter))
                if layer.qkv.bias_by_head(letter) is not None:
                    twin.qkv.bias_by_head(letter).copy_(layer.qkv.bias_by_head(letter))
            twin.hook_point.W_O.copy_(layer.hook_point.W_O)
    for key, value in redrawn_model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert redrawn


def test_randomize_attention_quantized_weights_raises() -> None:
    model = hw.quantize(new_model("decoder"), 4)
    with pytest.raises(hw.HeadwiseError, match="Dequantize"):
        randomize_attention(model)


@each_model
def test_save_reopen_restores_model(name: str, tmp_path: Path) -> None:
    model, inputs = cached_model(name), batch(name)
    before = logits(model, inputs)
    model.save(tmp_path / "model")
    options = {} if name in NATIVE else {"dtype": torch.float32}
    again = type(model).reopen(tmp_path / "model", **options)
    assert not again.training
    assert (logits(again, inputs).double() - before).abs().max() <= 1e-4  # loaded in single precision
    assert again.heads.addresses == model.heads.addresses
    if name == "gpt_neox":
        return  # transformers saves the folder with older names, which only its own loader converts
    modified = new_model(name)
    state = {key: value.clone() for key, value in load_file(tmp_path / "model" / "model.safetensors").items()}
    with torch.no_grad():
        for weight in modified.parameters():
            weight.add_(1)
    assert modified.load_weights({**state, "nothing": torch.zeros(1)}) == ["nothing"]
    assert torch.equal(logits(modified, inputs), before)


@pytest.mark.parametrize("name", ["decoder", "gpt2", "llama", "bert"])
def test_export_pruned_model_runs_in_transformers(name: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model, inputs = cached_model(name), batch(name)
    small = model.prune(sample_heads(model)[0])
    hw.export(small, tmp_path / "out", family="gpt2" if name == "decoder" else None)
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    hf_model = auto.from_pretrained(tmp_path / "out").double().eval()
    with torch.no_grad():
        assert (hf_model(inputs["ids"]).logits.flatten(0, 1) - logits(small, inputs)).abs().max() <= 1e-6


def test_export_attached_model_to_other_family_raises(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match="only be exported as its own family, gpt2"):
        hw.export(cached_model("gpt2"), tmp_path / "out", family="llama")
