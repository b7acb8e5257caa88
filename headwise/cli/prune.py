"""headwise prune: a smaller model, and what it costs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model, Texts
from headwise.compression.rankers import WAYS


def run(
    model: Model,
    text: Texts = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; TEXT has its answers, line by line.")
    ] = None,
    keep: Annotated[float | None, typer.Option(help="The share of heads that stays: 0.7")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Or the heads that go: 5.1, 6.*, 0-3.*", autocompletion=completion.heads)
    ] = None,
    apply: Annotated[Path | None, typer.Option(help="Or a plan that was saved.")] = None,
    by: Annotated[str, typer.Option(help=f"Heads are ranked by {', '.join(WAYS)}.")] = "ablation",
    fold: Annotated[bool, typer.Option(help="Leave behind what cut heads gave on average.")] = True,
    rounds: Annotated[int, typer.Option(help="Cut in so many rounds, ranking what is left anew.")] = 1,
    seed: Annotated[int, typer.Option(help="For random cuts and gates.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps in which gates are learned.")] = 200,
    heal: Annotated[int, typer.Option(help="Then train it so many steps on the texts heads were chosen on.")] = 0,
    heal_by: Annotated[
        str | None,
        typer.Option(
            help="What it learns from then: the whole model's logits (the default), hidden, maps, qkv; or text."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the smaller model in this folder.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Save the plan to this file.")] = None,
    test: Annotated[Path | None, typer.Option(help="Judge by this text; none: by every other text.")] = None,
    test_source: Annotated[Path | None, typer.Option(help="What belongs to --test, for an encoder-decoder.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")] = 64,
    length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    seeds: Annotated[int, typer.Option(help="So many random cuts to compare with.")] = 3,
    curve: Annotated[bool, typer.Option("--curve", help="Also cut at every share, by several ways.")] = False,
    shares: Annotated[str, typer.Option(help="The shares of the curve.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1",
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file: .png, .svg, .pdf")] = None,
    as_json: Json = False,
) -> None:
    """Cut heads from a model and say what that brought and cost, beside random cuts of the same size."""
    from headwise.compression.plan import Plan
    from headwise.compression.prune_request import PruneRequest
    from headwise.compression.prune_study import PruneStudy, prune_study
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.figures.tradeoff import draw_pruning
    from headwise.ui.progress import show_progress
    from headwise.ui.prune_view import show_curve, show_plan, show_report
    from headwise.weights import load

    on = Corpus.named(text, source) if text or source else None
    asked = PruneRequest(keep=keep, heads=heads, by=by, fold=fold, on=on, rounds=rounds, seed=seed, steps=steps)
    study = PruneStudy(
        asked,
        plan=None if apply is None else Plan.load(apply),
        test=Corpus.named([test] if test else None, test_source) if test or test_source else None,
        limit=limit, length=length, heal=heal, heal_by=heal_by, seeds=seeds, shares=_numbers(shares) if curve or plot else (),
    )  # fmt: skip
    if plot is not None:
        check_path(plot)
    with show_progress() as progress:
        made = prune_study(load(model), study, out=out, save_plan=plan, progress=progress)
    if plot is not None and made.curve is not None:
        draw_pruning(made.curve).save(plot)
    if as_json:
        print(json.dumps({**made.to_dict(), "out": None if out is None else str(out)}, indent=2))
        return
    for thing, show in ((made.plan, show_plan), (made.report, show_report), (made.curve, show_curve)):
        if thing is not None:
            show(thing)  # pyright: ignore[reportArgumentType]
    if out is not None:
        print(f"saved in {out}; hw.load({str(out)!r}) brings it back, and every verb takes it: headwise heads {out}")


def _numbers(shares: str) -> tuple[float, ...]:
    """0.9,0.5 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return tuple(float(share) for share in shares.split(","))
    except ValueError:
        raise HeadwiseError(f"shares are numbers with commas between, 0.9,0.5,0.1; got {shares!r}.") from None
