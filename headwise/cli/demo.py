"""headwise demo: train, look, cut, and see what was lost."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell.words import Json

if TYPE_CHECKING:
    from headwise.show.demo import Demo


def run(
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("headwise-demo"),
    model: Annotated[str | None, typer.Option(help="Look at and cut this one, smollm2 or minilm; train none.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In seconds: too small a model to learn anything.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of the training.", min=0, max=2**31 - 1)] = 0,
    as_json: Json = False,
) -> None:
    """Train a small decoder on a language made for it, say what each head does, cut those that do nothing: a few minutes."""
    from headwise.show.demo import demo
    from headwise.show.progress import noting

    if model is None and not as_json:
        print("A decoder of four layers with eight heads each learns a small language; a few minutes on two cores.")
    with noting() as note:
        made = demo(out, model, quick=quick, seed=seed, note=note)
    if as_json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        _show(made)


def _show(made: "Demo") -> None:
    from rich.console import Console

    from headwise.show.heads import show_profile
    from headwise.show.prune import show_plan, show_report
    from headwise.show.tables import make_table

    console = Console()
    if made.trained is not None:
        told = f"Trained {made.trained.step:,} steps in {made.trained.seconds:.0f} s; what it knows of held-out texts:"
        console.print(make_table(told, ["quiz", "questions", "right", "chance", "bigram"], made.marks))
    show_profile(made.profile, {str(address) for address in made.profile.addresses}, console)
    show_plan(made.plan, console)
    show_report(made.report, console)
    console.print(f"Written: {', '.join(made.files)}", highlight=False, soft_wrap=True)
    console.print(f"Open {made.folder / 'report.html'} in a browser.", highlight=False, soft_wrap=True)
    what = made.folder / "model" if made.trained is not None else made.name
    live = f"headwise view {what} --profile {made.folder / 'profile.npz'}"
    console.print(f"To type sentences and switch heads off: {live}", highlight=False, soft_wrap=True)
