"""Transformers against formulas and torch's layers (transformers: test_families.py), padding, initialization and errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention, from_torch
from headwise.kernels import causal, window
from headwise.model import Transformer
from headwise.model.block import Block, BlockContext
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec, preset
from tests.contract.layers import (
    MODELS,
    SIZES,
    SMALL,
    B,
    S,
    T,
    assert_equal,
    make_model,
    random_tensor,
    randomize,
    run_model,
    token_ids,
)

WIDTH, HEADS, HIDDEN = 12, 4, 23
ATTENTION = AttentionSpec(width=WIDTH, heads=HEADS, bias=True, out_bias=True)
REAL = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


# torch.nn.TransformerEncoderLayer and TransformerDecoderLayer.


def block_from_torch(torch_layer: Any, spec: ModelSpec, address: LayerAddress) -> Block:
    """Return a block with the weights of a torch layer."""
    block = Block(spec, address).double()
    attention = {"attention": torch_layer.self_attn}
    norms = [block.norm_attention, block.norm_mlp]
    if address.stack == "dec":
        attention["cross"] = torch_layer.multihead_attn
        norms.insert(1, block.norm_cross)
    for name, layer in attention.items():
        getattr(block, name).load_state_dict(from_torch(layer).state_dict())
    for index, norm in enumerate(norms, 1):
        norm.load_state_dict(getattr(torch_layer, f"norm{index}").state_dict())  # pyright: ignore
    block.mlp.up.load_state_dict(torch_layer.linear1.state_dict())
    block.mlp.down.load_state_dict(torch_layer.linear2.state_dict())
    return block


def torch_layer_and_spec(kind: Any, form: str, activation: str) -> tuple[Any, ModelSpec]:
    """Return a torch layer with random weights, and the spec of a model with one such layer."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "norm_first": form == "pre", "dtype": torch.float64}
    maker = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    torch_layer = maker(WIDTH, HEADS, HIDDEN, activation=activation, **options)
    randomize(torch_layer)
    spec = ModelSpec(17, 19, 1, ATTENTION, HIDDEN, kind, norm_placement=form, activation=activation)  # pyright: ignore
    return torch_layer, spec


