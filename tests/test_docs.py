"""Every example runs: docstrings as doctests, and the python blocks of README and docs, page by page."""

import ast
import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import headwise

ROOT = Path(__file__).parent.parent
MODULES = ["headwise", *(module_info.name for module_info in pkgutil.walk_packages(headwise.__path__, "headwise."))]
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [ROOT / "README.md", *(page for page in DOCS if page.parent.name != "guide")]  # the guide has a test of its own


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_docstring_examples_pass(name: str) -> None:
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_page_examples_print_expected_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for files that a page writes
    check_examples(page, fence="python")


LONG_PAGES = [page for page in PAGES if "```python3\n" in page.read_text()]  # these blocks take more than a few seconds


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_long_docs_examples_print_expected_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_examples(page, fence="python3")


def check_examples(page: Path, fence: str) -> None:
    """Run the blocks of a page with this fence in order, and compare printed lines with the comments."""
    torch.manual_seed(0)
    names: dict = {}
    for block in re.findall(rf"```{fence}\n(.*?)```", page.read_text(), re.DOTALL):
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile(ast.Module([statement], []), page.name, "exec"), names)
            source = lines[statement.lineno - 1 : statement.end_lineno]
            promises = [line.split("  # ")[-1] for line in source if "print(" in line and "  # " in line]
            for printed in stdout.getvalue().splitlines() if promises else []:
                assert any(matches_promise(printed, promise) for promise in promises), f"{page.name} printed {printed}"


GUIDE_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def test_guide_text_blocks_equal_printed_output() -> None:
    """Text blocks of the guide equal the output of the python block above them; `python tools/fill_guide.py` writes it."""
    for page in sorted((ROOT / "docs" / "guide").glob("[01]*.md")):
        torch.manual_seed(0)
        names: dict = {}
        for code, expected in GUIDE_BLOCK.findall(page.read_text()):
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(compile(code, page.name, "exec"), names)
            assert stdout.getvalue() == expected, page.name


def test_guide_notebook_equals_pages() -> None:
    from tools.build_guide_notebook import build_notebook

    committed = (ROOT / "docs" / "guide" / "guide.ipynb").read_text()
    assert committed == build_notebook(), "run python tools/build_guide_notebook.py"


def matches_promise(printed: str, promise: str) -> bool:
    """Check the comment after a print against its output. Words may follow a comma or colon, and … omits text."""
    if promise.endswith("…"):
        return printed.startswith(promise.removesuffix("…").strip())
    return promise == printed or promise.startswith((f"{printed}, ", f"{printed}: "))


def test_reference_page_lists_every_public_name() -> None:
    listed = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
    public = [getattr(headwise, name) for name in headwise.__all__]
    assert listed == {f"{public_object.__module__}.{public_object.__qualname__}" for public_object in public}


def test_page_words_equal_ui_glossary() -> None:
    from headwise.ui.glossary import GLOSSARY

    page = (ROOT / "docs" / "page-words.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| \[\w+\]\((.+?)\) \|$", page, re.MULTILINE)
    assert rows == [(name, word.meaning, word.docs) for name, word in GLOSSARY.items()]


def test_commands_page_lists_every_command() -> None:
    from headwise.cli import COMMANDS
    from headwise.cli.shell.command_examples import EXAMPLES

    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+)` \|$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    expected = []
    for command in COMMANDS:
        name, summary = command.__name__.split(".")[-1], command.run.__doc__.split("\n\n")[0]
        expected.append((name, " ".join(summary.split()), EXAMPLES[name]))
    assert sorted(rows) == sorted(expected)


def test_pages_have_at_most_2500_words_outside_tables() -> None:
    """Generated tables are looked up, not read."""
    for page in DOCS:
        prose = re.sub(r"^\|.*$", "", page.read_text(), flags=re.MULTILINE)
        assert len(prose.split()) <= 2500, page.name


def test_claim_pages_equal_the_figures_of_the_seeds() -> None:
    from tools.fill_claims import filled_pages

    for page, text in filled_pages().items():
        assert page.read_text() == text, f"{page.name}: run python tools/fill_claims.py"
