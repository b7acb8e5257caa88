"""x Wᵀ + b. In a generation step, which has few rows, by whichever product is quickest on this machine.

A step reads every weight once, so its time should be memory bandwidth; which of torch's products comes near it differs by
machine, up to twofold. So the first step of a shape times each of them on weights of that shape, some milliseconds a shape,
and the choice holds until the process ends: the same call gives the same bits, whoever listens.

HEADWISE_MATMUL=torch (or another name below) in the environment fixes the choice and nothing is timed. What is no step, or
has gradients, is traced, lies on another device, is spread over processes or not float32, always goes torch's usual way.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError, suggest_names

KERNEL_ENV_VAR = "HEADWISE_MATMUL"
AUTOTUNED = "measured"
MAX_DECODE_ROWS = 16
WEIGHTS_PER_TIMING = 6  # weights of a shape that are read to time a product
LARGE_WEIGHT = 2**22  # entries of a weight that is read twice, not three times
MAX_TIME_RATIO = 0.95  # who is chosen takes less than this share of what torch's usual product takes
SPLIT_COUNTS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # into how many a weight is cut, whichever divides its rows

MatmulKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class MatmulShape(NamedTuple):
    """What a choice is made for."""

    rows: int  # of x
    outputs: int
    inputs: int
    weight_layout: str  # how the weight does: "rows", "columns" or "otherwise"
    threads: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(…, in), (out, in), (out,) → (…, out)"""
    if _in_decode_step.get() and not torch.is_grad_enabled() and _is_tunable(x, weight):
        return _tuned_kernel(x, weight)(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear by that route. Its weights begin empty: `heads.weight_init` fills them, or a file does."""

    def reset_parameters(self) -> None:
        """Nothing: see above."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return linear(input, self.weight, self.bias)


# The products.


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _split_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Some rows of the weight at a time, as a batch of products: these are made by another routine than one product is."""
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    splits = next(count for count in SPLIT_COUNTS if weight.shape[0] % count == 0)
    pieces = weight.unflatten(0, (splits, -1))  # (parts, out/parts, in)
    out = torch.bmm(pieces, rows.t().expand(splits, -1, -1))  # (parts, out/parts, R)
    out = out.flatten(0, 1).t() if len(rows) > 1 else out.view(1, -1)  # (R, out)
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], -1)


MATMUL_KERNELS: dict[str, MatmulKernel] = {"torch": F.linear, "onednn": _onednn, "parts": _split_matmul}


def is_matmul_supported(name: str, outputs: int, weight_layout: str) -> bool:
    """Whether a product is there at all, and for such a weight."""
    if name == "onednn":  # private to torch
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if name == "parts":
        return weight_layout == "rows" and any(outputs % count == 0 for count in SPLIT_COUNTS)
    return True


# The choice.

_in_decode_step: ContextVar[bool] = ContextVar("stepping", default=False)
_prepacking_enabled: ContextVar[bool] = ContextVar("forming", default=False)
_tuned: dict[MatmulShape, str] = {}
_tuned_models: WeakKeyDictionary[nn.Module, set[tuple[int, int]]] = WeakKeyDictionary()  # whose weights have been timed
_lock = threading.Lock()


@contextmanager
def autotuned_decode_step(model: nn.Module, rows: int) -> Iterator[None]:
    """While open, products of a model's weights with so many rows are the quickest; those of new shapes are timed first."""
    # tracing asks nothing of sizes
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < rows <= MAX_DECODE_ROWS:
        yield
        return
    tuned, setting = _tuned_models.setdefault(model, set()), (rows, torch.get_num_threads())
    if setting not in tuned:
        # tables are only looked up
        modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
        autotune(
            (weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim == 2), rows
        )
        tuned.add(setting)
    decode_token, prepacking_token = (
        _in_decode_step.set(True),
        _prepacking_enabled.set(os.environ.get(KERNEL_ENV_VAR) != "torch"),
    )
    try:
        yield
    finally:
        _in_decode_step.reset(decode_token)
        _prepacking_enabled.reset(prepacking_token)


def autotune(weights: Iterable[Tensor], rows: int) -> None:
    """Time the products for weights of these shapes, where that has not been done; those of one shape take turns."""
    by_shape: dict[MatmulShape, list[Tensor]] = {}
    for weight in weights:
        if _is_plain_weight(weight):
            by_shape.setdefault(_matmul_shape(rows, weight), []).append(weight)
    with _lock, torch.no_grad():
        for shape, same_shape in by_shape.items():
            if shape not in _tuned:
                _tuned[shape] = _kernel_from_env(shape) or _fastest_kernel(shape, same_shape)


def can_use_prepacked(x: Tensor) -> bool:
    """Whether a product with weights at few bits may be made by a form of them (`kernels.prepacked_fp16`): as above."""
    if not _prepacking_enabled.get() or torch.is_grad_enabled():
        return False
    is_decode = 0 < x.numel() // max(1, x.shape[-1]) <= MAX_DECODE_ROWS
    return is_decode and type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu"


def tuned_matmul_choices() -> dict[MatmulShape, str]:
    """What has been chosen in this process so far, by shape."""
    return dict(_tuned)


def _tuned_kernel(x: Tensor, weight: Tensor) -> MatmulKernel:
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= MAX_DECODE_ROWS:
        return F.linear
    # what was not timed by now never will be
    return MATMUL_KERNELS[_tuned.setdefault(_matmul_shape(rows, weight), "torch")]


def _is_tunable(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _is_plain_weight(weight)


def _is_plain_weight(weight: Tensor) -> bool:
    """Not a tensor that is spread over processes, of another kind or elsewhere; and something to multiply by."""
    is_cpu_float32 = (
        type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    )
    return is_cpu_float32 and weight.numel() > 0


def _matmul_shape(rows: int, weight: Tensor) -> MatmulShape:
    outputs, inputs = weight.shape
    stride_out, stride_in = weight.stride()
    weight_layout = (
        "rows"
        if (stride_out, stride_in) == (inputs, 1)
        else "columns"
        if (stride_out, stride_in) == (1, outputs)
        else "otherwise"
    )
    return MatmulShape(rows, outputs, inputs, weight_layout, torch.get_num_threads())


def _kernel_from_env(shape: MatmulShape) -> str | None:
    name = os.environ.get(KERNEL_ENV_VAR, AUTOTUNED)
    if name == AUTOTUNED:
        return None
    if name not in MATMUL_KERNELS:
        raise HeadwiseError(f"{KERNEL_ENV_VAR} is {name!r}; {suggest_names(name, [AUTOTUNED, *MATMUL_KERNELS])}")
    return name if is_matmul_supported(name, shape.outputs, shape.weight_layout) else "torch"


def _fastest_kernel(shape: MatmulShape, weights: list[Tensor]) -> str:
    """Each product reads some of the weights, others in the first round than in the second; its best round counts."""
    names = [name for name in MATMUL_KERNELS if is_matmul_supported(name, shape.outputs, shape.weight_layout)]
    x, best = torch.ones(shape.rows, shape.inputs), dict.fromkeys(names, float("inf"))
    clock = time.thread_time if shape.threads == 1 else time.perf_counter  # others may be busy on this machine too
    for round_index in range(3 if weights[0].numel() < LARGE_WEIGHT else 2):
        for offset, name in enumerate(names):
            start = (round_index + offset) * WEIGHTS_PER_TIMING % len(weights)
            timed_weights = (weights[start:] + weights[:start])[:WEIGHTS_PER_TIMING]
            start_time = clock()
            for weight in timed_weights:
                MATMUL_KERNELS[name](x, weight, None)
            best[name] = min(best[name], (clock() - start_time) / len(timed_weights))
    fastest = min(names, key=lambda name: best[name])
    return fastest if best[fastest] < MAX_TIME_RATIO * best["torch"] else "torch"
