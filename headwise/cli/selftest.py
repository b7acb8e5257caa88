"""headwise selftest: verify the installation on one device."""

import json
from typing import Annotated

import typer

from headwise.cli.shell.common_options import DeviceOption, JsonOption


def run(
    device: DeviceOption = "auto",
    dtype: Annotated[
        str, typer.Option(help="Data type of the weights: float32, bfloat16, float16 or float64.")
    ] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Run a sample of the contract suite on a device and compare it with the CPU. The exit code is 1 if a check fails."""
    from headwise.experiments.device_selftest import selftest
    from headwise.ui.print_selftest import print_selftest
    from headwise.ui.progress import show_progress

    with show_progress(transient=True) as progress:
        report = selftest(device, dtype=dtype, progress=progress)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_selftest(report)
    if not report.passed:
        raise typer.Exit(1)
