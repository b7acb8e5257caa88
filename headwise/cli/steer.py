"""headwise steer: find heads and directions that steer a model."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    positive: Annotated[
        Path | None,
        typer.Option(
            help="File with the texts to steer to: one per line, or JSON Lines with [prompt, completion]; for an "
            "encoder-decoder [source, text]."
        ),
    ] = None,
    negative: Annotated[Path | None, typer.Option(help="File with the texts of the opposite set.")] = None,
    case: Annotated[
        str | None, typer.Option(help="Shipped case instead of two files: sentiment, tense or format.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="Method: mean_difference, ridge_probe or function_vector (in-context examples).")
    ] = "mean_difference",
    heads: Annotated[
        str, typer.Option(help="Heads to choose from: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    num_heads: Annotated[int, typer.Option(help="Number of heads to steer.", min=1)] = 16,
    strengths: Annotated[
        str | None, typer.Option(help="Strengths to try, comma-separated. Default: 0.5,1,2,4,8; for a case 1,2,4,8.")
    ] = None,
    max_kl: Annotated[
        float,
        typer.Option(
            help="Maximum KL divergence on other text of the chosen strength, nats per token. Not for encoders."
        ),
    ] = 0.2,
    max_distance: Annotated[
        float, typer.Option(help="Maximum distance between plain and steered embeddings of other text. For encoders.")
    ] = 0.1,
    corpus: Annotated[
        Path | None, typer.Option(help="Other text for side effects. Default: the embedded probe set.")
    ] = None,
    max_texts: Annotated[int, typer.Option(help="Maximum number of other texts.", min=2)] = 24,
    max_length: Annotated[int, typer.Option(help="Maximum number of tokens per other text.", min=2)] = 48,
    num_random: Annotated[int, typer.Option(help="Number of random baselines.", min=1)] = 19,
    seed: Annotated[int, typer.Option(help="Seed of the halves and of the random baselines.", min=0)] = 0,
    name: Annotated[str, typer.Option(help="Name of the steering, shown in the live view.")] = "",
    steps_file: Annotated[
        Path | None, typer.Option(help="File of finished steps. Run the same command again to resume.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the steering in this folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the result: .json, or .csv for the curve.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of the curve (.png, .svg, .pdf) or its data (.csv, .json).")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find directions of heads that steer a model: chosen on one half of the texts, judged on the other."""
    import json

    from headwise.analysis.steering.find_steering import find_steering
    from headwise.analysis.steering.steering_cases import run_steering_case
    from headwise.errors import ArgumentError
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.figures.tradeoff_curves import draw_steering
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.weights import load

    if (case is None) == (positive is None or negative is None) or (case and (positive or negative)):
        raise ArgumentError("positive, negative: pass both files, or --case sentiment, tense or format instead.")
    for path, suffixes in ((plot, None), (save, (".json", ".csv"))):
        if path is not None:
            check_path(path, *(() if suffixes is None else (suffixes,)))
    texts = [_read_texts(path) for path in (positive, negative) if path is not None]
    searched: dict[str, Any] = {
        "method": method, "heads": heads, "max_kl": max_kl, "max_distance": max_distance, "corpus": corpus,
        "max_texts": max_texts, "max_length": max_length, "name": name,
    }  # fmt: skip
    if case is not None:
        _check_case_options(searched)
    common: dict[str, Any] = {
        "num_heads": num_heads, "num_random": num_random, "seed": seed, "steps_file": steps_file,
    }  # fmt: skip
    common |= {} if strengths is None else {"strengths": _parse_strengths(strengths)}
    loaded: Any = load(model, device=device, dtype=dtype)
    with (
        resume_hint_on_interrupt() if steps_file is not None else nullcontext(),
        show_progress(transient=True) as progress,
    ):
        if case is not None:
            case_result = run_steering_case(loaded, case, progress=progress, **common)
            result, data = case_result.search, case_result.to_dict()
        else:
            case_result = None
            result = find_steering(loaded, texts[0], texts[1], progress=progress, **searched, **common)
            data = result.to_dict()
    if out is not None:
        result.steering.save(out)
    if save is not None:
        (result.to_csv if save.suffix == ".csv" else result.to_json)(save)
    if plot is not None:
        draw_steering(result).save(plot)
    if as_json:
        print(json.dumps(data | {"out": None if out is None else str(out)}, indent=1))
        return
    print(result)
    if case_result is not None:
        print(case_result)
    if out is not None:
        print(f"Saved in {out}. Try it: headwise view {model} --steering {out}")
        print(f"Or write a model with the steering in its weights: headwise export {model} FOLDER --steering {out}")


def _check_case_options(searched: dict[str, Any]) -> None:
    """Raise if an option that a case fixes was given."""
    from inspect import signature

    from headwise.errors import ArgumentError

    parameters = signature(run).parameters
    if changed := [key for key in searched if searched[key] != parameters[key].default]:
        raise ArgumentError(f"case: fixes {', '.join(changed)}. Leave these options out, or pass two files.")


def _read_texts(path: Path) -> list[Any]:
    """Read one text per line, or JSON Lines with a prompt and a completion each."""
    import json

    from headwise.errors import FileFormatError
    from headwise.io.resolve_path import read_text

    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not all(line.lstrip().startswith("[") for line in lines):
        return lines
    try:
        return [tuple(json.loads(line)) for line in lines]
    except (json.JSONDecodeError, RecursionError, TypeError) as error:
        raise FileFormatError(f"{path}: not JSON Lines ({error}). Write [prompt, completion] in each line.") from None


def _parse_strengths(strengths: str) -> tuple[float, ...]:
    from headwise.errors import ArgumentError

    try:
        return tuple(float(strength) for strength in strengths.split(","))
    except ValueError:
        raise ArgumentError(
            f"strengths: not a comma-separated list of numbers. Got {strengths!r}. Use, for example, 1,2,4."
        ) from None
