"""Architecture of the package: import order, public names, commands, and limits on names and functions."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import headwise as hw

ROOT = Path(__file__).parent.parent
PACKAGES = [
    *(
        "errors",
        "lazy_import",
        "progress",
        "spec",
        "kernels",
        "cache",
        "heads",
        "model",
        "text",
        "io",
        "distributed",
        "attached",
    ),
    *("weights", "exporters", "training", "distillation", "analysis", "compression", "experiments", "ui", "cli"),
]
# Modules whose result classes are printed by headwise.ui.result_text, imported inside `__repr__` and `_repr_html_`.
RESULT_MODULES = (
    "analysis/ablation/importance.py",
    "analysis/ablation/quantization_sensitivity.py",
    "analysis/attribution/score_attribution.py",
    "analysis/circuits/redundancy.py",
    "analysis/finding/head_search_result.py",
    "analysis/evaluation/evaluate.py",
    "analysis/recording/attention_maps.py",
    "analysis/recording/recording.py",
    "analysis/roles/head_history.py",
    "analysis/roles/head_profile.py",
    "analysis/roles/profile_result.py",
    "analysis/roles/roles.py",
    "analysis/similarity/compare_heads.py",
    "analysis/similarity/match_heads.py",
    "attached/attached_model.py",
    "compression/allocate_bits.py",
    "compression/prune_to_circuit_study.py",
    "compression/plan_report.py",
    "compression/prune_study.py",
    "compression/pruning_curve.py",
    "distributed/parallel_strategy_cost.py",
    "heads/head.py",
    "spec/plan.py",
    "training/train_result.py",
)
# Imports of later packages, all inside functions: objects show themselves, and a model saves, loads and exports itself.
ALLOWED_UPWARD_IMPORTS = {
    *((module, "headwise.ui.result_text") for module in RESULT_MODULES),
    ("analysis/attribution/scan.py", "headwise.ui.scan_page"),
    ("analysis/attribution/scan.py", "headwise.ui.scan_text"),
    ("analysis/circuits/circuit_result.py", "headwise.ui.circuit_page"),
    ("analysis/circuits/circuit_result.py", "headwise.ui.circuit_text"),
    ("heads/head.py", "headwise.ui.notebook"),
    ("analysis/recording/attention_maps.py", "headwise.ui.notebook"),
    ("analysis/recording/attention_maps.py", "headwise.ui.widget"),
    ("analysis/finding/head_search_result.py", "headwise.ui.figures.head_search_plot"),
    ("analysis/roles/profile_result.py", "headwise.ui.report_data"),
    ("analysis/roles/profile_result.py", "headwise.ui.figures.plot_accessor"),
    ("analysis/roles/profile_result.py", "headwise.ui.notebook"),
    ("analysis/roles/profile_result.py", "headwise.ui.report"),
    ("analysis/roles/profile_result.py", "headwise.ui.head_summary"),
    ("analysis/roles/profile_result.py", "headwise.ui.widget"),
    ("attached/attached_model.py", "headwise.weights.to_native"),  # whether an error can advise to convert the model
    ("model/transformer.py", "headwise.weights.save"),
    ("model/transformer.py", "headwise.weights.load"),
    ("model/transformer.py", "headwise.weights.export"),
}
SUBPACKAGES = {
    "analysis": [
        "recording",
        "metrics",
        "ablation",
        "roles",
        "attribution",
        "similarity",
        "finding",
        "evaluation",
        "steering",
        "circuits",
    ],
    "experiments": ["engine", "claim_tests"],
}
SOURCES = sorted((ROOT / "headwise").rglob("*.py"))
ALL_SOURCES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").glob("*.py"))]
MAX_LINES, MAX_PARAMETERS = 60, 8


@cache
def parse(path: Path) -> ast.Module:
    """Parse a source file once for all tests of this file."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def forget_parsed_sources() -> Iterator[None]:
    """Free the trees at the end, so that the garbage collector does not scan them during later tests."""
    yield
    parse.cache_clear()


