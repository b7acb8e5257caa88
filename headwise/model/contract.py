"""Whose model it is does not matter: what everything that looks at heads, or changes them, asks of a model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from headwise.heads import Heads, Site
from headwise.spec import ModelSpec


class AnyModel(Protocol):
    """A model with heads: our `Transformer`, or an attached one."""

    tokenizer: Any

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """What it is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    @property
    def output(self) -> Callable[[Tensor], Tensor] | None:
        """From final hidden states to logits."""
        ...

    @property
    def start(self) -> int:
        """The token before what an encoder-decoder writes."""
        ...

    @property
    def heads(self) -> Heads:
        """Every head, by address."""
        ...

    def sites(self) -> list[Site]:
        """Every place where attention happens."""
        ...

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits (B, T, V), or hidden states (B, T, D); `padding`, `source`, `source_padding`, `gates`, `hidden`."""
        ...

    def attention_layers(self) -> Iterable[Any]:
        """The layers that have those sites: `.site`, `.b_O`, and hooks before they are run."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Its parts."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Its weights, by name."""
        ...

    def train(self, mode: bool = True) -> Self:
        """Training mode, or not."""
        ...

    def eval(self) -> Self:
        """Not training."""
        ...


@contextmanager
def quiet(model: AnyModel | nn.Module) -> Iterator[None]:
    """While open nothing is dropped out; afterwards every part trains, or does not, as before, also after an error.

    Part by part: whoever trains one block and keeps the others frozen finds them so again.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with quiet(model):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
