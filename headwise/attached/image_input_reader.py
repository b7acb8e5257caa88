"""Image input of an attached model: preprocessing, and the assignment of tokens to patches.

The assignment is measured: the pixels of one row of patches at a time are changed, then those of one column at a time, and
the queries of the first layer show which tokens depend on them.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.io.images import ImagePreprocessor, open_image
from headwise.spec.patch_grid import PatchGrid, TokenKind

BATCH_IMAGES = 16  # images per call
# Names of parameters for tokens that are not patches.
SPECIAL_TOKEN_KINDS: dict[str, TokenKind] = {
    "cls_token": "class", "class_token": "class", "class_embedding": "class", "register_tokens": "register",
    "distillation_token": "other", "detection_tokens": "other",
}  # fmt: skip


class ImageInputReader:
    """Image input of a model that takes pixels.

    Attributes:
        preprocessor: Preprocessing of images; None if images must be given as tensors.
    """

    def __init__(self, model: Any, layers: Sequence[AttachedLayer], preprocessor: ImagePreprocessor | None) -> None:
        self._model, self._layers = model, layers
        self.preprocessor = preprocessor
        self._grid: PatchGrid | None = None

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input image."""
        config = self._model.config
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        size = (size, size) if isinstance(size, int) else tuple(size or ())
        if len(size) != 2 or not isinstance(channels, int):
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: its configuration has no image_size, so images cannot be prepared. Call the "
                f"model itself inside hw.record(attached)."
            )
        return channels, int(size[0]), int(size[1])

    def read_image(self, image: Any) -> Tensor:
        """Convert a path, a Pillow image or a preprocessed tensor to (C, height, width)."""
        if isinstance(image, Tensor):
            ready = image[0] if image.ndim == 4 and len(image) == 1 else image
            if tuple(ready.shape) != self.image_shape or not ready.is_floating_point():
                raise ArgumentError(
                    f"image: {type(self._model).__name__} requires a preprocessed float tensor of shape {self.image_shape} "
                    f"(channels, height, width). Got {image.dtype} {tuple(image.shape)}."
                )
            return ready
        if self.preprocessor is None:
            raise ArgumentError(
                f"image: the preprocessing of {type(self._model).__name__} is unknown. Attach the model with its image "
                f"processor, hw.attach(model, processor), or pass preprocessed tensors of shape {self.image_shape}."
            )
        pil_image = open_image(image) if isinstance(image, str | Path) else image
        if not hasattr(pil_image, "convert") or not hasattr(pil_image, "resize"):
            raise ArgumentError(f"image: must be a path, a Pillow image or a tensor. Got {type(image).__name__}.")
        pixels = self.preprocessor.to_tensor(pil_image, self.image_shape[0])
        if tuple(pixels.shape) != self.image_shape:
            raise ArgumentError(
                f"image: the image processor returns {tuple(pixels.shape)} for this image, but {type(self._model).__name__} "
                f"requires {self.image_shape}. Use the image processor of this model."
            )
        return pixels

    @property
    def token_patch_grid(self) -> PatchGrid:
        """Assignment of tokens to patches, measured once. Raises an error if tokens are not patches."""
        if self._grid is None:
            self._grid = self._find_grid()
        return self._grid

    def _find_grid(self) -> PatchGrid:
        channels, height, width = self.image_shape
        patch = _patch_size(self._model)
        rows, columns = height // patch[0], width // patch[1]
        generator = torch.Generator().manual_seed(0)
        base, other = torch.randn(2, channels, height, width, generator=generator, device="cpu")
        probes = [base]
        for axis, count, size in ((1, rows, patch[0]), (2, columns, patch[1])):
            for index in range(count):
                changed = base.clone()
                region = [slice(None)] * 3
                region[axis] = slice(index * size, (index + 1) * size)
                changed[tuple(region)] = other[tuple(region)]
                probes.append(changed)
        changed_tokens = self._changed_tokens(torch.stack(probes))  # (rows + columns, T)
        return _build_grid(
            type(self._model).__name__, changed_tokens[:rows], changed_tokens[rows:], _special_token_kinds(self._model)
        )

    @torch.no_grad()
    def _changed_tokens(self, probes: Tensor) -> Tensor:
        """Return which tokens differ between the first image and each other one, in the first layer: (n, T)."""
        reference = next(self._model.parameters())
        changes: list[Tensor] = []
        for probe_batch in probes[1:].split(BATCH_IMAGES):
            batch = torch.cat((probes[:1], probe_batch)).to(reference)
            q = self._first_queries(batch)
            if len(q) != len(batch):
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} does not process an image as one sequence of tokens (it uses windows, or "
                    f"combines images), so tokens cannot be assigned to patches. Call the model itself inside "
                    f"hw.record(attached)."
                )
            difference = (q[1:] - q[:1]).abs().amax((1, 3))  # (n, T)
            changes.append(difference > 1e3 * torch.finfo(q.dtype).eps * q.abs().amax())
        return torch.cat(changes)

    def _first_queries(self, batch: Tensor) -> Tensor:
        """Return the queries of the first layer, (B, H, T, d), without running the later layers."""
        queries: list[Tensor] = []

        def on_call(call: AttentionCall) -> None:
            queries.append(call.q)
            raise _QueriesCapturedError

        was_training = self._model.training
        self._model.eval()
        try:
            with self._layers[0].hook_point.listen(on_call):
                self._model(**{self._model.main_input_name: batch})
        except _QueriesCapturedError:
            pass
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            message = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{type(self._model).__name__} cannot be called with an image alone ({message}). Call the model itself "
                f"inside hw.record(attached)."
            ) from error
        finally:
            self._model.train(was_training)
        return queries[0]


