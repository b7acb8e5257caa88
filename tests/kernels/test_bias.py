"""Biases of attention scores: T5 buckets as in transformers, blocks of all biases, and a user-defined bias."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.kernels import (
    AlibiBias,
    Bias,
    DenseBias,
    T5RelativeBias,
    alibi_slopes,
    attention,
    make_kernel_choice,
    make_score_params,
    query_minus_key_distances,
)

B, H, T, S, d = 2, 3, 5, 7, 4
BACKENDS = ("reference", "batched", "fused", "blockwise")


@dataclass(frozen=True, eq=False)
class Kerple(Bias):
    """−a·log(1 + b·distance) (https://arxiv.org/abs/2205.09921), a bias that is not part of the package."""

    a: Tensor  # (H,)
    b: Tensor  # (H,)

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return (
            -self.a[:, None, None]
            * (1 + self.b[:, None, None] * query_minus_key_distances(rows, cols, T, S).abs()).log()
        )[None]


def make_bias(name: str) -> Bias:
    generator = torch.Generator().manual_seed(0)
    return {
        "given": DenseBias(torch.randn(B, H, T, S, generator=generator)),
        "alibi": AlibiBias(alibi_slopes(H)),
        "buckets": T5RelativeBias(torch.randn(H, 6, generator=generator), max_distance=9),
        "one way": T5RelativeBias(torch.randn(H, 6, generator=generator), max_distance=9, bidirectional=False),
        "own": Kerple(torch.rand(H, generator=generator), torch.rand(H, generator=generator)),
    }[name]


KINDS = ("given", "alibi", "buckets", "one way", "own")


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), [(32, 128), (8, 20), (6, 9)])
def test_t5_relative_bias_buckets_equal_transformers(bidirectional: bool, count: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets = torch.arange(60)[None] - torch.arange(60)[:, None]  # keys minus queries
    expected = T5Attention._relative_position_bucket(offsets, bidirectional, count, max_distance)
    table = torch.arange(float(count))[None]
    actual = T5RelativeBias(table, max_distance, bidirectional).block(range(60), range(60), 60, 60)[0, 0]
    assert torch.equal(actual.long(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_block_equals_slice_of_full(kind: str) -> None:
    bias = make_bias(kind)
    full = bias.block(range(T), range(S), T, S)
    assert torch.equal(bias.block(range(1, 4), range(2, 7), T, S), full[..., 1:4, 2:7])
    assert torch.equal(bias.for_heads(slice(1, 3)).block(range(T), range(S), T, S), full[:, 1:3])


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_any_bias_equal_reference_with_gradients(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, T, d).double(), torch.randn(B, H, S, d).double(), torch.randn(B, H, S, d).double()
    results = []
    for backend in BACKENDS:
        learned = [tensor.double().detach().clone().requires_grad_() for tensor in make_bias(kind).tensors()]
        out = attention(q, k, v, mask=hw.causal(), bias=make_bias(kind).with_tensors(learned), backend=backend)
        out.square().sum().backward()
        results.append((out.detach(), *(tensor.grad for tensor in learned)))
    bias = make_bias(kind).block(range(T), range(S), T, S).double()  # (1 or B, H, T, S)
    scores = (q @ k.mT / 2 + bias).masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), -torch.inf)
    torch.testing.assert_close(results[0][0], scores.softmax(-1) @ v, rtol=1e-6, atol=1e-6)
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            torch.testing.assert_close(expected, actual, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("given", "the bias is learned"),
        ("alibi", "the ALiBi slopes are learned"),
        ("buckets", "the T5 bias is learned"),
        ("own", "the bias is learned"),
    ],
)
def test_kernel_choice_learned_bias_is_named(kind: str, message: str) -> None:
    q, k = torch.randn(B, H, T, d), torch.randn(B, H, S, d)
    bias = make_bias(kind).with_tensors([tensor.requires_grad_() for tensor in make_bias(kind).tensors()])
    assert message in make_kernel_choice(make_score_params(q, k, k, bias=bias), B, H, T, S).reason
    assert make_kernel_choice(make_score_params(q, k, k, bias=bias.detached_copy()), B, H, T, S).backend == "fused"
    with torch.no_grad():
        assert make_kernel_choice(make_score_params(q, k, k, bias=bias), B, H, T, S).backend == "fused"


def test_attention_wrong_bias_raises() -> None:
    q, k = torch.randn(B, H, T, d), torch.randn(B, H, S, d)
    with pytest.raises(HeadwiseError, match=r"broadcast to \(2, 3, 5, 7\)\. Got shape \(2, 3, 5, 6\)"):
        attention(q, k, k, bias=torch.zeros(B, H, T, S - 1))
    with pytest.raises(HeadwiseError, match="4 rows for 3 heads"):
        attention(q, k, k, bias=AlibiBias(alibi_slopes(4)))
    with pytest.raises(HeadwiseError, match=r"Got \[3, 4\]"):
        attention(q, k, k, bias=Kerple(torch.ones(3), torch.ones(4)))
    with pytest.raises(HeadwiseError, match=r"must be a tensor or a Bias\. Got float"):
        attention(q, k, k, bias=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"at least 4 buckets\. Got shape \(3, 2\)"):
        T5RelativeBias(torch.zeros(H, 2))
    with pytest.raises(HeadwiseError, match="max_distance=8: must be above 8"):
        T5RelativeBias(torch.zeros(H, 32), max_distance=8)


