"""headwise prune: a smaller model, and what it costs."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.change.ways import WAYS, way_of
from headwise.cli.shell import complete
from headwise.cli.shell.words import Json, Model, Texts

if TYPE_CHECKING:
    from headwise.change.curve import Curve
    from headwise.change.plan import Plan
    from headwise.change.report import Report
    from headwise.model import AnyModel


def run(
    model: Model,
    text: Texts = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; TEXT has its answers, line by line.")
    ] = None,
    keep: Annotated[float | None, typer.Option(help="The share of heads that stays: 0.7")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Or the heads that go: 5.1, 6.*, 0-3.*", autocompletion=complete.heads)
    ] = None,
    apply: Annotated[Path | None, typer.Option(help="Or a plan that was saved.")] = None,
    by: Annotated[str, typer.Option(help=f"Heads are ranked by {', '.join(WAYS)}.")] = "ablation",
    fold: Annotated[bool, typer.Option(help="Leave behind what cut heads gave on average.")] = True,
    rounds: Annotated[int, typer.Option(help="Cut in so many rounds, ranking what is left anew.")] = 1,
    seed: Annotated[int, typer.Option(help="For random cuts and gates.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps in which gates are learned.")] = 200,
    heal: Annotated[int, typer.Option(help="Then train it so many steps on the texts heads were chosen on.")] = 0,
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
    from headwise.change.curve import curve as trace
    from headwise.change.curve import usual_bys
    from headwise.change.heal import heal as train_further
    from headwise.change.plan import Plan
    from headwise.change.report import report
    from headwise.errors import HeadwiseError
    from headwise.files.whole import whole_folder
    from headwise.show.figures.drawing import check_path
    from headwise.show.figures.tradeoff import draw_pruning
    from headwise.show.progress import noting
    from headwise.show.prune import show_curve, show_plan, show_report
    from headwise.weights import load

    ways = sum(given is not None for given in (keep, heads, apply))
    curve = curve or plot is not None
    if ways > 1 or (not ways and (not curve or out is not None or plan is not None)):
        raise HeadwiseError("say which heads go, in one way: --keep 0.7, --heads 5.1,6.* or --apply plan.json.")
    if heal < 0 or (heal and not ways):
        raise HeadwiseError(f"--heal trains a model that was cut, so many steps, 1 or more; got {heal}.")
    keeps = _numbers(shares)
    if plot is not None:
        check_path(plot)
    loaded = load(model)
    choosing, judging = _texts(
        loaded,
        text,
        source,
        test,
        test_source,
        limit,
        length,
        chosen=bool(curve or heal or keep is not None or (heads is not None and fold)),
    )
    read = heal or curve or (fold and apply is None) or (keep is not None and way_of(by).reads)
    if read and choosing is None and loaded.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "ranking, folding or healing an encoder-decoder needs pairs: give TEXT and --source, or --heads and --no-fold."
        )
    if heal and (choosing is None or loaded.output is None):
        raise HeadwiseError(
            "this model cannot be asked for tokens, so --heal has nothing to train it by; leave it out."
        )
    healer = partial(train_further, corpus=choosing, steps=heal, seed=seed, progress=False) if heal else None
    made = small = healed = measured = drawn = None
    with noting() as note:
        # The folder is asked for first: long work must not end before a folder that cannot be written.
        with nullcontext() if out is None else whole_folder(out, ("spec.json", "headwise.json")) as folder:
            if ways:
                made = Plan.load(apply) if apply is not None else Plan.make(
                    loaded, keep=keep, heads=heads, by=by, fold=fold, on=choosing, rounds=rounds, seed=seed, steps=steps,
                    note=note,
                )  # fmt: skip
                if plan is not None:
                    made.save(plan)
                small = made.apply(loaded)
                if healer is not None:
                    healed = made.apply(loaded)
                    healer(healed)
                if folder is not None:
                    (small if healed is None else healed).save(folder)
        if made is not None and small is not None and judging is not None:
            over = choosing if made.folded else None
            measured = report(
                loaded, small, judging, folded_on=over, seeds=seeds, heal=healer, healed=healed, note=note
            )
        if curve:
            ranked = {made.by: made.worth} if made is not None and made.worth and made.rounds == 1 else None
            folded = fold if made is None else bool(made.folded)
            bys = (*usual_bys(loaded), *(() if way_of(by).usual else (by,)))
            drawn = trace(
                loaded, choosing, judging, keeps=keeps, bys=bys, folded=folded, seeds=seeds, steps=steps, scores=ranked,
                note=note,
            )  # fmt: skip
    if drawn is not None and plot is not None:
        draw_pruning(drawn).save(plot)
    if as_json:
        print(json.dumps(_told(made, out, measured, drawn), indent=2))
        return
    for thing, show in ((made, show_plan), (measured, show_report), (drawn, show_curve)):
        if thing is not None:
            show(thing)  # pyright: ignore[reportArgumentType]
    if out is not None:
        print(f"saved in {out}; hw.load({str(out)!r}) brings it back, and every verb takes it: headwise heads {out}")


def _texts(
    model: "AnyModel",
    text: list[str] | None,
    source: Path | None,
    test: Path | None,
    test_source: Path | None,
    limit: int,
    length: int | None,
    chosen: bool,
) -> tuple[list[Any] | None, list[Any] | None]:
    """What heads are chosen on, and what the choice is judged by; none where a model cannot be asked about texts."""
    from headwise.change.trial import halves, read_texts
    from headwise.text.corpus import Corpus

    if model.tokenizer is None:
        return None, None  # heads can still be cut by name
    unread = model.spec.kind == "encoder-decoder" and source is None and not text  # no pairs are embedded
    texts = None if unread else read_texts(model, Corpus.named(text, source), limit, length)
    if test is not None or test_source is not None:
        return texts, read_texts(model, Corpus.named([test] if test else None, test_source), limit, length)
    if texts is None:
        return None, None
    return halves(texts) if chosen or len(texts) > 1 else (texts, texts)


def _numbers(shares: str) -> list[float]:
    """0.9,0.5 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return [float(share) for share in shares.split(",")]
    except ValueError:
        raise HeadwiseError(f"shares are numbers with commas between, 0.9,0.5,0.1; got {shares!r}.") from None


def _told(made: "Plan | None", out: Path | None, measured: "Report | None", drawn: "Curve | None") -> dict[str, Any]:
    """The result as plain data; a plan without what it folds, which a saved plan has."""
    scores = {} if made is None else {str(head): score for head, score in made.worth.items()}
    return {
        "plan": None if made is None else {
            "by": made.by, "rounds": made.rounds, "folded": bool(made.folded), "heads": made.heads, "scores": scores,
        },
        "out": None if out is None else str(out),
        "report": None if measured is None else measured.to_dict(),
        "curve": None if drawn is None else drawn.to_dict(),
    }  # fmt: skip
