"""headwise sensitivity: what few bits cost, head by head."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    bits: Annotated[str, typer.Option(help="Bits, with commas between: 8,4,3,2")] = "4",
    parts: Annotated[str, typer.Option(help="qk, vo (weights), keys, values (cached), with commas between.")] = "qk,vo",
    heads: Annotated[
        str, typer.Option(help="Which heads: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    group_size: Annotated[int, typer.Option(help="Numbers along the input that share a scale.")] = 32,
    basis: Annotated[
        str | None, typer.Option(help="given, balanced or random; none: balanced, where it is known.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    max_texts: Annotated[
        int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")
    ] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Keep every answer in this file; the same call goes on with it.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="How many rows to show.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw a grid of heads: .png, .svg, .pdf; or .csv, .json")] = None,
    as_json: JsonOption = False,
) -> None:
    """Store one head at a time at few bits and say what the model loses, with intervals."""
    from dataclasses import fields
    from typing import Any

    from rich.console import Console

    from headwise.analysis.ablation.head_outputs import eval_corpus
    from headwise.analysis.ablation.sensitivity import QuantizationCost, sensitivity
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.ui.quantization_tables import draw_quantization_costs
    from headwise.ui.terminal_table import make_table
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if not all(item.strip().isdigit() for item in bits.split(",")):
        raise HeadwiseError(f"bits are numbers with commas between, 4,3; got {bits!r}.")
    loaded: Any = load(model)
    tokenized = eval_corpus(loaded, Corpus.from_cli_arguments(corpus, None), max_length).first(max_texts)
    with resume_hint_on_interrupt() if out is not None else nullcontext(), show_progress() as progress:
        result = sensitivity(
            loaded, tokenized, bits=[int(item) for item in bits.split(",")],
            parts=[item.strip() for item in parts.split(",")],
            heads=heads, group_size=group_size, basis=basis, max_length=max_length, out=out,  # pyright: ignore[reportArgumentType]
            progress=progress,
        )  # fmt: skip
    if plot is not None:
        draw_quantization_costs(result).save(plot)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    columns = [field.name for field in fields(QuantizationCost)]
    baseline_note = "" if result.clean_loss is None else f"; untouched {result.clean_loss:.3f}"
    title = f"What few bits cost, {result.metric}, {len(result.counts)} texts{baseline_note}"
    rows = [
        [f"{item:.5f}" if isinstance(item, float) and math.isfinite(item) else item for item in row]
        for row in result.table_rows()[:max_rows]
    ]
    Console().print(make_table(title, columns, rows))  # a single head moves the loss by less than three digits show
