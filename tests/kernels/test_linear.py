"""The quicker route gives the same product, and is taken only where it may be."""

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.kernels.linear import FEW_ROWS, LARGE, linear


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, FEW_ROWS.start, 8, FEW_ROWS.stop - 1, FEW_ROWS.stop])
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_give_the_same_product(rows: int, transposed: bool) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 1, 1024), torch.randn(LARGE // 1024)
    weight = torch.randn(1024, LARGE // 1024).T if transposed else torch.randn(LARGE // 1024, 1024)
    for b in (bias, None):
        want = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert (linear(x, weight, b).double() - want).abs().max() < 1e-3 * want.abs().max()


def test_gradients_flow() -> None:
    weight = torch.randn(1024, 1024, requires_grad=True)
    linear(torch.randn(8, 1024), weight).sum().backward()
    assert weight.grad is not None


def test_queries_with_a_strange_stride_stay_on_the_flash_kernel() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 64).transpose(-1, -2).unbind()  # (1, 2, 64, 8), channels not neighbours
    with torch.profiler.profile() as seen:
        got = hw.attention(q, k, v, mask=hw.causal())
    names = {event.key for event in seen.key_averages()}
    assert any("flash_attention_for_cpu" in name for name in names)
    assert torch.allclose(got, hw.attention(q, k, v, mask=hw.causal(), backend="reference"), atol=1e-5)
