"""headwise scan: the prediction of one text and the heads that write for it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    NoStoreOption,
)


def run(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="Input text.")],
    answer: Annotated[
        str | None,
        typer.Option(help="Token to explain. Default: the most probable one. Words often start with a space."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Source text of an encoder-decoder.")] = None,
    position: Annotated[
        int | None,
        typer.Option(help="Token at which the model predicts; -1 is the last. Default: the last, or the mask."),
    ] = None,
    max_heads: Annotated[int, typer.Option(help="Number of heads to examine.", min=0)] = 10,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Saved profile of the model (.npz), for the roles of the heads. Default: the one in the store."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the scan as a self-contained page, such as scan.html.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    no_store: NoStoreOption = False,
    as_json: JsonOption = False,
) -> None:
    """Explain the prediction of one text: its layers, the heads and MLPs that write for it, and the loss without them."""
    from rich.console import Console

    from headwise.analysis.attribution.scan import scan_steps
    from headwise.analysis.load_or_measure import find_default_corpus_profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.ui.scan_text import sections_of_stage
    from headwise.weights import load

    saved_profile = None if profile is None else Profile.load(profile)
    console, result = Console(), None
    loaded = load(model, device=device, dtype=dtype)

    def find_profile() -> Profile | None:
        return saved_profile or (None if no_store else find_default_corpus_profile(loaded))

    steps = scan_steps(
        loaded, text, answer, source=source, position=position, max_heads=max_heads, find_profile=find_profile
    )
    for stage, result in enumerate(steps):
        if not as_json:
            for section in sections_of_stage(result, stage):
                console.print(section, highlight=False, markup=False)
    assert result is not None
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
    if report is not None:
        path = result.report(report)
        if not as_json:
            console.print(f"Page: {path}", highlight=False, markup=False)
