"""`hw.selftest` and its command, on the CPU. tests/devices runs it on the pretend device."""

import json
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.experiments import device_selftest as module
from headwise.experiments.device_selftest import CHECKS
from tests.runner import run_command

LIGHT = ("kernel fused", "decoder", "recording and silencing", "static cache", "pruning")


@pytest.fixture
def light_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKS", {name: CHECKS[name] for name in LIGHT})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_selftest_on_cpu_passes(dtype: str) -> None:
    report = hw.selftest("cpu", dtype=dtype)
    assert [check for check in report.checks if check.status == "failed"] == []
    assert len(report.checks) == len(CHECKS)


@pytest.mark.usefixtures("light_checks")
def test_selftest_command_prints_table_and_json() -> None:
    table = run_command("selftest", "--device", "cpu").output
    assert "Self-test on cpu in float32" in table
    assert f"{len(LIGHT)} passed" in table
    report = json.loads(run_command("selftest", "--device", "cpu", "--dtype", "bfloat16", "--json").output)
    assert report["passed"]
    assert [check["name"] for check in report["checks"]] == list(LIGHT)
    assert "not available on this machine" in run_command("selftest", "--device", "cuda:77").error_line


@pytest.mark.usefixtures("light_checks")
def test_selftest_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a relative error of 1e-3 fails in float32, and the exit code is 1."""
    correct = torch.nn.functional.scaled_dot_product_attention

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return correct(*args, **options) * 1.001

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    done = run_command("selftest", "--device", "cpu")
    assert done.code == 1
    failed = [line for line in done.out.splitlines() if "failed" in line]
    assert any(line.startswith("kernel fused") for line in failed)


def test_selftest_check_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setup: Any) -> float:
        raise NotImplementedError("aten::op is not implemented for this device")

    def unavailable(setup: Any) -> float:
        raise module.SkipCheck("no such package")

    monkeypatch.setattr(module, "CHECKS", {"broken": broken, "unavailable": unavailable})
    report = hw.selftest("cpu")
    assert [check.status for check in report.checks] == ["failed", "skipped"]
    assert "aten::op is not implemented" in report.checks[0].note
    assert not report.passed
