"""The demo, presets and unknown commands on the command line."""

import json
from pathlib import Path

import headwise as hw
from headwise.ui.print_demo import MAX_STAGE_LINES
from tests.runner import run_command, run_in_subprocess
from tests.ui.test_demo import stage_lengths


def test_demo_train_profiles_prunes_and_reports(tmp_path: Path) -> None:
    done = run_command("demo", "--train", "--quick", "--out", str(tmp_path / "demo"), columns=80)
    assert done.code == 0, done.err
    output = " ".join(done.out.split())
    for phrase in (
        "Ctrl-C skips the training",
        "after 24 steps",
        "All 8 heads",
        "heads pruned, ranked by ablation",
        "held-out texts, 95% CI",
        "What to try next",
        "headwise view",
    ):
        assert phrase in output
    assert (tmp_path / "demo" / "trained" / "report.html").is_file()
    lengths = stage_lengths(done.out)
    assert len(lengths) == 4, "three stages and the next steps"
    assert max(lengths.values()) <= MAX_STAGE_LINES, lengths


def test_demo_folder_with_other_files_raises(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "mine.txt").write_text("mine")
    done = run_command("demo", "--train", "--quick", "--out", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith(f"headwise: {tmp_path / 'trained'}: already exists")
    assert [path.name for path in (tmp_path / "trained").iterdir()] == ["mine.txt"]


def test_presets_lists_every_preset() -> None:
    listed = json.loads(run_command("presets", "--json").out)
    assert [row["preset"] for row in listed] == list(hw.presets())
    assert {row["preset"]: row["parameters"] for row in listed}["gpt2"] == 124_439_808
    assert [row["year"] for row in listed] == sorted(row["year"] for row in listed)
    gemma = next(row for row in listed if row["preset"] == "gemma3-1b")
    assert gemma["norm"] == "RMSNorm 1 + w, sandwich; q and k per head"
    assert gemma["positions"].endswith("window 512 (22 layers), none (4 layers)")  # layers 5, 11, 17, 23 see all tokens
    table = run_command("presets").out
    assert all(name in table for name in hw.presets())
    assert "124,439,808" in table


def test_command_unknown_raises() -> None:
    done = run_in_subprocess("heds")
    assert done.code == 2
    assert "No such command" in done.err
