"""headwise prune: a smaller model, and what it costs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; CORPUS has its answers, line by line.")
    ] = None,
    keep: Annotated[float | None, typer.Option(help="The share of heads that stays: 0.7")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Or the heads that go: 5.1, 6.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Or a plan that was saved.")] = None,
    ranking: Annotated[str, typer.Option(help="Ranking method: ablation, gradient, gates or random.")] = "ablation",
    fold_mean: Annotated[bool, typer.Option(help="Leave behind what cut heads gave on average.")] = True,
    rounds: Annotated[int, typer.Option(help="Cut in so many rounds, ranking what is left anew.")] = 1,
    seed: Annotated[int, typer.Option(help="For random cuts and gates.")] = 0,
    gate_steps: Annotated[int, typer.Option(help="Steps in which gates are learned.")] = 200,
    recover_steps: Annotated[
        int, typer.Option(help="Then train it so many steps on the texts heads were chosen on.")
    ] = 0,
    recover_losses: Annotated[
        str | None,
        typer.Option(
            help="What it learns from then: the whole model's logits (the default), hidden, maps, qkv; or text."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the smaller model in this folder.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    test: Annotated[Path | None, typer.Option(help="Judge by this text; none: by every other text.")] = None,
    test_source: Annotated[Path | None, typer.Option(help="What belongs to --test, for an encoder-decoder.")] = None,
    max_texts: Annotated[
        int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")
    ] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    seeds: Annotated[int, typer.Option(help="So many random cuts to compare with.")] = 3,
    curve: Annotated[bool, typer.Option("--curve", help="Also cut at every share, by several ways.")] = False,
    fractions: Annotated[str, typer.Option(help="The shares of the curve.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1",
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file: .png, .svg, .pdf")] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut heads from a model and say what that brought and cost, beside random cuts of the same size."""
    from headwise.compression.prune_request import PruneRequest
    from headwise.compression.prune_study import PruneStudy, prune_study
    from headwise.spec import Plan
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.figures.tradeoff_curves import draw_pruning
    from headwise.ui.progress import show_progress
    from headwise.ui.prune_tables import show_prune_plan, show_prune_report, show_pruning_curve
    from headwise.weights import load

    corpus_input = Corpus.from_cli_arguments(corpus, source) if corpus or source else None
    request = PruneRequest(
        keep=keep,
        heads=heads,
        ranking=ranking,
        fold_mean=fold_mean,
        corpus=corpus_input,
        rounds=rounds,
        seed=seed,
        gate_steps=gate_steps,
    )
    study = PruneStudy(
        request,
        plan=None if plan is None else Plan.load(plan),
        test=Corpus.from_cli_arguments([test] if test else None, test_source) if test or test_source else None,
        max_texts=max_texts, max_length=max_length, recover_steps=recover_steps, recover_losses=recover_losses,
        seeds=seeds, fractions=_parse_fractions(fractions) if curve or plot else (),
    )  # fmt: skip
    if plot is not None:
        check_path(plot)
    with show_progress() as progress:
        result = prune_study(load(model), study, out=out, save_plan=save_plan, progress=progress)
    if plot is not None and result.curve is not None:
        draw_pruning(result.curve).save(plot)
    if as_json:
        print(json.dumps({**result.to_dict(), "out": None if out is None else str(out)}, indent=2))
        return
    for section, show in (
        (result.plan, show_prune_plan),
        (result.report, show_prune_report),
        (result.curve, show_pruning_curve),
    ):
        if section is not None:
            show(section)  # pyright: ignore[reportArgumentType]
    if out is not None:
        print(f"saved in {out}; hw.load({str(out)!r}) brings it back, and every verb takes it: headwise profile {out}")


def _parse_fractions(fractions: str) -> tuple[float, ...]:
    """0.9,0.5 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return tuple(float(fraction) for fraction in fractions.split(","))
    except ValueError:
        raise HeadwiseError(f"shares are numbers with commas between, 0.9,0.5,0.1; got {fractions!r}.") from None
