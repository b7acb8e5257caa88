"""The attention layer: its slices, its heads as objects, the edges, what it refuses. (Against torch: test_torch_mha.)"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads import GrowingCache, MultiHeadAttention
from headwise.kernels import BACKENDS, Mask, causal, padding_mask, per_head
from headwise.spec import AttentionSpec
from tests.contract.layers import HEADS, LAYERS, PLAIN, WIDTH, B, S, T, assert_equal, call, make_layer, numbers

# Each head its own slice of the embedding.


@torch.no_grad()
def test_slices_are_a_grouped_convolution() -> None:
    layer = make_layer(LAYERS["slice"])
    x = numbers(B, T, WIDTH)
    for letter, made in zip("qkv", layer.read(x), strict=True):
        weight, bias = layer.read.weight(letter), layer.read.bias(letter)
        assert bias is not None
        conv = nn.Conv1d(WIDTH, weight.shape[:2].numel(), 1, groups=HEADS, dtype=torch.float64)
        conv.weight.copy_(weight.flatten(0, 1)[:, :, None])
        assert conv.bias is not None
        conv.bias.copy_(bias.flatten())
        want = conv(x.mT).unflatten(1, weight.shape[:2]).mT  # (B, H, T, d)
        assert_equal(made, want, 1e-12)


@pytest.mark.parametrize("name", ["slice", "cut, slice"])
@torch.no_grad()
def test_slices_are_block_diagonal_weights(name: str) -> None:
    layer, spec = make_layer(LAYERS[name]), LAYERS[name]
    full = make_layer(AttentionSpec(WIDTH, HEADS, spec.head_dim, kept=spec.kept, bias=spec.bias))
    full.write.load_state_dict(layer.write.state_dict())
    for letter in "qkv":
        full.read.weight(letter).zero_()
        for index, number in enumerate(spec.head_ids):
            own = slice(number * WIDTH // HEADS, (number + 1) * WIDTH // HEADS)
            full.read.weight(letter)[index, :, own] = layer.read.weight(letter)[index]
        if spec.bias:
            full.read.bias(letter).copy_(layer.read.bias(letter))  # pyright: ignore
    assert_equal(call(layer), call(full), 1e-12)
    for one, other in zip(layer.heads, full.heads, strict=True):
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(one, weight), getattr(other, weight)), "a view shows where the head is blind"


# The head as an object.


@pytest.mark.parametrize("name", ["biases", "grouped-query", "wide values", "cut, uneven groups"])
@torch.no_grad()
def test_a_head_alone_is_the_formula(name: str) -> None:
    layer, spec = make_layer(LAYERS[name]), LAYERS[name]
    x = numbers(B, T, WIDTH)
    found = layer.per_head(x)
    assert [head.address.head for head in layer.heads] == list(spec.head_ids)
    for head in layer.heads:
        assert head.W_Q.shape == head.W_K.shape == (WIDTH, spec.head_dim)
        assert (head.W_V.shape, head.W_O.shape) == ((WIDTH, spec.value_dim), (spec.value_dim, WIDTH))
        q, k, v = x @ head.W_Q, x @ head.W_K, x @ head.W_V
        if spec.bias:
            q, k, v = q + head.b_Q, k + head.b_K, v + head.b_V  # pyright: ignore
        share = (q @ k.mT / spec.head_dim**0.5).softmax(-1)
        assert_equal(found.write(head.index), share @ v @ head.W_O, 1e-12)


@torch.no_grad()
def test_writing_into_a_head_changes_the_layer() -> None:
    layer = make_layer(LAYERS["biases"])
    head, twin = layer.heads[2], make_layer(LAYERS["biases"])
    for name, rows in (("W_Q", "q"), ("W_K", "k"), ("W_V", "v")):
        getattr(head, name).mul_(2)
        twin.read.weight(rows)[2].mul_(2)
        getattr(head, "b" + name[1:]).add_(1)
        twin.read.bias(rows)[2].add_(1)  # pyright: ignore
    head.W_O.mul_(3)
    twin.write.weight[:, 2 * 6 : 3 * 6].mul_(3)
    assert torch.equal(call(layer), call(twin))


def test_what_a_head_does_not_have_is_none() -> None:
    head = make_layer(PLAIN).heads[0]
    assert (head.b_Q, head.b_K, head.b_V, head.gate) == (None, None, None, None)
    gated = make_layer(LAYERS["gated"])
    assert torch.equal(gated.heads[2].gate, gated.gate[2])  # pyright: ignore
    assert repr(make_layer(LAYERS["grouped-query"]).heads[2]) == "Head(0.2, head_dim=6, keys shared by heads [2, 3])"


@pytest.mark.parametrize("name", ["plain", "grouped-query", "narrow values", "slice"])
@torch.no_grad()
def test_circuits_have_the_spectrum_of_the_dense_matrix(name: str) -> None:
    for head in make_layer(LAYERS[name]).heads:
        W_Q, W_K, W_V, W_O = (x.numpy() for x in (head.W_Q, head.W_K, head.W_V, head.W_O))
        for circuit, dense in ((head.QK, W_Q @ W_K.T), (head.OV, W_V @ W_O)):
            rank = circuit.left.shape[1]
            np.testing.assert_allclose(circuit.dense().numpy(), dense, rtol=0, atol=1e-12)
            singular = np.linalg.svd(dense, compute_uv=False)[:rank]
            np.testing.assert_allclose(circuit.singular_values().numpy()[:rank], singular, rtol=0, atol=1e-10)
            largest = sorted(np.linalg.eigvals(dense), key=lambda value: (-abs(value), value.imag))[:rank]
            ours = sorted(circuit.eigenvalues().numpy(), key=lambda value: (-abs(value), value.imag))
            np.testing.assert_allclose(np.abs(ours), np.abs(largest), rtol=0, atol=1e-8)
            np.testing.assert_allclose(np.sum(ours), np.trace(dense), rtol=0, atol=1e-10)


def test_heads_are_taken_by_number_address_or_pattern() -> None:
    layer = make_layer(LAYERS["cut"])
    assert [str(address) for address in layer.heads.addresses] == ["0.0", "0.3"]
    assert layer.heads[3].index == 1
    assert layer.heads["0.3"].address == layer.heads[layer.heads.addresses[1]].address  # pyright: ignore
    assert len(layer.heads.select("*")) == 2
    for number in (1, 4, -1):
        with pytest.raises(HeadwiseError, match=rf"there is no head 0\.{number} here; layer 0 has heads 0,3"):
            layer.heads[number]


# What each head writes.


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "cross"])
@torch.no_grad()
def test_writes_sum_to_the_output(name: str) -> None:
    layer, x = make_layer(LAYERS[name]), numbers(B, T, WIDTH)
    found = layer.per_head(x, mask=causal())
    assert_equal(found.total(), call(layer), 1e-12)
    writes = list(found.writes())
    assert len(writes) == len(layer.spec.head_ids)
    for index, write in enumerate(writes):
        assert torch.equal(write, found.write(index))
        torch.testing.assert_close(found.norms()[:, index], write.norm(dim=-1), rtol=0, atol=1e-9)
    side_by_side = found.concatenated() @ found.W_O.flatten(0, 1)
    assert_equal(side_by_side + (0 if layer.b_O is None else layer.b_O), call(layer), 1e-12)


def test_the_norm_of_a_silent_write_has_a_finite_gradient() -> None:
    layer, x = make_layer(PLAIN), numbers(B, T, WIDTH).requires_grad_()
    with layer.heads[1].silenced():
        layer.per_head(x).norms().sum().backward()
    assert bool(x.grad.isfinite().all())  # pyright: ignore


# Which kernel runs is no secret.

WHYS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "plain": ({}, {}, "fused", "every query sees every key"),
    "causal": ({}, {"mask": causal()}, "fused", "plain causal attention, by the kernel's own flag"),
    "padding": ({}, {"mask": padding_mask(torch.ones(1, 16, dtype=torch.bool))}, "fused", "handed over in blocks of rows"),
    "sink": ({"softmax": "sink"}, {}, "fused", "the sink rides on one more key"),
    "alibi": ({"alibi": True}, {}, "fused", "the bias is added"),
    "softcap": ({"softcap": 3.0}, {}, "batched", "scores are capped"),
    "softcap, long": ({"softcap": 3.0}, {"T": 2**14}, "blockwise", "too many to keep at once"),
    "dropout": ({"dropout": 0.1}, {}, "batched", "attention weights are dropped out"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "asked", "backend", "because"), WHYS.values(), ids=WHYS)
def test_a_layer_says_which_kernel_runs_and_why(fields: dict, asked: dict, backend: str, because: str) -> None:
    asked = {"T": 16} | asked
    choice = MultiHeadAttention(width=WIDTH, heads=HEADS, **fields).why(**asked)
    assert choice.backend == backend
    assert because in choice.because
    assert str(choice).startswith(f"{backend}: ")


def test_a_kernel_that_was_asked_for_is_said_to_be() -> None:
    layer = MultiHeadAttention(width=WIDTH, heads=HEADS, backend="reference")
    assert layer.why(16).because == "it was asked for"
    with pytest.raises(HeadwiseError, match="there is no backend 'fusd'; did you mean fused"):
        MultiHeadAttention(width=WIDTH, heads=HEADS, backend="fusd")(torch.zeros(1, 2, WIDTH))


# The edges: no head, nothing to see.


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "fields", [{"heads": 0}, {"heads": 4, "kept": ()}, {"heads": 4, "kept": (), "alibi": True}], ids=str
)
def test_a_layer_without_heads_writes_its_bias_and_learns_it(backend: str, training: bool, fields: dict) -> None:
    layer = MultiHeadAttention(width=8, out_bias=True, bias=True, backend=backend, **fields).train(training)
    nn.init.normal_(layer.write.bias)  # pyright: ignore
    out = layer(torch.randn(2, 3, 8), mask=causal())
    assert torch.equal(out, layer.b_O.expand_as(out))  # pyright: ignore
    out.sum().backward()
    moved = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.numel() and p.grad.any()}
    assert moved == {"write.bias"}
    assert torch.equal(layer.b_O.grad, torch.full((8,), 6.0))  # pyright: ignore
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert layer.per_head(torch.randn(2, 3, 8)).norms().shape == (2, 0, 3)
    assert len(layer.heads) == 0


def test_a_layer_born_without_heads_has_nothing_to_lean() -> None:
    layer = MultiHeadAttention(width=8, heads=0, alibi=True)
    assert torch.equal(layer(torch.randn(2, 3, 8)), torch.zeros(2, 3, 8))


NOWHERE = {
    "a row": Mask.of(torch.tensor([[True] * 4, [False] * 4, [True] * 4, [True] * 4])),
    "a head": per_head([causal(), Mask.of(torch.zeros(4, 4, dtype=torch.bool)), causal(), causal()]),
    "an example": padding_mask(torch.tensor([[True] * 4, [False] * 4])),
    "everything": Mask.of(torch.zeros(1, 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", NOWHERE)
def test_where_nothing_is_seen_nothing_is_written(backend: str, training: bool, where: str) -> None:
    layer = MultiHeadAttention(width=WIDTH, heads=HEADS, bias=True, out_bias=True, backend=backend).train(training)
    x, mask = torch.randn(2, 4, WIDTH, requires_grad=True), NOWHERE[where]
    z = layer.attend(x, mask=mask)
    blind = ~mask.dense(4, 4).expand(2, HEADS, 4, 4).any(-1)  # (B, H, T)
    assert bool(blind.any())
    assert bool((z[blind] == 0).all())
    assert bool((z[~blind] != 0).any(-1).all())
    layer.write(z).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *layer.parameters()) if p.grad is not None)


# What is refused.

REFUSED: dict[str, tuple[Any, str]] = {
    "width": (lambda layer: layer(torch.zeros(2, 3, 9)), r"x must be \(batch, tokens, 8\), got \(2, 3, 9\)"),
    "axes": (lambda layer: layer(torch.zeros(3, 8)), r"x must be \(batch, tokens, 8\), got \(3, 8\)"),
    "source": (lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(2, 5, 7)), r"source must be \(batch, tokens, 8\)"),
    "source batch": (lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(1, 5, 8)), "do not fit: q and k share batch"),
    "tensor mask": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=torch.ones(3, 3).bool()),
        r"mask must be a Mask, got Tensor; wrap a tensor with hw\.Mask\.of",
    ),
    "mask shape": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=Mask.of(torch.ones(4, 3).bool())),
        r"the mask is \(1, 1, 4, 3\) but the call is \(2, 2, 3, 3\)",
    ),
    "padding shape": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=padding_mask(torch.ones(2, 4).bool())),
        r"the padding mask is \(2, 4\) but there are 3 keys in a batch of 2",
    ),
    "masks per head": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=per_head([causal()])),
        "the per-head mask has 1 masks but there are 2 heads",
    ),
    "bias": (lambda layer: layer(torch.zeros(2, 3, 8), bias=torch.ones(3, 3)), r"bias is \(3, 3\) but must broadcast"),
    "cache": (
        lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(2, 5, 8), cache=GrowingCache()),
        "cross-attention keeps its source in a SourceCache, got GrowingCache",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_a_call_that_does_not_fit_is_refused(act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(MultiHeadAttention(width=8, heads=2))


BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "indivisible": ({"width": 770, "heads": 12}, "width 770 is not divisible by heads 12; give head_dim explicitly"),
    "unknown": ({"width": 8, "heads": 2, "kv_head": 1}, "no setting 'kv_head'; did you mean kv_heads"),
    "no heads": ({"width": 8}, "an attention layer needs heads=…"),
    "both": ({"spec": PLAIN, "heads": 2}, "give a spec or its fields, not both: heads came beside a spec"),
}


@pytest.mark.parametrize(("fields", "message"), BUILT.values(), ids=BUILT)
def test_a_layer_that_cannot_be_built_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        MultiHeadAttention(**fields)


def test_a_layer_with_a_source_of_its_own_asks_for_it() -> None:
    with pytest.raises(HeadwiseError, match="this layer reads keys from a source of width 13; pass layer"):
        make_layer(LAYERS["cross"])(numbers(B, T, WIDTH))
    with pytest.raises(HeadwiseError, match="cross-attention has two: use no rotary"):
        make_layer(LAYERS["rotary, half"])(numbers(B, T, WIDTH), numbers(B, S, WIDTH))
    with pytest.raises(HeadwiseError, match="a layer with a bias by distance takes no other bias"):
        make_layer(LAYERS["alibi"])(numbers(B, T, WIDTH), bias=torch.zeros(1, 1, 1, 1))


def test_an_attention_mask_is_told_our_word() -> None:
    with pytest.raises(
        HeadwiseError, match=r"write mask=hw\.padding_mask\(attention_mask\.bool\(\)\): padding is True where"
    ):
        make_layer(LAYERS["plain"])(numbers(B, T, WIDTH), attention_mask=torch.ones(B, T))
