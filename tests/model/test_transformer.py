"""Whole networks, against formulas and torch's own layers (against transformers: test_families); padding, weights, errors."""

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
from headwise.model.block import Beside, Block
from headwise.spec import AttentionSpec, ModelSpec, SiteAddress, preset
from tests.contract.layers import MODELS, SIZES, SMALL, B, S, T, assert_equal, fill, make_model, numbers, run, token_ids

WIDTH, HEADS, HIDDEN = 12, 4, 23
ATTENTION = AttentionSpec(width=WIDTH, heads=HEADS, bias=True, out_bias=True)
REAL = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


# torch.nn.TransformerEncoderLayer and TransformerDecoderLayer.


def block_from_torch(theirs: Any, spec: ModelSpec, address: SiteAddress) -> Block:
    """A block of ours with the weights of a torch layer."""
    block = Block(spec, address).double()
    attention = {"attention": theirs.self_attn}
    norms = [block.norm_attention, block.norm_mlp]
    if address.stack == "dec":
        attention["cross"] = theirs.multihead_attn
        norms.insert(1, block.norm_cross)
    for name, layer in attention.items():
        getattr(block, name).load_state_dict(from_torch(layer).state_dict())
    for number, norm in enumerate(norms, 1):
        norm.load_state_dict(getattr(theirs, f"norm{number}").state_dict())  # pyright: ignore
    block.mlp.up.load_state_dict(theirs.linear1.state_dict())
    block.mlp.down.load_state_dict(theirs.linear2.state_dict())
    return block


