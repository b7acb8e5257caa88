"""Attached `nn.MultiheadAttention`: outputs bitwise as before, z and maps against torch's own weights, silencing, pruning."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.errors import HeadwiseError
from tests.attached.torch_modules import randomize

D, H, B, T, S = 24, 4, 3, 7, 5

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Support for mismatched")


class Block(nn.Module):
    """One attention module, whose call is that of `nn.MultiheadAttention`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


def _call(batch_first: bool, **options: Any) -> dict[str, Any]:
    """Return the arguments of a self-attention call."""
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    x = x if batch_first else x.transpose(0, 1).contiguous()
    return {"query": x, "key": x, "value": x, **options}


PADDING = torch.tensor([[False] * T, [False] * 5 + [True] * 2, [True] + [False] * 6])
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PER_HEAD = torch.rand(B * H, T, T, generator=torch.Generator().manual_seed(2)) < 0.3
PER_HEAD[..., 2] = False  # so that no row is empty
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weights": {"need_weights": False},
    "weights per head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding, no weights": {"key_padding_mask": PADDING, "need_weights": False},
    "float padding": {"key_padding_mask": torch.where(PADDING, -torch.inf, 0.25)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal with weights": {"attn_mask": CAUSAL, "is_causal": True},
    "mask per head": {"attn_mask": PER_HEAD, "key_padding_mask": PADDING},
    "bias": {"attn_mask": torch.linspace(-1, 1, T * T).view(T, T), "need_weights": False},
}
MODULES: dict[str, dict[str, Any]] = {
    "batch_first": {"batch_first": True}, "tokens first": {}, "no bias": {"bias": False, "batch_first": True},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True}, "dropout": {"dropout": 0.3, "batch_first": True},
}  # fmt: skip


def _weights_per_head(model: Block, call: dict[str, Any]) -> Tensor:
    """Return torch's own attention weights, (B, H, T, S)."""
    with torch.no_grad():
        return model.attn(**call | {"need_weights": True, "average_attn_weights": False})[1]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("options", MODULES)
@pytest.mark.parametrize("name", CALLS)
def test_looking_at_every_variant_leaves_outputs_bitwise_and_shows_torch_weights(
    name: str, options: str, gradients: bool
) -> None:
    model = randomize(Block(**MODULES[options]))
    call = _call(MODULES[options].get("batch_first", False), **CALLS[name])
    with torch.set_grad_enabled(gradients):
        before = model(**call)
        attached = hw.attach(model)
        unseen = model(**call)
        with hw.record(attached) as recording:
            observed = model(**call)
        with attached.heads["0.1"].scaled(1.0):
            scaled = model(**call)
    for other in (unseen, observed, scaled):
        assert torch.equal(other[0], before[0])
        assert (other[1] is None) == (before[1] is None)
        assert before[1] is None or torch.equal(other[1], before[1])
    expected = _weights_per_head(model, call)
    heads = torch.stack([recording[f"0.{head}"].map() for head in range(H)], 1)  # (B, H, T, S)
    hint_ignores_mask = call.get("is_causal") and not call.get("need_weights", True) and options == "extra keys"
    if not hint_ignores_mask:  # with weights, torch takes the mask instead, which shows the extra keys
        assert torch.allclose(heads, expected, atol=1e-6)
    attached.detach()
    with torch.set_grad_enabled(gradients):
        assert torch.equal(model(**call)[0], before[0])
    assert "forward" not in vars(model.attn)


