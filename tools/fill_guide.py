"""Write the printed outputs and pictures of the guide into docs/guide: python tools/fill_guide.py [--slow] [PAGE …].

Blocks of a page run in order. A block marked `python` is run again by tests/test_docs.py, which compares its output with the
text block after it. A block marked `py` depends on time or takes long, so it runs only with --slow
and the tests leave it out. If the last line of a block
is a figure, it is saved to the file of the nearest image link.
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch

from headwise.ui.figures.figure_with_data import FigureWithData

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
BLOCK = re.compile(r"```(python|py)\n(.*?)```\n(\n```text\n.*?```\n)?", re.DOTALL)


def run_block(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Run a block. Return its printed output and the value of its last line if that is an expression."""
    body, value = ast.parse(code).body, None
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        if isinstance(body[-1], ast.Expr):
            exec(compile(ast.Module(body[:-1], []), "guide", "exec"), names)
            value = eval(compile(ast.Expression(body[-1].value), "guide", "eval"), names)
        else:
            exec(compile(ast.Module(body, []), "guide", "exec"), names)
    return stdout.getvalue(), value


def fill_page(page: Path, *, slow: bool) -> None:
    """Replace the outputs of a page by those of a new run, and save its figures. `slow` also runs blocks marked `py`."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    text = page.read_text()

    def filled(match: re.Match[str]) -> str:
        if match[1] == "py" and not slow:
            return match[0]
        output, value = run_block(match[2], names)
        if isinstance(value, FigureWithData):
            images = [
                (abs(image.start() - match.start()), image[1]) for image in re.finditer(r"\]\((\S+\.svg)\)", text)
            ]
            value.save(page.parent / min(images)[1])
        block = f"```{match[1]}\n{match[2]}```\n"
        return f"{block}\n```text\n{output}```\n" if output else block

    page.write_text(BLOCK.sub(filled, text))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    paths = [Path(argument) for argument in arguments if argument != "--slow"]
    for path in paths or sorted(GUIDE.glob("[01]*.md")):
        fill_page(path, slow="--slow" in arguments)
        print(path)
