"""Examples in docstrings as code: a run of lines from >>> on, up to an empty line."""

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]


class Examples(griffe.Extension):
    """What griffe shows of docstrings, with their examples fenced: Markdown would take >>> for a quotation."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The same text, each example between fences."""
    return re.sub(r"(?m)^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text)