@pytest.mark.parametrize("options", MODULES)
@pytest.mark.parametrize("name", CALLS)
def test_silencing_equals_zeroed_output_weights_and_pruning(name: str, options: str) -> None:
    model = randomize(Block(**MODULES[options])).double()
    call = _call(MODULES[options].get("batch_first", False), **CALLS[name])
    call = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in call.items()}
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.attn.out_proj.weight[:, D // H : 3 * D // H] = 0  # heads 1 and 2
        expected = zeroed(**call)[0]
        attached = hw.attach(model)
        with attached.heads["0.1-2"].silenced():
            silenced = model(**call)[0]
        small = hw.prune(attached, heads="0.1-2", fold_mean=False)
        pruned, weights = small(**call)
    assert torch.allclose(silenced, expected, atol=1e-12, rtol=0)
    assert torch.allclose(pruned, expected, atol=1e-12, rtol=0)
    if call.get("need_weights", True):
        all_weights = _weights_per_head(model, call)[:, [0, 3]]
        expected_weights = all_weights.mean(1) if call.get("average_attn_weights", True) else all_weights
        assert torch.allclose(weights, expected_weights, atol=1e-12)
    assert [str(address) for address in small.heads.addresses] == ["0.0", "0.3"]
    with hw.record(small, "0.3") as recording, hw.record(attached, "0.3") as original:
        small(**call)
        model(**call)
    assert torch.allclose(recording["0.3"].output, original["0.3"].output, atol=1e-12)
    rest = hw.prune(small, heads="0.0", fold_mean=False)
    with torch.no_grad(), small.heads["0.0"].silenced():
        assert torch.allclose(rest(**call)[0], small(**call)[0], atol=1e-12, rtol=0)


def test_cross_attention_with_other_widths_and_unbatched_inputs() -> None:
    model = randomize(Block(kdim=9, vdim=11, batch_first=True))
    query, key, value = torch.randn(B, T, D), torch.randn(B, S, 9), torch.randn(B, S, 11)
    with torch.no_grad():
        before = [model(query, key, value)[0], model(query[0], key[0], value[0], need_weights=False)[0]]
        attached = hw.attach(model)
        with hw.record(attached) as recording:
            after = [model(query, key, value)[0], model(query[0], key[0], value[0], need_weights=False)[0]]
        with attached.heads["0.*"].silenced():
            silent = model(query[0], key[0], value[0])[0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert recording["0.2"].call(1).map().shape == (1, T, S)
    assert torch.equal(silent, model.attn.out_proj.bias.expand_as(silent))
    head: Any = attached.heads["0.2"]
    q = query @ head.W_Q + head.b_Q
    assert torch.allclose(q, recording["0.2"].call(0).q, atol=1e-6)
    assert torch.allclose(
        sum(recording[f"0.{h}"].call(0).output for h in range(H)) + model.attn.out_proj.bias, before[0], atol=1e-6
    )
    small = hw.prune(attached, heads="0.0,0.2", fold_mean=False)
    with torch.no_grad(), attached.heads["0.0,0.2"].silenced():
        assert torch.allclose(small(query[0], key[0], value[0])[0], model(query[0], key[0], value[0])[0], atol=1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu])
@pytest.mark.parametrize("padded", ["none", "right", "left"])
@pytest.mark.parametrize("gradients", [False, True])
def test_encoder_keeps_its_fused_path_and_nested_tensors(
    norm_first: bool, activation: Any, padded: str, gradients: bool
) -> None:
    block = nn.TransformerEncoderLayer(D, H, 40, batch_first=True, norm_first=norm_first, activation=activation)
    model = randomize(
        nn.TransformerEncoder(block, 3, enable_nested_tensor=not norm_first and isinstance(activation, str))
    )
    x = torch.randn(B, T, D)
    padding = {"none": None, "right": PADDING & (torch.arange(T) > 3), "left": PADDING & (torch.arange(T) < 3)}[padded]
    with torch.set_grad_enabled(gradients):
        before = model(x, src_key_padding_mask=padding)
        attached = hw.attach(model)
        with hw.record(attached) as recording, attached.heads["1.2"].scaled(1.0):
            scaled = model(x, src_key_padding_mask=padding)
        with hw.record(attached) as recording:
            observed = model(x, src_key_padding_mask=padding)
        with attached.heads["1.2"].silenced():
            silenced = model(x, src_key_padding_mask=padding)
        zeroed: Any = copy.deepcopy(model)
        with torch.no_grad():
            zeroed.layers[1].self_attn.out_proj.weight[:, 2 * D // H : 3 * D // H] = 0
        expected = zeroed(x, src_key_padding_mask=padding)
    assert torch.equal(observed, before)
    assert torch.equal(scaled, before)  # bitwise here; on other machines torch's kernels may round otherwise
    assert torch.allclose(silenced, expected, atol=1e-5)
    z = recording["2.3"].z
    assert z.shape[0] == B
    assert z.shape[2] == D // H
    assert all(len(recording[str(head)].calls) == 1 for head in attached.heads.addresses)
    small = hw.prune(attached, heads="1.2,2.*", fold_mean=False)
    with torch.set_grad_enabled(gradients), attached.heads["1.2,2.*"].silenced():
        assert torch.allclose(small(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding), atol=1e-5)


@pytest.mark.parametrize("mask", ["src_mask", "src_key_padding_mask"])
def test_float_mask_that_the_fused_kernel_takes_as_bool_raises(mask: str) -> None:
    model = randomize(nn.TransformerEncoderLayer(D, H, 40, batch_first=True))
    attached = hw.attach(nn.ModuleDict({"block": model}))
    x, options = torch.randn(B, T, D), {mask: torch.linspace(-1, 1, T).expand(T if mask == "src_mask" else B, T)}
    with torch.no_grad():
        assert bool(model(x, **options).isnan().any())  # the error of torch
        with pytest.raises(HeadwiseError, match="as a bool mask"), hw.record(attached):
            model(x, **options)
        with pytest.raises(HeadwiseError, match="as a bool mask"), attached.heads["0.1"].silenced():
            model(x, **options)
    before = model(x, **options)
    with hw.record(attached) as recording, attached.heads["0.1"].scaled(1.0):
        assert torch.equal(model(x, **options), before)
    weights = model.self_attn(x, x, x, need_weights=True, average_attn_weights=False,
                              **{{"src_mask": "attn_mask"}.get(mask, "key_padding_mask"): options[mask]})[1]  # fmt: skip
    assert torch.allclose(recording["0.3"].map(), weights[:, 3], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_bitwise_too(dtype: torch.dtype) -> None:
    model = randomize(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 40, batch_first=True), 2)).to(dtype)
    x = torch.randn(B, T, D, dtype=dtype)
    with torch.no_grad():
        before = model(x)
        attached = hw.attach(model)
        with hw.record(attached) as recording:
            assert torch.equal(model(x), before)
    assert recording["0.1"].z.dtype == dtype
    assert recording["0.1"].map().dtype == torch.float32


def test_transformer_has_encoder_decoder_and_cross_stacks() -> None:
    model = randomize(nn.Transformer(D, H, 2, 2, 40, batch_first=True))
    source, target = torch.randn(B, S, D), torch.randn(B, T, D)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    with torch.no_grad():
        before = model(source, target, tgt_mask=mask, tgt_is_causal=True)
        attached: Any = hw.attach(model)
        with hw.record(attached) as recording:
            assert torch.equal(model(source, target, tgt_mask=mask, tgt_is_causal=True), before)
        with attached.heads["cross.1.2"].silenced():
            assert not torch.equal(model(source, target, tgt_mask=mask, tgt_is_causal=True), before)
    assert attached.spec.kind == "encoder-decoder"
    assert recording["enc.0.1"].map().shape == (B, S, S)
    assert recording["cross.1.3"].map().shape == (B, T, S)
    assert float(recording["dec.0.0"].map().triu(1).abs().max()) == 0
    assert attached.layer_paths["cross.1"] == "decoder.layers.1.multihead_attn"
    small = hw.prune(attached, heads="enc.0.*,dec.1.0-2,cross.1.2", fold_mean=False)
    with torch.no_grad(), attached.heads["enc.0.*,dec.1.0-2,cross.1.2"].silenced():
        expected = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    with torch.no_grad():
        assert torch.allclose(small(source, target, tgt_mask=mask, tgt_is_causal=True), expected, atol=1e-5)


def test_training_with_dropout_draws_the_same_numbers_while_looking() -> None:
    model = randomize(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 40, dropout=0.3, batch_first=True), 2))
    model.train()
    x = torch.randn(B, T, D)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return model(x), torch.rand(1)

    before = run()
    attached = hw.attach(model)
    with hw.record(attached):
        observed = run()
    assert all(torch.equal(a, b) for a, b in zip(before, observed, strict=True))
    with attached.heads["0.0"].scaled(1.0):
        edited = run()
    assert all(torch.equal(a, b) for a, b in zip(before, edited, strict=True))


