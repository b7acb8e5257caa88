"""A profile on disk: arrays and a table in JSON, with a version, in one file; what is damaged or older is refused."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.metrics.metric import MetricSpec, RoleTarget
from headwise.analysis.roles.causal_effects import CausalEffect
from headwise.analysis.roles.roles import Role, RoleEvidence
from headwise.errors import HeadwiseError
from headwise.io.atomic_write import write_atomic

VERSION = 7  # of the table: names, what they mean, where their sums stand
INTERVALS = ("interval", "effect_interval", "excess_interval")


def write_npz(path: str | Path, stored: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a file, whole or not at all."""
    buffer = BytesIO()
    header = np.frombuffer(json.dumps({"version": VERSION, **stored}).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, **arrays, header=header)  # pyright: ignore[reportArgumentType]
    return write_atomic(path, buffer.getvalue())


def read_npz(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read one: the table and the arrays."""
    try:
        with np.load(BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
    except FileNotFoundError:
        raise HeadwiseError(f"there is no file {path}.") from None
    except Exception as error:  # zipfile, zlib, numpy and json each have their own
        raise HeadwiseError(
            f"{path} is not a profile, or is damaged ({error}); make it again: headwise profile MODEL --save FILE."
        ) from None
    version = header.get("version") if isinstance(header, dict) else None
    if version != VERSION:
        raise HeadwiseError(
            f"{path} is a profile of version {version}, this is {VERSION}; make it again: headwise profile MODEL --save FILE."
        )
    return header, arrays


def metric_spec_from_dict(stored: dict[str, Any]) -> MetricSpec:
    """A number as it was written."""
    return MetricSpec(**{**stored, "target": None if stored["target"] is None else RoleTarget(**stored["target"])})


def role_from_dict(stored: dict[str, Any]) -> Role:
    """A role as it was written."""
    return Role(**{**stored, "metric_spec": metric_spec_from_dict(stored["metric_spec"])})


def evidence_from_dict(stored: dict[str, Any]) -> RoleEvidence:
    """What spoke for a role."""
    intervals = {name: tuple(stored[name]) for name in INTERVALS if stored[name] is not None}
    effects = tuple(CausalEffect.load(effect) for effect in stored["effects"])
    return RoleEvidence(**{**stored, **intervals, "effects": effects, "causal_on": tuple(stored["causal_on"])})
