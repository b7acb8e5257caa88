"""headwise head: one head's full story."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import complete
from headwise.cli.shell.words import Json, Model, Texts


def run(
    model: Model,
    head: Annotated[str, typer.Argument(help="Its address: 5.1.", autocompletion=complete.heads)],
    text: Texts = None,
    as_json: Json = False,
) -> None:
    """Tell one head's full story: roles and what speaks for them, measures, evidence, what it promotes."""
    from headwise.errors import HeadwiseError
    from headwise.look.profile.make import profile
    from headwise.look.profile.result import Profile
    from headwise.look.writes.writes import copying, promoted
    from headwise.show.heads import show_head
    from headwise.show.progress import show_progress
    from headwise.spec import Address
    from headwise.weights import load

    corpus: Any = None if not text else text[0] if len(text) == 1 else [Path(one) for one in text]
    copies, words, why = None, None, ""
    if Path(model).is_file() and model.endswith(".npz"):
        made = Profile.load(model)
    else:
        loaded = load(model)
        Address.parse(head)
        loaded.heads[head]  # a wrong address is told before the work begins
        with show_progress() as progress:
            made = profile(loaded, corpus, progress=progress)
        copies = copying(loaded, head)[head]
        try:
            words = promoted(loaded, made[head])
        except HeadwiseError as refused:  # an encoder, say: the rest of the story is told all the same
            why = str(refused)
    told = made[head]
    if as_json:
        writes = None if words is None else [one._asdict() for one in words]
        print(json.dumps({**told.to_dict(), "copying": copies, "promotes": writes}, indent=2))
    else:
        show_head(made, told)
        if copies is not None:
            print(f"copying (OV): {copies:+.2f}")
        for one in words or []:
            print(f"at {one.token!r} promotes {_words(one.promotes)}; suppresses {_words(one.suppresses)}")
        if why:
            print(why)


def _words(scored: list[tuple[str, float]]) -> str:
    return " ".join(repr(word) for word, _ in scored)
