"""What somebody else's model reads of a picture: how pixels come in, and which token is which patch.

Which token is which patch is in no table: pixels of one row of patches after the other are changed, then of one column after
the other, and the queries of the first layer say which tokens changed.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.io.images import ImagePreprocessor, open_image
from headwise.spec.patch_grid import PatchGrid, TokenKind

BATCH_IMAGES = 16  # pictures of one call
# What tokens that are no patches are called where a model keeps them.
SPECIAL_TOKEN_KINDS: dict[str, TokenKind] = {
    "cls_token": "class", "class_token": "class", "class_embedding": "class", "register_tokens": "register",
    "distillation_token": "other", "detection_tokens": "other",
}  # fmt: skip


class ImageInput:
    """How a model that reads pixels reads them."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer], preprocessor: ImagePreprocessor | None) -> None:
        self._model, self._layers = model, layers
        self.preprocessor = preprocessor
        self._grid: PatchGrid | None = None

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what it reads."""
        config = self._model.config
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        size = (size, size) if isinstance(size, int) else tuple(size or ())
        if len(size) != 2 or not isinstance(channels, int):
            raise HeadwiseError(
                f"the configuration of {type(self._model).__name__} does not say how large its pictures are; call the model "
                f"itself, inside hw.record(attached)."
            )
        return channels, int(size[0]), int(size[1])

    def read_image(self, image: Any) -> Tensor:
        """A path, a Pillow image, or a tensor that is ready, as (C, height, width)."""
        if isinstance(image, Tensor):
            ready = image[0] if image.ndim == 4 and len(image) == 1 else image
            if tuple(ready.shape) != self.image_shape or not ready.is_floating_point():
                raise HeadwiseError(
                    f"{type(self._model).__name__} reads pictures of {self.image_shape}, channels first, as numbers that are "
                    f"ready for it; got {image.dtype} {tuple(image.shape)}."
                )
            return ready
        if self.preprocessor is None:
            raise HeadwiseError(
                f"how pixels become what {type(self._model).__name__} reads is not known: attach it with its image "
                f"processor, hw.attach(model, processor), or give tensors of {self.image_shape} that are ready for it."
            )
        pil_image = open_image(image) if isinstance(image, str | Path) else image
        if not hasattr(pil_image, "convert") or not hasattr(pil_image, "resize"):
            raise HeadwiseError(f"a picture is a path, a Pillow image or a tensor; got {type(image).__name__}.")
        pixels = self.preprocessor.to_tensor(pil_image, self.image_shape[0])
        if tuple(pixels.shape) != self.image_shape:
            raise HeadwiseError(
                f"its image processor makes {tuple(pixels.shape)} of this picture, and {type(self._model).__name__} reads "
                f"{self.image_shape}; the two do not belong together."
            )
        return pixels

    @property
    def token_patch_grid(self) -> PatchGrid:
        """Which token is which patch, found out once; refused where tokens are no patches."""
        if self._grid is None:
            self._grid = self._find_grid()
        return self._grid

    def _find_grid(self) -> PatchGrid:
        channels, height, width = self.image_shape
        patch = _patch_size(self._model)
        rows, columns = height // patch[0], width // patch[1]
        generator = torch.Generator().manual_seed(0)
        base, other = torch.randn(2, channels, height, width, generator=generator)
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
        """Which tokens the pictures behind the first one change, before any token has looked at another: (n, T)."""
        reference = next(self._model.parameters())
        changes: list[Tensor] = []
        for probe_batch in probes[1:].split(BATCH_IMAGES):
            batch = torch.cat((probes[:1], probe_batch)).to(reference)
            q = self._first_queries(batch)
            if len(q) != len(batch):
                raise HeadwiseError(
                    f"{type(self._model).__name__} does not look at a picture as one row of tokens (it cuts it into windows, "
                    f"or puts pictures together), so its tokens have no places here; call the model itself, inside "
                    f"hw.record(attached)."
                )
            difference = (q[1:] - q[:1]).abs().amax((1, 3))  # (n, T)
            changes.append(difference > 1e3 * torch.finfo(q.dtype).eps * q.abs().amax())
        return torch.cat(changes)

    def _first_queries(self, batch: Tensor) -> Tensor:
        """The queries of the first layer that is called, (B, H, T, d); nothing behind it runs."""
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
            raise HeadwiseError(
                f"{type(self._model).__name__} cannot be called with one picture alone ({message}); call the model itself, "
                f"inside hw.record(attached)."
            ) from error
        finally:
            self._model.train(was_training)
        return queries[0]


class _QueriesCapturedError(Exception):
    """The first layer was reached."""


def _patch_size(model: Any) -> tuple[int, int]:
    size = getattr(model.config, "patch_size", None)
    size = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(size) != 2:
        raise HeadwiseError(f"the configuration of {type(model).__name__} does not say how large its patches are.")
    return int(size[0]), int(size[1])


def _special_token_kinds(model: nn.Module) -> list[TokenKind]:
    """The tokens a model keeps that are no patches, in the order it names them."""
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
    """The grid, from which tokens each row and each column of patches changes: (rows, T) and (columns, T)."""
    rows, columns = len(changed_by_row), len(changed_by_column)
    change_counts = torch.stack((changed_by_row.sum(0), changed_by_column.sum(0)))  # (2, T)
    is_patch = (change_counts == 1).all(0)
    if not bool((is_patch | (change_counts == 0).all(0)).all()):
        raise HeadwiseError(
            f"tokens of {name} read more than one patch each, so they have no places in the picture here."
        )
    patch_of_token = torch.where(
        is_patch, changed_by_row.int().argmax(0) * columns + changed_by_column.int().argmax(0), -1
    ).tolist()
    if sorted(patch for patch in patch_of_token if patch >= 0) != list(range(rows * columns)):
        raise HeadwiseError(
            f"{name} reads {rows} rows of {columns} patches, but its tokens are not those: "
            f"{sum(patch >= 0 for patch in patch_of_token)} read one."
        )
    special_count = patch_of_token.count(-1)
    unnamed: list[TokenKind] = ["other"] * special_count
    kinds = special_kinds if len(special_kinds) == special_count else unnamed
    names = iter(kinds)
    return PatchGrid(
        rows, columns, tuple(patch_of_token), tuple("patch" if patch >= 0 else next(names) for patch in patch_of_token)
    )
