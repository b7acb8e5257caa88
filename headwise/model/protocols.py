"""Interface of models for analysis and compression, implemented by `Transformer` and by attached models.

Callers do not distinguish the two. A model raises an error with the reason if it does not support an operation.
`copy.deepcopy(model)` returns a copy with its own heads and hook points.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads import Heads, HookPoint
from headwise.heads.head import Gates, HeadPattern
from headwise.kernels.matmul_tuner import MatmulTuner
from headwise.spec import LayerAddress, ModelSpec, Plan
from headwise.spec.cache_policy import CachePolicies
from headwise.spec.patch_grid import PatchGrid

if TYPE_CHECKING:
    from headwise.model.prefix_forward import PrefixForward
    from headwise.model.residual_stream import ResidualStream
    from headwise.model.resumable_forward import ResumableForward, RowSelector
    from headwise.model.simulated_streaming_forward import SimulatedStreamingForward

Norms = dict[str, tuple[nn.Module | None, nn.Module | None]]  # by layer: input norm of q, input norm of k and v


class OutputLayerProtocol(Protocol):
    """Output layer from final hidden states to logits."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits: (…, D) → (…, V)."""
        ...

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """Return the mean cross-entropy of (N, D) and targets (N,), or the sum divided by `total`.

        Targets of IGNORE_INDEX are ignored. Logits are computed in chunks.
        """
        ...


class ImageInputProtocol(Protocol):
    """Image input of a model.

    Attributes:
        preprocessor: Preprocessor from pixels to the model's input, or None if it is unknown.
    """

    preprocessor: Any

    @property
    def token_patch_grid(self) -> PatchGrid:
        """Patch of each token. Raises if the tokens of the model are not patches."""
        ...

    def read_image(self, image: Any) -> Tensor:
        """Return an image, given as a path, a Pillow image or a preprocessed tensor, as (C, height, width)."""
        ...


