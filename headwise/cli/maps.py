"""headwise maps: attention weights on one text."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument

if TYPE_CHECKING:
    from headwise.analysis.recording.attention_maps import AttentionView


def run(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="Input text. For a vision model, the path of an image.")],
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads to show: 5.1 or 5.*. Default: the largest weights over all heads.",
            autocompletion=completion.complete_heads,
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(help="Query word. the#2 is the second 'the'. For an image, a patch: 2,5 (row, column)."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="With --query: rank heads by the weight from the query word to this word.")
    ] = None,
    no_words: Annotated[bool, typer.Option("--no-words", help="Show tokens instead of words.")] = False,
    source: Annotated[
        str | None, typer.Option(help="Source text of an encoder-decoder. TEXT is the target text.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of rows to show, per word or in total.", min=1)] = 8,
    heatmap: Annotated[
        str | None,
        typer.Option(
            help="Write a heat map (.svg, .png, .pdf) or its data (.csv, .json), by default of the three strongest heads."
        ),
    ] = None,
    arcs: Annotated[
        str | None, typer.Option(help="Write a figure with lines between words, for the same heads and file types.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the attention weights between the words of a text."""
    from headwise.analysis.recording.attention_maps import attention_maps
    from headwise.errors import ArgumentError
    from headwise.weights import load

    if key is not None and query is None:
        raise ArgumentError("--key: requires a query word. Add --query WORD.")
    view = attention_maps(
        load(model, device=device, dtype=dtype),
        text,
        "*" if heads is None else heads,
        words=not no_words,
        source=source,
    )
    if heatmap or arcs:
        from headwise.ui.figures import sentence_maps as draw

        figure_heads = view.heads if heads is not None else draw.top_heads(view, query, key)
        if heatmap:
            draw.draw_heat_map(view, figure_heads).save(heatmap)
        if arcs:
            draw.draw_arcs(view, figure_heads, query=query).save(arcs)
    if as_json:
        print(json.dumps(_result_dict(view, heads, query, key, max_rows), indent=2))
    else:
        _print(view, heads, query, key, max_rows)


def _result_dict(view: "AttentionView", heads: str | None, query: str | None, key: str | None, max_rows: int) -> dict:
    """Return heads ranked for a word pair, the largest weights, the weights of one query word, or full maps."""
    common = {"text": view.text, "words": list(view.words)}
    if query is not None and key is not None:
        scores = view.top_heads_for_pair(query, key, max_rows)
        return {
            **common,
            "query": query,
            "key": key,
            "heads": [{"head": address, "weight": weight} for address, weight in scores],
        }
    if heads is None:
        return {**common, "edges": [edge._asdict() for edge in view.top_edges(max_rows, query)]}
    if query is not None:
        return {
            **common,
            "query": query,
            "rows": {name: dict(view.attention_from_word(query, name)) for name in view.heads},
        }
    return view.to_dict()


def _print(view: "AttentionView", heads: str | None, query: str | None, key: str | None, max_rows: int) -> None:
    from rich.console import Console

    from headwise.ui.terminal_table import make_table

    console, token_noun = Console(), "word" if view.image is None else "patch"
    if query is not None and key is not None:
        rows = [(name, weight, _bar(weight)) for name, weight in view.top_heads_for_pair(query, key, max_rows)]
        title = f"Heads ranked by attention from {query} to {key}"
        console.print(make_table(title, ["head", "weight", ""], rows))
    elif heads is None:
        edge_rows = [
            (edge.head, edge.word, edge.attended, edge.weight, _bar(edge.weight))
            for edge in view.top_edges(max_rows, query)
        ]
        title = "Largest attention weights" if query is None else f"Largest attention weights from {query}"
        columns = ["head", token_noun, "attends to", "weight", ""]
        console.print(make_table(f"{title}, without itself, the first token and special tokens", columns, edge_rows))
    else:
        for name in view.heads:
            rows = _rows(view, name, query, max_rows)
            console.print(make_table(f"Head {name}", [token_noun, "attends to", "weight", ""], rows))


def _rows(view: "AttentionView", head: str, query: str | None, max_rows: int) -> list[tuple[str, str, float, str]]:
    """Return one row per key: all rows of one query word, or the three largest weights of each word."""
    query_groups = view.query_key_groups(head)[0]
    query_positions = [query_groups.find(query)] if query is not None else range(len(query_groups.unique_labels))
    max_edges = max_rows if query is not None else min(max_rows, 3)
    rows = []
    for position in query_positions:
        for rank, (key_name, weight) in enumerate(view.attention_from_word(position, head)[:max_edges]):
            if weight >= 0.005:
                rows.append((query_groups.unique_labels[position] if rank == 0 else "", key_name, weight, _bar(weight)))
    return rows


def _bar(weight: float, width: int = 24) -> str:
    """Return a bar with a resolution of an eighth of a character."""
    eighths = round(weight * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).ljust(width)
