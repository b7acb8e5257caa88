"""Migration of saved models from format 1 to format 2. Names of fields and tensors differ; the values are the same.

Format 1 is migrated in memory when a model is loaded; saving always writes format 2.
"""

from collections.abc import Mapping
from typing import Any

from headwise.errors import FileFormatError

FORMAT = 2  # format of model folders, stored as "format" in spec.json; format 1 has no such entry
NATIVE_FORMAT = f"headwise-{FORMAT}"  # in the metadata of model.safetensors
ATTACHED_FORMATS = {1: "headwise-attached-1", 2: "headwise-attached-2"}  # in headwise.json
SHARD_FOLDERS = {1: "pieces", 2: "shards"}  # in a checkpoint that several processes wrote
FORMAT_1_DIGEST = "format1:"  # prefix of a plan digest that was computed with the tensor names of format 1

KeyTable = Mapping[str, Mapping[str, str]]

# Keys of spec.json, old to new, by the path of their object in format 1. Items of a list have the path of the list.
SPEC_KEYS: KeyTable = {
    "": {
        "hidden": "mlp_width",
        "form": "norm_placement",
        "kept": "kept_heads",
        "weights": "weight_rules",
        "activations": "activation_bits",
    },
    "attention": {"kept": "kept_heads", "weights": "weight_bits", "buckets": "t5_buckets", "input": "head_input"},
    "attention.cache": {"first": "sink_tokens", "last": "window"},
    "attention.weights": {"group": "group_size", "activations": "activation_bits"},
    "cache": {"keeps": "policy"},
    "cache.keeps": {"first": "sink_tokens", "last": "window"},
    "weights": {"group": "group_size"},
}
# Keys of one plan of plans.json or headwise.json.
PLAN_KEYS: KeyTable = {
    "": {
        "cut": "pruned_heads",
        "weights": "weight_rules",
        "activations": "activation_bits",
        "by": "ranking",
        "on": "corpus",
        "folded": "folded_biases",
        "cache_by": "cache_ranking",
        "cache_on": "cache_corpus",
    },
    **{place: SPEC_KEYS[place] for place in ("cache", "cache.keeps", "weights")},
    **{f"spec.{place}".removesuffix("."): keys for place, keys in SPEC_KEYS.items()},
}
CACHE_RANKINGS = {"mass": "attention", "writes": "output"}  # values of cache_ranking in a plan
# Keys of headwise.json.
ATTACHED_KEYS: KeyTable = {"": {"kept": "kept_heads", "apart": "kv_expanded", "gives": "num_outputs"}}
ROW_LAYOUTS = {  # values of layouts in headwise.json
    "apart": "separate",
    "wide": "padded_per_head",
    "first": "padded_at_end",
    "joined": "fused",
    "by head": "per_head",
}
# Parts of tensor names between dots.
TENSOR_NAME_PARTS = {
    "read": "qkv",
    "write": "output_projection",
    "packed": "quantized",
    "position": "position_bias",
}
FORMAT_1_NAME_PARTS = {new: old for old, new in TENSOR_NAME_PARTS.items()}


def migrate_spec(data: dict[str, Any], file: object) -> tuple[dict[str, Any], int]:
    """Return the fields of a spec.json under the names of format 2, and the format it was written in."""
    version = data.pop("format", 1)
    if type(version) is not int or version not in (1, FORMAT):
        raise FileFormatError(
            f"{file}: unknown format {version!r}. This version of headwise reads formats 1 and {FORMAT}. Update headwise."
        )
    return (_rename_keys(data, SPEC_KEYS) if version == 1 else data), version


def migrate_plans(plans: Any, *, native: bool = True) -> Any:
    """Convert the plans of a model folder from format 1 to format 2. Invalid data is returned unchanged.

    Args:
        plans: Parsed JSON of the plans.
        native: True for plans of a native model. The tensors of attached models kept their names.
    """
    plans = _rename_keys(plans, PLAN_KEYS)
    for plan in plans if isinstance(plans, list) else ():
        if isinstance(plan, dict):
            plan["format"] = FORMAT
            if isinstance(ranking := plan.get("cache_ranking"), str):
                plan["cache_ranking"] = CACHE_RANKINGS.get(ranking, ranking)
            if native and isinstance(digest := plan.get("digest"), str):
                plan["digest"] = FORMAT_1_DIGEST + digest
    return plans


def migrate_attached(metadata: dict[str, Any]) -> dict[str, Any]:
    """Convert a headwise.json from format 1 to format 2. Other formats are returned unchanged."""
    if metadata.get("format") != ATTACHED_FORMATS[1]:
        return metadata
    metadata = _rename_keys(metadata, ATTACHED_KEYS) | {"format": ATTACHED_FORMATS[FORMAT]}
    if "plans" in metadata:
        metadata["plans"] = migrate_plans(metadata["plans"], native=False)
    if isinstance(layouts := metadata.get("layouts"), dict):
        metadata["layouts"] = {layer: _rename_layouts(by_projection) for layer, by_projection in layouts.items()}
    return metadata


def to_format_1_tensor_name(name: str) -> str:
    """Return the name that a tensor of a native model had in format 1.

    >>> to_format_1_tensor_name("blocks.0.attention.output_projection.quantized.codes4")
    'blocks.0.attention.write.packed.codes4'
    """
    return _rename_parts(name, FORMAT_1_NAME_PARTS)


def migrate_tensor_name(name: str) -> str:
    """Return the name that a tensor of a native model of format 1 has in format 2."""
    return _rename_parts(name, TENSOR_NAME_PARTS)


def _rename_parts(name: str, parts: Mapping[str, str]) -> str:
    return ".".join(parts.get(part, part) for part in name.split("."))


def _rename_layouts(by_projection: Any) -> Any:
    if not isinstance(by_projection, dict):
        return by_projection
    return {
        name: ROW_LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout
        for name, layout in by_projection.items()
    }


def _rename_keys(value: Any, table: KeyTable, place: str = "") -> Any:
    """Return a copy of JSON data with keys renamed by a table of paths."""
    if isinstance(value, list):
        return [_rename_keys(item, table, place) for item in value]
    if not isinstance(value, dict):
        return value
    names = table.get(place, {})
    renamed = {
        names.get(key, key): _rename_keys(item, table, f"{place}.{key}".removeprefix("."))
        for key, item in value.items()
    }
    if len(renamed) != len(value):
        duplicates = sorted(new for old, new in names.items() if old in value and new in value)
        raise FileFormatError(
            f"{', '.join(duplicates) or 'a field'}: present twice, under its format 1 name and its format 2 name. "
            f"Delete one of the two."
        )
    return renamed
