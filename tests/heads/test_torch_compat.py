"""The layer with torch's face against torch's own: every argument of the constructor and of the call, alone and together."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.heads.torch_compat import TorchAttention

D, H, B, T, S = 12, 3, 2, 5, 7
SAME: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}  # float64
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


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SEEN = torch.arange(S) == 0  # the first key is never hidden, so that no row is empty
HIDE = (drawn(T, S, seed=3) > 0.3) & ~SEEN
HIDE_EACH = (drawn(B * H, T, S, seed=4) > 0.3) & ~SEEN
PAD = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
AHEAD = torch.ones(T, S, dtype=torch.bool).triu(1)  # T queries, S keys: aligned at the upper left, as torch's hint is
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bool": {"attn_mask": HIDE},
    "bool for each head": {"attn_mask": HIDE_EACH},
    "float": {"attn_mask": drawn(T, S, seed=5)},
    "float for each head": {"attn_mask": drawn(B * H, T, S, seed=6)},
    "minus infinity": {"attn_mask": torch.zeros(T, S, dtype=torch.float64).masked_fill(HIDE, -torch.inf)},
    "padding": {"key_padding_mask": PAD},
    "float padding": {"key_padding_mask": drawn(B, S, seed=7)},
    "bool and padding": {"attn_mask": HIDE, "key_padding_mask": PAD},
    "float and float padding": {"attn_mask": drawn(T, S, seed=5), "key_padding_mask": drawn(B, S, seed=7)},
    "causal": {"attn_mask": AHEAD, "is_causal": True},
    "causal and padding": {"attn_mask": AHEAD, "is_causal": True, "key_padding_mask": PAD},
}


def pair(**options: Any) -> tuple[nn.MultiheadAttention, TorchAttention]:
    """The same seed for both: they begin with the same numbers."""
    made = []
    for build in (nn.MultiheadAttention, hw.MultiHeadAttention.like_torch):
        torch.manual_seed(0)
        made.append(build(D, H, dtype=torch.float64, **options))
    theirs, ours = made
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)  # torch begins with zeros, which would hide a bias that is forgotten
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(layer: TorchAttention) -> list[Tensor]:
    sizes = ((T, D), (S, layer.kdim), (S, layer.vdim))
    made = [drawn(B, tokens, width, seed=10 + i) for i, (tokens, width) in enumerate(sizes)]
    return [(x if layer.batch_first else x.transpose(0, 1)).requires_grad_() for x in made]


def check(theirs: nn.Module, ours: nn.Module, given: list[Tensor], **named: Any) -> None:
    wanted, weights = theirs(*given, **named)
    if named.get("is_causal"):  # see below: without weights torch hides extra keys
        wanted, _ = theirs(*given, **{**named, "need_weights": True})
    found, own = ours(*given, **named)
    torch.testing.assert_close(found, wanted, **SAME)
    assert (own is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(own, weights, **SAME)
    for got, want in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, **SAME)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_call_gives_what_torch_gives(options: dict[str, Any]) -> None:
    for batch_first in (True, False):
        theirs, ours = pair(**options, batch_first=batch_first)
        given = inputs(ours)
        for named, need, average in product(CALLS.values(), (True, False), (True, False)):
            check(theirs, ours, given, **named, need_weights=need, average_attn_weights=average)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_without_a_batch(options: dict[str, Any]) -> None:
    theirs, ours = pair(**options)
    given = [x[:, 0].detach().requires_grad_() for x in inputs(ours)]  # (T, D) (S, ·) (S, ·)
    calls: list[dict[str, Any]] = [
        {}, {"average_attn_weights": False}, {"need_weights": False}, {"key_padding_mask": PAD[0]},
        {"attn_mask": HIDE}, {"attn_mask": HIDE_EACH[:H], "key_padding_mask": PAD[0]},
    ]  # fmt: skip
    for named in calls:
        check(theirs, ours, given, **named)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_dice_alike() -> None:
    states = []
    for build in (nn.MultiheadAttention, hw.MultiHeadAttention.like_torch):
        torch.manual_seed(0)
        states.append((build(D, H, add_bias_kv=True).state_dict(), torch.rand(1)))
    (theirs, after), (ours, our_after) = states
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(after, our_after)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_dicts_are_exchanged_both_ways(options: dict[str, Any]) -> None:
    theirs, ours = pair(**options)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    assert {n: tuple(x.shape) for n, x in ours.state_dict().items()} == {
        n: tuple(x.shape) for n, x in theirs.state_dict().items()
    }
    theirs.load_state_dict(ours.state_dict())
    check(theirs, ours, inputs(ours))
    check(theirs, copy.deepcopy(ours), inputs(ours))
    holder, other = nn.ModuleDict({"attention": theirs}), nn.ModuleDict({"attention": pair(**options)[1]})
    other.load_state_dict(holder.state_dict())  # inside a larger model
    check(theirs, other["attention"], inputs(ours))


def test_rows_that_see_nothing_are_zeros_where_torch_has_nan() -> None:
    theirs, ours = pair(bias=False)
    given = inputs(ours)
    nothing = torch.ones(T, S, dtype=torch.bool)
    assert theirs(*given, attn_mask=nothing)[0].isnan().all()
    out, weights = ours(*given, attn_mask=nothing)
    assert not out.any()
    assert weights is not None
    assert not weights.any()


def test_a_hint_is_no_mask_and_weights_change_nothing() -> None:
    theirs, ours = pair(add_zero_attn=True)
    given = inputs(ours)
    outs = [
        [layer(*given, attn_mask=AHEAD, is_causal=True, need_weights=n)[0] for n in (True, False)]
        for layer in (theirs, ours)
    ]
    assert not torch.allclose(*outs[0])  # torch's answer hangs on whether one looks
    assert torch.equal(*outs[1])
    for mask in (AHEAD, torch.zeros(T, S, dtype=torch.float64).masked_fill(AHEAD, -torch.inf)):
        calls = []
        with ours.site.listen(calls.append):
            ours(*given, attn_mask=mask, is_causal=True)
        assert calls[0].terms.bias is None
    wrong, _ = ours(*given, attn_mask=HIDE, is_causal=True, need_weights=False)
    torch.testing.assert_close(wrong, ours(*given, attn_mask=HIDE)[0])


def test_in_torchs_own_encoder_layer() -> None:
    for train in (True, False):
        block = nn.TransformerEncoderLayer(D, H, 20, dropout=0.0, batch_first=True, dtype=torch.float64).train(train)
        x = drawn(B, T, D, seed=1)
        with torch.set_grad_enabled(train):
            wanted = block(x, src_key_padding_mask=PAD[:, 2:])
            theirs = block.self_attn
            block.self_attn = hw.MultiHeadAttention.like_torch(D, H, batch_first=True, dtype=torch.float64).train(train)  # pyright: ignore
            block.self_attn.load_state_dict(theirs.state_dict())
            calls = []
            with block.self_attn.site.listen(calls.append):  # pyright: ignore
                found = block(x, src_key_padding_mask=PAD[:, 2:])
        assert len(calls) == 1  # no path around the layer
        seen = ~PAD[:, 2:]
        torch.testing.assert_close(found[seen], wanted[seen], **SAME)  # torch's quick path leaves zeros in padding


def test_dropout_follows_training() -> None:
    layer = hw.MultiHeadAttention.like_torch(D, H, 0.5, batch_first=True)
    x = torch.randn(B, T, D)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x, need_weights=False)[0])  # looking changes nothing


def test_its_heads_are_heads() -> None:
    _, layer = pair(add_bias_kv=True, batch_first=True)
    x = drawn(B, T, D, seed=1)
    out, weights = layer(x, x, x, average_attn_weights=False)
    with hw.record(layer, "0.1") as recording:
        layer(x, x, x)
    assert weights is not None
    torch.testing.assert_close(recording["0.1"].map(), weights[:, 1], **SAME)
    torch.testing.assert_close(layer.attention_weights(x), weights, **SAME)
    torch.testing.assert_close(layer.per_head(x).total(), out, **SAME)
    with layer.heads[1].silenced():
        quiet, _ = layer(x, x, x)
    torch.testing.assert_close(out - quiet, recording["0.1"].write, **SAME)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"is_causal": True}, "give attn_mask too"),
        ({"attn_mask": HIDE[:, 1:]}, r"attn_mask is \(5, 6\) but must be \(5, 7\) or \(6, 5, 7\)"),
        ({"key_padding_mask": PAD[:, 1:]}, r"key_padding_mask is \(2, 6\) but must be \(2, 7\)"),
    ],
)
def test_what_does_not_fit_is_said(named: dict[str, Any], said: str) -> None:
    _, layer = pair()
    with pytest.raises(HeadwiseError, match=said):
        layer(*inputs(layer), **named)


def test_shapes_that_do_not_fit_are_said() -> None:
    _, layer = pair(kdim=11, vdim=13)
    q, k, v = inputs(layer)
    with pytest.raises(HeadwiseError, match=r"key must be \(tokens, batch, 11\)"):
        layer(q, v, v)
    with pytest.raises(HeadwiseError, match="need a source each"):
        layer.attend(q, k)
    with pytest.raises(HeadwiseError, match="not divisible"):
        hw.MultiHeadAttention.like_torch(13, 3)


def test_back_to_torch_with_everything_it_has() -> None:
    for options in OPTIONS.values():
        theirs, ours = pair(**options)
        check(theirs, hw.to_torch(ours).train(False), inputs(ours))
    with pytest.raises(HeadwiseError, match="like_torch"):
        hw.from_torch(pair(add_bias_kv=True)[0])


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        (3, {}, r"3 tensors were given: write layer\(x\) for self-attention"),
        (1, {"key_padding_mask": PAD}, r"for key_padding_mask= write mask=hw.padding_mask\(~key_padding_mask\)"),
        (1, {"attn_mask": HIDE}, r"for attn_mask= write mask=hw.Mask.of\(~attn_mask\)"),
        (1, {"need_weights": True}, r"for need_weights= write layer.attention_weights\(x"),
        (1, {"is_causal": True}, r"for is_causal= write mask=hw.causal\(\)"),
        (1, {"maks": None}, "no argument 'maks'; did you mean mask"),
    ],
)
def test_the_plain_layer_says_what_to_write(given: int, named: dict[str, Any], said: str) -> None:
    layer, x = hw.MultiHeadAttention(width=8, heads=2), torch.randn(1, 4, 8)
    with pytest.raises(HeadwiseError, match=said) as error:
        layer(*[x] * given, **named)
    assert "hw.MultiHeadAttention.like_torch(embed_dim, num_heads)" in str(error.value)


def test_weights_by_head_are_those_of_the_recording() -> None:
    layer = hw.MultiHeadAttention(width=12, heads=4, kv_heads=2)
    x, mask = torch.randn(B, T, 12), hw.causal()
    weights = layer.attention_weights(x, mask=mask)  # (B, H, T, T)
    assert torch.allclose(weights.sum(-1), torch.ones(B, 4, T))
    assert not weights.triu(1).any()
    with hw.record(layer) as recording:
        layer(x, mask=mask)
    for number, head in enumerate(recording):
        torch.testing.assert_close(head.map(), weights[:, number])
    v = layer.read(x)[2][:, [0, 0, 1, 1]]
    torch.testing.assert_close(layer.attend(x, mask=mask), weights @ v)


PORT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the table of docs/heads.md: torch's call, and ours
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


@pytest.mark.parametrize(("torchs", "ours"), PORT.values(), ids=PORT)
def test_the_port_table(torchs: dict[str, Any], ours: dict[str, Any]) -> None:
    theirs, _ = pair(kdim=11, vdim=11, batch_first=True)
    layer = hw.MultiHeadAttention(width=D, heads=H, kv_width=11, bias=True, out_bias=True).double()
    layer.load_state_dict(hw.from_torch(theirs).state_dict())
    x, source = drawn(B, T, D, seed=1), drawn(B, S, 11, seed=2)
    out, averaged = theirs(x, source, source, **torchs)
    torch.testing.assert_close(layer(x, source, **ours), out, **SAME)
    torch.testing.assert_close(layer.attention_weights(x, source, **ours).mean(1), averaged, **SAME)
    torch.testing.assert_close(layer(x[:1], source[:1])[0], theirs(x[0], source[0], source[0])[0], **SAME)
