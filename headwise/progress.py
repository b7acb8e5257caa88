"""Type of the callback that long-running functions call to report progress."""

from collections.abc import Callable

# Arguments: name of the current step, items done, total items (None if the total is not known yet).
Progress = Callable[[str, int, int | None], object]
