"""headwise head: one head's full story."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model, Texts


def run(
    model: Model,
    head: Annotated[str, typer.Argument(help="Its address: 5.1.", autocompletion=completion.heads)],
    text: Texts = None,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Also test roles on their own prompts: name movers, name and copy suppression, others."
        ),
    ] = False,
    all_numbers: Annotated[bool, typer.Option("--all", help="Every measure and every case, behind the story.")] = False,
    as_json: Json = False,
) -> None:
    """Tell one head's story: what it does and how sure that is, where it rests, what it writes, costs and works with."""
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.spec import Address
    from headwise.ui.head_facts import Facts, ask
    from headwise.ui.head_summary import story
    from headwise.ui.heads_view import show_head, show_story
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    corpus: Any = None if not text else text[0] if len(text) == 1 else [Path(one) for one in text]
    known = Facts()
    if Path(model).is_file() and model.endswith(".npz"):
        made = Profile.load(model)
        told = made[head]
    else:
        loaded = load(model)
        Address.parse(head)
        loaded.heads[head]  # a wrong address is told before the work begins
        with show_progress() as progress:
            made = profile(loaded, corpus, prompts=prompts, progress=progress)
            told = made[head]
            known = ask(loaded, told, corpus, progress)
    if as_json:
        wrote = known.wrote
        writes = None if wrote is None or not wrote.words else [one._asdict() for one in wrote.words]
        copies = None if wrote is None or math.isnan(wrote.copying) else wrote.copying
        lines = [line._asdict() for line in story(made, told, known)]
        effect = None if wrote is None or wrote.effect is None else asdict(wrote.effect)
        more = {"story": lines, "direct_effect": effect, "copying": copies, "promotes": writes}
        print(json.dumps({**told.to_dict(), **more}, indent=2))
        return
    show_story(made, told, known)
    if all_numbers:
        show_head(made, told, known)
