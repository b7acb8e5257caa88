"""Whose model it is does not matter: what everything that looks at heads, or changes them, asks of a model.

Our `Transformer` and an attached model implement all of it; nobody asks which of the two they have. What one of them cannot
do it refuses itself, with the reason. A copy is `copy.deepcopy(model)`, with heads and sites of its own.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import Heads, Site
from headwise.heads.head import Gates, Pattern
from headwise.spec import ModelSpec, SiteAddress
from headwise.spec.cache_policy import Treatments
from headwise.spec.patch_grid import Grid

if TYPE_CHECKING:
    from headwise.model.residual_stream import Wiring
    from headwise.model.resumable_forward import Pick, Walk

Norms = dict[str, tuple[nn.Module | None, nn.Module | None]]  # by layer: the norm before q, and before k and v


class AnyOutput(Protocol):
    """From final hidden states to a vocabulary."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """(…, D) → (…, V)"""
        ...

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """(N, D), (N,) → the mean surprise at targets, IGNORE left out, or the sum divided by `total`; few logits at once."""
        ...


class AnyPictures(Protocol):
    """How a model reads pictures."""

    how: Any  # how pixels become what it reads, if that is known

    @property
    def grid(self) -> Grid:
        """Which token is which patch; refused where tokens are no patches."""
        ...

    def read(self, given: Any) -> Tensor:
        """A path, a Pillow image, or a tensor that is ready, as (C, height, width)."""
        ...


class AnyModel(Protocol):
    """A model with heads: our `Transformer`, or an attached one."""

    tokenizer: Any
    family: str | None  # whose weights these are, if they came from elsewhere

    # What it is.

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
    def output(self) -> AnyOutput | None:
        """From final hidden states to logits; None where it gives none."""
        ...

    @property
    def pictures(self) -> AnyPictures | None:
        """How it reads pictures; None where it reads something else."""
        ...

    @property
    def start(self) -> int:
        """The token before what an encoder-decoder writes."""
        ...

    @property
    def plans(self) -> tuple[Any, ...]:
        """The plans (`hw.Plan`) by which heads were cut, in their order; heads cut by hand are in none."""
        ...

    @plans.setter
    def plans(self, plans: tuple[Any, ...]) -> None: ...

    # Calls.

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits (B, T, V), or hidden states (B, T, D); `padding`, `source`, `source_padding`, `gates`, `hidden`."""
        ...

    def generate(self, prompt: Any, tokens: int = 64, *, gates: Gates | None = None, seed: int | None = None) -> Any:
        """What is given and what follows, in its own kind: a text, a list of ids, a tensor (B, T). Nothing is dropped out."""
        ...

    def stream(
        self,
        prompt: Any,
        tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        gates: Gates | None = None,
    ) -> Iterator[Tensor]:
        """The tokens that follow, (B,) each, as they are made; temperature 0 takes the best one every time."""
        ...

    # Heads.

    @property
    def heads(self) -> Heads:
        """Every head, by address."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold its heads: then all of them read the same texts and make the same calls."""
        ...

    def sites(self) -> list[Site]:
        """Every place where attention happens, in the order data walks through them; heads of this process alone."""
        ...

    def all_sites(self) -> list[Site]:
        """The same with all heads, whichever process holds them; where it is shared, all must listen and edit alike."""
        ...

    def attention_layers(self) -> Iterable[Any]:
        """The layers that have those sites: `.site`, `.spec`, `.b_O`, and hooks on what they read and what they write."""
        ...

    def norms(self) -> Norms | None:
        """For each layer the norm its heads read through, for q, and for k and v; None where that is not known."""
        ...

    def wiring(self) -> "Wiring":
        """What adds to the stream of a decoder and what reads it at the end; refused, with the reason, where it is no sum."""
        ...

    def walk(
        self,
        ids: Tensor,
        wanted: Collection[SiteAddress],
        pick: "Pick",
        *,
        padding: Tensor | None = None,
        source: Tensor | None = None,
        source_padding: Tensor | None = None,
    ) -> "Walk":
        """A clean pass that stops at the layers wanted, from where it can go on with another z for copies of the batch."""
        ...

    def whole_passes(self) -> str:
        """Why such copies cost whole passes; empty where the stream up to a layer is computed once."""
        ...

    # Others like it.

    def in_memory(self) -> Self:
        """This model, or, if weights are offloaded, a copy with all weights in memory."""
        ...

    def untrained(self, seed: int = 0) -> "AnyModel":
        """A model of the same shape that has learned nothing."""
        ...

    def without(
        self, heads: Pattern, folded: Mapping[SiteAddress, Tensor] | None = None, cache: Treatments | None = None
    ) -> Self:
        """A smaller model without these heads, sharing no memory with this one, which stays as it is.

        `folded` is added to output biases; `cache` says what key heads keep (None: what they kept).
        """
        ...

    def check_own(self, what: str) -> None:
        """Refuse what only models of our own can do, as said in `what`; one that is not says what it is."""
        ...

    # Weights and folders.

    def modules(self) -> Iterator[nn.Module]:
        """Its parts."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Its weights, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over weights by the names they have in a folder it was saved to; the names that are not known."""
        ...

    def save(self, folder: str | Path) -> Path:
        """Write it, whole or not at all; `hw.load(folder)` brings it back."""
        ...

    @classmethod
    def reopen(cls, folder: str | Path) -> Self:
        """What `save` wrote, as a model of this very kind, in float32 on the CPU."""
        ...

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write it for transformers, zeros in place of heads that were cut."""
        ...

    # Modes.

    @property
    def checkpointing(self) -> bool:
        """Whether activations inside blocks are recomputed in the backward pass."""
        ...

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None: ...

    def train(self, mode: bool = True) -> Self:
        """Training mode, or not."""
        ...

    def eval(self) -> Self:
        """Not training."""
        ...


def is_model(model: object) -> TypeGuard[AnyModel]:
    """Whether something can be asked all of that."""
    asked = [name for name, member in vars(AnyModel).items() if isfunction(member) and not name.startswith("_")]
    return all(callable(getattr(type(model), name, None)) for name in asked)


def check_model(model: object) -> None:
    """Refuse what is not a model in this sense: a module, or a transformers model that nobody attached to.

    >>> check_model(nn.Linear(2, 2))
    Traceback (most recent call last):
    headwise.errors.HeadwiseError: this needs a headwise model; got Linear. Use hw.load(…) or hw.attach(model).
    """
    if not is_model(model):
        raise HeadwiseError(
            f"this needs a headwise model; got {type(model).__name__}. Use hw.load(…) or hw.attach(model)."
        )


# Parts that were in training mode before `quiet`, and how many callers, of all threads, keep them out of it now.
_quiet_users: dict[nn.Module, int] = {}
_quiet_lock = threading.Lock()


@contextmanager
def quiet(model: AnyModel | nn.Module, parts: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """While open nothing is dropped out; afterwards every part trains, or does not, as before, also after an error.

    Part by part: whoever trains one block and keeps the others frozen finds them so again. `parts` are the model's modules,
    where they are known already. If several threads are inside, the modes come back when the last one leaves.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with quiet(model):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    parts = tuple(model.modules()) if parts is None else parts
    with _quiet_lock:
        trained = [part for part in parts if part.training or part in _quiet_users]
        frozen = set(parts).difference(trained) if trained else parts
        for part in trained:
            _quiet_users[part] = _quiet_users.get(part, 0) + 1
        if any(part.training for part in trained):
            model.eval()
    try:
        yield
    finally:
        with _quiet_lock:
            for part in trained:
                _quiet_users[part] -= 1
                if not _quiet_users[part]:
                    del _quiet_users[part]
                    part.training = True
            for part in frozen:
                if part.training:
                    part.training = False