def test_gradient_of_a_gate_equals_the_closed_form() -> None:
    model = randomize(Block(batch_first=True)).double()
    x, direction = torch.randn(B, T, D).double(), torch.randn(B, T, D).double()
    attached = hw.attach(model)
    with hw.record(attached) as recording:
        model(x, x, x)
    gate = torch.ones(H, dtype=torch.float64, requires_grad=True)
    with attached.hook_points()[0].scaled(gate):
        (gradient,) = torch.autograd.grad((model(x, x, x)[0] * direction).sum(), gate)
    expected = [float((recording[f"0.{head}"].output * direction).sum()) for head in range(H)]  # the output is linear
    assert torch.allclose(gradient, torch.tensor(expected, dtype=torch.float64))


def test_checkpointed_block_with_edits_raises_in_backward() -> None:
    model = randomize(Block(batch_first=True))
    attached = hw.attach(model)
    x = torch.randn(B, T, D, requires_grad=True)
    with attached.heads["0.1"].silenced():
        out = checkpoint(lambda y: model(y, y, y)[0], x, use_reentrant=False)
    with pytest.raises(HeadwiseError, match="without the edits"):
        out.sum().backward()


def test_copies_and_saved_modules_are_not_attached() -> None:
    model = randomize(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 40, batch_first=True), 1))
    x = torch.randn(B, T, D)
    attached = hw.attach(model)
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad(), attached.heads["*"].silenced(), hw.record(attached) as recording:
        silenced = model(x)
        for other in (copied, loaded):
            assert not torch.equal(other(x), silenced)
    assert len(recording["0.0"].calls) == 1
    assert hw.attach(model) is attached
    again = hw.attach(copied)
    assert again is not attached
    assert torch.equal(copied(x), model(x))
    other = copy.deepcopy(attached)
    assert other.model is not model
    assert other.is_attached


