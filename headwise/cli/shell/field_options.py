"""Command line options generated from the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from headwise.cli.shell.common_options import drop_none


def field_options(dataclass: type, parameter: str, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace one parameter of a command by an option for each named field.

    The command receives a dict with the fields set on the command line. The help text is `help` in the metadata of a field.
    The default of a switch is off, and that of any other option None.

    Args:
        dataclass: The dataclass.
        parameter: Name of the parameter, keyword-only.
        names: Fields, in the order of their options.
    """
    types, fields_by_name = get_type_hints(dataclass), {field.name: field for field in fields(dataclass)}
    options = [_option(name, types[name], fields_by_name[name].metadata["help"]) for name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            options_given = drop_none(**{name: arguments.pop(name) for name in names})
            command(**arguments, **{parameter: options_given})

        signature = inspect.signature(command)
        parameters = list(signature.parameters.values())
        index = list(signature.parameters).index(parameter)
        parameters[index : index + 1] = options
        run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


def _option(name: str, field_type: Any, help_text: str) -> inspect.Parameter:
    if field_type is bool:
        flag = typer.Option("--" + name.replace("_", "-"), help=help_text)
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, flag])
    value_type = field_type if field_type in (int, float) else str  # a Literal is checked by the dataclass
    annotation = Annotated[value_type | None, typer.Option(help=help_text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
