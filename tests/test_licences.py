"""The table of dependencies lists every dependency with its version range in pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_dependency_table_lists_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required: dict[str, tuple[str, set[str]]] = {}
    for extra, names in {"always": project["dependencies"], **project["optional-dependencies"]}.items():
        for text in names:
            match = re.match(r"([\w.-]+)(?:\[[^]]*\])?(.*)", text)
            assert match is not None
            required.setdefault(match[1], (match[2].strip() or "any", set()))[1].add(extra)
    rows = re.findall(
        r"^\| ([\w.-]+) \| ((?:>=|any)[\d.,<]*) \| ([\w, ]+) \| ([^|]+) \|$",
        (ROOT / "docs" / "research" / "reliability.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    listed = {name: (versions, set(extras.split(", "))) for name, versions, extras, _ in rows}
    assert listed == required
    assert all(license_name.strip() for *_, license_name in rows)
