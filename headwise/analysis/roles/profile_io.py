"""A profile on disk: arrays and a table in JSON, with a version, in one file; what is damaged or older is refused."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.metrics.metric import Number, Target
from headwise.analysis.roles.effects import Effect
from headwise.analysis.roles.roles import Role, Support
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_file

VERSION = 6  # of the table: names, what they mean, where their sums stand
INTERVALS = ("interval", "effect_interval", "beyond_interval")


def pack(path: str | Path, stored: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a file, whole or not at all."""
    written = BytesIO()
    table = np.frombuffer(json.dumps({"version": VERSION, **stored}).encode(), dtype=np.uint8)
    np.savez_compressed(written, **arrays, told=table)  # pyright: ignore[reportArgumentType]
    return whole_file(path, written.getvalue())


def unpack(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one: the table and the arrays."""
    try:
        with np.load(BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        told = json.loads(arrays.pop("told").tobytes())
    except FileNotFoundError:
        raise HeadwiseError(f"there is no file {path}.") from None
    except Exception as error:  # zipfile, zlib, numpy and json each have their own
        raise HeadwiseError(f"{path} is not a profile, or is damaged ({error}); make it anew.") from None
    version = told.get("version") if isinstance(told, dict) else None
    if version != VERSION:
        raise HeadwiseError(f"{path} is a profile of version {version}, this is {VERSION}; make it anew.")
    return told, arrays


def number_of(stored: dict[str, Any]) -> Number:
    """A number as it was written."""
    return Number(**{**stored, "target": None if stored["target"] is None else Target(**stored["target"])})


def role_of(stored: dict[str, Any]) -> Role:
    """A role as it was written."""
    return Role(**{**stored, "measure": number_of(stored["measure"])})


def support_of(stored: dict[str, Any]) -> Support:
    """What spoke for a role."""
    intervals = {name: tuple(stored[name]) for name in INTERVALS if stored[name] is not None}
    effects = tuple(Effect.load(effect) for effect in stored["effects"])
    return Support(**{**stored, **intervals, "effects": effects, "causal_on": tuple(stored["causal_on"])})
