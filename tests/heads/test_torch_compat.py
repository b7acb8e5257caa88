"""`MultiHeadAttention.like_torch` against torch: every argument of the constructor and of the call, alone and combined."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.heads.torch_mha_replacement import TorchAttention

D, H, B, T, S = 12, 3, 2, 5, 7
TOLERANCE: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}  # float64
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True},
    "a source": {"kdim": 11, "vdim": 11},
    "two sources": {"kdim": 11, "vdim": 13},
    "two sources, no bias, both keys": {"kdim": 11, "vdim": 13, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
    "values alone": {"vdim": 13},
}  # fmt: skip


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FIRST_KEY = torch.arange(S) == 0  # the first key is never hidden, so that no row is empty
HIDE = (random_tensor(T, S, seed=3) > 0.3) & ~FIRST_KEY
HIDE_EACH = (random_tensor(B * H, T, S, seed=4) > 0.3) & ~FIRST_KEY
PAD = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
AHEAD = torch.ones(T, S, dtype=torch.bool).triu(1)  # T queries and S keys, aligned at the upper left like torch's hint
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bool": {"attn_mask": HIDE},
    "bool for each head": {"attn_mask": HIDE_EACH},
    "float": {"attn_mask": random_tensor(T, S, seed=5)},
    "float for each head": {"attn_mask": random_tensor(B * H, T, S, seed=6)},
    "minus infinity": {"attn_mask": torch.zeros(T, S, dtype=torch.float64).masked_fill(HIDE, -torch.inf)},
    "padding": {"key_padding_mask": PAD},
    "float padding": {"key_padding_mask": random_tensor(B, S, seed=7)},
    "bool and padding": {"attn_mask": HIDE, "key_padding_mask": PAD},
    "float and float padding": {
        "attn_mask": random_tensor(T, S, seed=5),
        "key_padding_mask": random_tensor(B, S, seed=7),
    },
    "causal": {"attn_mask": AHEAD, "is_causal": True},
    "causal and padding": {"attn_mask": AHEAD, "is_causal": True, "key_padding_mask": PAD},
}


def make_pair(**options: Any) -> tuple[nn.MultiheadAttention, TorchAttention]:
    """Create both layers with the same seed, so that they have the same weights."""
    layers = []
    for build in (nn.MultiheadAttention, hw.MultiHeadAttention.like_torch):
        torch.manual_seed(0)
        layers.append(build(D, H, dtype=torch.float64, **options))
    reference, native = layers
    for name, parameter in reference.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)  # torch initializes biases with zeros, which would hide a missing bias
    native.load_state_dict(reference.state_dict())
    return reference, native


def inputs(layer: TorchAttention) -> list[Tensor]:
    sizes = ((T, D), (S, layer.kdim), (S, layer.vdim))
    tensors = [random_tensor(B, tokens, width, seed=10 + i) for i, (tokens, width) in enumerate(sizes)]
    return [(x if layer.batch_first else x.transpose(0, 1)).requires_grad_() for x in tensors]


def check_equal(reference: nn.Module, native: nn.Module, tensors: list[Tensor], **kwargs: Any) -> None:
    expected, weights = reference(*tensors, **kwargs)
    if kwargs.get("is_causal"):  # without weights torch hides extra keys, see below
        expected, _ = reference(*tensors, **{**kwargs, "need_weights": True})
    actual, native_weights = native(*tensors, **kwargs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert (native_weights is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(native_weights, weights, **TOLERANCE)
    for got, want in zip(
        *(torch.autograd.grad(out.square().sum(), tensors) for out in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_attention_any_call_equals_torch(options: dict[str, Any]) -> None:
    for batch_first in (True, False):
        reference, native = make_pair(**options, batch_first=batch_first)
        tensors = inputs(native)
        for named, need, average in product(CALLS.values(), (True, False), (True, False)):
            check_equal(reference, native, tensors, **named, need_weights=need, average_attn_weights=average)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_attention_unbatched_equals_torch(options: dict[str, Any]) -> None:
    reference, native = make_pair(**options)
    tensors = [x[:, 0].detach().requires_grad_() for x in inputs(native)]  # (T, D) (S, ·) (S, ·)
    calls: list[dict[str, Any]] = [
        {}, {"average_attn_weights": False}, {"need_weights": False}, {"key_padding_mask": PAD[0]},
        {"attn_mask": HIDE}, {"attn_mask": HIDE_EACH[:H], "key_padding_mask": PAD[0]},
    ]  # fmt: skip
    for named in calls:
        check_equal(reference, native, tensors, **named)


def test_torch_attention_same_seed_gives_same_weights() -> None:
    states = []
    for build in (nn.MultiheadAttention, hw.MultiHeadAttention.like_torch):
        torch.manual_seed(0)
        states.append((build(D, H, add_bias_kv=True).state_dict(), torch.rand(1)))
    (reference, rng_sample), (native, native_rng_sample) = states
    assert set(native) == set(reference)
    assert all(torch.equal(native[name], reference[name]) for name in reference)
    assert torch.equal(rng_sample, native_rng_sample)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_attention_state_dict_exchanges_with_torch(options: dict[str, Any]) -> None:
    reference, native = make_pair(**options)
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.normal_()
    assert {n: tuple(x.shape) for n, x in native.state_dict().items()} == {
        n: tuple(x.shape) for n, x in reference.state_dict().items()
    }
    reference.load_state_dict(native.state_dict())
    check_equal(reference, native, inputs(native))
    check_equal(reference, copy.deepcopy(native), inputs(native))
    holder, other = nn.ModuleDict({"attention": reference}), nn.ModuleDict({"attention": make_pair(**options)[1]})
    other.load_state_dict(holder.state_dict())  # as part of a larger model
    check_equal(reference, other["attention"], inputs(native))


def test_torch_attention_fully_masked_rows_give_zeros() -> None:
    reference, native = make_pair(bias=False)
    tensors = inputs(native)
    all_hidden = torch.ones(T, S, dtype=torch.bool)
    assert reference(*tensors, attn_mask=all_hidden)[0].isnan().all()
    out, weights = native(*tensors, attn_mask=all_hidden)
    assert not out.any()
    assert weights is not None
    assert not weights.any()


def test_torch_attention_causal_hint_does_not_change_outputs() -> None:
    reference, native = make_pair(add_zero_attn=True)
    tensors = inputs(native)
    outs = [
        [layer(*tensors, attn_mask=AHEAD, is_causal=True, need_weights=n)[0] for n in (True, False)]
        for layer in (reference, native)
    ]
    assert not torch.allclose(*outs[0])  # torch's output depends on need_weights
    assert torch.equal(*outs[1])
    for mask in (AHEAD, torch.zeros(T, S, dtype=torch.float64).masked_fill(AHEAD, -torch.inf)):
        calls = []
        with native.hook_point.listen(calls.append):
            native(*tensors, attn_mask=mask, is_causal=True)
        assert calls[0].params.bias is None
    wrong, _ = native(*tensors, attn_mask=HIDE, is_causal=True, need_weights=False)
    torch.testing.assert_close(wrong, native(*tensors, attn_mask=HIDE)[0])


def test_torch_attention_in_encoder_layer_equals_torch() -> None:
    for train in (True, False):
        block = nn.TransformerEncoderLayer(D, H, 20, dropout=0.0, batch_first=True, dtype=torch.float64).train(train)
        x = random_tensor(B, T, D, seed=1)
        with torch.set_grad_enabled(train):
            expected = block(x, src_key_padding_mask=PAD[:, 2:])
            reference = block.self_attn
            block.self_attn = hw.MultiHeadAttention.like_torch(D, H, batch_first=True, dtype=torch.float64).train(train)  # pyright: ignore
            block.self_attn.load_state_dict(reference.state_dict())
            calls = []
            with block.self_attn.hook_point.listen(calls.append):  # pyright: ignore
                actual = block(x, src_key_padding_mask=PAD[:, 2:])
        assert len(calls) == 1  # the layer was called
        real_tokens = ~PAD[:, 2:]
        # torch's fast path returns zeros at padding
        torch.testing.assert_close(actual[real_tokens], expected[real_tokens], **TOLERANCE)


def test_torch_attention_dropout_follows_training_mode() -> None:
    layer = hw.MultiHeadAttention.like_torch(D, H, 0.5, batch_first=True)
    x = torch.randn(B, T, D)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(
        layer(x, x, x)[0], layer(x, x, x, need_weights=False)[0]
    )  # need_weights does not change the output


@pytest.mark.parametrize("tokens", [7, 130, 600])
@pytest.mark.parametrize("grad", [False, True])
def test_torch_attention_need_weights_does_not_change_bits(tokens: int, grad: bool) -> None:
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(36, 3, batch_first=True).eval()
    nn.init.normal_(reference.in_proj_bias)
    layer = hw.MultiHeadAttention.like_torch(36, 3, batch_first=True).eval()
    layer.load_state_dict(reference.state_dict())
    x, hidden = torch.randn(2, tokens, 36), torch.rand(tokens, tokens) < 0.3
    calls: list[dict[str, Any]] = [
        {}, {"attn_mask": torch.ones(tokens, tokens).triu(1).bool()}, {"attn_mask": hidden.fill_diagonal_(False)},
        {"attn_mask": torch.randn(tokens, tokens)}, {"key_padding_mask": torch.arange(tokens).expand(2, -1) >= 5},
    ]  # fmt: skip
    with torch.set_grad_enabled(grad):
        for kwargs in calls:
            expected, expected_weights = reference(x, x, x, average_attn_weights=False, **kwargs)
            out, weights = layer(x, x, x, average_attn_weights=False, **kwargs)
            assert torch.equal(out, layer(x, x, x, need_weights=False, **kwargs)[0])
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)
            captured: list[Any] = []
            with layer.hook_point.listen(captured.append):
                assert torch.equal(out, layer(x, x, x, **kwargs)[0])
            torch.testing.assert_close(captured[0].maps(), weights, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.output_projection(layer.compute_z(x)), layer(x, x, x)[0], rtol=0, atol=0)


def test_torch_attention_kernel_choice_names_the_kernel_of_the_call() -> None:
    layer = hw.MultiHeadAttention.like_torch(8, 2, batch_first=True).eval()
    assert layer.kernel_choice(16).backend == "fused"
    with torch.no_grad():
        assert layer.kernel_choice(16).backend == layer.kernel_choice(2048).backend == "batched"
        assert layer.kernel_choice(2049).backend == layer.kernel_choice(513, mask=hw.causal()).backend == "fused"
        layer.backend = "fused"
        assert layer.kernel_choice(16).backend == "fused"


def test_torch_attention_heads_match_recording() -> None:
    _, layer = make_pair(add_bias_kv=True, batch_first=True)
    x = random_tensor(B, T, D, seed=1)
    out, weights = layer(x, x, x, average_attn_weights=False)
    with hw.record(layer, "0.1") as recording:
        layer(x, x, x)
    assert weights is not None
    torch.testing.assert_close(recording["0.1"].map(), weights[:, 1], **TOLERANCE)
    torch.testing.assert_close(layer.attention_weights(x), weights, **TOLERANCE)
    torch.testing.assert_close(layer.per_head_output(x).layer_output(), out, **TOLERANCE)
    with layer.heads[1].silenced():
        quiet, _ = layer(x, x, x)
    torch.testing.assert_close(out - quiet, recording["0.1"].output, **TOLERANCE)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"is_causal": True}, "Pass attn_mask as well"),
        ({"attn_mask": HIDE[:, 1:]}, r"shape \(5, 7\) or \(6, 5, 7\)\. Got \(5, 6\)"),
        ({"key_padding_mask": PAD[:, 1:]}, r"shape \(2, 7\)\. Got \(2, 6\)"),
    ],
)
def test_torch_attention_wrong_mask_raises(named: dict[str, Any], message: str) -> None:
    _, layer = make_pair()
    with pytest.raises(HeadwiseError, match=message):
        layer(*inputs(layer), **named)


def test_torch_attention_wrong_shapes_raise() -> None:
    _, layer = make_pair(kdim=11, vdim=13)
    q, k, v = inputs(layer)
    with pytest.raises(HeadwiseError, match=r"key: must have shape \(tokens, batch, 11\)"):
        layer(q, v, v)
    with pytest.raises(HeadwiseError, match="need separate inputs"):
        layer.compute_z(q, k)
    with pytest.raises(HeadwiseError, match="not divisible"):
        hw.MultiHeadAttention.like_torch(13, 3)


def test_to_torch_any_options_equals_original() -> None:
    for options in OPTIONS.values():
        reference, native = make_pair(**options)
        check_equal(reference, hw.to_torch(native).train(False), inputs(native))
    with pytest.raises(HeadwiseError, match="like_torch"):
        hw.from_torch(make_pair(add_bias_kv=True)[0])


@pytest.mark.parametrize(
    ("num_inputs", "named", "message"),
    [
        (3, {}, r"Got 3 positional tensors\. Use layer\(x\) for self-attention"),
        (1, {"key_padding_mask": PAD}, r"Instead of key_padding_mask=, use mask=hw.padding_mask\(~key_padding_mask\)"),
        (1, {"attn_mask": HIDE}, r"Instead of attn_mask=, use mask=hw.Mask.of\(~attn_mask\)"),
        (1, {"need_weights": True}, r"Instead of need_weights=, use layer.attention_weights\(x"),
        (1, {"is_causal": True}, r"Instead of is_causal=, use mask=hw.causal\(\)"),
        (1, {"maks": None}, "Unknown argument 'maks'; did you mean mask"),
    ],
)
def test_attention_torch_arguments_error_suggests_fix(num_inputs: int, named: dict[str, Any], message: str) -> None:
    layer, x = hw.MultiHeadAttention(width=8, heads=2), torch.randn(1, 4, 8)
    with pytest.raises(HeadwiseError, match=message) as error:
        layer(*[x] * num_inputs, **named)
    assert "hw.MultiHeadAttention.like_torch(embed_dim, num_heads)" in str(error.value)


def test_attention_weights_equal_recorded_maps() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4, kv_heads=2)
    x, mask = torch.randn(B, T, 12), hw.causal()
    weights = layer.attention_weights(x, mask=mask)  # (B, H, T, T)
    assert torch.allclose(weights.sum(-1), torch.ones(B, 4, T))
    assert not weights.triu(1).any()
    with hw.record(layer) as recording:
        layer(x, mask=mask)
    for index, head in enumerate(recording):
        torch.testing.assert_close(head.map(), weights[:, index])
    v = layer.qkv(x)[2][:, [0, 0, 1, 1]]
    torch.testing.assert_close(layer.compute_z(x, mask=mask), weights @ v)


# the table in docs/heads.md: torch's call and the corresponding call of headwise
PORTED_ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({"key_padding_mask": PAD}, {"mask": hw.padding_mask(~PAD)}),
    "float padding": (
        {"key_padding_mask": CALLS["float padding"]["key_padding_mask"]},
        {"bias": CALLS["float padding"]["key_padding_mask"][:, None, None]},
    ),
    "bool": ({"attn_mask": HIDE}, {"mask": hw.Mask.of(~HIDE)}),
    "bool for each head": ({"attn_mask": HIDE_EACH}, {"mask": hw.Mask.of(~HIDE_EACH.unflatten(0, (-1, H)))}),
    "float": ({"attn_mask": CALLS["float"]["attn_mask"]}, {"bias": CALLS["float"]["attn_mask"][None, None]}),
    "float for each head": (
        {"attn_mask": CALLS["float for each head"]["attn_mask"]},
        {"bias": CALLS["float for each head"]["attn_mask"].unflatten(0, (-1, H))},
    ),
    "causal": ({"attn_mask": AHEAD, "is_causal": True}, {"mask": hw.causal(offset=0)}),
}


@pytest.mark.parametrize(("torch_kwargs", "native_kwargs"), PORTED_ARGUMENTS.values(), ids=PORTED_ARGUMENTS)
def test_attention_ported_arguments_equal_torch(torch_kwargs: dict[str, Any], native_kwargs: dict[str, Any]) -> None:
    reference, _ = make_pair(kdim=11, vdim=11, batch_first=True)
    layer = hw.MultiHeadAttention(width=D, heads=H, kv_width=11, bias=True, out_bias=True).double()
    layer.load_state_dict(hw.from_torch(reference).state_dict())
    x, source = random_tensor(B, T, D, seed=1), random_tensor(B, S, 11, seed=2)
    out, averaged = reference(x, source, source, **torch_kwargs)
    torch.testing.assert_close(layer(x, source, **native_kwargs), out, **TOLERANCE)
    torch.testing.assert_close(layer.attention_weights(x, source, **native_kwargs).mean(1), averaged, **TOLERANCE)
    torch.testing.assert_close(layer(x[:1], source[:1])[0], reference(x[0], source[0], source[0])[0], **TOLERANCE)
