"""headwise why: why a word looked there in a head."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model

if TYPE_CHECKING:
    from headwise.analysis.attribution.score_attribution import Link, Why


def run(
    model: Model,
    text: Annotated[str, typer.Argument(help="What the model reads.")],
    head: Annotated[str, typer.Option(help="The head: 18.6.", autocompletion=completion.heads)],
    at: Annotated[str, typer.Option("--at", help="The word that looks, or its place; the#2 is the second.")],
    to: Annotated[str | None, typer.Option(help="The word that is looked at; left out: the most attended one.")] = None,
    lead: Annotated[
        bool, typer.Option("--lead", help="Share out the lead over the mean of all visible words: what softmax sees.")
    ] = False,
    most: Annotated[int, typer.Option(help="How many pairs to show.", min=1)] = 10,
    as_json: Json = False,
) -> None:
    """Tell why a word looked at another: which parts of the stream at both met in the score."""
    from headwise.analysis.attribution.score_attribution import why
    from headwise.weights import load

    made = why(load(model), text, head, _word(at, text), None if to is None else _word(to, text), lead=lead)
    if as_json:
        print(json.dumps(made.to_dict(most), indent=2))
    else:
        _print(made, most)


def _word(said: str, text: str) -> str | int:
    """A word, or its place in the text where it is a number that does not stand there."""
    return int(said) if said.removeprefix("-").isdecimal() and said not in text.split() else said


def _print(made: "Why", most: int) -> None:
    from rich.console import Console

    from headwise.ui.tables import make_table

    console = Console()
    rows = [(pair.query, pair.key, pair.score, pair.share) for pair in made.pairs[:most]]
    what = "lead over the mean of what it sees" if made.lead else "score"
    title = f"Head {made.head}: {made.at} looks at {made.to} with weight {made.weight:.2f}; {what} {made.score:+.3f}"
    console.print(make_table(title, [f"written at {made.at}", f"written at {made.to}", "adds", "share"], rows))
    shown = sum(pair.score for pair in made.pairs[:most])
    console.print(
        f"{len(made.pairs):,} pairs sum to {made.total:+.4f} (the model's own: {made.score:+.4f}); "
        f"those shown to {shown:+.3f}. Shares are of the sum of all sizes.",
        highlight=False,
    )
    for side, word in (("query", made.at), ("key", made.to)):
        links = [link for link in made.chain if link.side == side]
        console.print(
            f"The strongest pair, followed back from {word}: {' ← '.join(map(_link_in_words, links))}", highlight=False
        )


def _link_in_words(link: "Link") -> str:
    if link.looks_at is None:
        return f"{link.part} at {link.token}"
    return f"{link.part} at {link.token} (from {link.looks_at}, weight {link.weight:.2f})"
