"""One picture as a model reads it: its tokens are patches, and have places in rows and columns."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.analysis.recording.batching import Unit
from headwise.errors import HeadwiseError
from headwise.io.images import find_pictures, shown, to_png
from headwise.model import AnyModel
from headwise.model.protocols import AnyPictures
from headwise.spec.patch_grid import Grid
from headwise.text.align import Alignment


@dataclass(frozen=True, eq=False)
class InputPicture:
    """One picture: what it is called, what the model reads, and where each token stands in it."""

    name: str
    pixels: Tensor  # (C, height, width)
    grid: Grid
    how: Any = None  # how pixels became that, if it is known

    def png(self) -> bytes:
        """As a person sees it."""
        return to_png(shown(self.pixels, self.how))


def pictures_of(model: AnyModel) -> AnyPictures:
    """How a model reads pictures, or an error that says what it reads."""
    if model.pictures is None:
        raise HeadwiseError(
            "this model reads text, not pictures; give it a text, or attach one that reads pixel_values."
        )
    return model.pictures


def read_picture(model: AnyModel, given: Any, name: str = "") -> InputPicture:
    """A path, a Pillow image or a tensor (C, height, width) that is ready, as a picture."""
    if isinstance(given, InputPicture):
        return given
    reads = pictures_of(model)
    name = name or (Path(given).name if isinstance(given, str | Path) else "a picture")
    return InputPicture(name, reads.read(given), reads.grid, reads.how)


def read_pictures(model: AnyModel, given: Any) -> Iterator[InputPicture]:
    """A folder of pictures, one picture, a list of them, or a tensor (N, C, height, width), one after the other."""
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        if not path.is_dir():
            yield read_picture(model, path)
            return
        for file in find_pictures(path):
            yield read_picture(model, file, str(file.relative_to(path)))
        return
    several: Iterable[Any] = given if isinstance(given, Iterable) and not _is_one(given) else [given]
    number = -1
    for number, one in enumerate(several):
        yield read_picture(model, one, "" if isinstance(one, str | Path) else f"picture {number}")
    if number < 0:
        raise HeadwiseError("there is no picture to look at; the list is empty.")


def _is_one(given: Any) -> bool:
    return given.ndim == 3 if isinstance(given, Tensor) else hasattr(given, "convert")


def picture_unit(number: int, picture: InputPicture) -> Unit:
    """A picture as a unit of the statistics. Its tokens have no ids, so they are counted."""
    ids, names = tuple(range(len(picture.grid))), picture.grid.names
    align = partial(Alignment.of, "", ids, names, [(0, 0)] * len(ids))
    return Unit(number, _bucket(picture.pixels), ids, None, align, text=picture.name, picture=picture)


def _bucket(pixels: Tensor) -> int:
    """Where a picture's sums go: by its pixels, the same wherever it stands."""
    data = np.ascontiguousarray(pixels.detach().float().cpu().numpy()).tobytes()
    return hashlib.blake2b(data, digest_size=1).digest()[0]
