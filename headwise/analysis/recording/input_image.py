"""One picture as a model reads it: its tokens are patches, and have places in rows and columns."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.analysis.recording.batching import TextSample
from headwise.errors import HeadwiseError
from headwise.io.images import find_images, to_displayable, to_png
from headwise.model import ModelProtocol
from headwise.model.protocols import ImageInputProtocol
from headwise.spec.patch_grid import PatchGrid
from headwise.text.token_alignment import Alignment


@dataclass(frozen=True, eq=False)
class InputImage:
    """One picture: what it is called, what the model reads, and where each token stands in it."""

    name: str
    pixels: Tensor  # (C, height, width)
    grid: PatchGrid
    preprocessing: Any = None  # how pixels became that, if it is known

    def png(self) -> bytes:
        """As a person sees it."""
        return to_png(to_displayable(self.pixels, self.preprocessing))


def image_input_of(model: ModelProtocol) -> ImageInputProtocol:
    """How a model reads pictures, or an error that says what it reads."""
    if model.image_input is None:
        raise HeadwiseError(
            "this model reads text, not pictures; give it a text, or attach one that reads pixel_values."
        )
    return model.image_input


def read_image(model: ModelProtocol, image: Any, name: str = "") -> InputImage:
    """A path, a Pillow image or a tensor (C, height, width) that is ready, as a picture."""
    if isinstance(image, InputImage):
        return image
    image_input = image_input_of(model)
    name = name or (Path(image).name if isinstance(image, str | Path) else "a picture")
    return InputImage(name, image_input.read_image(image), image_input.token_patch_grid, image_input.preprocessor)


def read_images(model: ModelProtocol, images: Any) -> Iterator[InputImage]:
    """A folder of pictures, one picture, a list of them, or a tensor (N, C, height, width), one after the other."""
    if isinstance(images, str | Path):
        path = Path(images).expanduser()
        if not path.is_dir():
            yield read_image(model, path)
            return
        for file in find_images(path):
            yield read_image(model, file, str(file.relative_to(path)))
        return
    items: Iterable[Any] = images if isinstance(images, Iterable) and not _is_single_image(images) else [images]
    index = -1
    for index, image in enumerate(items):
        yield read_image(model, image, "" if isinstance(image, str | Path) else f"picture {index}")
    if index < 0:
        raise HeadwiseError("there is no picture to look at; the list is empty.")


def _is_single_image(image: Any) -> bool:
    return image.ndim == 3 if isinstance(image, Tensor) else hasattr(image, "convert")


def image_sample(index: int, image: InputImage) -> TextSample:
    """A picture as a unit of the statistics. Its tokens have no ids, so they are counted."""
    ids, names = tuple(range(len(image.grid))), image.grid.token_names
    align = partial(Alignment.of, "", ids, names, [(0, 0)] * len(ids))
    return TextSample(index, _bucket(image.pixels), ids, None, align, text=image.name, image=image)


def _bucket(pixels: Tensor) -> int:
    """Where a picture's sums go: by its pixels, the same wherever it stands."""
    data = np.ascontiguousarray(pixels.detach().float().cpu().numpy()).tobytes()
    return hashlib.blake2b(data, digest_size=1).digest()[0]
