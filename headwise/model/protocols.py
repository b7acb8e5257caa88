"""Whose model it is does not matter: what everything that looks at heads, or changes them, asks of a model.

Our `Transformer` and an attached model implement all of it; nobody asks which of the two they have. What one of them cannot
do it refuses itself, with the reason. A copy is `copy.deepcopy(model)`, with heads and hook points of its own.
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
from headwise.heads import Heads, HookPoint
from headwise.heads.head import Gates, HeadPattern
from headwise.spec import LayerAddress, ModelSpec, Plan
from headwise.spec.cache_policy import CachePolicies
from headwise.spec.patch_grid import PatchGrid

if TYPE_CHECKING:
    from headwise.model.residual_stream import ResidualStream
    from headwise.model.resumable_forward import ResumableForward, RowSelector

Norms = dict[str, tuple[nn.Module | None, nn.Module | None]]  # by layer: the norm before q, and before k and v


class LMHeadProtocol(Protocol):
    """From final hidden states to a vocabulary."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """(…, D) → (…, V)"""
        ...

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """(N, D), (N,) → the mean surprise at targets, IGNORE left out, or the sum divided by `total`; few logits at once."""
        ...


class ImageInputProtocol(Protocol):
    """How a model reads pictures."""

    preprocessor: Any  # how pixels become what it reads, if that is known

    @property
    def token_patch_grid(self) -> PatchGrid:
        """Which token is which patch; refused where tokens are no patches."""
        ...

    def read_image(self, image: Any) -> Tensor:
        """A path, a Pillow image, or a tensor that is ready, as (C, height, width)."""
        ...


class ModelProtocol(Protocol):
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
    def output(self) -> LMHeadProtocol | None:
        """From final hidden states to logits; None where it gives none."""
        ...

    @property
    def image_input(self) -> ImageInputProtocol | None:
        """How it reads pictures; None where it reads something else."""
        ...

    @property
    def decoder_start_token(self) -> int:
        """The token before what an encoder-decoder writes."""
        ...

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans (`hw.Plan`) by which heads were cut, in their order; heads cut by hand are in none."""
        ...

    @plans.setter
    def plans(self, plans: tuple[Plan, ...]) -> None: ...

    # Calls.

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits (B, T, V), or hidden states (B, T, D).

        Options: `attention_mask`, `source`, `source_attention_mask`, `gates`, `hidden`.
        """
        ...

    def generate(
        self, prompt: Any, max_new_tokens: int = 64, *, gates: Gates | None = None, seed: int | None = None
    ) -> Any:
        """What is given and what follows, in its own kind: a text, a list of ids, a tensor (B, T). Nothing is dropped out."""
        ...

    def stream(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
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
    def is_sharded(self) -> bool:
        """Whether several processes hold its heads: then all of them read the same texts and make the same calls."""
        ...

    def hook_points(self) -> list[HookPoint]:
        """Every place where attention happens, in the order data walks through them; heads of this process alone."""
        ...

    def gathered_hook_points(self) -> list[HookPoint]:
        """The same with all heads, whichever process holds them; where it is shared, all must listen and edit alike."""
        ...

    def attention_layers(self) -> Iterable[Any]:
        """The layers of those hook points: `.hook_point`, `.spec`, `.b_O`, and hooks on what they read and write."""
        ...

    def input_norms(self) -> Norms | None:
        """For each layer the norm its heads read through, for q, and for k and v; None where that is not known."""
        ...

    def residual_stream(self) -> "ResidualStream":
        """What adds to the stream of a decoder and what reads it at the end; refused, with the reason, where it is no sum."""
        ...

    def resumable_forward(
        self,
        ids: Tensor,
        layer_addresses: Collection[LayerAddress],
        select_rows: "RowSelector",
        *,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
    ) -> "ResumableForward":
        """A clean pass that stops at the layers wanted, from where it can go on with another z for copies of the batch."""
        ...

    def why_not_resumable(self) -> str:
        """Why such copies cost whole passes; empty where the stream up to a layer is computed once."""
        ...

    # Others like it.

    def copy_offloaded_to_memory(self) -> Self:
        """This model, or, if weights are offloaded, a copy with all weights in memory."""
        ...

    def untrained(self, seed: int = 0) -> "ModelProtocol":
        """A model of the same shape that has learned nothing."""
        ...

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
    ) -> Self:
        """Return a smaller model without these heads. It shares no memory with this one, which stays unchanged.

        Args:
            heads: Heads to prune, by address or pattern.
            folded_biases: Added to the output biases of layers, (D,) each.
            cache: Cache policies of the KV heads; None keeps those of the model.
        """
        ...

    def check_native(self, operation: str) -> None:
        """Refuse what only models of our own can do, as said in `operation`; one that is not says what it is."""
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

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
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
    def checkpointing(self, enabled: bool) -> None: ...

    def train(self, mode: bool = True) -> Self:
        """Training mode, or not."""
        ...

    def eval(self) -> Self:
        """Not training."""
        ...


def is_model(model: object) -> TypeGuard[ModelProtocol]:
    """Whether something can be asked all of that."""
    methods = [name for name, member in vars(ModelProtocol).items() if isfunction(member) and not name.startswith("_")]
    return all(callable(getattr(type(model), name, None)) for name in methods)


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


# Parts that were in training mode before `eval_mode`, and how many callers, of all threads, keep them out of it now.
_eval_users: dict[nn.Module, int] = {}
_eval_lock = threading.Lock()


@contextmanager
def eval_mode(model: ModelProtocol | nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """While open nothing is dropped out; afterwards every part trains, or does not, as before, also after an error.

    Part by part: whoever trains one block and keeps the others frozen finds them so again. `modules` are the model's modules,
    where they are known already. If several threads are inside, the modes come back when the last one leaves.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with eval_mode(model):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    modules = tuple(model.modules()) if modules is None else modules
    with _eval_lock:
        trained = [module for module in modules if module.training or module in _eval_users]
        frozen = set(modules).difference(trained) if trained else modules
        for module in trained:
            _eval_users[module] = _eval_users.get(module, 0) + 1
        if any(module.training for module in trained):
            model.eval()
    try:
        yield
    finally:
        with _eval_lock:
            for module in trained:
                _eval_users[module] -= 1
                if not _eval_users[module]:
                    del _eval_users[module]
                    module.training = True
            for module in frozen:
                if module.training:
                    module.training = False
