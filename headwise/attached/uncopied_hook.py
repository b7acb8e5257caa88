"""Hooks that are not copied or saved with a module: a copy of an attached model is not attached."""

from collections.abc import Callable
from typing import Any


class UncopiedHook:
    """Hook of a module. Copies of the hook do nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function, unless this is a copy."""
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UncopiedHook":
        return UncopiedHook()

    def __reduce__(self) -> tuple[type["UncopiedHook"], tuple[()]]:
        return UncopiedHook, ()
