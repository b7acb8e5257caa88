"""How long work tells how far it is: one kind of function, whoever works and whoever listens."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], object]  # what is done, how much of it, of how much; None: nobody knows yet
