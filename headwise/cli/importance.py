"""headwise importance: loss increase without each head."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import (
    CorpusArgument,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    NoStoreOption,
)


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Source texts of an encoder-decoder, one per line. CORPUS has the target texts, line by line."
        ),
    ] = None,
    heads: Annotated[
        str, typer.Option(help="Heads to measure: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    ranking: Annotated[
        str, typer.Option(help="Ranking method: ablation (exact), gradient or attribution (fast estimate).")
    ] = "ablation",
    ablation: Annotated[
        str, typer.Option(help="Replacement of the head output: mean, zero or resample (its output on another text).")
    ] = "mean",
    metric: Annotated[str, typer.Option(help="loss (mean over all tokens) or last (loss of the last token).")] = "loss",
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per chunk of plain text. Default: 256, or the context of the model."
        ),
    ] = None,
    max_texts: Annotated[
        int, typer.Option(help="Maximum number of texts. Longer texts are split into chunks, each counted as a text.")
    ] = 32,
    max_rows: Annotated[int, typer.Option(help="Maximum number of heads to show, most important first.")] = 20,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    no_store: NoStoreOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ablate heads one at a time and show the increase of the loss, with 95% confidence intervals."""
    from dataclasses import fields

    from rich.console import Console

    from headwise.analysis.ablation.importance import SingleHeadImportance, importance
    from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
    from headwise.analysis.load_or_measure import as_whole_layer_patterns, load_or_measure_importance
    from headwise.io.result_store import ResultStore
    from headwise.text.corpus import Corpus
    from headwise.ui.progress import show_progress
    from headwise.ui.terminal_table import make_table
    from headwise.weights import load

    loaded = load(model, device=device, dtype=dtype)
    tokenized = eval_corpus(loaded, Corpus.from_cli_arguments(corpus, source), max_length).first(max_texts)
    layers = (
        None
        if no_store or (ranking, ablation, metric) != ("ablation", "mean", "loss")
        else as_whole_layer_patterns(loaded, heads)
    )
    with show_progress() as progress:
        if layers:
            result = load_or_measure_importance(loaded, tokenized, layers, store=ResultStore(), progress=progress)
        else:
            result = importance(
                loaded, tokenized, ranking=ranking, ablation=ablation, heads=heads, metric=metric,  # pyright: ignore[reportArgumentType]
                progress=progress,
            )  # fmt: skip
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    columns = [field.name.replace("_", " ") for field in fields(SingleHeadImportance)]
    Console().print(
        make_table(
            f"Head importance by {ranking}, with 95% CI; above layer: relative to the other heads of the layer",
            columns,
            result.table_rows()[:max_rows],
        )
    )
