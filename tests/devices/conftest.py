"""Registers the pretend device before any test runs a backward pass."""

import tests.devices.pretend_device  # noqa: F401
