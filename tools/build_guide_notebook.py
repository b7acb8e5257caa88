"""Write docs/guide/guide.ipynb from the pages of the guide, with their printed outputs: python tools/build_guide_notebook.py.

Run `python tools/fill_guide.py` first if code of the guide has changed. A test compares the notebook with the pages.
"""

import json
import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
BLOCK = re.compile(r"```(?:python|py)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
SEED = "import torch\n\ntorch.manual_seed(0);"


def markdown_cell(text: str) -> dict[str, Any]:
    """Return a markdown cell."""
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}


def code_cell(code: str, output: str, count: int) -> dict[str, Any]:
    """Return a code cell with its printed output."""
    stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
    return {
        "cell_type": "code", "execution_count": count, "metadata": {}, "outputs": [stream] if output else [],
        "source": code.strip().splitlines(keepends=True),
    }  # fmt: skip


def build_notebook() -> str:
    """Return the notebook as JSON. Each part starts with its own seed, as its page does in the tests."""
    cells: list[dict[str, Any]] = []
    count = 0
    for page in [GUIDE / "index.md", *sorted(GUIDE.glob("[01]*.md")), GUIDE / "solutions.md"]:
        text, position = page.read_text(), 0
        for index, match in enumerate(BLOCK.finditer(text)):
            cells.append(markdown_cell(text[position : match.start()]))
            if index == 0:
                count += 1
                cells.append(code_cell(SEED, "", count))
            count += 1
            cells.append(code_cell(match[1], match[2] or "", count))
            position = match.end()
        if text[position:].strip():
            cells.append(markdown_cell(text[position:]))
    cells = [cell | {"id": f"cell-{index}"} for index, cell in enumerate(cells) if cell["source"]]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    path = GUIDE / "guide.ipynb"
    path.write_text(build_notebook())
    print(path)