def test_dropped_handle_detaches_and_open_heads_keep_it() -> None:
    model = randomize(Block(batch_first=True))
    attached = hw.attach(model)
    head = attached.heads["0.1"]
    del attached
    x = torch.randn(B, T, D)
    with head.silenced():
        silenced = model(x, x, x)[0]
    assert not torch.equal(silenced, model(x, x, x)[0])
    del head
    assert "forward" not in vars(model.attn)
    with hw.attach(model) as inner:
        assert inner.is_attached
    assert not inner.is_attached


def test_a_part_of_an_attached_module_is_rejected() -> None:
    model = nn.Sequential(Block(batch_first=True))
    attached = hw.attach(model)
    with pytest.raises(HeadwiseError, match="already attached"):
        hw.attach(model[0])
    assert len(attached.heads) == H


@pytest.mark.parametrize(("name", "options"), list(itertools.product(["causal"], ["extra keys"])))
def test_causal_hint_hides_extra_keys_as_torch_does(name: str, options: str) -> None:
    model = randomize(Block(**MODULES[options])).double()
    call = _call(False, **CALLS[name])
    call = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in call.items()}
    attached = hw.attach(model)
    with torch.no_grad(), hw.record(attached) as recording:
        model(**call)
    head = recording["0.1"]
    assert torch.allclose(head.map().double() @ head.v, head.z, atol=1e-12)
