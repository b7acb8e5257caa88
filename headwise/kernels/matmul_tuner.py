"""Linear products x Wᵀ + b. A decode step, which has few rows, uses the matrix product that is fastest on this machine.
Long analyses that repeat forward passes do so for their many rows too (`large_products`).

A decode step reads every weight once, so memory bandwidth should limit it. The torch operator that comes closest to this
limit differs between machines, by up to a factor of two. So the `MatmulTuner` of a model times the operators in the first
step of each shape, for some milliseconds per shape, and remembers its choice. Products of many rows are limited by
arithmetic. The library that torch calls by default uses only half of the width of AVX-512 on processors of some makers.

Set the environment variable HEADWISE_MATMUL=torch (or another name of `MATMUL_KERNELS`) to fix the choice for models that
are created afterwards, without timing. `F.linear` is always used outside of both, with gradients, in traced code, on
devices other than CPUs, for weights that are split over processes and for dtypes other than float32.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.errors import ArgumentError, suggest_names
from headwise.kernels.int8_matmul import is_dynamic_int8_matmul_exact

KERNEL_ENV_VAR = "HEADWISE_MATMUL"
AUTOTUNED = "measured"
MAX_DECODE_ROWS = 16
MIN_LARGE_ROWS = 64  # products with at least this number of rows are large
TIMED_LARGE_ROWS = 128  # number of rows in the timing of large products
LARGE_MAX_TIME_RATIO = 0.8  # as MAX_TIME_RATIO, for large products, whose choice should not differ between processes
WEIGHTS_PER_TIMING = 6  # number of weights of a shape that one timing reads
LARGE_WEIGHT = 2**22  # weights with at least this number of entries are timed twice instead of three times
MAX_TIME_RATIO = 0.95  # another product is chosen only if its time is below this fraction of the time of F.linear
SPLIT_COUNTS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # number of parts; the first that divides the rows is used

MatmulKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
BoundMatmul = Callable[[Tensor], Tensor]  # (rows, in) → (rows, out)


class MatmulShape(NamedTuple):
    """Sizes for which a product is chosen.

    Attributes:
        rows: Number of rows of x.
        outputs: Number of outputs of the weight.
        inputs: Number of inputs of the weight.
        weight_layout: Memory layout of the weight: "rows", "columns" or "otherwise".
        threads: Number of threads of torch.
    """

    rows: int
    outputs: int
    inputs: int
    weight_layout: str
    threads: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b, in decode steps with the tuned product: (…, in), (out, in), (out,) → (…, out)."""
    if torch.compiler.is_compiling():  # the compiler chooses the product, and cannot trace `ContextVar.get`
        return F.linear(x, weight, bias)
    tuner = _active_tuner.get()
    if tuner is not None and not torch.is_grad_enabled() and _is_tunable(x, weight):
        return tuner.kernel_for(x, weight)(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear with the tuned product in decode steps. Weights are not initialized; use `heads.initialize` or load them."""

    def reset_parameters(self) -> None:
        """Leave the weights uninitialized."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return linear(input, self.weight, self.bias)


# The products.


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _split_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply parts of the weight as a batch, because torch uses another routine for batched products."""
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    splits = _split_count(weight)
    pieces = weight.unflatten(0, (splits, -1))  # (parts, out/parts, in)
    out = torch.bmm(pieces, rows.t().expand(splits, -1, -1))  # (parts, out/parts, R)
    out = out.flatten(0, 1).t() if len(rows) > 1 else out.view(1, -1)  # (R, out)
    out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], -1)


def _split_count(weight: Tensor) -> int:
    return next(count for count in SPLIT_COUNTS if weight.shape[0] % count == 0)


def _bind(kernel: MatmulKernel, weight: Tensor, bias: Tensor | None) -> BoundMatmul:
    return lambda x: kernel(x, weight, bias)


def _bind_split_matmul(weight: Tensor, bias: Tensor | None, rows: int) -> BoundMatmul:
    """Return `_split_matmul` of one weight, whose parts are computed once."""
    splits = _split_count(weight)
    pieces = weight.unflatten(0, (splits, -1))  # (parts, out/parts, in)

    def matmul(x: Tensor) -> Tensor:
        out = torch.bmm(pieces, x.t().expand(splits, -1, -1))  # (parts, out/parts, R)
        out = out.flatten(0, 1).t() if rows > 1 else out.view(1, -1)  # (R, out)
        return out if bias is None else out + bias

    return matmul


MATMUL_KERNELS: dict[str, MatmulKernel] = {"torch": F.linear, "onednn": _onednn, "parts": _split_matmul}


def is_matmul_supported(name: str, outputs: int, weight_layout: str) -> bool:
    """Return True if this torch build has a product and the product supports the weight."""
    if name == "onednn":  # a private operator of torch
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if name == "parts":
        return weight_layout == "rows" and any(outputs % count == 0 for count in SPLIT_COUNTS)
    return True


# The choice.


class MatmulTuner:
    """The product that decode steps of one model use for each weight shape.

    The first step of a shape times all products on weights of that shape. The choice never changes afterwards, so that equal
    calls return equal bits. A copy of the tuner, or of its model, has the same choices.

    Attributes:
        kernel: Name of the product to use, or "measured" to time them. Default: $HEADWISE_MATMUL, or "measured".
        choices: Name of the chosen product, by shape.
        int8_inputs: True multiplies weights of at most 8 bits as 8-bit codes in steps of one token, and rounds their inputs
            to 8 bits as well (`make_dynamic_int8_matmul`). Faster, and less exact than the default, 16-bit floats.
        prepacked: Prepacked products of quantized weights, created in the first step by their modules. Never copied.
    """

    def __init__(
        self,
        kernel: str | None = None,
        choices: Mapping[MatmulShape, str] | None = None,
        *,
        int8_inputs: bool = False,
    ) -> None:
        self.kernel = os.environ.get(KERNEL_ENV_VAR, AUTOTUNED) if kernel is None else kernel
        if self.kernel != AUTOTUNED and self.kernel not in MATMUL_KERNELS:
            names = suggest_names(self.kernel, [AUTOTUNED, *MATMUL_KERNELS])
            raise ArgumentError(f"{KERNEL_ENV_VAR}={self.kernel!r}: unknown matrix product kernel; {names}")
        if int8_inputs and not is_dynamic_int8_matmul_exact():
            raise ArgumentError(
                "int8_inputs=True: this CPU or this build of torch has no exact 8-bit product. Use int8_inputs=False."
            )
        self.choices, self.int8_inputs = dict(choices or {}), int8_inputs
        self.prepacked: WeakKeyDictionary[nn.Module, dict[tuple[str, int], tuple[object, Any]]] = WeakKeyDictionary()
        self._tuned_settings: set[tuple[int, int]] = set()  # rows and threads for which the weights were timed
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, tuple[str, dict[MatmulShape, str]]]:
        return partial(MatmulTuner, int8_inputs=self.int8_inputs), (self.kernel, self.choices)

    @contextmanager
    def decode_step(self, model: nn.Module, rows: int) -> Iterator[None]:
        """Use the fastest products for the weights of a model and this number of rows. New shapes are timed first."""
        # a traced graph must not depend on sizes
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < rows <= MAX_DECODE_ROWS:
            yield
            return
        setting = (rows, torch.get_num_threads())
        if setting not in self._tuned_settings:
            # embedding tables are looked up, not multiplied
            modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
            self.tune(
                (weight for module in modules for weight in module.parameters(recurse=False) if weight.ndim == 2), rows
            )
            self._tuned_settings.add(setting)
        token = _active_tuner.set(self)
        try:
            yield
        finally:
            _active_tuner.reset(token)

    def tune(self, weights: Iterable[Tensor], rows: int) -> None:
        """Choose a product for each weight shape without a choice."""
        by_shape: dict[MatmulShape, list[Tensor]] = {}
        for weight in weights:
            if _is_plain_weight(weight):
                by_shape.setdefault(_matmul_shape(rows, weight), []).append(weight)
        with self._lock, torch.no_grad():
            for shape, same_shape in by_shape.items():
                if shape not in self.choices:
                    self.choices[shape] = self._choose(shape, same_shape)

    def kernel_for(self, x: Tensor, weight: Tensor) -> MatmulKernel:
        """Return the product chosen for a weight and the rows of x."""
        rows = x.numel() // max(1, x.shape[-1])
        if _times_large_products.get():
            return self._large_kernel(weight) if rows >= MIN_LARGE_ROWS else F.linear
        if not 0 < rows <= MAX_DECODE_ROWS:
            return F.linear
        # a shape that was not timed before the step uses F.linear
        return MATMUL_KERNELS[self.choices.setdefault(_matmul_shape(rows, weight), "torch")]

    def bind(self, weight: Tensor, bias: Tensor | None, rows: int) -> BoundMatmul | None:
        """Return the product of this weight as a function of x, (rows, in) → (rows, out), or None if it is not tuned.

        In a decode step the function returns the bits of `linear`. It holds views of the weight and of the bias.
        """
        if not _is_plain_weight(weight) or (bias is not None and not _is_plain_weight(bias)):
            return None
        name = self.choices.get(_matmul_shape(rows, weight), "torch")
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        return _bind_split_matmul(weight, bias, rows) if name == "parts" else _bind(MATMUL_KERNELS[name], weight, bias)

    def _large_kernel(self, weight: Tensor) -> MatmulKernel:
        """Return the product for a weight and many rows. The first call of a shape times the products."""
        shape = _matmul_shape(TIMED_LARGE_ROWS, weight)
        if shape not in self.choices:
            token = _active_tuner.set(None)  # the timed products must not be routed here
            try:
                with self._lock:
                    if shape not in self.choices:
                        self.choices[shape] = self._choose(shape, [weight])
            finally:
                _active_tuner.reset(token)
        return MATMUL_KERNELS[self.choices[shape]]

    def _choose(self, shape: MatmulShape, weights: list[Tensor]) -> str:
        if self.kernel == AUTOTUNED:
            return _fastest_kernel(shape, weights)
        return self.kernel if is_matmul_supported(self.kernel, shape.outputs, shape.weight_layout) else "torch"


# The tuner of the decode step that runs in this context. Modules read it here because `forward` passes tensors only.
_active_tuner: ContextVar[MatmulTuner | None] = ContextVar("active matmul tuner", default=None)
_times_large_products: ContextVar[bool] = ContextVar("times large products", default=False)


@contextmanager
def large_products(tuner: MatmulTuner) -> Iterator[None]:
    """Use the fastest products for many rows inside the context, also in layers of torch and transformers.

    Results differ from those outside of the context by the rounding of another order of sums.

    Args:
        tuner: The choices of a model.

    >>> with torch.no_grad(), large_products(MatmulTuner()):
    ...     nn.Linear(8, 4)(torch.ones(100, 8)).shape
    torch.Size([100, 4])
    """
    tokens = _active_tuner.set(tuner), _times_large_products.set(True)
    try:
        with _ProductRouterMode():
            yield
    finally:
        _active_tuner.reset(tokens[0])
        _times_large_products.reset(tokens[1])


class _ProductRouterMode(TorchFunctionMode):
    """Routes the products of linear layers of torch, and of Conv1D layers of transformers, to `linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs:
            return linear(*args)
        if func is torch.addmm and not kwargs and len(args) == 3 and args[0].ndim == 1:  # Conv1D: b + x W
            return linear(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


def prepacking_tuner(x: Tensor) -> MatmulTuner | None:
    """Return the tuner of this decode step if quantized weights may be multiplied by x in prepacked form, else None."""
    if torch.compiler.is_compiling():
        return None
    tuner = _active_tuner.get()
    if tuner is None or tuner.kernel == "torch" or torch.is_grad_enabled():
        return None
    is_decode = 0 < x.numel() // max(1, x.shape[-1]) <= MAX_DECODE_ROWS
    return tuner if is_decode and type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" else None


def _is_tunable(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _is_plain_weight(weight)


def _is_plain_weight(weight: Tensor) -> bool:
    """Return True for a nonempty float32 CPU tensor that is not a subclass such as DTensor."""
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


def _fastest_kernel(shape: MatmulShape, weights: list[Tensor]) -> str:
    """Return the fastest product: the best of several timings of each.

    Each timing reads the weights that were read longest ago. So all products find the CPU caches in a similar state, and the
    first call of a product, which sets it up, is not timed.
    """
    names = [name for name in MATMUL_KERNELS if is_matmul_supported(name, shape.outputs, shape.weight_layout)]
    x, best = torch.ones(shape.rows, shape.inputs, dtype=torch.float32), dict.fromkeys(names, float("inf"))
    clock = (
        time.thread_time if shape.threads == 1 else time.perf_counter
    )  # CPU time, because other processes may be running
    max_ratio = LARGE_MAX_TIME_RATIO if shape.rows >= MIN_LARGE_ROWS else MAX_TIME_RATIO
    for name in names:
        MATMUL_KERNELS[name](x, weights[0], None)
    rounds, position = 3 if weights[0].numel() < LARGE_WEIGHT else 2, 1
    for name in names * rounds:
        indices = range(position, position + min(WEIGHTS_PER_TIMING, len(weights)))
        timed_weights = [weights[index % len(weights)] for index in indices]
        position = indices.stop
        start_time = clock()
        for weight in timed_weights:
            MATMUL_KERNELS[name](x, weight, None)
        best[name] = min(best[name], (clock() - start_time) / len(timed_weights))
    fastest = min(names, key=lambda name: best[name])
    return fastest if best[fastest] < max_ratio * best["torch"] else "torch"
