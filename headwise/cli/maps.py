"""headwise attend: one sentence, and where its words look."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model

if TYPE_CHECKING:
    from headwise.analysis.recording.attention_maps import Attended


def run(
    model: Model,
    text: Annotated[str, typer.Argument(help="What the model reads; of one that reads pixels, the path of a picture.")],
    head: Annotated[
        str | None,
        typer.Option(
            help="A head, 5.1, or several, 5.*; left out: all, and the hardest looks are shown.",
            autocompletion=completion.heads,
        ),
    ] = None,
    word: Annotated[
        str | None,
        typer.Option("--from", help="Show where this word looks; the#2 is the second; of a picture a patch, 2,5."),
    ] = None,
    to: Annotated[str | None, typer.Option(help="With --from: rank heads by how hard it looks at this word.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Keep the tokens of a word apart.")] = False,
    source: Annotated[str | None, typer.Option(help="What an encoder-decoder reads; TEXT is what it writes.")] = None,
    most: Annotated[int, typer.Option(help="How many lines to show for a word, or in all.", min=1)] = 8,
    heat: Annotated[
        str | None,
        typer.Option(help="Draw a heat map, by default of the three hardest heads: .svg .png .pdf .csv .json"),
    ] = None,
    arcs: Annotated[str | None, typer.Option(help="Draw lines between words, likewise.")] = None,
    as_json: Json = False,
) -> None:
    """Show where the words of a sentence look."""
    from headwise.analysis.recording.attention_maps import attend
    from headwise.errors import HeadwiseError
    from headwise.weights import load

    if to is not None and word is None:
        raise HeadwiseError("--to needs --from, the word that looks.")
    seen = attend(load(model), text, "*" if head is None else head, words=not tokens, source=source)
    if heat or arcs:
        from headwise.ui.figures import sentence as draw

        drawn = seen.heads if head is not None else draw.hardest(seen, word, to)
        if heat:
            draw.heat_map(seen, drawn).save(heat)
        if arcs:
            draw.arcs(seen, drawn, source=word).save(arcs)
    if as_json:
        print(json.dumps(_answer(seen, head, word, to, most), indent=2))
    else:
        _print(seen, head, word, to, most)


def _answer(seen: "Attended", head: str | None, word: str | None, to: str | None, most: int) -> dict:
    """What was asked, as data: heads for a pair, the hardest looks, where one word looks, or whole maps."""
    said = {"text": seen.text, "words": list(seen.words)}
    if word is not None and to is not None:
        found = seen.heads_for(word, to, most)
        return {**said, "from": word, "to": to, "heads": [{"head": h, "weight": weight} for h, weight in found]}
    if head is None:
        return {**said, "looks": [look._asdict() for look in seen.strongest(most, word)]}
    if word is not None:
        return {**said, "from": word, "rows": {name: dict(seen.row(word, name)) for name in seen.heads}}
    return seen.to_dict()


def _print(seen: "Attended", head: str | None, word: str | None, to: str | None, most: int) -> None:
    from rich.console import Console

    from headwise.ui.tables import make_table

    console, token = Console(), "word" if seen.picture is None else "patch"
    if word is not None and to is not None:
        rows = [(name, weight, _bar(weight)) for name, weight in seen.heads_for(word, to, most)]
        title = f"Heads in which {word} looks at {to}"
        console.print(make_table(title, ["head", "weight", ""], rows))
    elif head is None:
        looks = [
            (look.head, look.word, look.attended, look.weight, _bar(look.weight)) for look in seen.strongest(most, word)
        ]
        title = "The hardest looks" if word is None else f"The hardest looks of {word}"
        columns = ["head", token, "looks at", "weight", ""]
        console.print(make_table(f"{title} (not at itself, the first or a special token)", columns, looks))
    else:
        for name in seen.heads:
            rows = _rows(seen, name, word, most)
            console.print(make_table(f"Head {name}", [token, "looks at", "weight", ""], rows))


def _rows(seen: "Attended", head: str, word: str | None, most: int) -> list[tuple[str, str, float, str]]:
    """One line per look: all of one word's, or the three hardest of each."""
    looking = seen.sides(head)[0]
    chosen = [looking.find(word)] if word is not None else range(len(looking.names))
    shown = most if word is not None else min(most, 3)
    rows = []
    for place in chosen:
        for rank, (attended, weight) in enumerate(seen.row(place, head)[:shown]):
            if weight >= 0.005:
                rows.append((looking.names[place] if rank == 0 else "", attended, weight, _bar(weight)))
    return rows


def _bar(weight: float, width: int = 24) -> str:
    """A bar in eighths of a cell."""
    eighths = round(weight * width * 8)
    return ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]).ljust(width)
