"""Image files: reading, preprocessing into model inputs, and encoding as PNG."""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ArgumentError, FileFormatError, MissingDependencyError, UnsupportedModelError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
PREPROCESSOR_FILE = "preprocessor_config.json"
SUPPORTED_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class ImagePreprocessor:
    """Steps that turn an image into a model input: resize, center crop, rescale, normalize. A step set to None is skipped.

    Attributes:
        size: Height and width to resize to.
        shortest_edge: Resize so that the shorter side has this length; used if `size` is None.
        resample: Interpolation, numbered as in Pillow: 2 is bilinear, 3 is bicubic.
        crop: Height and width of the center crop.
        scale: Factor for pixel values.
        mean: Mean of each channel, subtracted after scaling.
        std: Standard deviation of each channel, divided by after subtracting the mean.
    """

    size: tuple[int, int] | None = None
    shortest_edge: int | None = None
    resample: int = 2
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "ImagePreprocessor":
        """Create a preprocessor from `processor.to_dict()` or `preprocessor_config.json` of a transformers image processor.

        >>> ImagePreprocessor.from_config({"do_rescale": True, "rescale_factor": 0.5}).scale
        0.5
        """
        unsupported = [
            name for name, value in config.items() if name.startswith("do_") and value and name not in SUPPORTED_STEPS
        ]
        if unsupported:
            raise UnsupportedModelError(
                f"image processor: the steps {', '.join(unsupported)} are not supported. Run the processor yourself and "
                f"pass its output tensors."
            )
        size = config.get("size") if config.get("do_resize") else None
        size = {"height": size, "width": size} if isinstance(size, int) else size or {}
        if size and not ({"height", "width"} <= set(size) or "shortest_edge" in size):
            raise UnsupportedModelError(
                f"image processor: size={size} is not supported. Set height and width, or shortest_edge."
            )
        crop = config.get("crop_size") if config.get("do_center_crop") else None
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        normalizes = bool(config.get("do_normalize"))
        return ImagePreprocessor(
            (size["height"], size["width"]) if "height" in size else None,
            size.get("shortest_edge"),
            int(config.get("resample") or 2),
            None if crop is None else (crop["height"], crop["width"]),
            float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale") else None,
            tuple(config["image_mean"]) if normalizes else None,
            tuple(config["image_std"]) if normalizes else None,
        )

    @staticmethod
    def load(folder: Path) -> "ImagePreprocessor | None":
        """Read the preprocessor of a model folder. Return None if the folder has no preprocessor_config.json."""
        file = folder / PREPROCESSOR_FILE
        if not file.is_file():
            return None
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            return ImagePreprocessor.from_config(config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"{file}: not a valid image processor config ({error}). Download it again.") from None

    def save(self, folder: Path) -> None:
        """Write preprocessor_config.json to a model folder, in the format of transformers."""
        config: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "resample": self.resample}
        steps = {
            "resize": self.size or self.shortest_edge,
            "center_crop": self.crop,
            "rescale": self.scale,
            "normalize": self.mean,
        }
        config |= {f"do_{name}": setting is not None for name, setting in steps.items()}
        if self.size is not None:
            config["size"] = dict(zip(("height", "width"), self.size, strict=True))
        elif self.shortest_edge is not None:
            config["size"] = {"shortest_edge": self.shortest_edge}
        if self.crop is not None:
            config["crop_size"] = dict(zip(("height", "width"), self.crop, strict=True))
        config |= {"rescale_factor": self.scale, "image_mean": self.mean, "image_std": self.std}
        (folder / PREPROCESSOR_FILE).write_text(
            json.dumps({name: value for name, value in config.items() if value is not None}), "utf-8"
        )

    def to_tensor(self, image: Any, channels: int) -> Tensor:
        """Preprocess a Pillow image into a float tensor (C, height, width)."""
        image = image.convert("L" if channels == 1 else "RGB")
        if self.size is not None:
            image = image.resize(self.size[::-1], resample=self.resample)
        elif self.shortest_edge is not None:
            width, height = image.size
            short, long = min(width, height), max(width, height)
            long_target = int(self.shortest_edge * long / short)
            image = image.resize(
                (self.shortest_edge, long_target) if width <= height else (long_target, self.shortest_edge),
                resample=self.resample,
            )
        pixels = np.asarray(image, dtype=np.float64)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels  # (height, width, C)
        if self.crop is not None:
            pixels = _center_crop(pixels, *self.crop)
        pixels = pixels if self.scale is None else pixels * self.scale
        if self.mean is not None and self.std is not None:
            pixels = (pixels - np.array(self.mean)) / np.array(self.std)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float()


def _center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crop the center of an image; smaller images are padded with black."""
    missing = [max(0, target - size) for target, size in zip((height, width), pixels.shape, strict=False)]
    if any(missing):
        pixels = np.pad(pixels, [*(((s + 1) // 2, s // 2) for s in missing), (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def open_image(path: str | Path) -> Any:
    """Read a file as a Pillow image, with all pixels loaded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingDependencyError("Pillow is required to read images. Run: pip install 'headwise[images]'") from None
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened.copy()
    except FileNotFoundError:
        raise FileFormatError(f"{path}: image not found. Check the path.") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path}: this is a folder. Pass one of its images.") from None
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise FileFormatError(f"{path}: not a readable image ({error}). Convert it to PNG or JPEG.") from None


def find_images(folder: Path) -> list[Path]:
    """Return all images in a folder and its subfolders, sorted by name."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not paths:
        raise ArgumentError(f"{folder}: contains no images. Supported file types: {', '.join(IMAGE_SUFFIXES)}.")
    return paths


def to_png(pixels: np.ndarray) -> bytes:
    """Encode pixels (height, width, 3), uint8, as a PNG.

    >>> to_png(np.zeros((2, 2, 3), np.uint8))[1:4]
    b'PNG'
    """
    height, width, _ = pixels.shape
    rows = np.concatenate(
        (np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)), 1
    )  # each row: no filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def to_displayable(pixels: Tensor, preprocessor: ImagePreprocessor | None) -> np.ndarray:
    """Undo the preprocessing of a model input (C, height, width). Returns uint8 pixels (height, width, 3)."""
    image = pixels.detach().float().cpu().numpy().transpose(1, 2, 0)  # (height, width, C)
    if preprocessor is not None and preprocessor.mean is not None and preprocessor.std is not None:
        image = image * np.array(preprocessor.std) + np.array(preprocessor.mean)
    elif preprocessor is None:  # the preprocessing is unknown: stretch the values from black to white
        low, high = image.min(), image.max()
        image = (image - low) / (high - low if high > low else 1.0)
    image = image if preprocessor is None or preprocessor.scale is not None else image / 255
    image = image[..., :3] if image.shape[-1] >= 3 else image[..., :1].repeat(3, -1)
    return np.rint(image.clip(0, 1) * 255).astype(np.uint8)
