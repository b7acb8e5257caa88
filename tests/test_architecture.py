"""The house stays in order: small files, imports that flow down, a true tree, a frozen surface."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import headwise as hw

ROOT = Path(__file__).parent.parent
ROOMS = [
    *("errors", "progress", "spec", "kernels", "heads", "model", "text", "files", "team", "attach"),
    *("weights", "deploy", "train", "teach", "look", "change", "lab", "show", "cli"),
]
# The few that look up, inside a function: what is there to be shown shows itself, a model saves, reopens and exports
# itself, and the plans a model was cut by are read with it.
UPWARDS = {
    ("heads/head.py", "headwise.ui.notebook"),
    ("look/record/attend.py", "headwise.ui.notebook"),
    ("look/record/attend.py", "headwise.ui.widget"),
    ("look/profile/result.py", "headwise.ui.report_data"),
    ("look/profile/result.py", "headwise.ui.figures.plot"),
    ("look/profile/result.py", "headwise.ui.notebook"),
    ("look/profile/result.py", "headwise.ui.report"),
    ("look/profile/result.py", "headwise.ui.head_summary"),
    ("look/profile/result.py", "headwise.ui.widget"),
    ("model/transformer.py", "headwise.weights.save"),
    ("model/transformer.py", "headwise.weights.load"),
    ("model/transformer.py", "headwise.weights.export"),
    ("weights/load.py", "headwise.compression.plan"),
    ("attach/store.py", "headwise.compression.plan"),
}
SUB_ROOMS = {
    "look": ["record", "measure", "worth", "profile", "writes", "why", "compare"],
    "lab": ["engine", "experiments"],
}
SOURCES = sorted((ROOT / "headwise").rglob("*.py"))

PUBLIC_NAMES = [
    "HeadwiseError",
    *("Address", "AttentionSpec", "Keeps", "ModelSpec", "Rotary", "RotaryScaling", "layout", "preset", "presets"),
    *("Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window"),
    *("Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch"),
    "Transformer",
    *("Corpus", "Tokenizer", "embed"),
    "shard",
    "attach",
    "load",
    "export",
    *("Recipe", "TrainRequest", "train", "distil"),
    *("Reading", "record", "attend", "profile", "profile_shards", "WeightAt", "WeightOn", "Role", "Profile"),
    *("ablated", "patched", "importance", "sensitivity", "why", "compare", "match", "HeadHistory"),
    *("prune", "quantise", "dequantise", "allocate", "Plan", "PruneRequest", "PruneStudy", "prune_study"),
    *("head_sweep", "claims"),
]
VERBS = [
    *("ablate", "attend", "cache", "claims", "corpus", "demo", "diff", "distil", "export", "generate", "head", "heads"),
    *("info", "layout", "plot", "presets", "prune", "quantise", "sensitivity", "sweep", "train", "view", "why"),
]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "headwise").parts[0].removesuffix(".py")


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of this package that some statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a room is named in full"
            deeper = {f"headwise.{alias.name}" for alias in node.names if alias.name in ROOMS}
            found |= deeper if node.module == "headwise" else {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.startswith("headwise.")}


def test_imports_flow_down() -> None:
    """Inside functions too, but for those few."""
    upwards = set()
    for path in SOURCES:
        if room_of(path) not in ROOMS:
            continue  # the front door and __main__ see every room
        tree = ast.parse(path.read_text())
        for module in imported(ast.walk(tree)):
            if ROOMS.index(module.split(".")[1]) > ROOMS.index(room_of(path)):
                assert module not in imported(tree.body), f"{path} imports {module}, a later room"
                upwards.add((str(path.relative_to(ROOT / "headwise")), module))
    assert upwards == UPWARDS


@pytest.mark.parametrize("room", SUB_ROOMS)
def test_so_they_do_inside_a_room(room: str) -> None:
    order = SUB_ROOMS[room]
    for path in (ROOT / "headwise" / room).glob("*/**/*.py"):
        own = path.relative_to(ROOT / "headwise" / room).parts[0]
        for module in imported(ast.walk(ast.parse(path.read_text()))):
            within = module.removeprefix(f"headwise.{room}.").split(".")[0]
            if module.startswith(f"headwise.{room}.") and within in order:
                assert order.index(within) <= order.index(own), f"{path} imports {module}, a later part of the room"


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("def f():\n    from headwise.ui.report_data import make_book", {"headwise.ui.report_data"}),
        ("def f():\n    import headwise.analysis.recording.recording", {"headwise.analysis.recording.recording"}),
        ("from headwise import cli", {"headwise.cli"}),
        ("from headwise import __version__\nimport os", set()),
    ],
)
def test_imports_inside_functions_are_seen(line: str, seen: set[str]) -> None:
    assert imported(ast.walk(ast.parse(line))) == seen


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(path) in ROOMS], ids=str)
def test_nobody_asks_whose_model_it_is(path: Path) -> None:
    """What differs between a model of ours and an attached one is a method of both; see model/contract.py."""
    if path == ROOT / "headwise/analysis/ablation/sensitivity.py":
        return  # it walks through blocks of ours by itself
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            assert not kinds & {"Transformer", "Attached"}, f"line {node.lineno}"


def test_a_class_has_its_name_for_itself() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def named(tree: ast.AST) -> Iterator[str]:
    """What classes, functions, parameters and fields are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign))


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_names_say_what_they_hold(path: Path) -> None:
    """Anything can be told or asked, so nothing is called that."""
    for name in (path.stem, *named(ast.parse(path.read_text()))):
        assert not {"told", "asked"} & set(name.lower().split("_")), name


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in SOURCES} - {"__init__", "__main__"} <= set(ROOMS)


def test_the_tree_is_the_tree() -> None:
    block = (ROOT / "docs" / "house.md").read_text().split("<!-- tree -->")[1]
    told, folders = set(), []
    for line in re.findall(r"^( *)(\S+)", block.replace("```", ""), re.MULTILINE):
        depth, name = len(line[0]) // 2, line[1]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            told.add("".join(folders) + name)
    there = {
        str(path.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py" or path.parent.name == "headwise"
    }
    assert told == there


def test_public_names_are_frozen() -> None:
    assert hw.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(hw, name) is not None
        assert name in dir(hw)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hw.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_verbs_are_frozen() -> None:
    from headwise.cli import app

    assert sorted(command.name or "" for command in app.registered_commands) == VERBS
    files = {path.stem for path in (ROOT / "headwise" / "cli").glob("*.py")} - {"__init__"}
    assert sorted(files) == VERBS


@pytest.mark.parametrize("arguments", [["-c", "import headwise"], ["-m", "headwise", "--help"]])
def test_starting_up_imports_nothing_heavy(arguments: list[str]) -> None:
    code = ["-X", "importtime", *arguments]
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, check=True, cwd=ROOT)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "headwise" in imported
    assert not imported & {"torch", "scipy", "matplotlib", "numpy", "transformers"}


def test_no_path_of_one_machine_is_in_the_project() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ""):
            assert not re.search(r"(^|[\s\"'(])/(work|root|home)/", path.read_text(errors="ignore")), name