def gradients(module: nn.Module) -> list[Tensor]:
    """Return all gradients of a model, ordered by size and then by sum, so that two implementations can be compared."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return sorted((grad.flatten() for grad in grads), key=lambda grad: (len(grad), round(grad.sum().item(), 6)))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("form", ["post", "pre"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_block_encoder_equals_torch(form: str, activation: str, padded: bool) -> None:
    reference, spec = torch_layer_and_spec("encoder", form, activation)
    block = block_from_torch(reference, spec, LayerAddress("", 0))
    x, twin = random_tensor(B, T, WIDTH).requires_grad_(), random_tensor(B, T, WIDTH).requires_grad_()
    real = REAL if padded else torch.ones_like(REAL)
    want = reference(x, src_key_padding_mask=~REAL if padded else None)
    got = block(twin, BlockContext(attention_mask=REAL if padded else None))
    assert_equal(got[real], want[real])
    want[real].square().sum().backward()
    got[real].square().sum().backward()
    assert_equal(twin.grad, x.grad)
    assert_equal(gradients(block), gradients(reference))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("form", ["post", "pre"])
def test_block_decoder_with_source_equals_torch(form: str, activation: str) -> None:
    reference, spec = torch_layer_and_spec("encoder-decoder", form, activation)
    block = block_from_torch(reference, spec, LayerAddress("dec", 0))
    x, twin = random_tensor(B, T, WIDTH).requires_grad_(), random_tensor(B, T, WIDTH).requires_grad_()
    memory = random_tensor(B, S, WIDTH, seed=2)
    memory_real = torch.arange(S) < torch.tensor([[S], [4]])
    future = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    want = reference(x, memory, tgt_mask=future, tgt_is_causal=True, memory_key_padding_mask=~memory_real)
    got = block(twin, BlockContext(causal=True, memory=memory, source_attention_mask=memory_real))
    assert_equal(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_equal(twin.grad, x.grad)
    assert_equal(gradients(block), gradients(reference))


@torch.no_grad()
def test_transformer_one_block_encoder_equals_torch() -> None:
    reference, spec = torch_layer_and_spec("encoder", "post", "gelu")
    model = make_model(replace(spec, output="none"))
    model.blocks[0].load_state_dict(block_from_torch(reference, spec, LayerAddress("", 0)).state_dict())
    ids = token_ids(B, T)
    embedded = model.embed.tokens.weight[ids] + model.embed.positions.weight[:T]  # pyright: ignore
    want = reference.eval()(embedded, src_key_padding_mask=~REAL)
    assert_equal(model(ids, attention_mask=REAL)[REAL], want[REAL])


# Parts of the model against formulas.


def apply_norm(x: Tensor, norm: Any, eps: float) -> Tensor:
    """LayerNorm or RMSNorm as a formula."""
    if isinstance(norm, nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("norm", ["layer", "rms"])
@torch.no_grad()
def test_block_parallel_form_equals_formula(norm: Any) -> None:
    spec = ModelSpec(**SIZES, attention=SMALL, norm_placement="parallel", norm=norm, norm_eps=0.1, activation="swiglu")
    block = Block(spec, LayerAddress("", 0)).double()
    randomize(block)
    x = random_tensor(B, T, WIDTH)
    y, mlp = apply_norm(x, block.norm_attention, 0.1), block.mlp
    gate = mlp.gate
    assert gate is not None
    assert gate.bias is not None
    assert mlp.up.bias is not None
    assert mlp.down.bias is not None
    activated = F.silu(y @ gate.weight.T + gate.bias) * (y @ mlp.up.weight.T + mlp.up.bias)
    want = x + block.attention(y, mask=causal()) + activated @ mlp.down.weight.T + mlp.down.bias
    assert_equal(block(x, BlockContext(causal=True)), want)


@torch.no_grad()
def test_embedding_all_parts_equal_formula() -> None:
    """Scaled token embeddings plus types plus sinusoids, then a norm."""
    spec = ModelSpec(17, 19, 0, SMALL, kind="encoder", positions="sinusoidal", embed_scale=3.0, token_types=2,
                     embed_norm=True, norm_placement="post", output="none")  # fmt: skip
    model, ids, types = make_model(spec), token_ids(B, T), token_ids(B, T, vocab=2)
    table = [
        [(math.sin if c % 2 == 0 else math.cos)(t / 10000 ** (c // 2 * 2 / WIDTH)) for c in range(WIDTH)]
        for t in range(T)
    ]
    embed = model.embed
    x = 3 * embed.tokens.weight[ids] + embed.types.weight[types] + torch.tensor(table)  # pyright: ignore
    torch.testing.assert_close(model(ids, token_types=types), apply_norm(x, embed.norm, 1e-5), rtol=0, atol=1e-6)  # pyright: ignore


@torch.no_grad()
def test_transformer_outputs_equal_formula() -> None:
    encoder = make_model(MODELS["encoder"])
    ids, hidden = token_ids(B, T), run_model(encoder, hidden=True)
    assert run_model(encoder).shape == (B, T, 17)
    assert hidden.shape == (B, T, WIDTH)
    out = encoder.output
    assert out is not None
    assert out.vocabulary.bias is not None
    activated = apply_norm(F.gelu(hidden @ out.transform.weight.T + out.transform.bias), out.norm, 1e-5)  # pyright: ignore
    want = activated @ encoder.embed.tokens.weight.T + out.vocabulary.bias
    assert_equal(run_model(encoder), want)
    dense = encoder.pooler.dense  # pyright: ignore
    want = torch.tanh(hidden[:, 0] @ dense.weight.T + dense.bias)
    assert_equal(encoder.pooled(ids), want)
    headless = make_model(replace(MODELS["encoder"], output="none"))
    assert headless(ids).shape == (B, T, WIDTH)


def test_transformer_tied_weights_are_shared() -> None:
    tied, untied = Transformer(MODELS["decoder"]), Transformer(MODELS["decoder, rotary"])
    assert tied.output.vocabulary.weight is tied.embed.tokens.weight  # pyright: ignore
    assert untied.output.vocabulary.weight is not untied.embed.tokens.weight  # pyright: ignore
    run_model(tied).sum().backward()
    assert tied.embed.tokens.weight.grad.abs().sum() > 0  # pyright: ignore


# Padding on the left, on the right, or none.

LENGTHS, MAX_LENGTH = (7, 4, 1), 7
PADDED = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut", "encoder"]


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_forward_padding_leaves_real_tokens_unchanged(name: str, side: str) -> None:
    model = make_model(MODELS[name])
    texts = [token_ids(1, length, seed=length) for length in LENGTHS]
    ids, real_tokens = (
        torch.zeros(len(LENGTHS), MAX_LENGTH, dtype=torch.long),
        torch.zeros(len(LENGTHS), MAX_LENGTH, dtype=torch.bool),
    )
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        span = slice(MAX_LENGTH - length, None) if side == "left" else slice(length)
        ids[row, span], real_tokens[row, span] = text[0], True
    for mask in (real_tokens, real_tokens.long()):
        out = model(ids, attention_mask=mask)
        for row, text in enumerate(texts):
            assert_equal(out[row, real_tokens[row]], model(text)[0])


@torch.no_grad()
def test_forward_padded_source_changes_nothing() -> None:
    model, ids, source = make_model(MODELS["encoder-decoder"]), token_ids(2, T), token_ids(2, S)
    real = torch.arange(S) < torch.tensor([[S], [3]])
    batched = model(ids, source=source, source_attention_mask=real)
    assert_equal(batched[1:], model(ids[1:], source=source[1:, :3]))
    encoded = model(ids, memory=model.encode(source, attention_mask=real), source_attention_mask=real)
    assert_equal(encoded, batched)


@torch.no_grad()
def test_forward_extra_mask_combines_with_own() -> None:
    model, ids = make_model(MODELS["decoder, rotary"]), token_ids(B, T)
    windowed = make_model(replace(MODELS["decoder, rotary"], windows=(2,)))
    assert_equal(model(ids, mask=window(2)), windowed(ids))


@torch.no_grad()
def test_attention_decoder_is_causal_encoder_is_not() -> None:
    ids = token_ids(1, T)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 17
    for name, blind in (("decoder", True), ("encoder", False)):
        model = make_model(MODELS[name])
        assert torch.equal(model(ids)[:, :-1], model(other)[:, :-1]) is blind


# Initialization.


def test_init_weights_follow_table() -> None:
    """The standard deviation of n normal draws is within 5 standard errors, σ/√(2n), of σ."""
    torch.manual_seed(0)
    layers = 3
    attention = AttentionSpec(width=64, heads=4, bias=True, out_bias=True, gated=True, softmax="sink")
    model = Transformer(ModelSpec(97, 31, layers, attention, kind="encoder", token_types=2, pooler=True, tied=False))
    residual_outputs = {"output_projection.weight", "down.weight"}
    for name, p in model.named_parameters():
        tail = ".".join(name.split(".")[-2:])
        if p.ndim == 2:
            std = 0.02 / math.sqrt(2 * layers) if tail in residual_outputs else 0.02
            assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name
            assert abs(p.mean().item()) <= 5 * std / math.sqrt(p.numel()), name
        else:
            ones = name.endswith(".gate") or ("norm" in name and name.endswith("weight"))
            assert bool((p == (1.0 if ones else 0.0)).all()), name


def test_init_single_layer_is_xavier() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(width=64, heads=8, kv_heads=2, out_bias=True)
    fan = {"q": (64, 64), "k": (64, 16), "v": (64, 16)}
    for projection, (inputs, outputs) in fan.items():
        bound, weight = math.sqrt(6 / (inputs + outputs)), layer.qkv.weight_by_head(projection)
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert layer.output_projection.weight.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    assert not layer.output_projection.bias.any()  # pyright: ignore


def test_init_encoder_decoder_scales_every_output_projection() -> None:
    torch.manual_seed(0)
    model = Transformer(
        ModelSpec(17, 19, 4, AttentionSpec(width=64, heads=4), kind="encoder-decoder", encoder_layers=2)
    )
    std = 0.02 / math.sqrt(2 * 2 + 3 * 4)  # two residual writes per encoder block, three per decoder block
    for layer in model.attention_layers():
        assert abs(layer.output_projection.weight.std().item() - std) <= 5 * std / math.sqrt(
            2 * layer.output_projection.weight.numel()
        )


# Errors.

IDS = token_ids(B, T)
CALL_ERRORS: dict[str, tuple[str, Any, str]] = {
    "too long": ("decoder", lambda m: m(token_ids(1, 20)), "20 tokens are more than the 19 positions"),
    "too long, encoder": ("encoder", lambda m: m(token_ids(1, 25)), "25 tokens are more than the 19 positions"),
    "floats": ("decoder", lambda m: m(torch.zeros(2, 5)), "integer tensor .* Got torch.float32"),
    "one axis": ("decoder", lambda m: m(torch.tensor([1, 2])), r"integer tensor .* Got torch.int64 \(2,\)"),
    "attention_mask": (
        "decoder", lambda m: m(IDS, attention_mask=REAL[:, 1:]), r"shape of ids, \(2, 5\).* Got shape \(2, 4\)"
    ),
    "no source": ("encoder-decoder", lambda m: m(IDS), "source=source_ids"),
    "a source": ("decoder", lambda m: m(IDS, source=IDS), "only an encoder-decoder reads a source"),
    "a memory": (
        "encoder", lambda m: m(IDS, memory=random_tensor(B, T, 12)), "This model has kind='encoder'"
    ),
    "encode": ("decoder", lambda m: m.encode(IDS), "supports encoder-decoders only"),
    "token types": ("decoder", lambda m: m(IDS, token_types=IDS), "does not have token types"),
    "pooled": ("decoder", lambda m: m.pooled(IDS), "does not have a pooler"),
    "cache": ("encoder", lambda m: m.cache(), "does not have a KV cache"),
    "cache kind": ("decoder", lambda m: m.cache("slide"), "kind='slide': unknown; did you mean sliding"),
    "cache size": ("decoder", lambda m: m.cache("sliding"), "a sliding cache needs"),
    "cache no size": ("decoder", lambda m: m.cache("dynamic", 5), "a dynamic cache does not have a size"),
    "head": ("decoder", lambda m: m.heads["5.0"], r"'5\.0': the model has no such head\. Layers 0, 1 have heads 0-3"),
    "head of which": ("decoder", lambda m: m.heads[1], r"heads\[1\]: this names a head but no layer"),
    "mask": ("decoder", lambda m: m(IDS, mask=torch.ones(5, 5)), r"Got Tensor\. Convert a tensor with hw\.Mask\.of"),
    "encoder_attention_mask": (
        "decoder", lambda m: m(IDS, encoder_attention_mask=REAL), "use source_attention_mask=encoder_attention_mask"
    ),
    "a batch of transformers": (
        "encoder", lambda m: m(input_ids=IDS, token_type_ids=IDS), r"use model\(ids\)\. Instead of token_type_ids="
    ),
    "generate": ("decoder", lambda m: m.generate(IDS, 1, past_key_values=IDS), r"use cache=model\.cache\(\)"),
    "a slip": ("decoder", lambda m: m(IDS, attention_masks=REAL), "attention_masks= is unknown; did you mean attention_mask"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "act", "message"), CALL_ERRORS.values(), ids=CALL_ERRORS)
def test_transformer_invalid_call_raises(name: str, act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(make_model(MODELS[name]))


def test_preset_nano_gives_logits() -> None:
    model = Transformer(preset("nano")).eval()
    with torch.no_grad():
        assert model(token_ids(1, 5)).shape == (1, 5, 256)