# Names that do not describe their value.
BANNED_NAMES = frozenset(
    """
    made told one some found there asked given whole what those seen kept known wanted here how who which both held
    taken due said shown drawn usual worth way ways apart turned cut gone theirs ours mine behind beside dice looking
    alike todo most fewest longest by on
    """.split()  # noqa: SIM905
)
# Last words of class names. A new class ends in one of them, or adds its noun here.
CLASS_NOUNS = frozenset(
    """
    ablator accessor accumulator accuracy activations address alignment allocation architecture arcs attachment
    attention attribution axis batch batches bias bits block blocks buffer cache call capture case check checkpoint
    checkpoints choice chunk circuit claim collector command comparison components config context contexts converter
    copy corpus cost costs curve curves data demo description details difference display distance document drop
    dropout edge effect effects embedding emergence encoder ensemble entropy entry error estimate estimator evaluation
    evaluator evidence example executor experiment extractor facts family feature features file files flops focus folder
    footprint forward fraction fragment function gate gates gather generation grad grid group groups guard head heads
    history hook hooks image importance index info input key kl labels language latent layer layout line linear log logits
    loop loss map mapping maps mark mask match matching matrices matrix means measurement mentions metric mixin mlp
    mode model module mover name names nodes norm noun observer offset offsets ops options output outputs pair pairs params
    partition parts pass patch patches placement plan planner plot point points policy pool pooler position prediction
    prefill preprocessor printer probe probs profile progress projection projections prompt protocol provider proxy
    qkv quantity quantize queue range rank ranker reader recipe record recorder recording relation report request
    rerun responses result results rng role rotary row rows rule runner sample sampler samples sampling scaling scan
    score scores search selection sensitivity sentence sequences server session settings setup shape shard share
    signal size slice spec spread state states statistic stats steering step store strategy stream streamer study sum
    summary sums suppression sweep table target targets task tensor term test text timer timing token tokenizer tokens
    totals trace trajectory transform transformer trend trial tuner verdict verifier view visibility weight weights
    widget word writer columns contrast handle holder matches modules notes repair defaults requirements status
    """.split()  # noqa: SIM905
)

PUBLIC_NAMES = [
    "HeadwiseError",
    *(
        "Address",
        "AttentionSpec",
        "CachePolicy",
        "Latent",
        "ModelSpec",
        "Plan",
        "QKNorm",
        "QueryScaling",
        "Rotary",
        "RotaryScaling",
        "preset",
        "presets",
    ),
    *("Mask", "attention", "causal", "document_mask", "padding_mask", "per_head", "window"),
    *("Head", "Heads", "MultiHeadAttention", "from_torch", "to_torch"),
    "Transformer",
    *("Corpus", "Tokenizer", "embed"),
    *("shard", "layout"),
    *("attach", "per_head_cache", "cached", "load", "to_native", "export"),
    *("Recipe", "train", "distill"),
    *(
        "TokenizedCorpus",
        "record",
        "attention_maps",
        "scan",
        "Scan",
        "profile",
        "Profile",
        "Role",
        "AttentionToTokens",
        "AttentionToPosition",
    ),
    *(
        "describe",
        "ablated",
        "patched",
        "importance",
        "sensitivity",
        "explain",
        "compare_heads",
        "match_heads",
        "HeadHistory",
        "find_heads",
    ),
    *("HarnessModel", "evaluate"),
    *("Steering", "find_steering"),
    *("CircuitTask", "find_circuit", "redundancy"),
    *(
        "plan_pruning",
        "plan_streaming",
        "apply",
        "prune",
        "prune_study",
        "quantize",
        "quantized",
        "dequantize",
        "allocate_bits",
    ),
    "fold_steering",
    "selftest",
]
COMMANDS = [
    *(
        "cache",
        "circuit",
        "claims",
        "corpus",
        "demo",
        "describe",
        "diff",
        "distill",
        "evaluate",
        "explain",
        "export",
        "find",
        "generate",
        "importance",
        "info",
    ),
    *(
        "layout",
        "maps",
        "plot",
        "presets",
        "profile",
        "prune",
        "quantize",
        "scan",
        "selftest",
        "sensitivity",
        "steer",
        "store",
        "sweep",
        "train",
        "view",
    ),
]


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "headwise").parts[0].removesuffix(".py")


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of this package that some statements import."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            deeper = {f"headwise.{alias.name}" for alias in node.names if alias.name in PACKAGES}
            modules |= deeper if node.module == "headwise" else {node.module or ""}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module for module in modules if module.startswith("headwise.")}


def test_imports_follow_package_order() -> None:
    """Inside functions too, but for those few."""
    upwards = set()
    for path in SOURCES:
        if package_of(path) not in PACKAGES:
            continue  # headwise/__init__.py and __main__.py import every package
        tree = parse(path)
        for module in imported(ast.walk(tree)):
            if PACKAGES.index(module.split(".")[1]) > PACKAGES.index(package_of(path)):
                assert module not in imported(tree.body), f"{path} imports {module}, a later package"
                upwards.add((str(path.relative_to(ROOT / "headwise")), module))
    assert upwards == ALLOWED_UPWARD_IMPORTS


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_imports_follow_subpackage_order(package: str) -> None:
    order = SUBPACKAGES[package]
    for path in (ROOT / "headwise" / package).glob("*/**/*.py"):
        own = path.relative_to(ROOT / "headwise" / package).parts[0]
        for module in imported(ast.walk(parse(path))):
            within = module.removeprefix(f"headwise.{package}.").split(".")[0]
            if module.startswith(f"headwise.{package}.") and within in order:
                assert order.index(within) <= order.index(own), f"{path} imports {module}, a later subpackage"


