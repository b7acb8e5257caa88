"""headwise explain: attribution of one attention score."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument

if TYPE_CHECKING:
    from headwise.analysis.attribution.score_attribution import AttentionPathStep, ScoreAttribution


def run(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="Input text.")],
    head: Annotated[str, typer.Option(help="Address of the head: 18.6.", autocompletion=completion.complete_heads)],
    query: Annotated[str, typer.Option(help="Query word or position. the#2 is the second 'the'.")],
    key: Annotated[
        str | None, typer.Option(help="Key word or position. Default: the word with the largest attention weight.")
    ] = None,
    relative_to_mean: Annotated[
        bool,
        typer.Option(
            "--relative-to-mean",
            help="Decompose the score minus its mean over all visible keys. Softmax depends only on this difference.",
        ),
    ] = False,
    max_rows: Annotated[
        int, typer.Option(help="Maximum number of pairs to show, largest contribution first.", min=1)
    ] = 10,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decompose an attention score into contributions of pairs of residual stream parts, one at the query, one at the key."""
    from headwise.analysis.attribution.score_attribution import explain
    from headwise.weights import load

    attribution = explain(
        load(model, device=device, dtype=dtype),
        text,
        head,
        _parse_word_or_position(query, text),
        None if key is None else _parse_word_or_position(key, text),
        relative_to_mean=relative_to_mean,
    )
    if as_json:
        print(json.dumps(attribution.to_dict(max_rows), indent=2))
    else:
        _print(attribution, max_rows)


def _parse_word_or_position(value: str, text: str) -> str | int:
    """Return the word, or an integer position if the value is a number that does not occur in the text."""
    return int(value) if value.removeprefix("-").isdecimal() and value not in text.split() else value


def _print(attribution: "ScoreAttribution", max_rows: int) -> None:
    from rich.console import Console

    from headwise.ui.terminal_table import make_table

    console = Console()
    rows = [(pair.query, pair.key, pair.score, pair.fraction) for pair in attribution.pairs[:max_rows]]
    score_name = "score minus mean over keys" if attribution.relative_to_mean else "score"
    title = (
        f"Head {attribution.head}: {attribution.query_token} attends to {attribution.key_token} with weight "
        f"{attribution.weight:.2f}; {score_name} {attribution.score:+.3f}"
    )
    console.print(
        make_table(
            title,
            [f"part at {attribution.query_token}", f"part at {attribution.key_token}", "contribution", "share"],
            rows,
        )
    )
    shown_sum = sum(pair.score for pair in attribution.pairs[:max_rows])
    console.print(
        f"{len(attribution.pairs):,} pairs sum to {attribution.total:+.4f}; the model has {attribution.score:+.4f}. "
        f"The pairs shown sum to {shown_sum:+.3f}. share: fraction of the sum of absolute contributions.",
        highlight=False,
    )
    for side, word in (("query", attribution.query_token), ("key", attribution.key_token)):
        steps = [step for step in attribution.path if step.side == side]
        console.print(
            f"Path of the largest pair back from {word}: {' ← '.join(map(_format_step, steps))}", highlight=False
        )


def _format_step(step: "AttentionPathStep") -> str:
    if step.source_token is None:
        return f"{step.part} at {step.token}"
    return f"{step.part} at {step.token} (from {step.source_token}, weight {step.attention:.2f})"
