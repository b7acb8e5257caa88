"""x Wᵀ + b. In a generation step, which has few rows, by whichever product is quickest on this machine.

A step reads every weight once, so its time should be memory bandwidth; which of torch's products comes near it differs by
machine, up to twofold. So the first step of a shape times each of them on weights of that shape, some milliseconds a shape,
and the choice holds until the process ends: the same call gives the same bits, whoever listens.

HEADWISE_PRODUCT=torch (or another name below) in the environment fixes the choice and nothing is timed. What is no step, or
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

from headwise.errors import HeadwiseError, close_names

SETTING = "HEADWISE_PRODUCT"
MEASURED = "measured"
FEW_ROWS = 16
TRIED = 6  # weights of a shape that are read to time a product
LARGE = 2**22  # entries of a weight that is read twice, not three times
BETTER = 0.95  # who is chosen takes less than this share of what torch's usual product takes
PARTS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # into how many a weight is cut, whichever divides its rows

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ProductShape(NamedTuple):
    """What a choice is made for."""

    rows: int  # of x
    outputs: int
    inputs: int
    lies: str  # how the weight does: "rows", "columns" or "otherwise"
    threads: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(…, in), (out, in), (out,) → (…, out)"""
    if _stepping.get() and not torch.is_grad_enabled() and _may_choose(x, weight):
        return _choice(x, weight)(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear by that route. Its weights begin empty: `heads.init` fills them, or a file does."""

    def reset_parameters(self) -> None:
        """Nothing: see above."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return linear(input, self.weight, self.bias)


# The products.


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Some rows of the weight at a time, as a batch of products: these are made by another routine than one product is."""
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    parts = next(count for count in PARTS if weight.shape[0] % count == 0)
    pieces = weight.unflatten(0, (parts, -1))  # (parts, out/parts, in)
    made = torch.bmm(pieces, rows.t().expand(parts, -1, -1))  # (parts, out/parts, R)
    made = made.flatten(0, 1).t() if len(rows) > 1 else made.view(1, -1)  # (R, out)
    made = made if bias is None else made + bias
    return made.reshape(*x.shape[:-1], -1)


PRODUCTS: dict[str, Product] = {"torch": F.linear, "onednn": _onednn, "parts": _in_parts}


def can(name: str, outputs: int, lies: str) -> bool:
    """Whether a product is there at all, and for such a weight."""
    if name == "onednn":  # private to torch
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if name == "parts":
        return lies == "rows" and any(outputs % count == 0 for count in PARTS)
    return True


# The choice.

_stepping: ContextVar[bool] = ContextVar("stepping", default=False)
_forming: ContextVar[bool] = ContextVar("forming", default=False)
_chosen: dict[ProductShape, str] = {}
_seen: WeakKeyDictionary[nn.Module, set[tuple[int, int]]] = WeakKeyDictionary()  # whose weights have been timed
_lock = threading.Lock()


@contextmanager
def step(model: nn.Module, rows: int) -> Iterator[None]:
    """While open, products of a model's weights with so many rows are the quickest; those of new shapes are timed first."""
    if (
        torch.compiler.is_compiling() or torch.is_grad_enabled() or not 0 < rows <= FEW_ROWS
    ):  # tracing asks nothing of sizes
        yield
        return
    seen, now = _seen.setdefault(model, set()), (rows, torch.get_num_threads())
    if now not in seen:
        parts = [part for part in model.modules() if not isinstance(part, nn.Embedding)]  # tables are only looked up
        choose((own for part in parts for own in part.parameters(recurse=False) if own.ndim == 2), rows)
        seen.add(now)
    token, other = _stepping.set(True), _forming.set(os.environ.get(SETTING) != "torch")
    try:
        yield
    finally:
        _stepping.reset(token)
        _forming.reset(other)


def choose(weights: Iterable[Tensor], rows: int) -> None:
    """Time the products for weights of these shapes, where that has not been done; those of one shape take turns."""
    by_shape: dict[ProductShape, list[Tensor]] = {}
    for weight in weights:
        if _plain(weight):
            by_shape.setdefault(_shape(rows, weight), []).append(weight)
    with _lock, torch.no_grad():
        for shape, several in by_shape.items():
            if shape not in _chosen:
                _chosen[shape] = _fixed(shape) or _quickest(shape, several)


def forms_wanted(x: Tensor) -> bool:
    """Whether a product with weights at few bits may be made by a form of them (`headwise.kernels.prepacked_fp16`): as above."""
    if not _forming.get() or torch.is_grad_enabled():
        return False
    few = 0 < x.numel() // max(1, x.shape[-1]) <= FEW_ROWS
    return few and type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu"


def chosen() -> dict[ProductShape, str]:
    """What has been chosen in this process so far, by shape."""
    return dict(_chosen)


def _choice(x: Tensor, weight: Tensor) -> Product:
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= FEW_ROWS:
        return F.linear
    return PRODUCTS[_chosen.setdefault(_shape(rows, weight), "torch")]  # what was not timed by now never will be


def _may_choose(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _plain(weight)


def _plain(weight: Tensor) -> bool:
    """Not a tensor that is spread over processes, of another kind or elsewhere; and something to multiply by."""
    ours = type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return ours and weight.numel() > 0


def _shape(rows: int, weight: Tensor) -> ProductShape:
    outputs, inputs = weight.shape
    step, along = weight.stride()
    lies = "rows" if (step, along) == (inputs, 1) else "columns" if (step, along) == (1, outputs) else "otherwise"
    return ProductShape(rows, outputs, inputs, lies, torch.get_num_threads())


def _fixed(shape: ProductShape) -> str | None:
    name = os.environ.get(SETTING, MEASURED)
    if name == MEASURED:
        return None
    if name not in PRODUCTS:
        raise HeadwiseError(f"{SETTING} is {name!r}; {close_names(name, [MEASURED, *PRODUCTS])}")
    return name if can(name, shape.outputs, shape.lies) else "torch"


def _quickest(shape: ProductShape, weights: list[Tensor]) -> str:
    """Each product reads some of the weights, others in the first round than in the second; its best round counts."""
    names = [name for name in PRODUCTS if can(name, shape.outputs, shape.lies)]
    x, best = torch.ones(shape.rows, shape.inputs), dict.fromkeys(names, float("inf"))
    clock = time.thread_time if shape.threads == 1 else time.perf_counter  # others may be busy on this machine too
    for turn in range(3 if weights[0].numel() < LARGE else 2):
        for place, name in enumerate(names):
            start = (turn + place) * TRIED % len(weights)
            some = (weights[start:] + weights[:start])[:TRIED]
            began = clock()
            for weight in some:
                PRODUCTS[name](x, weight, None)
            best[name] = min(best[name], (clock() - began) / len(some))
    quickest = min(names, key=lambda name: best[name])
    return quickest if best[quickest] < BETTER * best["torch"] else "torch"
