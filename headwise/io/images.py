"""Pictures in and out: files as pixels, pixels as the numbers a model reads, and pixels as a PNG that a page can show."""

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

from headwise.errors import HeadwiseError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
CONFIG = "preprocessor_config.json"
KNOWN = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class Pixels:
    """How a picture becomes what a model reads: resized, cut to its middle, divided, normalised; None where it is not."""

    size: tuple[int, int] | None = None  # height, width
    shortest: int | None = None  # or: the shorter side becomes so long
    resample: int = 2  # as Pillow numbers them: 2 bilinear, 3 bicubic
    crop: tuple[int, int] | None = None
    scale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Pixels":
        """What an image processor of transformers says of itself, `processor.to_dict()` or `preprocessor_config.json`.

        >>> Pixels.of({"do_resize": True, "size": {"height": 8, "width": 8}, "do_rescale": True, "rescale_factor": 0.5}).scale
        0.5
        """
        more = [name for name, value in config.items() if name.startswith("do_") and value and name not in KNOWN]
        if more:
            raise HeadwiseError(
                f"its image processor also does {', '.join(more)}, which is not done here; give pictures as the tensors that "
                f"the processor makes."
            )
        size = config.get("size") if config.get("do_resize") else None
        size = {"height": size, "width": size} if isinstance(size, int) else size or {}
        if size and not ({"height", "width"} <= set(size) or "shortest_edge" in size):
            raise HeadwiseError(
                f"its image processor resizes to {size}; height and width or shortest_edge are known here."
            )
        crop = config.get("crop_size") if config.get("do_center_crop") else None
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        normal = bool(config.get("do_normalize"))
        return Pixels(
            (size["height"], size["width"]) if "height" in size else None,
            size.get("shortest_edge"),
            int(config.get("resample") or 2),
            None if crop is None else (crop["height"], crop["width"]),
            float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale") else None,
            tuple(config["image_mean"]) if normal else None,
            tuple(config["image_std"]) if normal else None,
        )

    @staticmethod
    def read(folder: Path) -> "Pixels | None":
        """What a model's folder says; None: nothing."""
        file = folder / CONFIG
        if not file.is_file():
            return None
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            return Pixels.of(told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HeadwiseError(f"{file} does not say how pictures are read ({error}).") from None

    def save(self, folder: Path) -> None:
        """Write it beside a model, as transformers does."""
        told: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "resample": self.resample}
        for name, there in (("resize", self.size or self.shortest), ("center_crop", self.crop), ("rescale", self.scale),
                            ("normalize", self.mean)):  # fmt: skip
            told[f"do_{name}"] = there is not None
        if self.size is not None:
            told["size"] = dict(zip(("height", "width"), self.size, strict=True))
        elif self.shortest is not None:
            told["size"] = {"shortest_edge": self.shortest}
        if self.crop is not None:
            told["crop_size"] = dict(zip(("height", "width"), self.crop, strict=True))
        told |= {"rescale_factor": self.scale, "image_mean": self.mean, "image_std": self.std}
        (folder / CONFIG).write_text(json.dumps({name: one for name, one in told.items() if one is not None}), "utf-8")

    def numbers(self, picture: Any, channels: int) -> Tensor:
        """A Pillow image → (C, height, width)."""
        picture = picture.convert("L" if channels == 1 else "RGB")
        if self.size is not None:
            picture = picture.resize(self.size[::-1], resample=self.resample)
        elif self.shortest is not None:
            wide, high = picture.size
            short, long = min(wide, high), max(wide, high)
            far = int(self.shortest * long / short)
            picture = picture.resize(
                (self.shortest, far) if wide <= high else (far, self.shortest), resample=self.resample
            )
        made = np.asarray(picture, dtype=np.float64)
        made = made[..., None] if made.ndim == 2 else made  # (height, width, C)
        if self.crop is not None:
            made = _middle(made, *self.crop)
        made = made if self.scale is None else made * self.scale
        if self.mean is not None and self.std is not None:
            made = (made - np.array(self.mean)) / np.array(self.std)
        return torch.from_numpy(np.ascontiguousarray(made.transpose(2, 0, 1))).float()


def _middle(made: np.ndarray, high: int, wide: int) -> np.ndarray:
    """The middle of a picture, black around it where it is smaller."""
    short = [max(0, wanted - there) for wanted, there in zip((high, wide), made.shape, strict=False)]
    if any(short):
        made = np.pad(made, [*(((s + 1) // 2, s // 2) for s in short), (0, 0)])
    top, left = (made.shape[0] - high) // 2, (made.shape[1] - wide) // 2
    return made[top : top + high, left : left + wide]


def open_picture(path: str | Path) -> Any:
    """A file as a Pillow image, read whole."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise HeadwiseError("to read pictures Pillow is needed; pip install 'headwise[images]'.") from None
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened.copy()
    except FileNotFoundError:
        raise HeadwiseError(f"there is no picture {path}.") from None
    except IsADirectoryError:
        raise HeadwiseError(f"{path} is a folder; give one of its pictures.") from None
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise HeadwiseError(f"{path} is no picture that can be read ({error}).") from None


def find_pictures(folder: Path) -> list[Path]:
    """All pictures in a folder and in those inside it, in the order of their names."""
    there = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not there:
        raise HeadwiseError(f"{folder} holds no picture; looked for {', '.join(SUFFIXES)}.")
    return there


def to_png(pixels: np.ndarray) -> bytes:
    """Bytes (height, width, 3) as a PNG.

    >>> to_png(np.zeros((2, 2, 3), np.uint8))[1:4]
    b'PNG'
    """
    high, wide, _ = pixels.shape
    rows = np.concatenate((np.zeros((high, 1), np.uint8), pixels.reshape(high, wide * 3)), 1)  # each row: no filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def shown(pixels: Tensor, how: Pixels | None) -> np.ndarray:
    """What a model reads, (C, height, width), as a person sees it: bytes (height, width, 3)."""
    made = pixels.detach().float().cpu().numpy().transpose(1, 2, 0)  # (height, width, C)
    if how is not None and how.mean is not None and how.std is not None:
        made = made * np.array(how.std) + np.array(how.mean)
    elif how is None:  # nobody said how it was made: stretched from black to white
        low, high = made.min(), made.max()
        made = (made - low) / (high - low if high > low else 1.0)
    made = made if how is None or how.scale is not None else made / 255
    made = made[..., :3] if made.shape[-1] >= 3 else made[..., :1].repeat(3, -1)
    return np.rint(made.clip(0, 1) * 255).astype(np.uint8)