def test_experiments_import_public_names_only() -> None:
    """Each name is in the `__all__` of the package it is imported from."""
    private = []
    for path in (ROOT / "headwise" / "experiments").rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                private += [f"{path.name}: {alias.name}" for alias in node.names if alias.name.startswith("headwise.")]
            if not isinstance(node, ast.ImportFrom) or node.module in ("headwise.errors", "headwise.progress"):
                continue
            module = node.module or ""
            if module.split(".")[0] != "headwise" or f"{module}.".startswith("headwise.experiments."):
                continue
            is_package = (ROOT / module.replace(".", "/")).is_dir()
            public = getattr(import_module(module), "__all__", ()) if is_package else ()
            private += [f"{path.name}: {module}.{alias.name}" for alias in node.names if alias.name not in public]
    assert private == [], "make the name public in its package, or do without it"


@pytest.mark.parametrize("package", [name for name in PACKAGES if (ROOT / "headwise" / name).is_dir()])
def test_package_public_names_exist(package: str) -> None:
    module = import_module(f"headwise.{package}")
    for name in getattr(module, "__all__", ()):
        assert not isinstance(getattr(module, name), ModuleType), f"{name} is also a module of the package"


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("def f():\n    from headwise.ui.report_data import make_report_data", {"headwise.ui.report_data"}),
        ("def f():\n    import headwise.analysis.recording.recording", {"headwise.analysis.recording.recording"}),
        ("from headwise import cli", {"headwise.cli"}),
        ("from headwise import __version__\nimport os", set()),
    ],
)
def test_imported_inside_functions_are_found(line: str, modules: set[str]) -> None:
    assert imported(ast.walk(ast.parse(line))) == modules


@pytest.mark.parametrize("path", [path for path in SOURCES if package_of(path) in PACKAGES], ids=str)
def test_isinstance_on_model_classes_is_absent(path: Path) -> None:
    """Differences between a native and an attached model are methods of both; see model/protocols.py."""
    if path == ROOT / "headwise/analysis/ablation/quantization_sensitivity.py":
        return  # it runs the blocks of native models itself
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            assert not kinds & {"Transformer", "AttachedModel"}, f"line {node.lineno}"


