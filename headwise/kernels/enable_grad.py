"""Gradients inside functions that need them, also under `torch.no_grad()` and `torch.inference_mode()`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headwise.errors import UnsupportedModelError


@contextmanager
def enable_gradients(model: object = None) -> Iterator[None]:
    """Record gradients, also inside `torch.no_grad()` or `torch.inference_mode()`.

    Args:
        model: The model whose gradients are needed. Weights created under `torch.inference_mode()` raise an error.

    >>> with torch.inference_mode(), enable_gradients():
    ...     torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    (True, False)
    """
    if isinstance(model, nn.Module):
        _check_no_inference_tensors(model)
    with torch.inference_mode(False), torch.enable_grad():
        yield


def copy_inference_tensors(values: Any) -> Any:
    """Copy tensors created under `torch.inference_mode()` in a nested structure, because autograd cannot save them."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x, values)


def _check_no_inference_tensors(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.is_inference():
            raise UnsupportedModelError(
                f"weight {name}: gradients cannot be computed, because it was created under torch.inference_mode(). "
                f"Build or load the model outside of torch.inference_mode()."
            )
