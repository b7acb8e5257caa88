"""`empty_large` against torch's own allocation: dtype, shape, alignment, and use outside of the mode that created it."""

import pytest
import torch

from headwise.kernels.empty_large import ALIGNMENT, MIN_BYTES, empty_large


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool])
@pytest.mark.parametrize("num_bytes", [0, 64, MIN_BYTES, MIN_BYTES + 24])
def test_empty_large_is_a_plain_aligned_tensor(dtype: torch.dtype, num_bytes: int) -> None:
    like = torch.empty(1, dtype=dtype)
    columns = num_bytes // like.element_size() // 2
    with torch.inference_mode(num_bytes == 64):
        x = empty_large(like, 2, columns)
    assert (x.dtype, tuple(x.shape), x.is_contiguous(), x._base) == (dtype, (2, columns), True, None)
    assert num_bytes < MIN_BYTES or x.data_ptr() % ALIGNMENT == 0
    if num_bytes != 64:
        x.fill_(1)
        assert x.all()


def test_empty_large_can_be_changed_in_place_with_gradients() -> None:
    with torch.no_grad():
        x = empty_large(torch.empty(1), MIN_BYTES // 4).zero_()
    factor = torch.ones((), requires_grad=True)
    x.add_(factor)
    x.sum().backward()
    assert factor.grad == MIN_BYTES // 4


def test_empty_large_of_a_meta_tensor_has_no_memory() -> None:
    assert empty_large(torch.empty(1, device="meta"), MIN_BYTES).device.type == "meta"
