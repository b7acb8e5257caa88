"""The table of what the package is built on names every dependency, with the range pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_dependency_is_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked: dict[str, tuple[str, set[str]]] = {}
    for extra, names in {"always": project["dependencies"], **project["optional-dependencies"]}.items():
        for text in names:
            found = re.match(r"([\w.-]+)(?:\[[^]]*\])?(.*)", text)
            assert found is not None
            asked.setdefault(found[1], (found[2].strip() or "any", set()))[1].add(extra)
    rows = re.findall(
        r"^\| ([\w.-]+) \| ((?:>=|any)[\d.]*) \| ([\w, ]+) \| ([^|]+) \|$",
        (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    listed = {name: (versions, set(extras.split(", "))) for name, versions, extras, _ in rows}
    assert listed == asked
    assert all(licence.strip() for *_, licence in rows)
