"""Tests on the pretend device run in processes of their own: torch takes a registered device as the accelerator everywhere.

`make test` runs them as `PRETEND_DEVICE=1 pytest tests/devices`. Without the variable they are not collected.
"""

import os

if os.environ.get("PRETEND_DEVICE"):
    import tests.devices.pretend_device  # noqa: F401 (registers the device before any test runs a backward pass)
else:
    collect_ignore_glob = ["test_*.py"]
