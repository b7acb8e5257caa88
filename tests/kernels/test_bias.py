"""Biases of scores: T5's buckets as transformers counts them, blocks of all kinds, and a scheme of one's own as one class."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.kernels import Alibi, Bias, Buckets, Given, alibi_slopes, attention, choose, distances, make_terms

B, H, T, S, d = 2, 3, 5, 7, 4
BACKENDS = ("reference", "batched", "fused", "blockwise")


@dataclass(frozen=True, eq=False)
class Kerple(Bias):
    """−a·log(1 + b·distance) (https://arxiv.org/abs/2205.09921), which this package does not have."""

    a: Tensor  # (H,)
    b: Tensor  # (H,)

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return (-self.a[:, None, None] * (1 + self.b[:, None, None] * distances(rows, cols, T, S).abs()).log())[None]


def made(name: str) -> Bias:
    dice = torch.Generator().manual_seed(0)
    return {
        "given": Given(torch.randn(B, H, T, S, generator=dice)),
        "alibi": Alibi(alibi_slopes(H)),
        "buckets": Buckets(torch.randn(H, 6, generator=dice), farthest=9),
        "one way": Buckets(torch.randn(H, 6, generator=dice), farthest=9, both_ways=False),
        "own": Kerple(torch.rand(H, generator=dice), torch.rand(H, generator=dice)),
    }[name]


KINDS = ("given", "alibi", "buckets", "one way", "own")


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 20), (6, 9)])
def test_buckets_are_those_of_transformers(both_ways: bool, count: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    away = torch.arange(60)[None] - torch.arange(60)[:, None]  # keys minus queries
    theirs = T5Attention._relative_position_bucket(away, both_ways, count, farthest)
    table = torch.arange(float(count))[None]
    ours = Buckets(table, farthest, both_ways).block(range(60), range(60), 60, 60)[0, 0]
    assert torch.equal(ours.long(), theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_a_part_of_the_whole(kind: str) -> None:
    bias = made(kind)
    whole = bias.block(range(T), range(S), T, S)
    assert torch.equal(bias.block(range(1, 4), range(2, 7), T, S), whole[..., 1:4, 2:7])
    assert torch.equal(bias.for_heads(slice(1, 3)).block(range(T), range(S), T, S), whole[:, 1:3])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_takes_it_with_its_gradients(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, T, d).double(), torch.randn(B, H, S, d).double(), torch.randn(B, H, S, d).double()
    found = []
    for backend in BACKENDS:
        learned = [tensor.double().detach().clone().requires_grad_() for tensor in made(kind).tensors()]
        out = attention(q, k, v, mask=hw.causal(), bias=made(kind).with_tensors(learned), backend=backend)
        out.square().sum().backward()
        found.append((out.detach(), *(tensor.grad for tensor in learned)))
    bias = made(kind).block(range(T), range(S), T, S).double()  # (1 or B, H, T, S)
    scores = (q @ k.mT / 2 + bias).masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), -torch.inf)
    torch.testing.assert_close(found[0][0], scores.softmax(-1) @ v, rtol=1e-6, atol=1e-6)
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("given", "the bias is learned"),
        ("alibi", "the ALiBi slopes are learned"),
        ("buckets", "the table of buckets is learned"),
        ("own", "the bias is learned"),
    ],
)
def test_what_is_learned_is_said_and_detached(kind: str, said: str) -> None:
    q, k = torch.randn(B, H, T, d), torch.randn(B, H, S, d)
    bias = made(kind).with_tensors([tensor.requires_grad_() for tensor in made(kind).tensors()])
    assert said in choose(make_terms(q, k, k, bias=bias), B, H, T, S).because
    assert choose(make_terms(q, k, k, bias=bias.kept()), B, H, T, S).backend == "fused"
    with torch.no_grad():
        assert choose(make_terms(q, k, k, bias=bias), B, H, T, S).backend == "fused"


