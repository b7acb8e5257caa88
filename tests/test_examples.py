"""The notebooks of examples/: short enough for a phone, executed as they stand, and running again."""

import base64
import json
import struct
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
MAX_LINE, MAX_IMAGE_WIDTH, MAX_BYTES = 48, 520, 300_000  # characters of code, pixels across, of a file


def test_examples_are_the_five_notebooks() -> None:
    assert [book.stem.split("-")[1] for book in NOTEBOOKS] == ["roles", "induction", "pruning", "molecules", "circuits"]


@pytest.mark.parametrize("book", NOTEBOOKS, ids=lambda book: book.stem)
def test_notebook_is_executed_and_narrow(book: Path) -> None:
    assert book.stat().st_size < MAX_BYTES
    cells = [cell for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert max(len(line.rstrip("\n")) for cell in cells for line in cell["source"]) <= MAX_LINE
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    for output in outputs:
        image = output.get("data", {}).get("image/png")
        if image:
            assert struct.unpack(">I", base64.b64decode(image)[16:20])[0] <= 2 * MAX_IMAGE_WIDTH  # two pixels for one


@pytest.mark.slow
@pytest.mark.parametrize("book", NOTEBOOKS, ids=lambda book: book.stem)
def test_notebook_executes_without_error(book: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    read = nbformat.read(book, as_version=4)
    NotebookClient(read, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
