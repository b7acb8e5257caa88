"""headwise diff: differences between two profiles."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption


def run(
    before: Annotated[Path, typer.Argument(help="Profile written by headwise profile --save.")],
    after: Annotated[Path, typer.Argument(help="Profile of the same model, further trained or with pruned heads.")],
    max_rows: Annotated[int, typer.Option(help="Maximum number of heads to show, largest change first.", min=1)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare two profiles: roles gained and lost, heads removed, and changes of metrics."""
    from headwise.analysis.roles.profile_result import Profile

    old_profile, new_profile = Profile.load(before), Profile.load(after)
    rows = old_profile.diff(new_profile)
    if as_json:
        print(json.dumps({"before": str(before), "after": str(after), "heads": rows}, indent=2))
    else:
        from headwise.ui.print_profile_diff import show_diff

        show_diff(old_profile, new_profile, rows, max_rows)