class ModelProtocol(Protocol):
    """A model with heads: a `Transformer` or an attached model.

    Attributes:
        tokenizer: Tokenizer of the model, or None.
        family: Model family of the weights if they were loaded, otherwise None.
        matmul_tuner: Choice of the matrix products of decode steps and of long analyses.
    """

    tokenizer: Any
    family: str | None
    matmul_tuner: MatmulTuner

    # Properties.

    @property
    def training(self) -> bool:
        """True in training mode."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """Configuration of the model."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    @property
    def output(self) -> OutputLayerProtocol | None:
        """Output layer from final hidden states to logits, or None."""
        ...

    @property
    def image_input(self) -> ImageInputProtocol | None:
        """Image input of the model, or None if it does not read images."""
        ...

    @property
    def decoder_start_token(self) -> int:
        """First decoder token of an encoder-decoder."""
        ...

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans (`hw.Plan`) that were applied to the model, in order. Heads pruned without a plan are not included."""
        ...

    @plans.setter
    def plans(self, plans: tuple[Plan, ...]) -> None: ...

    # Calls.

    def __call__(self, ids: Tensor, **options: Any) -> Tensor:
        """Return logits (B, T, V), or hidden states (B, T, D) if `hidden` is True.

        Options: `attention_mask`, `source`, `source_attention_mask`, `gates`, `hidden`.
        """
        ...

    def generate(
        self, prompt: Any, max_new_tokens: int = 64, *, gates: Gates | None = None, seed: int | None = None
    ) -> Any:
        """Return the prompt and its continuation in the type of the prompt: text, list of ids or tensor (B, T)."""
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
        """Yield the generated tokens step by step, (B,) each. Temperature 0 chooses the most likely token."""
        ...

    # Heads.

    @property
    def heads(self) -> Heads:
        """All heads by address."""
        ...

    @property
    def is_native(self) -> bool:
        """True for Headwise's own models, False for attached models."""
        ...

    @property
    def is_sharded(self) -> bool:
        """True if the heads are split over several processes, which must then make the same calls on the same texts."""
        ...

    def hook_points(self) -> list[HookPoint]:
        """Return the hook points of all attention layers in forward order, with the heads of this process."""
        ...

    def gathered_hook_points(self) -> list[HookPoint]:
        """Return the hook points with the heads of all processes. All processes must open the same listeners and edits."""
        ...

    def attention_layers(self) -> Iterable[Any]:
        """Return the attention layers in the order of `hook_points`, with `.hook_point`, `.spec` and `.b_O`."""
        ...

    def input_norms(self) -> Norms | None:
        """Return the input norms of q, and of k and v, for each layer. None if they are not known."""
        ...

    def residual_stream(self) -> "ResidualStream":
        """Return the additive terms, norms and output of a decoder's residual stream. Raises if it is not a plain sum."""
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
        """Run a forward pass with a checkpoint at some layers, from which it can be resumed with another z."""
        ...

    def why_not_resumable(self) -> str:
        """Return why resuming needs full forward passes. Empty if the layers before a checkpoint are not run again."""
        ...

    def prefix_forward(self, prefix_ids: Tensor) -> "PrefixForward | None":
        """Return forward passes after a prefix, (B, P), that is computed once. None if the model does not support them."""
        ...

    def recompute_blocks(self) -> AbstractContextManager[None]:
        """Recompute the activations of blocks in the backward pass while the context is open, instead of storing them."""
        ...

    def streaming_forward(self) -> "SimulatedStreamingForward":
        """Return the forward passes of a decoder in which KV heads stream."""
        ...

    # Copies and variants.

    def copy_offloaded_to_memory(self) -> Self:
        """Return this model, or a copy with all weights in memory if some weights are offloaded."""
        ...

    def untrained(self, seed: int = 0) -> "ModelProtocol":
        """Return a model of the same spec with random weights."""
        ...

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
    ) -> Self:
        """Return a smaller model without these heads. This model stays unchanged and shares no memory with it.

        Args:
            heads: Heads to prune, by address or pattern.
            folded_biases: Added to the output biases of layers, (D,) each.
            cache: Cache policies of the KV heads. None means those of the model.
        """
        ...

    def check_native(self, operation: str) -> None:
        """Raise if the model is not native. `operation` names the operation that only native models support."""
        ...

    # Weights and folders.

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all weights by name."""
        ...

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load weights by the names that they have in a saved folder. Return the unknown names."""
        ...

    def save(self, folder: str | Path) -> Path:
        """Save the model atomically to a folder. `hw.load(folder)` loads it."""
        ...

    @classmethod
    def reopen(cls, folder: str | Path) -> Self:
        """Load a model that `save` wrote as an instance of this class, in float32 on the CPU."""
        ...

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model in the format of transformers, with zeros for pruned heads."""
        ...

    # Modes.

    @property
    def checkpointing(self) -> bool:
        """True if activations of blocks are recomputed in the backward pass (activation checkpointing)."""
        ...

    @checkpointing.setter
    def checkpointing(self, enabled: bool) -> None: ...

    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode if `mode` is False."""
        ...

    def eval(self) -> Self:
        """Set evaluation mode."""
        ...


def is_model(model: object) -> TypeGuard[ModelProtocol]:
    """Return True if an object implements `ModelProtocol`."""
    methods = [name for name, member in vars(ModelProtocol).items() if isfunction(member) and not name.startswith("_")]
    return all(callable(getattr(type(model), name, None)) for name in methods)


def check_model(model: object) -> None:
    """Raise if an object does not implement `ModelProtocol`, for example a transformers model that is not attached.

    >>> check_model(nn.Linear(2, 2))
    Traceback (most recent call last):
    headwise.errors.ArgumentError: model: must be a headwise model. Got Linear. Use hw.load(…) or hw.attach(model).
    """
    if not is_model(model):
        raise ArgumentError(
            f"model: must be a headwise model. Got {type(model).__name__}. Use hw.load(…) or hw.attach(model)."
        )


# Modules that were in training mode before `eval_mode`, and the number of its open contexts in all threads.
_eval_users: dict[nn.Module, int] = {}
_eval_lock = threading.Lock()


@contextmanager
def eval_mode(model: ModelProtocol | nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore the mode of each module afterwards, also after an error.

    If several threads are inside the context, the modes are restored when the last one leaves.

    Args:
        model: The model.
        modules: Modules of the model, if the caller already has them.

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