def torch_like(kind: Any, form: str, activation: str) -> tuple[Any, ModelSpec]:
    """A torch layer with random weights, and the spec of a model made of one of them."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "norm_first": form == "pre", "dtype": torch.float64}
    maker = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    theirs = maker(WIDTH, HEADS, HIDDEN, activation=activation, **options)
    fill(theirs)
    spec = ModelSpec(17, 19, 1, ATTENTION, HIDDEN, kind, form=form, activation=activation)  # pyright: ignore
    return theirs, spec


def gradients(module: nn.Module) -> list[Tensor]:
    """All gradients in one order for both sides: by size, then by what they sum to; slabs are the same on both."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return sorted((grad.flatten() for grad in grads), key=lambda grad: (len(grad), round(grad.sum().item(), 6)))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("form", ["post", "pre"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_an_encoder_block_is_torchs(form: str, activation: str, padded: bool) -> None:
    theirs, spec = torch_like("encoder", form, activation)
    ours = block_from_torch(theirs, spec, SiteAddress("", 0))
    x, twin = numbers(B, T, WIDTH).requires_grad_(), numbers(B, T, WIDTH).requires_grad_()
    real = REAL if padded else torch.ones_like(REAL)
    want = theirs(x, src_key_padding_mask=~REAL if padded else None)
    got = ours(twin, Beside(real=REAL if padded else None))
    assert_equal(got[real], want[real])
    want[real].square().sum().backward()
    got[real].square().sum().backward()
    assert_equal(twin.grad, x.grad)
    assert_equal(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("form", ["post", "pre"])
def test_a_decoder_block_with_a_source_is_torchs(form: str, activation: str) -> None:
    theirs, spec = torch_like("encoder-decoder", form, activation)
    ours = block_from_torch(theirs, spec, SiteAddress("dec", 0))
    x, twin = numbers(B, T, WIDTH).requires_grad_(), numbers(B, T, WIDTH).requires_grad_()
    memory = numbers(B, S, WIDTH, seed=2)
    memory_real = torch.arange(S) < torch.tensor([[S], [4]])
    future = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    want = theirs(x, memory, tgt_mask=future, tgt_is_causal=True, memory_key_padding_mask=~memory_real)
    got = ours(twin, Beside(causal=True, memory=memory, memory_real=memory_real))
    assert_equal(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    assert_equal(twin.grad, x.grad)
    assert_equal(gradients(ours), gradients(theirs))


@torch.no_grad()
def test_a_one_block_encoder_is_embedding_and_block() -> None:
    theirs, spec = torch_like("encoder", "post", "gelu")
    model = make_model(replace(spec, output="none"))
    model.blocks[0].load_state_dict(block_from_torch(theirs, spec, SiteAddress("", 0)).state_dict())
    ids = token_ids(B, T)
    embedded = model.embed.tokens.weight[ids] + model.embed.positions.weight[:T]  # pyright: ignore
    want = theirs.eval()(embedded, src_key_padding_mask=~REAL)
    assert_equal(model(ids, padding=REAL)[REAL], want[REAL])


# The parts, against their formulas.


def normed(x: Tensor, norm: Any, eps: float) -> Tensor:
    """LayerNorm or RMSNorm, written out."""
    if isinstance(norm, nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


@pytest.mark.parametrize("norm", ["layer", "rms"])
@torch.no_grad()
def test_the_parallel_form_is_its_formula(norm: Any) -> None:
    spec = ModelSpec(**SIZES, attention=SMALL, form="parallel", norm=norm, norm_eps=0.1, activation="swiglu")
    block = Block(spec, SiteAddress("", 0)).double()
    fill(block)
    x = numbers(B, T, WIDTH)
    y, mlp = normed(x, block.norm_attention, 0.1), block.mlp
    gate = mlp.gate
    assert gate is not None
    assert gate.bias is not None
    assert mlp.up.bias is not None
    assert mlp.down.bias is not None
    bent = F.silu(y @ gate.weight.T + gate.bias) * (y @ mlp.up.weight.T + mlp.up.bias)
    want = x + block.attention(y, mask=causal()) + bent @ mlp.down.weight.T + mlp.down.bias
    assert_equal(block(x, Beside(causal=True)), want)


@torch.no_grad()
def test_the_stream_starts_as_the_spec_says() -> None:
    """Scaled tokens, plus types, plus sinusoids, normed."""
    spec = ModelSpec(17, 19, 0, SMALL, kind="encoder", positions="sinusoidal", embed_scale=3.0, token_types=2,
                     embed_norm=True, form="post", output="none")  # fmt: skip
    model, ids, types = make_model(spec), token_ids(B, T), token_ids(B, T, vocab=2)
    table = [
        [(math.sin if c % 2 == 0 else math.cos)(t / 10000 ** (c // 2 * 2 / WIDTH)) for c in range(WIDTH)]
        for t in range(T)
    ]
    embed = model.embed
    x = 3 * embed.tokens.weight[ids] + embed.types.weight[types] + torch.tensor(table)  # pyright: ignore
    torch.testing.assert_close(model(ids, token_types=types), normed(x, embed.norm, 1e-5), rtol=0, atol=1e-6)  # pyright: ignore


@torch.no_grad()
def test_outputs_are_of_their_kinds() -> None:
    encoder = make_model(MODELS["encoder"])
    ids, hidden = token_ids(B, T), run(encoder, hidden=True)
    assert run(encoder).shape == (B, T, 17)
    assert hidden.shape == (B, T, WIDTH)
    out = encoder.output
    assert out is not None
    assert out.vocabulary.bias is not None
    bent = normed(F.gelu(hidden @ out.transform.weight.T + out.transform.bias), out.norm, 1e-5)  # pyright: ignore
    want = bent @ encoder.embed.tokens.weight.T + out.vocabulary.bias
    assert_equal(run(encoder), want)
    dense = encoder.pooler.dense  # pyright: ignore
    want = torch.tanh(hidden[:, 0] @ dense.weight.T + dense.bias)
    assert_equal(encoder.pooled(ids), want)
    headless = make_model(replace(MODELS["encoder"], output="none"))
    assert headless(ids).shape == (B, T, WIDTH)


def test_tied_weights_are_one_and_untied_are_two() -> None:
    tied, untied = Transformer(MODELS["decoder"]), Transformer(MODELS["decoder, rotary"])
    assert tied.output.vocabulary.weight is tied.embed.tokens.weight  # pyright: ignore
    assert untied.output.vocabulary.weight is not untied.embed.tokens.weight  # pyright: ignore
    run(tied).sum().backward()
    assert tied.embed.tokens.weight.grad.abs().sum() > 0  # pyright: ignore


# Padding: to the left, to the right, or not at all.

LENGTHS, LONGEST = (7, 4, 1), 7
PADDED = ["decoder", "decoder, rotary", "decoder, parallel", "decoder, windows", "decoder, cut", "encoder"]


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_for_real_tokens(name: str, side: str) -> None:
    model = make_model(MODELS[name])
    texts = [token_ids(1, length, seed=length) for length in LENGTHS]
    ids, real = (
        torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long),
        torch.zeros(len(LENGTHS), LONGEST, dtype=torch.bool),
    )
    for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
        place = slice(LONGEST - length, None) if side == "left" else slice(length)
        ids[row, place], real[row, place] = text[0], True
    for marks in (real, real.long()):
        out = model(ids, padding=marks)
        for row, text in enumerate(texts):
            assert_equal(out[row, real[row]], model(text)[0])


@torch.no_grad()
def test_a_padded_source_changes_nothing() -> None:
    model, ids, source = make_model(MODELS["encoder-decoder"]), token_ids(2, T), token_ids(2, S)
    real = torch.arange(S) < torch.tensor([[S], [3]])
    both = model(ids, source=source, source_padding=real)
    assert_equal(both[1:], model(ids[1:], source=source[1:, :3]))
    encoded = model(ids, memory=model.encode(source, padding=real), source_padding=real)
    assert_equal(encoded, both)


@torch.no_grad()
def test_a_mask_comes_on_top_of_the_models_own() -> None:
    model, ids = make_model(MODELS["decoder, rotary"]), token_ids(B, T)
    windowed = make_model(replace(MODELS["decoder, rotary"], windows=(2,)))
    assert_equal(model(ids, mask=window(2)), windowed(ids))


@torch.no_grad()
def test_a_decoder_looks_back_only_and_an_encoder_both_ways() -> None:
    ids = token_ids(1, T)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % 17
    for name, blind in (("decoder", True), ("encoder", False)):
        model = make_model(MODELS[name])
        assert torch.equal(model(ids)[:, :-1], model(other)[:, :-1]) is blind


# How weights begin.


def test_weights_begin_as_the_table_says() -> None:
    """The spread of n normal draws lies within 5 standard errors, σ/√(2n), of σ."""
    torch.manual_seed(0)
    layers = 3
    attention = AttentionSpec(width=64, heads=4, bias=True, out_bias=True, gated=True, softmax="sink")
    model = Transformer(ModelSpec(97, 31, layers, attention, kind="encoder", token_types=2, pooler=True, tied=False))
    writes = {"write.weight", "down.weight"}
    for name, p in model.named_parameters():
        tail = ".".join(name.split(".")[-2:])
        if p.ndim == 2:
            std = 0.02 / math.sqrt(2 * layers) if tail in writes else 0.02
            assert abs(p.std().item() - std) <= 5 * std / math.sqrt(2 * p.numel()), name
            assert abs(p.mean().item()) <= 5 * std / math.sqrt(p.numel()), name
        else:
            ones = name.endswith(".gate") or ("norm" in name and name.endswith("weight"))
            assert bool((p == (1.0 if ones else 0.0)).all()), name


def test_a_layer_alone_begins_as_xavier_says() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(width=64, heads=8, kv_heads=2, out_bias=True)
    fan = {"q": (64, 64), "k": (64, 16), "v": (64, 16)}
    for letter, (inputs, outputs) in fan.items():
        bound, weight = math.sqrt(6 / (inputs + outputs)), layer.read.weight(letter)
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert layer.write.weight.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    assert not layer.write.bias.any()  # pyright: ignore


def test_every_write_of_an_encoder_decoder_counts() -> None:
    torch.manual_seed(0)
    model = Transformer(
        ModelSpec(17, 19, 4, AttentionSpec(width=64, heads=4), kind="encoder-decoder", encoder_layers=2)
    )
    std = 0.02 / math.sqrt(2 * 2 + 3 * 4)  # two a block of the encoder, three a block of the decoder
    for layer in model.attention_layers():
        assert abs(layer.write.weight.std().item() - std) <= 5 * std / math.sqrt(2 * layer.write.weight.numel())


# What is refused.

IDS = token_ids(B, T)
REFUSED: dict[str, tuple[str, Any, str]] = {
    "too long": ("decoder", lambda m: m(token_ids(1, 20)), "20 tokens are more than the 19 positions this model has learned"),
    "too long, encoder": ("encoder", lambda m: m(token_ids(1, 25)), "25 tokens are more than the 19 positions"),
    "floats": ("decoder", lambda m: m(torch.zeros(2, 5)), "token ids are a tensor of whole numbers, .* got torch.float32"),
    "one axis": ("decoder", lambda m: m(torch.tensor([1, 2])), r"a tensor of whole numbers, .* got torch.int64 \(2,\)"),
    "padding": ("decoder", lambda m: m(IDS, padding=REAL[:, 1:]), r"padding is \(2, 4\) but ids are \(2, 5\); True at"),
    "no source": ("encoder-decoder", lambda m: m(IDS), "an encoder-decoder needs what it reads: model"),
    "a source": ("decoder", lambda m: m(IDS, source=IDS), "of kind decoder and reads no source; leave source out"),
    "a memory": ("encoder", lambda m: m(IDS, memory=numbers(B, T, 12)), "this model is of kind encoder and reads no source"),
    "encode": ("decoder", lambda m: m.encode(IDS), "this model is of kind decoder; encode is for an encoder-decoder"),
    "token types": ("decoder", lambda m: m(IDS, token_types=IDS), "this model has no token types; leave token_types out"),
    "pooled": ("decoder", lambda m: m.pooled(IDS), "this model has no pooler; take the mean"),
    "cache": ("encoder", lambda m: m.cache(), "an encoder sees all tokens at once and keeps no cache"),
    "cache kind": ("decoder", lambda m: m.cache("slide"), "there is no cache 'slide'; did you mean sliding"),
    "cache size": ("decoder", lambda m: m.cache("sliding"), "a sliding cache needs size=…"),
    "cache no size": ("decoder", lambda m: m.cache("growing", 5), "a growing cache takes no size"),
    "head": ("decoder", lambda m: m.heads["5.0"], r"'5\.0' names no head here; layers 0, 1 have heads 0-3"),
    "head of which": ("decoder", lambda m: m.heads[1], r"head 1 of which layer\? Write layer.head"),
    "mask": ("decoder", lambda m: m(IDS, mask=torch.ones(5, 5)), r"got Tensor; wrap a tensor with hw\.Mask\.of"),
    "attention_mask": (
        "decoder", lambda m: m(IDS, attention_mask=REAL), r"write padding=attention_mask\.bool\(\), True where a token is"
    ),
    "a batch of transformers": (
        "encoder", lambda m: m(input_ids=IDS, attention_mask=REAL), r"for input_ids= write model\(ids\); for attention_mask="
    ),
    "generate": ("decoder", lambda m: m.generate(IDS, 1, attention_mask=REAL), "write padding=attention_mask"),
    "a slip": ("decoder", lambda m: m(IDS, paddings=REAL), "paddings= is unknown; did you mean padding"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "act", "message"), REFUSED.values(), ids=REFUSED)
def test_a_call_that_does_not_fit_is_refused(name: str, act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(make_model(MODELS[name]))


def test_a_preset_runs() -> None:
    model = Transformer(preset("nano")).eval()
    with torch.no_grad():
        assert model(token_ids(1, 5)).shape == (1, 5, 256)
