"""headwise explain: why a word looked there in a head."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import JsonOption, ModelArgument

if TYPE_CHECKING:
    from headwise.analysis.attribution.score_attribution import AttentionPathStep, ScoreAttribution


def run(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="What the model reads.")],
    head: Annotated[str, typer.Option(help="The head: 18.6.", autocompletion=completion.complete_heads)],
    query: Annotated[str, typer.Option(help="The word that looks, or its place; the#2 is the second.")],
    key: Annotated[
        str | None, typer.Option(help="The word that is looked at; left out: the most attended one.")
    ] = None,
    relative_to_mean: Annotated[
        bool,
        typer.Option(
            "--relative-to-mean", help="Share out the lead over the mean of all visible words: what softmax sees."
        ),
    ] = False,
    max_rows: Annotated[int, typer.Option(help="How many pairs to show.", min=1)] = 10,
    as_json: JsonOption = False,
) -> None:
    """Tell why a word looked at another: which parts of the stream at both met in the score."""
    from headwise.analysis.attribution.score_attribution import explain
    from headwise.weights import load

    attribution = explain(
        load(model),
        text,
        head,
        _parse_position(query, text),
        None if key is None else _parse_position(key, text),
        relative_to_mean=relative_to_mean,
    )
    if as_json:
        print(json.dumps(attribution.to_dict(max_rows), indent=2))
    else:
        _print(attribution, max_rows)


def _parse_position(value: str, text: str) -> str | int:
    """A word, or its place in the text where it is a number that does not stand there."""
    return int(value) if value.removeprefix("-").isdecimal() and value not in text.split() else value


def _print(attribution: "ScoreAttribution", max_rows: int) -> None:
    from rich.console import Console

    from headwise.ui.terminal_table import make_table

    console = Console()
    rows = [(pair.query, pair.key, pair.score, pair.fraction) for pair in attribution.pairs[:max_rows]]
    score_name = "lead over the mean of what it sees" if attribution.relative_to_mean else "score"
    title = (
        f"Head {attribution.head}: {attribution.query_token} looks at {attribution.key_token} with weight "
        f"{attribution.weight:.2f}; {score_name} {attribution.score:+.3f}"
    )
    console.print(
        make_table(
            title,
            [f"written at {attribution.query_token}", f"written at {attribution.key_token}", "adds", "share"],
            rows,
        )
    )
    shown_sum = sum(pair.score for pair in attribution.pairs[:max_rows])
    console.print(
        f"{len(attribution.pairs):,} pairs sum to {attribution.total:+.4f} (the model's own: {attribution.score:+.4f}); "
        f"those shown to {shown_sum:+.3f}. Shares are of the sum of all sizes.",
        highlight=False,
    )
    for side, word in (("query", attribution.query_token), ("key", attribution.key_token)):
        steps = [step for step in attribution.path if step.side == side]
        console.print(
            f"The strongest pair, followed back from {word}: {' ← '.join(map(_format_step, steps))}", highlight=False
        )


def _format_step(step: "AttentionPathStep") -> str:
    if step.source_token is None:
        return f"{step.part} at {step.token}"
    return f"{step.part} at {step.token} (from {step.source_token}, weight {step.attention:.2f})"
