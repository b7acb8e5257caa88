"""headwise quantise: a model with its weights at few bits."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import Json, Model, Texts


def run(
    model: Model,
    text: Texts = None,
    weights: Annotated[
        str, typer.Option(help="Bits: 16, 8, 4, 3 or 2; or by head and part: '*=8,5.1=4,5.2:qk=3,mlp=8,vocabulary=8'.")
    ] = "8",
    group: Annotated[int, typer.Option(help="Numbers along the input that share a scale.")] = 32,
    activations: Annotated[int, typer.Option(help="8: round what weights are multiplied by as well.")] = 32,
    basis: Annotated[str, typer.Option(help="given, or balanced: heads in their balanced basis.")] = "given",
    mean_bits: Annotated[
        float | None, typer.Option(help="Share out bits among heads, so many on average; needs --by.")
    ] = None,
    megabytes: Annotated[
        float | None, typer.Option(help="Or so many megabytes for all heads, scales counted; needs --by.")
    ] = None,
    by: Annotated[Path | None, typer.Option(help="What headwise sensitivity --out has kept of this model.")] = None,
    choices: Annotated[str, typer.Option(help="Bits to share out, with commas between.")] = "8,4,3,2",
    seeds: Annotated[int, typer.Option(help="Random mixes of equal cost to show the shared out bits beside.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Save the new model in this folder.")] = None,
    limit: Annotated[int, typer.Option(help="Judge it on at most so many texts; 0: do not.")] = 16,
    length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the bits of every head: .png, .svg, .pdf; or .csv, .json")
    ] = None,
    as_json: Json = False,
) -> None:
    """Store weights at few bits, by head and part, and say what that saves and costs."""
    from headwise.analysis.ablation.head_outputs import read_on
    from headwise.analysis.ablation.sensitivity import Sensitivity
    from headwise.compression.allocate_bits import allocate, report_allocation
    from headwise.compression.quantization_report import judge
    from headwise.compression.quantize import quantise
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import show_progress
    from headwise.ui.quantization_view import draw_bits, show_allocation, show_judged
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if mean_bits is not None and megabytes is not None:
        raise HeadwiseError("a budget is of --mean-bits or of --megabytes; give one of them.")
    if (mean_bits is None and megabytes is None) != (by is None):
        raise HeadwiseError("--mean-bits, or --megabytes, shares out bits by what --by tells of each head; give both.")
    loaded: Any = load(model)
    bits, made, shared = _bits(weights), None, None
    if by is not None:
        found = Sensitivity.load(by)
        made = allocate(loaded, found, mean_bits=mean_bits, megabytes=megabytes, choices=_choices(choices))
        beside = {part: bits if isinstance(bits, int) else bits.get(part, 32) for part in ("mlp", "vocabulary")}
        bits, group, basis = made.weights | beside, found.about["group"], found.about["basis"]
    small = quantise(loaded, bits, group=group, activations=activations, basis=basis)  # pyright: ignore
    asked = limit and loaded.tokenizer is not None and (text or loaded.spec.kind != "encoder-decoder")
    texts = read_on(loaded, Corpus.named(text, None), length).first(limit) if asked else None
    judged = judge(loaded, small, texts)
    if made is not None and texts is not None:
        with show_progress() as progress:
            shared = report_allocation(
                loaded, made, texts, beside=beside, uniform=sorted(made.counts(), reverse=True), seeds=seeds, basis=basis,  # pyright: ignore
                progress=progress,
            )  # fmt: skip
    if out is not None:
        small.save(out)
    if plot is not None:
        draw_bits(small.spec).save(plot)
    if as_json:
        told = {"out": None if out is None else str(out), "allocation": None if shared is None else shared.to_dict()}
        print(json.dumps(judged.to_dict() | told, indent=2))
        return
    show_judged(judged)
    if shared is not None:
        show_allocation(shared)
    if out is not None:
        print(f"saved in {out}; hw.load({str(out)!r}) brings it back, and every verb takes it: headwise info {out}")


def _choices(text: str) -> list[int]:
    """4,3 as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise HeadwiseError(f"choices are bits with commas between, 4,3; got {text!r}.") from None


def _bits(text: str) -> int | dict[str, int]:
    """4, or *=8,5.1=4 as a mapping."""
    from headwise.errors import HeadwiseError

    try:
        if "=" not in text:
            return int(text)
        pairs = [one.rpartition("=") for one in text.split(",")]
        return {part.strip(): int(bits) for part, _, bits in pairs}
    except ValueError:
        raise HeadwiseError(f"weights are bits, 4, or bits by part, '*=8,5.1=4,mlp=8'; got {text!r}.") from None
