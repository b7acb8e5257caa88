"""headwise sensitivity: loss increase when one head at a time is quantized."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    bits: Annotated[str, typer.Option(help="Bits to test, comma-separated: 8,4,3,2")] = "4",
    parts: Annotated[
        str, typer.Option(help="Parts to quantize, comma-separated: qk and vo (weights), keys and values (cache).")
    ] = "qk,vo",
    heads: Annotated[
        str, typer.Option(help="Heads to measure: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    group_size: Annotated[int, typer.Option(help="Weights along the input dimension that share a scale.")] = 32,
    basis: Annotated[
        str | None,
        typer.Option(
            help="Basis in which heads are quantized: given, balanced or random. Default: balanced, if supported."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per chunk of plain text. Default: 256, or the context of the model."
        ),
    ] = None,
    max_texts: Annotated[
        int, typer.Option(help="Maximum number of texts. Longer texts are split into chunks, each counted as a text.")
    ] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Write each result to this file. Run the same command again to resume.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of rows to show, largest loss increase first.")] = 20,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of all heads (.png, .svg, .pdf) or its data (.csv, .json).")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize one head at a time and show the increase of the loss, with 95% confidence intervals."""
    from dataclasses import fields
    from typing import Any

    from rich.console import Console

    from headwise.analysis.ablation.quantization_sensitivity import QuantizationCost, sensitivity
    from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
    from headwise.errors import ArgumentError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.ui.quantization_tables_and_figures import draw_quantization_costs
    from headwise.ui.terminal_table import make_table
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if not all(item.strip().isdigit() for item in bits.split(",")):
        raise ArgumentError(
            f"--bits: not a comma-separated list of integers. Got {bits!r}. Use, for example, --bits 4,3."
        )
    loaded: Any = load(model, device=device, dtype=dtype)
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
    columns = [field.name.replace("_", " ") for field in fields(QuantizationCost)]
    baseline_note = "" if result.clean_loss is None else f"; loss of the unquantized model {result.clean_loss:.3f}"
    title = f"Cost of quantization, {result.metric}, {len(result.counts)} texts, with 95% CI{baseline_note}"
    rows = [
        [f"{item:.5f}" if isinstance(item, float) and math.isfinite(item) else item for item in row]
        for row in result.table_rows()[:max_rows]
    ]
    Console().print(make_table(title, columns, rows))  # one head changes the loss in the fourth digit