@pytest.mark.parametrize("kind", KINDS)
def test_record_learned_bias_keeps_values_of_call(kind: str) -> None:
    if kind == "given":
        bias: Bias = DenseBias(torch.randn(1, H, T, T))
    else:
        bias = make_bias(kind)
    learned = [tensor.clone().requires_grad_() for tensor in bias.tensors()]
    layer = hw.MultiHeadAttention(width=12, heads=H)
    x = torch.randn(1, T, 12)
    with hw.record(layer) as recording:
        layer(x, bias=bias.with_tensors(learned))
    before = recording["0.1"].map()
    with torch.no_grad():
        for tensor in learned:
            tensor.add_(3.0 * torch.arange(float(tensor.numel())).view_as(tensor))  # a training step
    assert torch.equal(recording["0.1"].map(), before)


def test_bias_extra_key_gets_no_bias() -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention.like_torch(12, H, batch_first=True, add_zero_attn=True, bias=False)
    x, slopes = torch.randn(B, T, 12), alibi_slopes(H)
    dense = AlibiBias(slopes).block(range(T), range(T), T, T)
    assert torch.equal(layer.compute_z(x, bias=AlibiBias(slopes)), layer.compute_z(x, bias=dense))


def test_attention_buckets_equals_t5_layer() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    sizes = {"d_model": 12, "d_kv": d, "num_heads": H, "relative_attention_num_buckets": 8, "dropout_rate": 0.0}
    config = T5Config(**sizes, attn_implementation="eager")  # pyright: ignore[reportCallIssue]
    t5_layer: Any = T5Attention(config, has_relative_attention_bias=True).double().eval()
    native = hw.MultiHeadAttention(width=12, heads=H, head_dim=d, scale=1.0, t5_buckets=8).double().eval()
    assert native.position_bias is not None
    assert not native.position_bias.any(), "it begins without a bias"
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in t5_layer.parameters():
            weight.normal_()
        for projection in "qkv":
            native.qkv.weight_by_head(projection).copy_(getattr(t5_layer, projection).weight.view(H, d, 12))
        native.output_projection.weight.copy_(t5_layer.o.weight)
        native.position_bias.copy_(t5_layer.relative_attention_bias.weight.mT)  # (H, buckets)
    x = torch.randn(B, 23, 12, dtype=torch.float64)
    expected, expected_bias, _ = t5_layer(x)
    torch.testing.assert_close(native(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(T5RelativeBias(native.position_bias).block(range(23), range(23), 23, 23), expected_bias)
    native(x).square().sum().backward()
    t5_layer(x)[0].square().sum().backward()
    torch.testing.assert_close(
        native.position_bias.grad, t5_layer.relative_attention_bias.weight.grad.mT, rtol=1e-6, atol=1e-6
    )


def test_model_buckets_learns_and_prunes_table() -> None:
    spec = hw.ModelSpec(
        vocab=257, context=16, layers=1, attention=hw.AttentionSpec(16, 4, t5_buckets=8), positions="none"
    )
    model = hw.train(spec, "to be or not to be " * 50, hw.Recipe(steps=4, batch_size=4, warmup=1), progress=False).model
    (learned,) = [layer.position_bias for layer in model.attention_layers()]
    assert learned is not None
    assert learned[:, :3].abs().min() > 0, "distances 0, 1, and 2 to 15"
    assert not learned[:, 3:].any(), "from 16 on, and after a token: a decoder of 16 tokens sees neither"
    assert model.spec.num_parameters == sum(value.numel() for value in model.parameters())
    small = hw.prune(model, heads="0.1,0.2", fold_mean=False)
    (pruned_table,) = [layer.position_bias for layer in small.attention_layers()]
    assert pruned_table is not None
    assert torch.equal(pruned_table, learned[[0, 3]])
    ids = torch.arange(7)[None]
    with model.heads["0.1,0.2"].silenced():
        torch.testing.assert_close(small(ids), model(ids), rtol=1e-5, atol=1e-5)


def test_attention_spec_two_distance_biases_raise() -> None:
    with pytest.raises(HeadwiseError, match="alibi and t5_buckets: a layer supports only one position bias"):
        hw.AttentionSpec(8, 2, alibi=True, t5_buckets=8)
    with pytest.raises(HeadwiseError, match="t5_buckets=3: must be 0 or at least 4"):
        hw.AttentionSpec(8, 2, t5_buckets=3)