def test_what_does_not_fit_is_refused() -> None:
    q, k = torch.randn(B, H, T, d), torch.randn(B, H, S, d)
    with pytest.raises(HeadwiseError, match=r"bias is \(2, 3, 5, 6\) but must broadcast to \(2, 3, 5, 7\)"):
        attention(q, k, k, bias=torch.zeros(B, H, T, S - 1))
    with pytest.raises(HeadwiseError, match="the bias is for 4 heads, the call has 3"):
        attention(q, k, k, bias=Alibi(alibi_slopes(4)))
    with pytest.raises(HeadwiseError, match=r"for \[3, 4\] heads"):
        attention(q, k, k, bias=Kerple(torch.ones(3), torch.ones(4)))
    with pytest.raises(HeadwiseError, match="bias must be a tensor or a Bias, got float"):
        attention(q, k, k, bias=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(HeadwiseError, match=r"at least 4 buckets, got \(3, 2\)"):
        Buckets(torch.zeros(H, 2))
    with pytest.raises(HeadwiseError, match="farthest=8 is too near"):
        Buckets(torch.zeros(H, 32), farthest=8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_holds_the_numbers_of_its_own_time(kind: str) -> None:
    if kind == "given":
        bias: Bias = Given(torch.randn(1, H, T, T))
    else:
        bias = made(kind)
    learned = [tensor.clone().requires_grad_() for tensor in bias.tensors()]
    layer = hw.MultiHeadAttention(width=12, heads=H)
    x = torch.randn(1, T, 12)
    with hw.record(layer) as seen:
        layer(x, bias=bias.with_tensors(learned))
    before = seen["0.1"].map()
    with torch.no_grad():
        for tensor in learned:
            tensor.add_(3.0 * torch.arange(float(tensor.numel())).view_as(tensor))  # a step of training
    assert torch.equal(seen["0.1"].map(), before)


def test_keys_without_a_place_get_no_bias() -> None:
    torch.manual_seed(0)
    layer = hw.MultiHeadAttention.like_torch(12, H, batch_first=True, add_zero_attn=True, bias=False)
    x, slopes = torch.randn(B, T, 12), alibi_slopes(H)
    whole = Alibi(slopes).block(range(T), range(T), T, T)
    assert torch.equal(layer.attend(x, bias=Alibi(slopes)), layer.attend(x, bias=whole))


def test_a_layer_with_buckets_is_t5s_layer() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    sizes = {"d_model": 12, "d_kv": d, "num_heads": H, "relative_attention_num_buckets": 8, "dropout_rate": 0.0}
    config = T5Config(**sizes, attn_implementation="eager")  # pyright: ignore[reportCallIssue]
    theirs: Any = T5Attention(config, has_relative_attention_bias=True).double().eval()
    ours = hw.MultiHeadAttention(width=12, heads=H, head_dim=d, scale=1.0, buckets=8).double().eval()
    assert ours.position is not None
    assert not ours.position.any(), "it begins without a bias"
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_()
        for letter in "qkv":
            ours.read.weight(letter).copy_(getattr(theirs, letter).weight.view(H, d, 12))
        ours.write.weight.copy_(theirs.o.weight)
        ours.position.copy_(theirs.relative_attention_bias.weight.mT)  # (H, buckets)
    x = torch.randn(B, 23, 12, dtype=torch.float64)
    wanted, gained, _ = theirs(x)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(Buckets(ours.position).block(range(23), range(23), 23, 23), gained)
    ours(x).square().sum().backward()
    theirs(x)[0].square().sum().backward()
    torch.testing.assert_close(ours.position.grad, theirs.relative_attention_bias.weight.grad.mT, rtol=1e-6, atol=1e-6)


def test_a_model_with_buckets_learns_them_and_is_cut() -> None:
    spec = hw.ModelSpec(vocab=257, context=16, layers=1, attention=hw.AttentionSpec(16, 4, buckets=8), positions="none")
    made = hw.train(spec, "to be or not to be " * 50, hw.Recipe(steps=4, batch=4, warmup=1), progress=False).model
    (learned,) = [layer.position for layer in made.attention_layers()]
    assert learned is not None
    assert learned[:, :3].abs().min() > 0, "distances 0, 1, and 2 to 15"
    assert not learned[:, 3:].any(), "from 16 on, and after a token: a decoder of 16 tokens sees neither"
    assert made.spec.parameters == sum(value.numel() for value in made.parameters())
    small = hw.prune(made, heads="0.1,0.2", fold=False)
    (left,) = [layer.position for layer in small.attention_layers()]
    assert left is not None
    assert torch.equal(left, learned[[0, 3]])
    ids = torch.arange(7)[None]
    with made.heads["0.1,0.2"].silenced():
        torch.testing.assert_close(small(ids), made(ids), rtol=1e-5, atol=1e-5)


def test_one_bias_by_distance() -> None:
    with pytest.raises(HeadwiseError, match="scores have one bias by distance; alibi and buckets are two"):
        hw.AttentionSpec(8, 2, alibi=True, buckets=8)
    with pytest.raises(HeadwiseError, match="0 or at least 4, got 3"):
        hw.AttentionSpec(8, 2, buckets=3)
