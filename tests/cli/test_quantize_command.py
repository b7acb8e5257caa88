"""headwise quantize and sensitivity on the command line."""

import json
from pathlib import Path

import pytest

import headwise as hw
from tests.distillation.tiny import make_model
from tests.runner import run_command

TEXT = "to be or not to be that is the question " * 40


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_model().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_quantize_reports_bytes_and_loss(files: Path) -> None:
    options = ("--weights", "*=4,0.1:qk=3,mlp=8", "--out", files / "small", "--plot", files / "bits.csv")
    result = json.loads(run_command("quantize", files / "model", files / "text.txt", *options, "--json").output)
    small = hw.load(files / "small")
    assert result["after"][-1]["nbytes"] == small.spec.weight_bytes() < result["before"][-1]["nbytes"]
    assert result["loss_after"]["mean"] == pytest.approx(
        result["loss_before"]["mean"] + result["loss_increase"]["mean"], abs=1e-6
    )
    assert "bits of qk,0.1,3.0" in (files / "bits.csv").read_text()
    table = run_command("quantize", files / "model", "--weights", 8, "--max-texts", 0).output
    assert "bits per weight" in table
    assert "loss" not in table
    facts = json.loads(run_command("info", files / "small", "--json").output)
    assert facts["weight_bits"] == "heads 4 3, mlp 8"
    assert facts["stored_megabytes"] == pytest.approx(small.spec.weight_bytes() / 1e6)


def test_quantize_invalid_weights_raise(files: Path) -> None:
    for weights, message in (
        ("5", "8, 4, 3 or 2 bits"),
        ("much", "not a number of bits"),
        ("9.1=4", "the model has no such head"),
    ):
        assert message in run_command("quantize", files / "model", "--weights", weights, "--max-texts", 0).error_line
    run_command("quantize", files / "model", "--weights", 4, "--max-texts", 0, "--out", files / "small")
    assert "already quantized" in run_command("quantize", files / "small", "--weights", 4, "--max-texts", 0).error_line


def test_sensitivity_reports_costs_and_figure(files: Path) -> None:
    options = (
        "--bits",
        "4,2",
        "--heads",
        "0.*",
        "--max-texts",
        2,
        "--out",
        files / "bits.jsonl",
        "--plot",
        files / "grid.svg",
    )
    result = json.loads(run_command("sensitivity", files / "model", files / "text.txt", *options, "--json").output)
    assert len(result["costs"]) == 4 * 2 * 2
    assert "qk at 4 bits" in (files / "grid.svg").read_text()
    table = run_command(
        "sensitivity", files / "model", files / "text.txt", *options
    ).output  # resumed: all results are in the file
    assert "Cost of quantization" in table
    assert (
        "8, 4, 3 or 2 bits" in run_command("sensitivity", files / "model", files / "text.txt", "--bits", "5").error_line
    )
    assert "comma-separated list of integers" in run_command("sensitivity", files / "model", "--bits", "few").error_line


def test_quantize_mean_bits_allocates_by_sensitivity(files: Path) -> None:
    run_command("sensitivity", files / "model", files / "text.txt", "--max-texts", 2, "--out", files / "bits.jsonl")
    options = (
        "--mean-bits",
        3.5,
        "--sensitivity",
        files / "bits.jsonl",
        "--choices",
        "4,3",
        "--seeds",
        2,
        "--out",
        files / "small",
    )
    table = run_command("quantize", files / "model", files / "text.txt", "--weights", "mlp=8", *options)
    assert "Bit allocation: 8 pairs at 4, 8 pairs at 3" in table.output
    assert json.loads(run_command("info", files / "small", "--json").output)["weight_bits"] == "heads 4 3, mlp 8"
    result = json.loads(run_command("quantize", files / "model", files / "text.txt", *options[:-2], "--json").output)
    assert len(result["allocation"]["random"]) == 2
    assert (
        "Use --sensitivity FILE together with"
        in run_command("quantize", files / "model", "--mean-bits", 3.5).error_line
    )
    byte_budget = ("--megabytes", 0.0019, *options[2:6])
    allocated = json.loads(
        run_command("quantize", files / "model", files / "text.txt", *byte_budget, "--max-texts", 0, "--json").output
    )
    heads = next(row for row in allocated["after"] if row["part"] == "heads")
    assert heads["nbytes"] <= 1900 < next(row for row in allocated["before"] if row["part"] == "heads")["nbytes"]
    assert "Use one of them" in run_command("quantize", files / "model", "--megabytes", 1, *options[:4]).error_line
    assert (
        "--choices: not a comma-separated list"
        in run_command("quantize", files / "model", *options[:4], "--choices", "few").error_line
    )
    make_model(5).save(files / "other")
    assert "another model" in run_command("quantize", files / "other", *options[:4], "--max-texts", 0).error_line
