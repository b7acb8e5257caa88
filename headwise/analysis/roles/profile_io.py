"""Save and load profiles: arrays and a JSON header with a version. Damaged or older files raise an error."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.directed_relations import DirectedRelation
from headwise.analysis.metrics.metric import MetricSpec, RoleTarget
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.roles.causal_test_results import CausalEffect
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import Role, RoleEvidence
from headwise.errors import FileFormatError
from headwise.io.atomic_write import write_atomic
from headwise.spec import Address

VERSION = 7  # version of the file format: names, their meaning and the layout of their sums
INTERVALS = ("interval", "effect_interval", "excess_interval")


def save_profile(profile: Profile, path: str | Path) -> Path:
    """Write a profile to one compressed file. Load it with `load_profile`."""
    return write_atomic(path, profile_to_bytes(profile))


def profile_to_bytes(profile: Profile) -> bytes:
    """Return the content of the file that `save_profile` writes."""
    arrays = {f"sums/{group}": value for group, value in profile.accumulator.sums.items()}
    arrays |= {f"counts/{group}": value for group, value in profile.accumulator.counts.items()}
    header = {
        "metadata": profile.metadata, "family_size": profile.family_size, "heads": [str(a) for a in profile.addresses],
        "fields": profile.accumulator.fields,
        "metric_specs": [asdict(metric_spec) for metric_spec in profile.metric_specs.values()],
        "roles": [asdict(role) for role in profile.extra_roles], "idle_patterns": profile.idle_patterns,
        "top_contexts": [[asdict(c) for c in items] for items in profile.top_contexts],
        "examples": profile.examples.positions_to_dict(),
        "evidence": [[asdict(s) for s in items] for items in profile.evidence],
    }  # fmt: skip
    if profile.relation_metric is not None:
        relations = profile.relation_metric.relations
        header["relations"] = [(relation.relation, relation.direction) for relation in relations]
        header["causal"] = profile.relation_metric.causal
        arrays |= {f"relations/{name}": value for name, value in profile.relation_metric.arc_count_arrays().items()}
    arrays |= {f"examples/{name}": value for name, value in profile.examples.arrays.items()}
    return npz_to_bytes(header, arrays)


def profile_from_bytes(content: bytes) -> Profile:
    """Return the profile of a content made by `profile_to_bytes`."""
    return _checked_profile(*npz_from_bytes(content, "profile"), "profile")


def load_profile(path: str | Path) -> Profile:
    """Load a file written by `save_profile`. Raise FileFormatError if it is damaged or of another version."""
    return _checked_profile(*read_header_and_arrays(path), path)


def _checked_profile(header: dict[str, Any], arrays: dict[str, np.ndarray], path: str | Path) -> Profile:
    try:
        return _profile_from_stored(header, arrays)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: incomplete profile ({type(error).__name__}: {error}). "
            f"Create it again with headwise profile MODEL --save FILE."
        ) from None


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Return plain data for JSON: one record per head."""
    return {
        "version": VERSION,
        "metadata": profile.metadata,
        "family_size": profile.family_size,
        "heads": [head.to_dict() for head in profile],
    }


def write_npz(path: str | Path, stored: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write header and arrays to a file atomically."""
    return write_atomic(path, npz_to_bytes(stored, arrays))


def npz_to_bytes(stored: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return header and arrays as the content of a compressed file."""
    buffer = BytesIO()
    header = np.frombuffer(json.dumps({"version": VERSION, **stored}).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, **arrays, header=header)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def read_header_and_arrays(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read header and arrays from a file."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise FileFormatError(
            f"{path}: file not found. Check the path, or create it with headwise profile MODEL --save FILE."
        ) from None
    except OSError as error:
        raise FileFormatError(
            f"{path}: not a profile, or damaged ({error}). Create it again with headwise profile MODEL --save FILE."
        ) from None
    return npz_from_bytes(content, path)


def npz_from_bytes(content: bytes, path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return header and arrays of a compressed file. `path` is named in errors."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop("header").tobytes())
    except Exception as error:  # zipfile, zlib, numpy and json each have their own
        raise FileFormatError(
            f"{path}: not a profile, or damaged ({error}). Create it again with headwise profile MODEL --save FILE."
        ) from None
    version = header.get("version") if isinstance(header, dict) else None
    if version != VERSION:
        raise FileFormatError(
            f"{path}: profile of format version {version}, but this version of headwise reads version {VERSION}. "
            f"Create it again with headwise profile MODEL --save FILE."
        )
    return header, arrays


def metric_spec_from_dict(stored: dict[str, Any]) -> MetricSpec:
    """Rebuild a metric spec from its JSON form."""
    return MetricSpec(**{**stored, "target": None if stored["target"] is None else RoleTarget(**stored["target"])})


def role_from_dict(stored: dict[str, Any]) -> Role:
    """Rebuild a role from its JSON form."""
    return Role(**{**stored, "metric_spec": metric_spec_from_dict(stored["metric_spec"])})


def evidence_from_dict(stored: dict[str, Any]) -> RoleEvidence:
    """Rebuild the evidence for a role from its JSON form."""
    intervals = {name: tuple(stored[name]) for name in INTERVALS if stored[name] is not None}
    effects = tuple(CausalEffect.load(effect) for effect in stored["effects"])
    return RoleEvidence(**{**stored, **intervals, "effects": effects, "causal_on": tuple(stored["causal_on"])})


def _profile_from_stored(stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> Profile:
    addresses = tuple(Address.parse(text) for text in stored["heads"])
    fields = {name: (group, column) for name, (group, column) in stored["fields"].items()}
    accumulator = Accumulator(len(addresses), fields)
    for name, value in arrays.items():
        kind, _, group = name.partition("/")
        if kind in ("sums", "counts"):
            getattr(accumulator, kind)[group] = value
    relation_metric = None
    if "relations" in stored:
        relations = tuple(DirectedRelation(name, direction) for name, direction in stored["relations"])
        relation_metric = RelationMetric(accumulator, relations, stored["causal"])
        for name in relation_metric.arc_count_arrays():
            setattr(relation_metric, name, arrays[f"relations/{name}"])
    return Profile(
        addresses=addresses,
        accumulator=accumulator,
        relation_metric=relation_metric,
        top_contexts=[[AttentionContext(**c) for c in items] for items in stored["top_contexts"]],
        examples=ExampleStore.of(len(addresses), stored["examples"], arrays),
        metadata=stored["metadata"],
        metric_specs={entry["name"]: metric_spec_from_dict(entry) for entry in stored["metric_specs"]},
        evidence=tuple(tuple(evidence_from_dict(s) for s in items) for items in stored["evidence"]),
        idle_patterns=[tuple(names) for names in stored["idle_patterns"]],
        family_size=stored["family_size"],
        extra_roles=tuple(map(role_from_dict, stored["roles"])),
    )
