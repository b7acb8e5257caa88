"""headwise cache: KV cache policies per head, their memory savings and their cost in loss."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    fraction: Annotated[
        float | None,
        typer.Option(help="Fraction of the KV heads that stream, that is, cache only the sink tokens and the window."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="KV heads that stream, instead of --fraction: 5.1, 6.*, 0-3.*",
            autocompletion=completion.complete_heads,
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Saved plan to apply, instead of --fraction or --heads.")] = None,
    sink_tokens: Annotated[int, typer.Option(help="Number of first tokens in the cache of a streaming head.")] = 4,
    window: Annotated[int, typer.Option(help="Number of most recent tokens in the cache of a streaming head.")] = 128,
    bits: Annotated[int, typer.Option(help="Bits of the cached keys and values of all heads: 32, 16, 8 or 4.")] = 32,
    ranking: Annotated[
        str, typer.Option(help="Ranking method of the KV heads: attention, output, loss, gates, role, pattern, random.")
    ] = "output",
    pattern: Annotated[
        Path | None,
        typer.Option(
            help="File with a score per KV head (DuoAttention's full_attention_heads.tsv), instead of --ranking."
        ),
    ] = None,
    gate_steps: Annotated[int, typer.Option(help="With --ranking gates: training steps of the gates.")] = 60,
    protected_fraction: Annotated[
        float,
        typer.Option(
            help="Fraction of the KV heads that never streams: those with the highest retrieval scores on repeated text."
        ),
    ] = 0.0,
    rounds: Annotated[
        int,
        typer.Option(
            help="Number of selection rounds. Each ranks again with the selected heads streaming (attention, output, loss)."
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of random plans, gates and passkeys.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Save the model with its cache policies in this folder.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Save the plan to this file (.json).")] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            help="Text to evaluate on. Default: every other text of CORPUS; KV heads are ranked on the others."
        ),
    ] = None,
    max_texts: Annotated[
        int, typer.Option(help="Maximum number of texts. Longer texts are split into chunks, each counted as a text.")
    ] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per text. Default: 1024, or the context of the model.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of random plans of equal cost to compare with.")] = 3,
    passkeys: Annotated[
        int,
        typer.Option(
            help="Number of passkey retrieval tests. Also measures the loss on repeated lists and facts. 0: none."
        ),
    ] = 0,
    curve: Annotated[bool, typer.Option("--curve", help="Also measure each of --fractions, and fewer bits.")] = False,
    fractions: Annotated[
        str, typer.Option(help="Fractions of streaming KV heads on the curve, comma-separated.")
    ] = "0.25,0.5,0.75,1",
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a figure of cache size against loss (.png, .svg, .pdf) or its data (.csv, .json)."),
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Limit the KV cache per head to fewer tokens or bits, and compare memory and loss with random plans of equal cost."""
    from headwise.compression.cache_study import CacheStudyConfig, cache_study
    from headwise.spec import Plan
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.print_cache_results import plot_cache_curve, show_cache_curve, show_cache_plan, show_cache_report
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    study = CacheStudyConfig(
        fraction=fraction, heads=heads, sink_tokens=sink_tokens, window=window, bits=bits, ranking=ranking,
        plan=None if plan is None else Plan.load(plan),
        corpus=Corpus.from_cli_arguments(corpus, None) if corpus else None, test=None if test is None else Corpus.of(test),
        max_texts=max_texts, max_length=max_length, seed=seed, gate_steps=gate_steps, rounds=rounds,
        protected_fraction=protected_fraction, seeds=seeds, passkeys=passkeys,
        fractions=_parse_fractions(fractions) if curve or plot else (), pattern=pattern,
    )  # fmt: skip
    loaded: Any = load(model, device=device, dtype=dtype)
    with show_progress() as progress:
        result = cache_study(loaded, study, out=out, save_plan=save_plan, progress=progress)
    if plot is not None:
        plot_cache_curve(result).save(plot)
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
        print(f"Saved in {out}. Every command accepts it: headwise generate {out} 'Once upon a time'")


def _parse_fractions(fractions: str) -> tuple[float, ...]:
    """Parse a list such as `0.25,0.5`."""
    from headwise.errors import ArgumentError

    try:
        return tuple(float(fraction) for fraction in fractions.split(","))
    except ValueError:
        raise ArgumentError(
            f"--fractions: not a comma-separated list of numbers. Got {fractions!r}. Use, for example, 0.25,0.5,1."
        ) from None