class _QueriesCapturedError(Exception):
    """Raised to stop the forward pass in the first layer."""


def _patch_size(model: Any) -> tuple[int, int]:
    size = getattr(model.config, "patch_size", None)
    size = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(size) != 2:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its configuration has no patch_size (height and width), so its tokens cannot be "
            f"assigned to patches of an image. Call the model itself inside hw.record(attached)."
        )
    return int(size[0]), int(size[1])


def _special_token_kinds(model: nn.Module) -> list[TokenKind]:
    """Return the kinds of tokens that are not patches, in the order of the sequence."""
    model_kinds: list[TokenKind] = []
    for name, weight in model.named_parameters():
        kind = SPECIAL_TOKEN_KINDS.get(name.rpartition(".")[2])
        if kind is not None:
            model_kinds.extend(kind for _ in range(1 if weight.ndim < 2 else weight.shape[-2]))
    order: tuple[TokenKind, ...] = ("class", "other", "register")
    return [kind for kind in order for model_kind in model_kinds if model_kind == kind]


def _build_grid(
    name: str, changed_by_row: Tensor, changed_by_column: Tensor, special_kinds: list[TokenKind]
) -> PatchGrid:
    """Build the grid from the tokens that each row and each column of patches changes: (rows, T) and (columns, T)."""
    rows, columns = len(changed_by_row), len(changed_by_column)
    change_counts = torch.stack((changed_by_row.sum(0), changed_by_column.sum(0)))  # (2, T)
    is_patch = (change_counts == 1).all(0)
    if not bool((is_patch | (change_counts == 0).all(0)).all()):
        raise UnsupportedModelError(
            f"{name}: its tokens depend on more than one patch each, so they cannot be assigned to patches."
        )
    patch_of_token = torch.where(
        is_patch, changed_by_row.int().argmax(0) * columns + changed_by_column.int().argmax(0), -1
    ).tolist()
    if sorted(patch for patch in patch_of_token if patch >= 0) != list(range(rows * columns)):
        raise UnsupportedModelError(
            f"{name}: each patch of an image must have exactly one token. Got {rows} × {columns} patches and "
            f"{sum(patch >= 0 for patch in patch_of_token)} tokens that belong to a patch. Call the model itself inside "
            f"hw.record(attached)."
        )
    special_count = patch_of_token.count(-1)
    unnamed: list[TokenKind] = ["other"] * special_count
    kinds = special_kinds if len(special_kinds) == special_count else unnamed
    names = iter(kinds)
    return PatchGrid(
        rows, columns, tuple(patch_of_token), tuple("patch" if patch >= 0 else next(names) for patch in patch_of_token)
    )
