"""Conversion of specs to and from JSON. Fields with their default value are omitted; unknown fields raise an error."""

import json
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from headwise.errors import FileFormatError, suggest_names


class JSONSpec:
    """Base class of specs that can be converted to and from JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data without fields that have their default value."""
        return _to_json_value(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build a spec from plain data.

        Args:
            data: The fields as `to_dict` returns them.

        Raises:
            FileFormatError: A field is unknown, missing or has the wrong type.
        """
        return _build(cls, data, cls.__name__)

    def to_json(self) -> str:
        """Return the spec as JSON text without fields that have their default value."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a spec from JSON text.

        Args:
            text: JSON as `to_json` returns it.

        Raises:
            FileFormatError: The text is not valid JSON, or a field is unknown, missing or has the wrong type.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise FileFormatError(f"{cls.__name__}: the text is not valid JSON: {error}.") from None
        return cls.from_dict(data)


def _to_json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        field_values = {field.name: getattr(value, field.name) for field in fields(value)}
        defaults = {field.name: field.default for field in fields(value)}
        return {
            name: _to_json_value(field_value)
            for name, field_value in field_values.items()
            if defaults[name] is MISSING or field_value != defaults[name]
        }
    if isinstance(value, tuple):
        is_mapping = value and all(
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], tuple)
            for item in value
        )
        return {key: list(items) for key, items in value} if is_mapping else [_to_json_value(item) for item in value]
    return value


def _build(spec_class: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise FileFormatError(f"{path}: must be a JSON object. Got {type(data).__name__}.")
    hints = get_type_hints(spec_class)
    field_names = {field.name for field in fields(spec_class)}
    for name in data:
        if name not in field_names:
            raise FileFormatError(f"{path}: unknown field {name!r}; {suggest_names(name, field_names)}")
    for field in fields(spec_class):
        if field.name not in data and field.default is MISSING:
            raise FileFormatError(f"{path}: the required field {field.name!r} is missing. Add it.")
    return spec_class(**{name: _convert(hints[name], value, f"{path}.{name}") for name, value in data.items()})


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Convert one JSON value to the type of its field."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in options:
        return None
    for option in options:
        origin = get_origin(option)
        if is_dataclass(option):
            return _build(option, value, path)
        if origin is tuple and isinstance(value, list):
            hints = get_args(option)
            hints = hints[:1] * len(value) if hints[-1] is Ellipsis else hints
            if len(hints) == len(value):
                return tuple(_convert(hint, item, path) for hint, item in zip(hints, value, strict=True))
        if origin not in (None, Literal, tuple) and isinstance(value, dict):  # a mapping of numbers, such as kept_heads
            return {key: _convert(tuple[int, ...], items, f"{path}.{key}") for key, items in value.items()}
        if origin is Literal and isinstance(value, str):
            return value  # the constructor of the spec checks the allowed values
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option in (int, bool, str) and type(value) is option:
            return value
    names = " or ".join(map(_describe_type, options))
    raise FileFormatError(f"{path}={value!r}: must be {names}.")


def _describe_type(option: Any) -> str:
    """Return the name of a type for error messages."""
    if get_origin(option) is Literal:
        return " or ".join(map(repr, get_args(option)))
    return "None" if option is NoneType else getattr(option, "__name__", str(option))
