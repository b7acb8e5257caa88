"""headwise diff: what changed from one profile to another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption


def run(
    before: Annotated[Path, typer.Argument(help="A profile, as headwise profile --save wrote it.")],
    after: Annotated[Path, typer.Argument(help="Another, of the same model at another time, or with heads cut.")],
    max_rows: Annotated[int, typer.Option(help="How many heads to show, those that changed most first.", min=1)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Say what changed between two profiles: roles won and lost, heads gone, metrics moved."""
    from headwise.analysis.roles.profile_result import Profile

    old_profile, new_profile = Profile.load(before), Profile.load(after)
    rows = old_profile.diff(new_profile)
    if as_json:
        print(json.dumps({"before": str(before), "after": str(after), "heads": rows}, indent=2))
    else:
        from headwise.ui.diff_tables import show_diff

        show_diff(old_profile, new_profile, rows, max_rows)
