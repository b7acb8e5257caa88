"""Check the prose of the project: docstrings, comments, errors, help texts, page texts and docs.

`python tools/check_prose.py` counts the matches of each pattern of `tools/prose_patterns.toml` and compares the counts with
`tools/prose_baseline.json`. A count may only fall. Public docstrings, errors, help texts and screens have no entry in the
baseline: every match in them fails.

Options: `--update` writes lower counts, `--list [TEXT]` prints the matches whose line contains TEXT, `--rates`
prints matches per 1,000 words.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).with_name("prose_baseline.json")
STRICT = ("public", "error", "help", "screen")

PATTERNS = tomllib.loads(Path(__file__).with_name("prose_patterns.toml").read_text())
COMPILED = {name: re.compile(entry["pattern"], re.MULTILINE) for name, entry in PATTERNS.items()}
CODE = re.compile(
    r"```.*?```|``[^`]*``|`[^`\n]*`|^ *(?:>>>|\.\.\.) .*$|https?://\S+|--[a-z-]+", re.MULTILINE | re.DOTALL
)

GENERATED = re.compile(r"<!-- ([\w ]+?)(?:: begin)? -->.*?<!-- \1(?:: end)? -->", re.DOTALL)  # tables of words, counts


@dataclass(frozen=True)
class Passage:
    """One piece of prose.

    Attributes:
        path, line: Position of the passage.
        kind: public, docstring, comment, error, help, screen or docs.
        text: Prose without code.
    """

    path: str
    line: int
    kind: str
    text: str


def public_names() -> set[str]:
    """Return the names in `headwise.__all__`."""
    for node in ast.parse((ROOT / "headwise" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    raise LookupError("headwise/__init__.py has no __all__")


def string_parts(node: ast.AST) -> str:
    """Join the literal parts of a string expression. An interpolated value becomes `X`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("X" if isinstance(part, ast.FormattedValue) else string_parts(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return string_parts(node.left) + string_parts(node.right)
    if isinstance(node, ast.IfExp):
        return f"{string_parts(node.body)} {string_parts(node.orelse)}"
    return ""


def python_passages(path: Path, public: set[str]) -> Iterator[Passage]:
    """Yield the docstrings, comments, errors, help texts and screen texts of a module."""
    source, name = path.read_text(), path.relative_to(ROOT).as_posix()
    tree = ast.parse(source)
    docstrings = set()
    for node, exported in walk_with_export(tree, public):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body and isinstance(body[0], ast.Expr):
            text = string_parts(body[0].value)
            if text:
                docstrings.add(body[0].value)
                command = name.startswith("headwise/cli/") and isinstance(node, ast.FunctionDef) and node.name == "run"
                kind = "help" if command else "public" if exported else "docstring"
                yield Passage(name, node.body[0].lineno, kind, text)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield Passage(name, node.lineno, "error", string_parts(argument))
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help":
                    yield Passage(name, keyword.value.lineno, "help", string_parts(keyword.value))
    if name.startswith("headwise/ui/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and node not in docstrings and " " in string_parts(node):
                yield Passage(name, node.lineno, "screen", string_parts(node))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# pyright", "# noqa", "# type", "# fmt")):
            yield Passage(name, token.start[0], "comment", token.string.lstrip("# "))


def walk_with_export(tree: ast.Module, public: set[str]) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether it belongs to an exported class or function."""

    def walk(node: ast.AST, exported: bool) -> Iterator[tuple[ast.AST, bool]]:
        yield node, exported
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.ClassDef | ast.FunctionDef)
            top = isinstance(node, ast.Module) and named and child.name in public  # type: ignore[union-attr]
            private = named and child.name.startswith("_") and not child.name.startswith("__")  # type: ignore[union-attr]
            yield from walk(child, (exported or top) and not private)

    yield from walk(tree, False)


def passages() -> Iterator[Passage]:
    """Yield all prose of the project."""
    public = public_names()
    for folder in ("headwise", "bench", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from python_passages(path, public)
    for path in sorted((ROOT / "headwise" / "ui").rglob("*.js")):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            for literal in re.findall(r'"([^"\\\n]* [^"\\\n]*)"|`([^`\n]* [^`\n]*)`', text.split("// ")[0]):
                yield Passage(
                    path.relative_to(ROOT).as_posix(), line, "screen", re.sub(r"\$\{[^}]*\}", "X", "".join(literal))
                )
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for path in sorted(page for page in pages if "research" not in page.parts):
        text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
        text = CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
        for line, content in enumerate(text.splitlines(), 1):
            yield Passage(path.relative_to(ROOT).as_posix(), line, "docs", content)


def matches() -> Iterator[tuple[Passage, str, str]]:
    """Yield the passage, the pattern and the matched words of every match."""
    for passage in passages():
        text = CODE.sub(" ", passage.text)
        for name, expression in COMPILED.items():
            for match in expression.finditer(text):
                yield passage, name, match[0]


def print_rates() -> None:
    """Print matches per 1,000 words for each kind of prose."""
    words = Counter[str]()
    for passage in passages():
        words[passage.kind] += len(CODE.sub(" ", passage.text).split())
    counts = Counter((passage.kind, name) for passage, name, _ in matches())
    for kind in sorted(words):
        total = sum(number for (other, _), number in counts.items() if other == kind)
        what = counts[kind, "what"]
        print(f"{kind:10} {words[kind]:8,} words  {total:6,} matches  {1000 * total / words[kind]:6.2f} per 1,000  "
              f"what {1000 * what / words[kind]:5.2f} per 1,000")  # fmt: skip


def main() -> int:
    """Run the check. Return 1 if a count rose."""
    parser = argparse.ArgumentParser(description="Check the prose of the project.")
    parser.add_argument("--update", action="store_true", help="write lower counts to the baseline")
    parser.add_argument("--list", nargs="?", const="", help="print every match in paths that contain this text")
    parser.add_argument("--rates", action="store_true", help="print matches per 1,000 words")
    options = parser.parse_args()
    if options.rates:
        print_rates()
        return 0
    counts, lines = Counter[str](), {}
    for passage, name, words in matches():
        key = f"{passage.path} {passage.kind} {name}"
        counts[key] += 1
        lines.setdefault(key, []).append(
            f"{passage.path}:{passage.line}: {passage.kind}: {words.strip()!r} ({name}: {PATTERNS[name]['advice']})"
        )
    if options.list is not None:
        print("\n".join(line for group in lines.values() for line in group if options.list in line))
        return 0
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if options.update:
        kept = {key: number for key, number in sorted(counts.items()) if key.split(" ")[1] not in STRICT}
        if baseline:
            kept = {key: min(number, baseline.get(key, 0)) for key, number in kept.items() if baseline.get(key, 0)}
        BASELINE.write_text(json.dumps(kept, indent=0) + "\n")
        baseline = kept
    risen = [key for key, number in counts.items() if number > baseline.get(key, 0)]
    for key in risen:
        print(*lines[key], sep="\n")
    print(f"{sum(counts.values())} matches, {len(risen)} groups above the baseline")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
