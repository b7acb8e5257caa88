"""Tables of a profile: one row per head, a DataFrame, heads by role, means by layer, and the changes between two profiles."""

from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, FIRST_TOKEN, OUTPUT_SHARE
from headwise.errors import ArgumentError, MissingDependencyError
from headwise.spec import Address

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwise.analysis.roles.profile_result import Profile

DEFAULT_COLUMNS = tuple(metric_spec.name for metric_spec in (ENTROPY, CONFIDENCE, DISTANCE, FIRST_TOKEN, OUTPUT_SHARE))


def table_metrics(profile: "Profile") -> tuple[str, ...]:
    """Return the metrics that have a column in the table of heads."""
    available = tuple(name for name in DEFAULT_COLUMNS if name in profile.metric_specs)  # images have only some
    in_table = (name for name, metric_spec in profile.metric_specs.items() if metric_spec.in_table)
    return (*available, *(name for name in in_table if name not in DEFAULT_COLUMNS))


def table_rows(profile: "Profile") -> list[dict[str, Any]]:
    """Return one row per head."""
    columns = table_metrics(profile)
    return [
        {
            "head": str(head.address), "role": head.role, "roles": "; ".join(entry.role for entry in head.roles),
            "detail": head.detail, "corpus": head.corpus_label, "evidence_level": head.evidence_level,
            "causal_on": " and ".join(head.causal_on), "score": head.score, "baseline": head.baseline,
            "low": (head.interval or (None, None))[0], "high": (head.interval or (None, None))[1], "effect": head.effect,
            "idle_pattern": ", ".join(head.idle_pattern),
            **{name: head.metrics[name] for name in columns},
        }
        for head in profile
    ]  # fmt: skip


def to_frame(profile: "Profile") -> "DataFrame":
    """Return the table with every metric as a pandas DataFrame, indexed by head."""
    try:
        import pandas
    except ImportError:
        raise MissingDependencyError(
            "to_frame: pandas is not installed. Run pip install 'headwise[frame]', or use profile.table()."
        ) from None
    rows = [{**row, **head.metrics} for row, head in zip(table_rows(profile), profile, strict=True)]
    return pandas.DataFrame(rows).set_index("head")


def heads_by_role(profile: "Profile") -> dict[str, list[Address]]:
    """Return the heads of every role that a head has, first or not, best first."""
    keyed_heads: dict[str, list[tuple[tuple[int, float], Address]]] = {}
    for address, evidence in zip(profile.addresses, profile.evidence, strict=True):
        for entry in evidence:
            if entry.is_supported:
                keyed_heads.setdefault(entry.role, []).append((entry.sort_key, address))
    return {
        role: [address for _, address in sorted(heads, key=lambda item: item[0], reverse=True)]
        for role, heads in sorted(keyed_heads.items())
    }


def mean_by_layer(profile: "Profile", name: str) -> np.ndarray:
    """Return the mean of a metric over the heads of each layer, (layers,). NaN for a layer without measured heads."""
    layers: dict[str, list[float]] = {layer: [] for layer in profile.metadata["layers"]}
    for value, address in zip(profile.metric(name), profile.addresses, strict=True):
        if np.isfinite(value):
            layers[str(address.layer_address)].append(value)
    return np.array([np.mean(layer_values) if layer_values else np.nan for layer_values in layers.values()])


def diff_rows(first: "Profile", second: "Profile") -> list[dict[str, Any]]:
    """Return one row per head with its roles, evidence levels and metric changes from one profile to another."""
    if first.metadata["model"] != second.metadata["model"]:
        raise ArgumentError(
            f"other: profiles of different models cannot be compared, because heads with the same address are unrelated. "
            f"Got {first.metadata['model']} and {second.metadata['model']}. Pass two profiles of one model."
        )
    rows = []
    for address in dict.fromkeys((*first.addresses, *second.addresses)):
        before = first[address] if address in first.addresses else None
        after = second[address] if address in second.addresses else None
        row: dict[str, Any] = {
            "head": str(address),
            "before": before.role if before else "absent", "after": after.role if after else "absent",
            "evidence_level before": before.evidence_level if before else "",
            "evidence_level after": after.evidence_level if after else "",
        }  # fmt: skip
        if before and after:
            row |= {
                name: after.metrics[name] - before.metrics[name] for name in DEFAULT_COLUMNS if name in after.metrics
            }
        rows.append(row)
    return rows
