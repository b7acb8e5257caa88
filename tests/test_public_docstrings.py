"""Docstrings of the public API: a summary, all parameters, the return value, and the fields of dataclasses."""

import dataclasses
import inspect
import re
from typing import Any

import pytest

import headwise as hw

PUBLIC = [getattr(hw, name) for name in hw.__all__]
FUNCTIONS = [item for item in PUBLIC if inspect.isfunction(item)]
DATACLASSES = [item for item in PUBLIC if inspect.isclass(item) and dataclasses.is_dataclass(item)]


def documented_names(docstring: str, section: str) -> set[str]:
    """Return the names that a section of a Google-style docstring lists."""
    match = re.search(rf"^ *{section}:\n(.*?)(?:\n\s*\n(?! {{8}})|\Z)", inspect.cleandoc(docstring), re.S | re.M)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:", match[1], re.M) if match else []
    return {name.lstrip("*") for group in names for name in group.split(", ")}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_public_function_documents_arguments_and_result(function: Any) -> None:
    docstring = function.__doc__ or ""
    signature = inspect.signature(function)
    assert documented_names(docstring, "Args") >= set(signature.parameters), "Args:"
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        assert re.search(r"^ *(Returns|Yields):", docstring, re.M), "Returns:"
    assert inspect.cleandoc(docstring).splitlines()[0].endswith("."), "the summary is one line"


@pytest.mark.parametrize("kind", DATACLASSES, ids=lambda kind: kind.__name__)
def test_public_dataclass_documents_fields(kind: Any) -> None:
    public_fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    documented = documented_names(kind.__doc__ or "", "Attributes") | documented_names(kind.__doc__ or "", "Args")
    assert documented >= public_fields


@pytest.mark.parametrize("item", PUBLIC, ids=lambda item: getattr(item, "__name__", str(item)))
def test_public_name_has_docstring(item: Any) -> None:
    assert inspect.getdoc(item)
