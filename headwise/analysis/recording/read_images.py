"""Images as model input: the tokens are patches on a grid of rows and columns."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.analysis.recording.batching import TextSample
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.io.images import find_images, to_displayable, to_png
from headwise.model import ModelProtocol
from headwise.model.protocols import ImageInputProtocol
from headwise.spec.patch_grid import PatchGrid
from headwise.text.token_alignment import Alignment


@dataclass(frozen=True, eq=False)
class InputImage:
    """One preprocessed image.

    Attributes:
        name: File name, or a label.
        pixels: Preprocessed pixels, (C, height, width).
        grid: Position of each token in the image.
        preprocessing: Preprocessor that produced `pixels`, if known. It is used to undo the normalization for display.
    """

    name: str
    pixels: Tensor
    grid: PatchGrid
    preprocessing: Any = None

    def png(self) -> bytes:
        """Return the image for display, as PNG."""
        return to_png(to_displayable(self.pixels, self.preprocessing))


def image_input_of(model: ModelProtocol) -> ImageInputProtocol:
    """Return the image input of a model. Raise an error if the model reads text."""
    if model.image_input is None:
        raise UnsupportedModelError(
            "this model reads text, not images. Give it a text, or attach a model that reads pixel_values."
        )
    return model.image_input


def read_image(model: ModelProtocol, image: Any, name: str = "") -> InputImage:
    """Preprocess one image: a path, a Pillow image, or a preprocessed tensor (C, height, width)."""
    if isinstance(image, InputImage):
        return image
    image_input = image_input_of(model)
    name = name or (Path(image).name if isinstance(image, str | Path) else "image")
    return InputImage(name, image_input.read_image(image), image_input.token_patch_grid, image_input.preprocessor)


def read_images(model: ModelProtocol, images: Any) -> Iterator[InputImage]:
    """Iterate over images: a folder, one image, a list of images, or a preprocessed tensor (N, C, height, width)."""
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
        yield read_image(model, image, "" if isinstance(image, str | Path) else f"image {index}")
    if index < 0:
        raise ArgumentError("images: the list is empty. Give at least one image.")


def _is_single_image(image: Any) -> bool:
    return image.ndim == 3 if isinstance(image, Tensor) else hasattr(image, "convert")


def image_sample(index: int, image: InputImage) -> TextSample:
    """Create a sample from an image. Patches have no vocabulary ids, so the ids are 0, 1, 2, …"""
    ids, names = tuple(range(len(image.grid))), image.grid.token_names
    align = partial(Alignment.of, "", ids, names, [(0, 0)] * len(ids))
    return TextSample(index, _hash_bucket(image.pixels), ids, None, align, text=image.name, image=image)


def _hash_bucket(pixels: Tensor) -> int:
    """Return the bucket of an image, a hash of its pixels."""
    data = np.ascontiguousarray(pixels.detach().float().cpu().numpy()).tobytes()
    return hashlib.blake2b(data, digest_size=1).digest()[0]
