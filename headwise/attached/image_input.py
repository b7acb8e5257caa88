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

from headwise.attached.layer import Layer
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.io.images import Pixels, open_picture
from headwise.spec.patch_grid import Grid, Kind

AT_ONCE = 16  # pictures of one call
# What tokens that are no patches are called where a model keeps them.
TOKENS: dict[str, Kind] = {
    "cls_token": "class", "class_token": "class", "class_embedding": "class", "register_tokens": "register",
    "distillation_token": "other", "detection_tokens": "other",
}  # fmt: skip


class Pictures:
    """How a model that reads pixels reads them."""

    def __init__(self, model: Any, layers: Sequence[Layer], how: Pixels | None) -> None:
        self._model, self._layers = model, layers
        self.how = how
        self._grid: Grid | None = None

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what it reads."""
        config = self._model.config
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        size = (size, size) if isinstance(size, int) else tuple(size or ())
        if len(size) != 2 or not isinstance(channels, int):
            raise HeadwiseError(
                f"the configuration of {type(self._model).__name__} does not say how large its pictures are; call the model "
                f"itself, inside hw.record(theirs)."
            )
        return channels, int(size[0]), int(size[1])

    def read(self, given: Any) -> Tensor:
        """A path, a Pillow image, or a tensor that is ready, as (C, height, width)."""
        if isinstance(given, Tensor):
            ready = given[0] if given.ndim == 4 and len(given) == 1 else given
            if tuple(ready.shape) != self.shape or not ready.is_floating_point():
                raise HeadwiseError(
                    f"{type(self._model).__name__} reads pictures of {self.shape}, channels first, as numbers that are "
                    f"ready for it; got {given.dtype} {tuple(given.shape)}."
                )
            return ready
        if self.how is None:
            raise HeadwiseError(
                f"how pixels become what {type(self._model).__name__} reads is not known: attach it with its image "
                f"processor, hw.attach(model, processor), or give tensors of {self.shape} that are ready for it."
            )
        picture = open_picture(given) if isinstance(given, str | Path) else given
        if not hasattr(picture, "convert") or not hasattr(picture, "resize"):
            raise HeadwiseError(f"a picture is a path, a Pillow image or a tensor; got {type(given).__name__}.")
        made = self.how.numbers(picture, self.shape[0])
        if tuple(made.shape) != self.shape:
            raise HeadwiseError(
                f"its image processor makes {tuple(made.shape)} of this picture, and {type(self._model).__name__} reads "
                f"{self.shape}; the two do not belong together."
            )
        return made

    @property
    def grid(self) -> Grid:
        """Which token is which patch, found out once; refused where tokens are no patches."""
        if self._grid is None:
            self._grid = self._find_grid()
        return self._grid

    def _find_grid(self) -> Grid:
        channels, high, wide = self.shape
        patch = _patch_size(self._model)
        rows, columns = high // patch[0], wide // patch[1]
        dice = torch.Generator().manual_seed(0)
        first, other = torch.randn(2, channels, high, wide, generator=dice)
        tried = [first]
        for axis, count, size in ((1, rows, patch[0]), (2, columns, patch[1])):
            for place in range(count):
                changed = first.clone()
                part = [slice(None)] * 3
                part[axis] = slice(place * size, (place + 1) * size)
                changed[tuple(part)] = other[tuple(part)]
                tried.append(changed)
        moved = self._moved(torch.stack(tried))  # (rows + columns, T)
        return _laid_out(type(self._model).__name__, moved[:rows], moved[rows:], _others(self._model))

    @torch.no_grad()
    def _moved(self, tried: Tensor) -> Tensor:
        """Which tokens the pictures behind the first one change, before any token has looked at another: (n, T)."""
        like = next(self._model.parameters())
        made: list[Tensor] = []
        for some in tried[1:].split(AT_ONCE):
            batch = torch.cat((tried[:1], some)).to(like)
            q = self._first_queries(batch)
            if len(q) != len(batch):
                raise HeadwiseError(
                    f"{type(self._model).__name__} does not look at a picture as one row of tokens (it cuts it into windows, "
                    f"or puts pictures together), so its tokens have no places here; call the model itself, inside "
                    f"hw.record(theirs)."
                )
            far = (q[1:] - q[:1]).abs().amax((1, 3))  # (n, T)
            made.append(far > 1e3 * torch.finfo(q.dtype).eps * q.abs().amax())
        return torch.cat(made)

    def _first_queries(self, batch: Tensor) -> Tensor:
        """The queries of the first layer that is called, (B, H, T, d); nothing behind it runs."""
        found: list[Tensor] = []

        def hear(seen: Seen) -> None:
            found.append(seen.q)
            raise _SeenError

        was = self._model.training
        self._model.eval()
        try:
            with self._layers[0].site.listen(hear):
                self._model(**{self._model.main_input_name: batch})
        except _SeenError:
            pass
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            words = " ".join(str(error).split())
            raise HeadwiseError(
                f"{type(self._model).__name__} cannot be called with one picture alone ({words}); call the model itself, "
                f"inside hw.record(theirs)."
            ) from error
        finally:
            self._model.train(was)
        return found[0]


class _SeenError(Exception):
    """The first layer was reached."""


def _patch_size(model: Any) -> tuple[int, int]:
    size = getattr(model.config, "patch_size", None)
    size = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(size) != 2:
        raise HeadwiseError(f"the configuration of {type(model).__name__} does not say how large its patches are.")
    return int(size[0]), int(size[1])


def _others(model: nn.Module) -> list[Kind]:
    """The tokens a model keeps that are no patches, in the order it names them."""
    found: list[Kind] = []
    for name, weight in model.named_parameters():
        kind = TOKENS.get(name.rpartition(".")[2])
        if kind is not None:
            found.extend(kind for _ in range(1 if weight.ndim < 2 else weight.shape[-2]))
    order: tuple[Kind, ...] = ("class", "other", "register")
    return [kind for kind in order for one in found if one == kind]


def _laid_out(name: str, by_row: Tensor, by_column: Tensor, others: list[Kind]) -> Grid:
    """The grid, from which tokens each row and each column of patches changes: (rows, T) and (columns, T)."""
    rows, columns = len(by_row), len(by_column)
    read = torch.stack((by_row.sum(0), by_column.sum(0)))  # (2, T)
    patch = (read == 1).all(0)
    if not bool((patch | (read == 0).all(0)).all()):
        raise HeadwiseError(
            f"tokens of {name} read more than one patch each, so they have no places in the picture here."
        )
    cells = torch.where(patch, by_row.int().argmax(0) * columns + by_column.int().argmax(0), -1).tolist()
    if sorted(cell for cell in cells if cell >= 0) != list(range(rows * columns)):
        raise HeadwiseError(
            f"{name} reads {rows} rows of {columns} patches, but its tokens are not those: {sum(c >= 0 for c in cells)} read "
            f"one."
        )
    left = cells.count(-1)
    nameless: list[Kind] = ["other"] * left
    kinds = others if len(others) == left else nameless
    names = iter(kinds)
    return Grid(rows, columns, tuple(cells), tuple("patch" if cell >= 0 else next(names) for cell in cells))
