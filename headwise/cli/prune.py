"""headwise prune: remove heads and measure the cost in loss."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Source texts of an encoder-decoder, one per line. CORPUS has the target texts, line by line."
        ),
    ] = None,
    keep: Annotated[float | None, typer.Option(help="Fraction of the heads that remain: 0.7")] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads to prune, instead of --keep: 5.1, 6.*, 0-3.*", autocompletion=completion.complete_heads
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Saved plan to apply, instead of --keep or --heads.")] = None,
    ranking: Annotated[str, typer.Option(help="Ranking method: ablation, gradient, gates or random.")] = "ablation",
    fold_mean: Annotated[
        bool, typer.Option(help="Fold the mean output of pruned heads into the output bias of their layer.")
    ] = True,
    rounds: Annotated[
        int, typer.Option(help="Number of pruning rounds. Each round ranks the remaining heads again.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of random rankings and gates.")] = 0,
    gate_steps: Annotated[int, typer.Option(help="With --ranking gates: training steps of the gates.")] = 200,
    recover_steps: Annotated[
        int, typer.Option(help="Steps of recovery fine-tuning, on the texts on which heads were ranked.")
    ] = 0,
    recover_losses: Annotated[
        str | None,
        typer.Option(
            help="Loss of recovery fine-tuning: text, or distillation from the full model by logits, hidden, maps, qkv. "
            "Default: logits."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the pruned model in this folder.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Save the plan to this file (.json).")] = None,
    test: Annotated[
        Path | None,
        typer.Option(help="Text to evaluate on. Default: every other text of CORPUS; heads are ranked on the others."),
    ] = None,
    test_source: Annotated[Path | None, typer.Option(help="Source texts of --test, for an encoder-decoder.")] = None,
    max_texts: Annotated[
        int, typer.Option(help="Maximum number of texts. Longer texts are split into chunks, each counted as a text.")
    ] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per chunk of plain text. Default: 256, or the context of the model."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of random prunings of the same size to compare with.")] = 3,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also prune to each of --fractions, by several ranking methods.")
    ] = False,
    fractions: Annotated[
        str, typer.Option(help="Fractions of remaining heads on the curve, comma-separated.")
    ] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1",
    plot: Annotated[Path | None, typer.Option(help="Write a figure of the curve (.png, .svg, .pdf).")] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prune heads and compare size, speed and loss with the full model and with random pruning of the same size."""
    from headwise.compression.prune_request import PruneRequest
    from headwise.compression.prune_study import PruneStudy, prune_study
    from headwise.spec import Plan
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.figures.tradeoff_curves import draw_pruning
    from headwise.ui.print_pruning import show_prune_plan, show_prune_report, show_pruning_curve
    from headwise.ui.progress import show_progress
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
        result = prune_study(
            load(model, device=device, dtype=dtype), study, out=out, save_plan=save_plan, progress=progress
        )
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
        print(f"Saved in {out}. Load it with hw.load({str(out)!r}); every command accepts it: headwise profile {out}")


def _parse_fractions(fractions: str) -> tuple[float, ...]:
    """Parse a list such as `0.9,0.5`."""
    from headwise.errors import ArgumentError

    try:
        return tuple(float(fraction) for fraction in fractions.split(","))
    except ValueError:
        raise ArgumentError(
            f"--fractions: not a comma-separated list of numbers. Got {fractions!r}. Use, for example, 0.9,0.5,0.1."
        ) from None
