"""`hw.selftest` on the pretend device."""

import pytest

import headwise as hw
from tests.devices.pretend_device import pretend_device


@pytest.mark.parametrize("float64", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_selftest_on_pretend_device_passes(float64: bool) -> None:
    with pretend_device(float64=float64):
        report = hw.selftest("pretend")
    assert [check for check in report.checks if check.status != "passed"] == []
    assert report.device.startswith("pretend")
