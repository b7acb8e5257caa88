"""Folders are replaced atomically: after an interrupt at any step, either the old or the new folder exists."""

from pathlib import Path

import pytest

from headwise.io import atomic_write
from headwise.io.atomic_write import atomic_folder


def write_folder(folder: Path, text: str) -> None:
    with atomic_folder(folder, ("mark",)) as new:
        (new / "mark").write_text(text)


@pytest.mark.parametrize("swaps", [True, False], ids=["in one step", "in two"])
def test_atomic_folder_replaces_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    if not swaps:
        monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)  # as on a system without atomic swap
    for text in ("old", "new", "newer"):
        write_folder(tmp_path / "made", text)
        assert (tmp_path / "made" / "mark").read_text() == text
        assert [file.name for file in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", [0, 1])
def test_atomic_folder_interrupted_keeps_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: type[BaseException], step: int
) -> None:
    write_folder(tmp_path / "made", "old")
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    rename, steps = Path.rename, []

    def stop(self: Path, target: Path) -> Path:
        steps.append(self)
        if len(steps) == step + 1:
            raise stopped
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises((KeyboardInterrupt, atomic_write.HeadwiseError)):
        write_folder(tmp_path / "made", "new")
    assert (tmp_path / "made" / "mark").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["made"]