def find_cache_classes(trees: Iterable[ast.AST]) -> set[str]:
    """Names of the model cache, of `LayerCache` and of its subclasses in any package."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {"LayerCache", "ModelCache"}
    while more := {name for name, base_names in bases.items() if base_names & names} - names:
        names |= more
    return names


def find_isinstance_calls(tree: ast.AST, class_names: set[str]) -> list[int]:
    """Lines of a module that call isinstance or issubclass on one of these classes, by name or as an attribute."""
    lines = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            parts = list(ast.walk(node.args[1]))
            kinds = {part.id for part in parts if isinstance(part, ast.Name)}
            kinds |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
            lines += [node.lineno] if kinds & class_names else []
    return lines


def test_isinstance_on_caches_is_absent_outside_cache() -> None:
    """Differences between caches are methods and attributes of `LayerCache`."""
    trees = {path: parse(path) for path in SOURCES}
    cache_classes = find_cache_classes(trees.values())
    assert {"NoCache", "PerHeadCache", "SlidingWindowCache", "CrossAttentionCache", "FunctionalCache"} <= cache_classes
    calls = {
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in trees.items()
        if package_of(path) != "cache"
        for line in find_isinstance_calls(tree, cache_classes)
    }
    assert calls == set()


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("isinstance(cache, PerHeadCache | SharedKVCache)", 1),
        ("issubclass(kind, cache.PerHeadCache)", 1),
        ("isinstance(cache, (int, PerHeadCache))", 1),
        ("isinstance(cache, dict)", 0),
    ],
)
def test_isinstance_on_caches_is_found(line: str, count: int) -> None:
    assert len(find_isinstance_calls(ast.parse(line), {"PerHeadCache", "SharedKVCache"})) == count


def test_class_names_are_unique() -> None:
    paths_by_name: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths_by_name.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in paths_by_name.items() if len(where) > 1}


def allowed(rule: str) -> set[str]:
    """Entries of the allow-list of one rule, as `path name`. The list may only shrink."""
    lines = (ROOT / "tests" / "architecture_allowed.txt").read_text().splitlines()
    return {line.removeprefix(f"{rule} ") for line in lines if line.startswith(f"{rule} ")}


def check_rule(rule: str, actual: set[str]) -> None:
    """Fail for entries that break a rule and are not allowed, and for allowed ones that no longer break it."""
    assert sorted(actual - allowed(rule)) == [], "new entries break this rule"
    assert sorted(allowed(rule) - actual) == [], "delete these lines of tests/architecture_allowed.txt"


def walk_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from walk_functions(node, f"{name}.")
        else:
            yield from walk_functions(node, prefix)


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names of classes, functions, parameters, fields, attributes and locals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def test_names_avoid_banned_words() -> None:
    actual = {
        f"{path.relative_to(ROOT)} {name}"
        for path in ALL_SOURCES
        for name in {path.stem, *defined_names(parse(path))}
        if name.lstrip("_") in BANNED_NAMES
    }
    check_rule("name", actual)


def test_class_names_end_in_known_nouns() -> None:
    unknown = {}
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                last = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z]?[a-z0-9]+", node.name.lstrip("_"))[-1].lower()
                if last not in CLASS_NOUNS:
                    unknown[node.name] = str(path.relative_to(ROOT))
    assert unknown == {}, "end the class name in a noun, or add its noun to CLASS_NOUNS"


def test_docstrings_name_their_subject() -> None:
    """No docstring begins with `What` or `The same`."""
    actual = set()
    for path in ALL_SOURCES:
        tree = parse(path)
        documented = [("module", tree), *walk_functions(tree)]
        documented += [(node.name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        actual |= {
            f"{path.relative_to(ROOT)} {name}"
            for name, node in documented
            if (ast.get_docstring(node) or "").startswith(("What ", "The same"))
        }
    check_rule("docstring", actual)


def test_functions_are_short() -> None:
    actual = set()
    for path in SOURCES:
        for name, node in walk_functions(parse(path)):
            start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno  # docstrings do not count
            if (node.end_lineno or 0) - (start or 0) > MAX_LINES:
                actual.add(f"{path.relative_to(ROOT)} {name}")
    check_rule("lines", actual)


def test_functions_have_few_parameters() -> None:
    """Public entry points may have more if they are keyword-only."""
    public = {*PUBLIC_NAMES}
    actual = set()
    for path in SOURCES:
        if path.parent == ROOT / "headwise/cli":
            continue  # typer makes options of all parameters
        for name, node in walk_functions(parse(path)):
            positional = [*node.args.posonlyargs, *node.args.args]
            count = len(positional) + (0 if name in public else len(node.args.kwonlyargs))
            count -= bool(positional and positional[0].arg in ("self", "cls"))
            if count > MAX_PARAMETERS:
                actual.add(f"{path.relative_to(ROOT)} {name}")
    check_rule("parameters", actual)


def test_booleans_are_keyword_only() -> None:
    actual = set()
    for path in SOURCES:
        if path.parent == ROOT / "headwise/cli":
            continue  # typer makes options of all parameters
        for name, node in walk_functions(parse(path)):
            for argument in (*node.args.posonlyargs, *node.args.args):
                if argument.annotation is not None and ast.unparse(argument.annotation) in ("bool", "bool | None"):
                    actual.add(f"{path.relative_to(ROOT)} {name}.{argument.arg}")
    check_rule("boolean", actual)


def test_packages_all_are_listed() -> None:
    assert {package_of(path) for path in SOURCES} - {"__init__", "__main__"} <= set(PACKAGES)


def test_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    assert listed == PACKAGES


def test_public_names_are_frozen() -> None:
    assert hw.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(hw, name) is not None
        assert name in dir(hw)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hw.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_commands_are_frozen() -> None:
    from headwise.cli import app

    assert sorted(command.name or "" for command in app.registered_commands) == COMMANDS
    files = {path.stem for path in (ROOT / "headwise" / "cli").glob("*.py")} - {"__init__"}
    assert sorted(files) == COMMANDS


@pytest.mark.parametrize("arguments", [["-c", "import headwise"], ["-m", "headwise", "--help"]])
def test_startup_imports_no_heavy_modules(arguments: list[str]) -> None:
    code = ["-X", "importtime", *arguments]
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, check=True, cwd=ROOT)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "headwise" in imported
    assert not imported & {"torch", "scipy", "matplotlib", "numpy", "transformers"}


def test_tracked_files_contain_no_local_paths() -> None:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ""):
            assert not re.search(r"(^|[\s\"'(])/(work|root|home)/", path.read_text(errors="ignore")), name
