"""The guide is run when the site is built: behind each block of code stands what it printed, and the picture it made."""

import ast
import base64
import contextlib
import io
import re
from typing import Any

import torch

from headwise.ui.figures.figure_with_data import Drawing

RUN = "guide.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return run_blocks(markdown) if page.file.src_uri == RUN else markdown


def run_blocks(markdown: str) -> str:
    """Run the python blocks of a page, in order, and put their output behind them."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}

    def run(found: re.Match[str]) -> str:
        said, last = _run(found[1], names)
        # what a comment promises behind a print is shown by the output itself
        code = re.sub(r"(print\(.*\))  # .*", r"\1", found[1])
        made = f"```python\n{code}```\n"
        if said:
            made += f"\n```text\n{said}```\n"
        if isinstance(last, Drawing):
            made += f"\n![](data:image/svg+xml;base64,{base64.b64encode(last.as_picture('.svg')).decode()})\n"
        return made

    return re.sub(r"```python\n(.*?)```\n", run, markdown, flags=re.DOTALL)


def _run(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a block printed, and what its last line is, if that is a thing and not an act."""
    body, last = ast.parse(code).body, None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if isinstance(body[-1], ast.Expr):
            exec(compile(ast.Module(body[:-1], []), RUN, "exec"), names)
            last = eval(compile(ast.Expression(body[-1].value), RUN, "eval"), names)
        else:
            exec(compile(ast.Module(body, []), RUN, "exec"), names)
    return said.getvalue(), last
