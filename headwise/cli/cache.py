"""headwise cache: key heads that keep less of a text, and what that saves and costs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    fraction: Annotated[
        float | None,
        typer.Option(help="The share of key heads that stream: they keep the first and last tokens alone."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="Or the key heads that stream: 5.1, 6.*, 0-3.*", autocompletion=completion.complete_heads),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Or a plan that was saved.")] = None,
    sink_tokens: Annotated[int, typer.Option(help="Tokens at the beginning that a streaming head keeps.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens at the end that it keeps.")] = 128,
    bits: Annotated[int, typer.Option(help="Keep keys and values of all heads at 32, 16, 8 or 4 bits.")] = 32,
    ranking: Annotated[
        str, typer.Option(help="Key heads are ranked by attention, output, loss, gates, role, random.")
    ] = "output",
    gate_steps: Annotated[int, typer.Option(help="Steps in which gates are learned.")] = 60,
    protected_fraction: Annotated[
        float, typer.Option(help="This share of key heads, those that find what is repeated best, never streams.")
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option(help="Choose in so many rounds, asking again with those streaming: attention, output, loss.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="For random plans, gates and pass keys.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Save the model, which says what its key heads keep.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    test: Annotated[Path | None, typer.Option(help="Judge by this text; none: by every other text.")] = None,
    max_texts: Annotated[
        int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")
    ] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a text; none: 1024, or the model's context.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="So many random plans to compare with.")] = 3,
    passkeys: Annotated[
        int,
        typer.Option(
            help="Also hide so many numbers in texts and ask for them, and measure the loss on repeated lists and facts."
        ),
    ] = 0,
    curve: Annotated[bool, typer.Option("--curve", help="Also with every share streaming, and at fewer bits.")] = False,
    fractions: Annotated[str, typer.Option(help="The shares of the curve.")] = "0.25,0.5,0.75,1",
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes of the cache against loss: .png, .svg, .pdf; or .csv, .json")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let key heads keep fewer tokens or bits, and say what that saves and costs, beside random plans of equal cost."""
    from headwise.compression.cache_study import CacheStudy, cache_study
    from headwise.spec import Plan
    from headwise.text.corpus import Corpus
    from headwise.ui.cache_tables import draw_cache_curve, show_cache_curve, show_cache_plan, show_cache_report
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    study = CacheStudy(
        fraction=fraction, heads=heads, sink_tokens=sink_tokens, window=window, bits=bits, ranking=ranking,
        plan=None if plan is None else Plan.load(plan),
        corpus=Corpus.from_cli_arguments(corpus, None) if corpus else None, test=None if test is None else Corpus.of(test),
        max_texts=max_texts, max_length=max_length, seed=seed, gate_steps=gate_steps, rounds=rounds,
        protected_fraction=protected_fraction, seeds=seeds, passkeys=passkeys,
        fractions=_parse_fractions(fractions) if curve or plot else (),
    )  # fmt: skip
    loaded: Any = load(model)
    with show_progress() as progress:
        result = cache_study(loaded, study, out=out, save_plan=save_plan, progress=progress)
    if plot is not None:
        draw_cache_curve(result).save(plot)
    if as_json:
        print(json.dumps({**result.to_dict(), "out": None if out is None else str(out)}, indent=2))
        return
    if result.plan is not None:
        show_cache_plan(result.plan)
    if result.report is not None:
        show_cache_report(result.report)
    if result.curve:
        show_cache_curve(result)
    if out is not None:
        print(f"saved in {out}; every verb takes it and obeys: headwise generate {out} 'Once upon a time'")


def _parse_fractions(fractions: str) -> tuple[float, ...]:
    """0.25,0.5 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return tuple(float(fraction) for fraction in fractions.split(","))
    except ValueError:
        raise HeadwiseError(f"shares are numbers with commas between, 0.25,0.5,1; got {fractions!r}.") from None
