"""Hooks that stay behind when a module is copied or saved: a copy of an attached model is not attached."""

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook of a module; a copy of it does nothing."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        """Run what was given, unless this is a copy."""
        return None if self._run is None else self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()
